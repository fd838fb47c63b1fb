"""A fault or a cancel of one request never touches another's; nothing waits for ever."""

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from decode_helpers import ragged_prompts, tiny_policy

from grpolab.decode.audit import recompute
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams

PARAMS = SamplingParams(max_new_tokens=25, seed=3)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def expected(policy):
    """What the untouched request gives when it is alone."""
    with Sampler(policy, slots=6) as sampler:
        return sampler.sample_sync(ragged_prompts(5), group_size=2, params=PARAMS)


@pytest.fixture
def sampler(policy):
    with Sampler(policy, slots=20) as sampler:
        yield sampler


def in_a_thread(fn, *args) -> Future:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(fn, *args)
    pool.shutdown(wait=False)
    return future


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["callback", "run"])
def test_stop_iteration_is_an_error_and_no_hang(sampler, where):
    """asyncio refuses to carry it: the await would never end."""
    def exhausted(*_):
        next(iter(()))

    async def main():
        if where == "run":
            return await asyncio.wait_for(sampler.run(exhausted), 5)
        request = sampler.submit([[1, 2]], params=PARAMS, on_rollout=exhausted)
        return await asyncio.wait_for(asyncio.wrap_future(request.future), 5)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())
    assert sampler.sample_sync([[1, 2]], params=PARAMS)


@pytest.mark.parametrize("fault", [KeyError("mine"), SystemExit("mine")], ids=["an error", "an exit"])
@pytest.mark.parametrize("where", ["callback", "tokenizer", "run"])
def test_a_fault_in_one_request_never_touches_another(policy, sampler, expected, monkeypatch, where, fault):
    def raises(*_):
        raise fault

    good = sampler.submit(ragged_prompts(5), group_size=2, params=PARAMS)
    if where == "callback":
        bad = sampler.submit(ragged_prompts(4), group_size=2, params=SamplingParams(max_new_tokens=9), on_rollout=raises).future
    elif where == "tokenizer":
        monkeypatch.setattr(policy.tokenizer, "decode", raises, raising=False)
        bad = sampler.submit(ragged_prompts(4), params=SamplingParams(max_new_tokens=9, stop_strings=("x",))).future
    else:
        bad = in_a_thread(sampler.run_sync, raises)
    with pytest.raises(type(fault), match="mine"):
        bad.result(timeout=10)
    assert good.result(timeout=10) == expected
    monkeypatch.undo()
    assert sampler.sample_sync(ragged_prompts(5), group_size=2, params=PARAMS) == expected


@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), SystemExit("out of memory")], ids=["an error", "an exit"])
def test_a_fault_of_the_model_in_a_prefill_fails_that_prefill_alone(sampler, monkeypatch, fault):
    """Rows in progress and prompts of another prefill go on."""
    honest, unfinished = sampler.engine.forward, []

    def fails_on_77(tokens, *rest):
        if tokens.shape[1] > 1 and bool((tokens == 77).any()):
            unfinished.append(not good.future.done())
            raise fault
        return honest(tokens, *rest)

    monkeypatch.setattr(sampler.engine, "forward", fails_on_77)
    prompts, params = [[t if t != 77 else 78 for t in p] for p in ragged_prompts(2)], SamplingParams(max_new_tokens=150, seed=0)
    good = sampler.submit(prompts, group_size=2, params=params)
    while not sampler.stats.steps:
        time.sleep(0.001)
    bad = sampler.submit([[77] * 60], params=PARAMS)
    with pytest.raises(type(fault), match="out of memory"):
        bad.result(timeout=10)
    found = good.result(timeout=10)
    assert unfinished == [True]
    monkeypatch.undo()
    assert sampler.sample_sync(prompts, group_size=2, params=params) == found


def test_a_fault_of_the_model_in_a_step_fails_its_rows_and_not_what_waits(policy, monkeypatch):
    with Sampler(policy, slots=2) as sampler:
        honest, steps = sampler.engine.forward, []

        def fails_once(tokens, *rest):
            steps.extend([1] * (tokens.shape[1] == 1))
            if len(steps) == 5 and tokens.shape[1] == 1:
                raise RuntimeError("out of memory")
            return honest(tokens, *rest)

        monkeypatch.setattr(sampler.engine, "forward", fails_once)
        first = sampler.submit(ragged_prompts(2), params=PARAMS)
        waits = sampler.submit([[1, 2, 3]], params=SamplingParams(greedy=True, max_new_tokens=20))
        with pytest.raises(RuntimeError, match="out of memory"):
            first.result(timeout=10)
        assert waits.result(timeout=10)[0][0].tokens == recompute(policy, [1, 2, 3], 20)


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "future", "wait_for"])
def test_a_request_cancelled_while_another_is_prefilled_is_cancelled(policy, how, monkeypatch):
    params = SamplingParams(max_new_tokens=200)

    async def waits(sampler):
        await asyncio.wait_for(sampler.sample([[4, 5]], params=params), 0.01)

    with Sampler(policy, slots=8) as sampler:
        honest, inside, go = sampler.engine.forward, threading.Event(), threading.Event()

        def slow(tokens, *rest):
            if tokens.shape[1] > 1 and not inside.is_set():
                inside.set()
                assert go.wait(10)
            return honest(tokens, *rest)

        monkeypatch.setattr(sampler.engine, "forward", slow)
        first = sampler.submit([[1, 2, 3]], params=PARAMS)
        assert inside.wait(10)
        if how == "wait_for":
            with pytest.raises(TimeoutError):
                asyncio.run(waits(sampler))
        else:
            late = sampler.submit([[4, 5]], params=params)
            late.cancel() if how == "cancel" else late.future.cancel()
        go.set()
        assert len(first.result(timeout=10)[0][0].tokens) == 25
        if how == "cancel":
            rollout = late.result(timeout=10)[0][0]
            assert rollout.finish_reason == "cancelled" and len(rollout.tokens) <= 1
        sampler.sample_sync([[6]], params=PARAMS)
        assert sampler.stats.new_tokens <= 25 + 1 + 25


# --- waiting, the choice of the engine, closing -----------------------------------------------------------------------


def test_who_would_wait_for_ever_is_refused(policy):
    """In the worker, and with the lock in hand; a refused turn leaves its conversation usable."""
    with Sampler(policy) as sampler:
        sampler.sample_sync([[1]], params=PARAMS)
        conversation = sampler.conversation()
        with policy.lock:
            for waits in (lambda: sampler.sample_sync([[1]]), lambda: sampler.run_sync(int), lambda: Sampler(policy).engine,
                          lambda: asyncio.run(sampler.sample([[1]])), lambda: asyncio.run(sampler.run(int)),
                          lambda: asyncio.run(conversation.sample([1])), lambda: asyncio.run(anext(sampler.stream([[1]])))):
                with pytest.raises(RuntimeError, match="policy.lock"):
                    waits()
        assert len(asyncio.run(conversation.sample([1], PARAMS)).tokens) == 25
        with pytest.raises(RuntimeError, match="worker thread"):
            sampler.run_sync(lambda: sampler.sample_sync([[1, 2, 3]]))


def test_every_caller_gets_the_error_of_an_engine_that_does_not_fit(policy):
    sampler = Sampler(policy, engine="fast")
    for call in (lambda: sampler.sample_sync([[1]]), lambda: sampler.engine, lambda: sampler.run_sync(int),
                 lambda: asyncio.run(sampler.__aenter__())):
        with pytest.raises(ValueError, match="'fast'"):
            call()
    sampler.close()


def test_a_closed_worker_has_ended_and_an_idle_one_ends_and_comes_back(policy):
    def workers():
        return [t for t in threading.enumerate() if t.name == "grpolab-sampler"]

    def idle():
        for _ in range(500):
            if not workers():
                return True
            time.sleep(0.01)

    async def main():
        async with Sampler(policy) as sampler:
            await sampler.sample([[1]], params=PARAMS)
        assert not workers()

    assert idle()
    with Sampler(policy) as sampler:
        first = sampler.sample_sync([[1, 2]], params=PARAMS)
        assert idle()
        assert sampler.sample_sync([[1, 2]], params=PARAMS) == first and workers()
    assert not workers()
    asyncio.run(main())
    Sampler(policy).close()  # never used
    own = Sampler(policy)
    own.run_sync(own.close)  # from its own worker
