"""The sampler against full recompute, and its promises to concurrent callers."""

import asyncio
import threading
import time

import pytest
import torch
from decode_helpers import ENGINES, VOCAB, flat, ragged_prompts, tiny_policy

from grpolab.decode import prefill, scheduler, verify
from grpolab.decode.audit import FAULTS, audit, recompute, sabotage
from grpolab.decode.cache import FIRST, store_for
from grpolab.decode.requests import Request
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.verify import choose_engine
from grpolab.models.load import attention_of

GREEDY = SamplingParams(greedy=True, max_new_tokens=40, seed=0)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture
def sampler(policy):
    with Sampler(policy, slots=6) as sampler:
        yield sampler


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_equals_full_recompute(policy, engine):
    """Ragged prompts, shared prefill, 20 rollouts through 6 slots, window crossings."""
    prompts = ragged_prompts(10)
    with Sampler(policy, slots=6, engine=engine) as sampler:
        groups = sampler.sample_sync(prompts, group_size=2, params=GREEDY)
        assert sampler.stats.prefill_tokens == sum(map(len, prompts))
    for prompt, group in zip(prompts, groups):
        expected = recompute(policy, prompt, 40)
        assert [r.tokens for r in group] == [expected, expected]
        assert group[0].finish_reason == "length" and group[0].mask == (1,) * 40
    assert audit(policy, flat(groups)).margin > 2


@pytest.mark.full
def test_a_thousand_greedy_tokens_equal_recompute():
    policy = tiny_policy(context=1200)
    params = SamplingParams(greedy=True, max_new_tokens=1100)
    with Sampler(policy) as sampler:
        rollout = sampler.sample_sync(ragged_prompts(1), params=params)[0][0]
    found = audit(policy, [rollout])
    assert found.tokens == 1100 and found.disagreements == 0 and found.margin > 2


def test_rows_that_end_at_different_steps_leave_the_others_exact():
    policy = tiny_policy(eos=(3, 14, 15, 92, 65))
    prompts = ragged_prompts(24)
    with Sampler(policy, slots=8) as sampler:
        groups = sampler.sample_sync(prompts, group_size=3, params=SamplingParams(max_new_tokens=60, seed=1))
    found = audit(policy, flat(groups))
    assert found.after_stop == 0 and found.max_error <= 1e-4 and found.mean_error <= 1e-5
    assert len({len(r.tokens) for r in flat(groups)}) > 10
    assert {r.finish_reason for r in flat(groups)} == {"eos", "length"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_equal_the_forward(policy, sampler, temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=30, seed=2)
    found = audit(policy, flat(sampler.sample_sync(ragged_prompts(5), group_size=3, params=params)), temperature)
    assert found.tokens == 450
    assert max(found.max_error, found.raw_max_error) <= 1e-4 and found.mean_error <= 1e-5


@pytest.mark.parametrize("engine", ["llama", pytest.param("hf", marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen_by_an_audit(fault, engine):
    """The same audit is silent without a fault: the tests above."""
    policy, prompts = tiny_policy(eos=(3, 14, 15)), ragged_prompts(8)
    with Sampler(policy, slots=8, engine=engine) as sampler, sabotage(sampler, fault):
        greedy = audit(policy, flat(sampler.sample_sync(prompts[:4], group_size=2, params=GREEDY)))
        params = SamplingParams(temperature=0.7, max_new_tokens=40, seed=1)
        sampled = audit(policy, flat(sampler.sample_sync(prompts, group_size=4, params=params)), temperature=0.7)
    assert greedy.disagreements or sampled.max_error > 1e-4 or sampled.mean_error > 1e-5 or sampled.after_stop


def test_a_rollout_does_not_depend_on_its_batch(policy, sampler):
    """Alone, in another order, among others, after refills and compaction: tokens and logps in every bit."""
    prompts, params = ragged_prompts(7), SamplingParams(max_new_tokens=30, seed=3)
    together = sampler.sample_sync(prompts, group_size=4, params=params)
    with Sampler(policy, slots=64) as wide:
        assert wide.sample_sync(prompts, group_size=4, params=params) == together
    seeds = [[r.seed for r in group] for group in together]
    backwards = sampler.submit(prompts[::-1], group_size=4, params=params, seeds=seeds[::-1]).result()
    assert backwards[::-1] == together
    rollout = together[5][2]
    assert sampler.submit([rollout.prompt], params=params, seeds=[[rollout.seed]]).result()[0][0] == rollout
    assert len({r.tokens for r in together[5]}) == 4


def test_blocks_of_steps_change_nothing(policy):
    policy = tiny_policy(eos=(3, 14, 15))
    prompts, params = ragged_prompts(9), SamplingParams(max_new_tokens=37, seed=3)
    with Sampler(policy, slots=6) as one, Sampler(policy, slots=6) as many:
        many._scheduler.block = 5
        expected = one.sample_sync(prompts, group_size=3, params=params)
        assert many.sample_sync(prompts, group_size=3, params=params) == expected


def test_a_trainer_gets_the_model_between_two_steps(policy, monkeypatch):
    """The worker takes the model anew for every step; who waits for it gets it after the step in progress."""
    waited = []
    with Sampler(policy) as sampler:
        class Counted:  # the steps from the moment that a thread is the next one, however late the system lets it ask
            lock, release = policy.lock._lock, policy.lock._lock.release

            def acquire(self):
                before = sampler.stats.steps
                self.lock.acquire()
                if threading.current_thread() is threading.main_thread():
                    waited.append(sampler.stats.steps - before)

        monkeypatch.setattr(policy.lock, "_lock", Counted())
        request = sampler.submit(ragged_prompts(8), group_size=8, params=SamplingParams(max_new_tokens=200))
        while not sampler.stats.steps:
            time.sleep(0.001)
        waited.clear()
        while not request.future.done():
            with policy.lock:
                pass
            time.sleep(0.001)
    assert len(waited) > 20 and 0 < max(waited) <= 1


def test_options_are_obeyed_or_refused(policy):
    with Sampler(policy, slots=5, threads=2) as sampler:
        assert (sampler.engine.name, sampler.slots, sampler.run_sync(torch.get_num_threads)) == ("llama", 5, 2)
        assert sampler.sample_sync([]) == []
    for wrong in (dict(threads=0), dict(slots=0)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1"):
            Sampler(policy, **wrong)
    runs = []
    for _ in range(2):
        with Sampler(policy, seed=5) as sampler:
            runs.append([sampler.sample_sync([[1, 2]])[0][0].tokens for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_long_prompts_are_prefilled_in_pieces(policy, monkeypatch):
    prompts = [*ragged_prompts(3, 100, 200), list(range(33))]  # the last one ends with the first column of a piece
    monkeypatch.setattr(prefill, "PREFILL_COLUMNS", 32)
    with Sampler(policy) as sampler:
        found = audit(policy, flat(sampler.sample_sync(prompts, params=SamplingParams(max_new_tokens=20, seed=0))))
    assert found.max_error <= 1e-4


# --- ends -------------------------------------------------------------------------------------------------------------


def test_stop_ids_end_a_rollout_and_are_kept(sampler):
    prompt = ragged_prompts(1)[0]
    free = sampler.sample_sync([prompt], params=SamplingParams(max_new_tokens=30, seed=2))[0][0]
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    params = SamplingParams(max_new_tokens=30, seed=2, stop_ids=(stop, (stop + 1) % VOCAB))
    cut = sampler.sample_sync([prompt], params=params)[0][0]
    end = min(i for i, t in enumerate(free.tokens) if t in params.stop_ids)
    assert cut.finish_reason == "stop_id" and cut.tokens == free.tokens[: end + 1] and end <= first
    assert cut.logps == free.logps[: end + 1] and cut.mask[-1] == 1


def test_stop_strings_cut_at_the_token_that_completes_them(policy, sampler):
    prompts = ragged_prompts(6)
    free = sampler.sample_sync(prompts, params=SamplingParams(max_new_tokens=30, seed=2))
    text = policy.tokenizer.decode(free[2][0].tokens)
    params = SamplingParams(max_new_tokens=30, seed=2, stop_strings=(text[7:10],))
    cut = sampler.sample_sync(prompts, params=params)
    end = text.index(text[7:10]) + 3
    assert cut[2][0].finish_reason == "stop_string" and cut[2][0].tokens == free[2][0].tokens[:end]
    others = [i for i in range(6) if text[7:10] not in policy.tokenizer.decode(free[i][0].tokens)]
    assert len(others) >= 4 and all(cut[i] == free[i] for i in others)


def test_eos_and_context():
    policy = tiny_policy(context=64, eos=(7,))
    with Sampler(policy) as sampler:
        groups = sampler.sample_sync(ragged_prompts(4), group_size=8, params=SamplingParams(max_new_tokens=500, seed=0))
        free = sampler.sample_sync(ragged_prompts(4), group_size=8,
                                   params=SamplingParams(max_new_tokens=500, seed=0, ignore_eos=True))
    assert {r.finish_reason for r in flat(groups)} == {"eos", "context"}
    for r in flat(groups):
        whole = len(r.prompt) + len(r.tokens)
        assert (r.tokens[-1] == 7) == (r.finish_reason == "eos") and 7 not in r.tokens[:-1]
        assert whole <= 64 and (r.finish_reason == "eos" or whole == 64)
    assert {r.finish_reason for r in flat(free)} == {"context"} and any(7 in r.tokens[:-1] for r in flat(free))


def test_truncated_sampling_records_the_kept_mass(policy, sampler):
    params = SamplingParams(temperature=1.5, top_k=4, max_new_tokens=20, seed=0)
    cut = sampler.sample_sync(ragged_prompts(2), params=params)[0][0]
    plain = sampler.sample_sync(ragged_prompts(2), params=SamplingParams(temperature=1.5, max_new_tokens=20))[0][0]
    assert plain.kept_mass == () and len(cut.kept_mass) == 20 and all(0 < m < 1 for m in cut.kept_mass)
    with torch.no_grad():
        logits = policy.model(torch.tensor([cut.prompt + cut.tokens])).logits[0, len(cut.prompt) - 1: -1] / 1.5
    mass = logits.softmax(-1).topk(4).values.sum(-1)
    torch.testing.assert_close(torch.tensor(cut.kept_mass), mass, atol=1e-4, rtol=0)
    full = logits.log_softmax(-1).gather(1, torch.tensor(cut.tokens)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(cut.logps) + mass.log(), full, atol=1e-4, rtol=0)


# --- concurrency ------------------------------------------------------------------------------------------------------


def test_concurrent_callers_share_the_batch(policy):
    async def main():
        async with Sampler(policy, slots=64) as sampler:
            params = [SamplingParams(max_new_tokens=20, seed=i, temperature=1 + i % 2 / 2) for i in range(8)]
            prompts = ragged_prompts(8)
            many = await asyncio.gather(*(sampler.sample([p], group_size=2, params=q) for p, q in zip(prompts, params)))
            steps = sampler.stats.steps
            one_by_one = [await sampler.sample([p], group_size=2, params=q) for p, q in zip(prompts, params)]
            return many, one_by_one, steps

    many, one_by_one, steps = asyncio.run(main())
    assert many == one_by_one
    assert steps < 8 * 19


def test_rollouts_stream_as_they_finish():
    policy = tiny_policy(eos=(3, 14, 15))

    async def main():
        async with Sampler(policy, slots=8) as sampler:
            params, prompts = SamplingParams(max_new_tokens=60, seed=1), ragged_prompts(6)
            seen = [item async for item in sampler.stream(prompts, group_size=3, params=params)]
            return seen, await sampler.sample(prompts, group_size=3, params=params)

    seen, groups = asyncio.run(main())
    assert sorted((i, g) for i, g, _ in seen) == [(i, g) for i in range(6) for g in range(3)]
    assert [(i, g) for i, g, _ in seen] != sorted((i, g) for i, g, _ in seen)
    assert all(groups[i][g] == rollout for i, g, rollout in seen)


@pytest.mark.parametrize("how", ["await", "stream"])
def test_who_leaves_frees_its_slots(how):
    policy = tiny_policy(context=4096)

    async def main():
        async with Sampler(policy, slots=4) as sampler:
            params = SamplingParams(max_new_tokens=4000)
            call = sampler.sample if how == "await" else lambda *a, **k: anext(sampler.stream(*a, **k))
            long = asyncio.create_task(call(ragged_prompts(4), params=params))
            while sampler.stats.row_steps < 4:
                await asyncio.sleep(0.005)
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            async with asyncio.timeout(5):
                groups = await sampler.sample(ragged_prompts(3), params=SamplingParams(greedy=True, max_new_tokens=10))
                while sampler.busy:  # the last answer comes a moment before its row is gone
                    await asyncio.sleep(0.001)
            return groups

    assert [g[0].tokens for g in asyncio.run(main())] == [recompute(policy, p, 10) for p in ragged_prompts(3)]


def test_a_cancelled_request_returns_what_it_has():
    policy = tiny_policy(context=4096)
    with Sampler(policy, slots=2) as sampler:
        request = sampler.submit(ragged_prompts(3), params=SamplingParams(max_new_tokens=4000, seed=0))
        while sampler.stats.new_tokens < 40:
            time.sleep(0.005)
        request.cancel()
        rollouts = flat(request.result(timeout=5))
        free = sampler.submit(ragged_prompts(3), params=SamplingParams(max_new_tokens=30, seed=0)).result()
    assert {r.finish_reason for r in rollouts} == {"cancelled"}
    assert len(rollouts[0].tokens) >= 15 and rollouts[2].tokens == ()
    assert rollouts[0].tokens[:15] == free[0][0].tokens[:15]


@pytest.mark.parametrize("counted", [True, False])
def test_weights_changed_between_steps_are_seen(counted):
    """The worker runs the update; rows in progress go on, and what enters after it is sampled under the new weights, also where
    somebody edits them in place and counts no version."""
    policy, prompt = tiny_policy(), ragged_prompts(1)[0]

    def update():
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        policy.version += counted

    with Sampler(policy, slots=4) as sampler:
        before = sampler.sample_sync([prompt], params=GREEDY)[0][0]
        running = sampler.submit([prompt], params=SamplingParams(max_new_tokens=200))
        while sampler.stats.new_tokens < 42:
            time.sleep(0.001)
        sampler.run_sync(update)
        after = sampler.sample_sync([prompt], params=GREEDY)[0][0]
        running.result(timeout=20)
        assert sampler.stats.refreshes == 1
    assert (before.policy_version, after.policy_version) == (0, counted)
    assert audit(policy, [after]).disagreements == 0 and after.tokens != before.tokens


def test_a_second_sampler_of_an_unchanged_policy_is_ready_at_once(policy, monkeypatch):
    """It shares the engine and its packed weights; after a change both sample the new weights."""
    own = tiny_policy()
    with Sampler(own) as first, Sampler(own) as second, Sampler(own, slots=1) as one:
        assert first.engine is second.engine is one.engine
        for sampler in (first, second):
            with torch.no_grad():
                own.model.model.norm.weight.mul_(0.7)
            assert audit(own, flat(sampler.sample_sync([[1, 2]], params=GREEDY))).max_error < 1e-4
        assert audit(own, flat(first.sample_sync([[1, 2]], params=GREEDY))).max_error < 1e-4
        assert (first.stats.refreshes, second.stats.refreshes) == (2, 1)


def test_an_interrupted_call_goes_on_for_nobody(monkeypatch):
    policy = tiny_policy(context=8192)
    with Sampler(policy) as sampler:
        sampler.sample_sync([[1]], params=GREEDY)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Request, "result", raising(KeyboardInterrupt))
            sampler.sample_sync([[1, 2]], group_size=4, params=SamplingParams(max_new_tokens=8000))
        until = time.monotonic() + 5
        while sampler.busy and time.monotonic() < until:
            time.sleep(0.01)
        assert not sampler.busy


async def test_a_start_that_is_cancelled_leaves_the_model_as_it_was(monkeypatch):
    policy, honest = tiny_policy(dtype=torch.bfloat16), verify.disagreement
    before = attention_of(policy.model)
    monkeypatch.setattr(verify, "disagreement", lambda *of: (time.sleep(0.3), honest(*of))[1])

    async def start():
        async with Sampler(policy, exact=True):
            pass

    task = asyncio.create_task(start())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(1.0)
    assert attention_of(policy.model) == before


def test_a_worker_that_cannot_start_is_an_error_and_no_wait():
    with Sampler(tiny_policy(), threads=2**40) as sampler, pytest.raises(ValueError, match="Overflow"):
        sampler.submit([[1]], params=GREEDY).result(timeout=5)


def raising(error):
    def method(*_, **__):
        raise error
    return method


def test_a_model_in_train_mode_is_sampled_without_dropout():
    policy = tiny_policy(attention_dropout=0.5)
    with Sampler(policy, engine="hf") as sampler:
        expected = sampler.sample_sync([[5, 6, 7]], params=GREEDY)[0][0].tokens
        policy.model.train()
        assert sampler.sample_sync([[5, 6, 7]], params=GREEDY)[0][0].tokens == expected and policy.model.training


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "kwargs", "message"), [
    ([[]], {}, "prompt 0 is empty"), ([[1], [1] * 256], {}, "prompt 1 has 256 tokens"), ([[1, VOCAB]], {}, f"token id {VOCAB}"),
    ([[-1]], {}, "token id -1"), ([[1]], dict(group_size=0), "group_size must be at least 1"),
    ([1, 2, 3], {}, "list of token id lists"), ("text", {}, "list of token id lists"),
    ([[1]], dict(params=SamplingParams(stop_ids=(VOCAB,))), "stop_ids"), ([[1]], dict(seeds=[[1, 2]]), "seeds must be"),
    ([[1]], dict(seeds=[[-1]]), "seed"), ([[1]], dict(seeds=[[2**64]]), "seed"), ([[1]], dict(seeds=[[1.5]]), "integer"),
])
def test_bad_requests_fail_alone(sampler, prompts, kwargs, message):
    good = sampler.submit(ragged_prompts(3), params=SamplingParams(max_new_tokens=20))
    with pytest.raises((ValueError, TypeError), match=message):
        sampler.submit(prompts, **kwargs)
    assert [len(g[0].tokens) for g in good.result(timeout=10)] == [20] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_logits_fail_their_request_alone_and_leave_no_trace(engine):
    """One token's embedding is NaN: who feeds it fails, the others go on, and the slot is clean for the next."""
    policy = tiny_policy(tie_word_embeddings=False)
    with torch.no_grad():
        policy.model.model.embed_tokens.weight[99] = float("nan")
    with Sampler(policy, slots=4, engine=engine) as sampler:
        careful = SamplingParams(max_new_tokens=30, seed=0, stop_ids=(99,))  # drawn, but never fed
        good = sampler.submit([[1, 2, 3], [4, 5]], params=careful)
        bad = sampler.submit([[6, 99, 7]], group_size=2, params=SamplingParams(max_new_tokens=30, seed=0))
        with pytest.raises(FloatingPointError, match="prompt 0, sample 0 are not finite"):
            bad.result(timeout=10)
        found = good.result(timeout=10)
        again = sampler.submit([[1, 2, 3], [4, 5]] * 2, params=careful).result(timeout=10)
        with Sampler(policy, slots=4, engine=engine) as other:
            alone = other.sample_sync([[1, 2, 3], [4, 5]] * 2, params=careful)
    assert [r.tokens for r in flat(again)] == [r.tokens for r in flat(alone)]
    assert [r.tokens for r in flat(again[:2])] == [r.tokens for r in flat(found)]


def test_a_closed_sampler_refuses_and_fails_what_waits():
    sampler = Sampler(tiny_policy(context=4096), slots=2)
    running = sampler.submit(ragged_prompts(4), params=SamplingParams(max_new_tokens=4000))
    sampler.close()
    with pytest.raises(RuntimeError, match="closed before"):
        running.result(timeout=5)
    calls = lambda: sampler.sample_sync([[1]]), lambda: sampler.run_sync(int), lambda: asyncio.run(sampler.sample([[1]]))
    for call in calls:
        with pytest.raises(RuntimeError, match="is closed"):
            call()
    sampler.close()


def test_the_memory_for_keys_and_values_bounds_the_rows(policy, monkeypatch):
    """A fifth of what is free is theirs: here three rows of two pages."""
    stores, free = [], 5 * 64 * 3 * choose_engine(policy).bytes_per_token()
    monkeypatch.setattr(scheduler, "free_bytes", lambda device: free)
    monkeypatch.setattr(scheduler, "store_for", lambda *about: stores.append(store_for(*about)) or stores[-1])
    with Sampler(policy, slots=8) as sampler:
        groups = sampler.sample_sync(ragged_prompts(9, 5, 20), params=SamplingParams(max_new_tokens=40, seed=0))
        assert len(stores[-1].users) <= 1.5 * (3 * 2 + FIRST)
        assert sampler.stats.row_steps / sampler.stats.steps <= 3
    assert audit(policy, flat(groups)).max_error <= 1e-4
