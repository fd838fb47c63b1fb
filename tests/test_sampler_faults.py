"""A fault or a cancel of one request never touches another's; nothing waits for ever."""

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy

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
    honest, rows = sampler.engine.forward, []

    def fails_on_77(tokens, *rest):
        if tokens.shape[1] > 1 and bool((tokens == 77).any()):
            rows.append(sampler._scheduler.rows.n)
            raise fault
        return honest(tokens, *rest)

    monkeypatch.setattr(sampler.engine, "forward", fails_on_77)
    prompts, params = [[t if t != 77 else 78 for t in p] for p in ragged_prompts(2)], SamplingParams(max_new_tokens=150, seed=0)
    good = sampler.submit(prompts, group_size=2, params=params)
    while not sampler._scheduler.rows.n:
        time.sleep(0.001)
    bad = sampler.submit([[77] * 60], params=PARAMS)
    with pytest.raises(type(fault), match="out of memory"):
        bad.result(timeout=10)
    found = good.result(timeout=10)
    assert rows[0] > 0, "nothing was in progress"
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


def test_after_a_failure_nobody_is_called_back(policy, sampler):
    """Of a request whose callback failed once, the other rollouts are dropped."""
    calls = []

    def once(*item):
        calls.append(item)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        sampler.submit(ragged_prompts(3), group_size=4, params=PARAMS, on_rollout=once).result(timeout=10)
    sampler.run_sync(int)
    assert len(calls) == 1


def test_a_failed_request_is_not_held(policy, sampler, monkeypatch):
    monkeypatch.setattr(policy.tokenizer, "decode", lambda ids: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        sampler.sample_sync([[1, 2]], params=SamplingParams(stop_strings=("x",)))
    with policy.lock:  # the step in which it failed is over
        assert not sampler._scheduler.requests


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5])
def test_a_seed_that_no_generator_takes_is_refused_at_once(sampler, expected, seed):
    good = sampler.submit(ragged_prompts(5), group_size=2, params=PARAMS)
    with pytest.raises((ValueError, TypeError), match="seed|integer"):
        sampler.submit([[1]], seeds=[[seed]])
    with pytest.raises((ValueError, TypeError), match="seed|integer"):
        sampler.conversation(seed=seed)
    assert good.result(timeout=10) == expected


# --- what waits -------------------------------------------------------------------------------------------------------


def test_rollouts_that_memory_admits_only_a_few_at_a_time_all_come(policy):
    """More slots than memory: eight rollouts of which three fit, with slots // 8 = 8."""
    with Sampler(policy, slots=64) as sampler:
        sampler._scheduler.cache_bytes = sampler.engine.bytes_per_token() * 250 * 3
        request = sampler.submit([[1, 2, 3]], group_size=8, params=SamplingParams(max_new_tokens=200, seed=0))
        rollouts = flat(request.result(timeout=30))
        assert [len(r.tokens) for r in rollouts] == [200] * 8
        assert sampler.stats.row_steps / sampler.stats.steps > 2, "the memory holds three"


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


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_whoever_holds_the_policy_may_not_wait_for_the_sampler(policy):
    with Sampler(policy) as sampler:
        sampler.sample_sync([[1]], params=PARAMS)
        conversation, queued = sampler.conversation(), None
        with policy.lock:
            queued = sampler.submit([[1, 2]], params=PARAMS)  # does not wait
            for waits in (lambda: sampler.sample_sync([[1]]), lambda: sampler.run_sync(int), queued.result,
                          lambda: asyncio.run(sampler.sample([[1]])), lambda: asyncio.run(sampler.run(int)),
                          lambda: conversation.sample_sync([1]), lambda: asyncio.run(conversation.sample([1])),
                          lambda: asyncio.run(anext(sampler.stream([[1]])))):
                with pytest.raises(RuntimeError, match="policy.lock"):
                    waits()
        assert len(queued.result(timeout=10)[0][0].tokens) == 25
        assert len(conversation.sample_sync([1], PARAMS).tokens) == 25, "a refused turn leaves the conversation usable"


def test_what_changes_the_weights_holds_the_policy(policy):
    """`run` excludes whoever takes the lock, and a trainer in the lock excludes `run`."""
    inside, out, order = threading.Event(), threading.Event(), []

    def change():
        inside.set()
        assert out.wait(10)
        order.append("change")

    with Sampler(policy) as sampler:
        changing = in_a_thread(sampler.run_sync, change)
        assert inside.wait(10)
        threading.Timer(0.2, out.set).start()
        with policy.lock:
            order.append("trainer")
        changing.result(timeout=10)
    assert order == ["change", "trainer"]


# --- the choice of the engine -----------------------------------------------------------------------------------------


def longest_stall(work):
    """(result, seconds of the longest pause of the loop) of a coroutine, and how long it took."""
    async def main():
        stalls, done = [], asyncio.Event()

        async def tick():
            while not done.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.002)
                stalls.append(time.perf_counter() - before)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.01)
        result = await work()
        done.set()
        await ticking
        return result, max(stalls)

    return asyncio.run(main())


@pytest.mark.parametrize("entered", [False, True])
def test_a_new_sampler_does_not_hold_up_the_loop(policy, monkeypatch, entered):
    """The engine is chosen in the worker: a choice of a second is not felt."""
    from grpolab.decode import sampler as module
    honest = module.choose_engine

    def slow(*args, **kw):
        time.sleep(1.0)
        return honest(*args, **kw)

    monkeypatch.setattr(module, "choose_engine", slow)

    async def work():
        sampler = Sampler(policy)
        if entered:
            async with sampler:
                return await sampler.sample([[1, 2]], params=PARAMS)
        groups = await sampler.sample([[1, 2]], params=PARAMS)
        await sampler.close()
        return groups

    groups, stall = longest_stall(work)
    assert len(groups[0][0].tokens) == 25 and stall < 0.5


def test_an_engine_that_does_not_fit_is_told_to_whoever_asks_first_and_later(policy):
    asked = Sampler(policy, engine="fast")
    with pytest.raises(ValueError, match="'fast'"):
        asked.sample_sync([[1]])
    for again in (lambda: asked.sample_sync([[1]]), lambda: asked.engine, lambda: asked.slots,
                  lambda: asked.run_sync(int), lambda: asyncio.run(asked.__aenter__())):
        with pytest.raises(ValueError, match="'fast'"):
            again()
    asked.close()

    async def enters():
        async with Sampler(policy, engine="fast"):
            raise AssertionError("it was entered")

    with pytest.raises(ValueError, match="'fast'"):
        asyncio.run(enters())


def test_the_choice_can_be_read_before_the_first_use(policy):
    with Sampler(policy, slots=5) as sampler:
        assert sampler.stats.steps == 0
        assert (sampler.engine.name, sampler.slots, sampler.threads) == ("llama", 5, torch.get_num_threads())
    with policy.lock, pytest.raises(RuntimeError, match="policy.lock"):
        Sampler(policy).engine  # noqa: B018


def test_a_cancelled_entry_leaves_the_choice_whole(policy):
    async def main():
        sampler = Sampler(policy)
        entering = asyncio.create_task(sampler.__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        groups = await sampler.sample([[1, 2]], params=PARAMS)
        await sampler.close()
        return groups

    assert len(asyncio.run(main())[0][0].tokens) == 25


# --- closing ----------------------------------------------------------------------------------------------------------


def test_closing_waits_outside_a_loop_and_when_awaited(policy):
    sampler = Sampler(policy)
    sampler.sample_sync([[1]], params=PARAMS)
    worker = sampler._worker
    sampler.close()
    assert not worker.is_alive()

    async def main():
        sampler = Sampler(policy)
        await sampler.sample([[1]], params=PARAMS)
        worker = sampler._worker
        await sampler.close()
        assert not worker.is_alive()
        await sampler.close()
        sampler = Sampler(policy)
        await sampler.sample([[1]], params=PARAMS)
        sampler.close()  # without waiting

    asyncio.run(main())
    Sampler(policy).close()  # never used
    own = Sampler(policy)
    own.run_sync(own.close)  # from its own worker


def test_a_prompt_that_a_new_model_has_no_room_for_is_refused_while_it_waits():
    policy, small = tiny_policy(), tiny_policy(context=64).model
    with Sampler(policy, slots=1) as sampler:
        running = sampler.submit([[1, 2]], params=SamplingParams(max_new_tokens=40))
        waits, fits = sampler.submit([[3] * 100], params=PARAMS), sampler.submit([[4, 5]], params=PARAMS)
        sampler.run_sync(setattr, policy, "model", small)
        assert len(running.result(timeout=10)[0][0].tokens) == 40
        with pytest.raises(ValueError, match="100 tokens and leaves no room in the context of 64"):
            waits.result(timeout=10)
        assert len(fits.result(timeout=10)[0][0].tokens) == 25
