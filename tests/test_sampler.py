"""The sampler against full recompute, and its promises to concurrent callers."""

import asyncio
import threading
import time

import pytest
import torch
from decode_helpers import VOCAB, flat, ragged_prompts, tiny_policy

from grpolab.decode import prefill
from grpolab.decode.audit import FAULTS, audit, recompute, sabotage
from grpolab.decode.cache import FIRST
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams

GREEDY = SamplingParams(greedy=True, max_new_tokens=40, seed=0)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture
def sampler(policy):
    with Sampler(policy, slots=6) as sampler:
        yield sampler


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["llama", "hf"])
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
    assert max(found.max_error, found.raw_max_error) <= 1e-4 and max(found.mean_error, found.raw_mean_error) <= 1e-5


def gate(policy, sampler):
    """What notebook 02 gates, in small: raises AssertionError where the engine is wrong."""
    prompts = ragged_prompts(8)
    greedy = sampler.sample_sync(prompts[:4], group_size=2, params=GREEDY)
    params = SamplingParams(temperature=0.7, max_new_tokens=40, seed=1)
    sampled = sampler.sample_sync(prompts, group_size=4, params=params)
    first, second = audit(policy, flat(greedy)), audit(policy, flat(sampled), temperature=0.7)
    assert first.disagreements == 0
    assert second.max_error <= 1e-4 and second.mean_error <= 1e-5
    assert first.after_stop == second.after_stop == 0


@pytest.mark.parametrize("engine", ["llama", "hf"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_fault_fails_the_gate(fault, engine):
    policy = tiny_policy(eos=(3, 14, 15))
    with Sampler(policy, slots=8, engine=engine) as sampler:
        if fault is None:
            return gate(policy, sampler)
        with sabotage(sampler, fault), pytest.raises(AssertionError):
            gate(policy, sampler)


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


def test_a_trainer_gets_the_model_between_two_steps(policy):
    """The worker takes the model anew for every step; who waits for it gets it after the step in progress."""
    with Sampler(policy) as sampler:
        request, waited = sampler.submit(ragged_prompts(8), group_size=8, params=SamplingParams(max_new_tokens=200)), []
        while not sampler.stats.steps:
            time.sleep(0.001)
        while not request.future.done():
            before = sampler.stats.steps
            with policy.lock:
                waited.append(sampler.stats.steps - before)
            time.sleep(0.001)
    assert len(waited) > 20 and max(waited) <= 1


def test_threads_are_chosen_or_refused(policy):
    with Sampler(policy, threads=2) as two:
        assert two.run_sync(torch.get_num_threads) == 2 and two.threads == 2
    with pytest.raises(ValueError, match="threads must be at least 1"):
        Sampler(policy, threads=0)


def test_long_prompts_are_prefilled_in_pieces(policy, monkeypatch):
    prompts = [*ragged_prompts(3, 100, 200), list(range(33))]  # the last one ends with the first column of a piece
    monkeypatch.setattr(prefill, "PREFILL_COLUMNS", 32)
    with Sampler(policy) as sampler:
        found = audit(policy, flat(sampler.sample_sync(prompts, params=SamplingParams(max_new_tokens=20, seed=0))))
    assert found.max_error <= 1e-4


def test_unseeded_requests_differ_and_repeat_with_the_sampler(policy):
    prompt = ragged_prompts(1)
    runs = []
    for _ in range(2):
        with Sampler(policy, seed=5) as sampler:
            runs.append([sampler.sample_sync(prompt)[0][0].tokens for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


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


def test_cancelling_an_await_frees_its_slots(policy):
    async def main():
        async with Sampler(tiny_policy(context=4096), slots=4) as sampler:
            long = asyncio.create_task(sampler.sample(ragged_prompts(4), params=SamplingParams(max_new_tokens=4000)))
            while sampler._scheduler.rows.n < 4:
                await asyncio.sleep(0.005)
            long.cancel()
            async with asyncio.timeout(5):
                groups = await sampler.sample(ragged_prompts(3), params=SamplingParams(greedy=True, max_new_tokens=10))
                while sampler._scheduler.rows.n:  # the last answer comes a moment before its row is gone
                    await asyncio.sleep(0.001)
            assert long.cancelled()
            return groups

    groups = asyncio.run(main())
    assert [g[0].tokens for g in groups] == [recompute(tiny_policy(), p, 10) for p in ragged_prompts(3)]


def test_leaving_a_stream_cancels_the_rest(policy):
    async def main():
        async with Sampler(tiny_policy(context=4096), slots=4) as sampler:
            stream = sampler.stream(ragged_prompts(2) + [[1]], params=SamplingParams(max_new_tokens=4000))
            task = asyncio.create_task(anext(stream))
            while sampler._scheduler.rows.n < 3:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(5):
                await sampler.sample([[1, 2]], params=SamplingParams(max_new_tokens=2))
                while sampler._scheduler.rows.n:
                    await asyncio.sleep(0.005)

    asyncio.run(main())


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


def test_the_loop_answers_while_the_worker_decodes(policy):
    """A loop that ticks every 2 ms is never held for as long as the decode of one rollout would hold it."""
    async def main():
        stalls = []

        async def tick():
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.002)
                stalls.append(time.perf_counter() - before)

        async with Sampler(policy) as sampler:
            ticking = asyncio.create_task(tick())
            started = time.perf_counter()
            await sampler.sample(ragged_prompts(8), group_size=8, params=SamplingParams(max_new_tokens=200))
            seconds = time.perf_counter() - started
            ticking.cancel()
        return max(stalls), len(stalls), seconds

    worst, ticks, seconds = asyncio.run(main())
    assert ticks > 20 and worst < seconds / 4


def test_sync_calls_work_inside_a_running_loop_but_not_inside_the_worker(sampler):
    async def main():
        return sampler.sample_sync([[1, 2, 3]], params=SamplingParams(max_new_tokens=3))

    assert len(asyncio.run(main())[0][0].tokens) == 3
    with pytest.raises(RuntimeError, match="worker thread"):
        sampler.run_sync(lambda: sampler.sample_sync([[1, 2, 3]]))


def test_weights_changed_between_steps_are_seen():
    """The worker runs the update; rows in progress go on, and what enters after it is sampled under the new weights."""
    policy = tiny_policy()
    prompt = ragged_prompts(1)[0]

    def update():
        assert threading.current_thread().name == "grpolab-sampler"
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        policy.version += 1

    with Sampler(policy, slots=4) as sampler:
        before = sampler.sample_sync([prompt], params=GREEDY)[0][0]
        running = sampler.submit([prompt], params=SamplingParams(max_new_tokens=200))
        while not sampler._scheduler.rows.n:
            time.sleep(0.001)
        sampler.run_sync(update)
        after = sampler.sample_sync([prompt], params=GREEDY)[0][0]
        running.result(timeout=20)
        with torch.no_grad():
            policy.model.model.norm.weight.mul_(torch.rand_like(policy.model.model.norm.weight) + 0.5)
        unannounced = sampler.sample_sync([prompt], params=GREEDY)[0][0]
        assert sampler.stats.refreshes == 2
    assert (before.policy_version, after.policy_version) == (0, 1)
    assert audit(policy, [unannounced]).disagreements == 0 and unannounced.tokens != after.tokens != before.tokens


def test_a_model_in_train_mode_is_sampled_without_dropout():
    policy = tiny_policy(attention_dropout=0.5)
    with Sampler(policy, engine="hf") as sampler:
        expected = sampler.sample_sync([[5, 6, 7]], params=GREEDY)[0][0].tokens
        policy.model.train()
        assert sampler.sample_sync([[5, 6, 7]], params=GREEDY)[0][0].tokens == expected and policy.model.training


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_prefills_only_what_is_new(policy):
    with Sampler(policy, slots=6) as sampler:
        conversation = sampler.conversation(seed=4)
        given = ragged_prompts(3, 5, 40, seed=9)
        turns = []
        for ids in given:
            fed = sampler.stats.prefill_tokens
            turns.append(conversation.sample_sync(ids, SamplingParams(max_new_tokens=12)))
            carried = 1 if len(turns) > 1 else 0  # the last token of a turn was drawn but never fed
            assert sampler.stats.prefill_tokens - fed == len(ids) + carried
        rollout = conversation.rollout()
        found = audit(policy, [rollout])
        with pytest.raises(ValueError, match="context"):
            conversation.sample_sync([1] * 250)
        conversation.close()
        with pytest.raises(RuntimeError, match="closed"):
            conversation.sample_sync([1])
    assert found.tokens == 36 and found.max_error <= 1e-4
    assert rollout.prompt == tuple(given[0])
    assert rollout.tokens == turns[0].tokens + tuple(given[1]) + turns[1].tokens + tuple(given[2]) + turns[2].tokens
    assert rollout.mask == (1,) * 12 + (0,) * len(given[1]) + (1,) * 12 + (0,) * len(given[2]) + (1,) * 12
    assert len({t.tokens for t in turns}) == 3


def test_conversations_join_the_batch_and_one_turn_at_a_time(policy):
    async def exchange(sampler, i):
        conversation = sampler.conversation(seed=i)
        for ids in ragged_prompts(3, seed=i):
            await conversation.sample(ids, SamplingParams(max_new_tokens=10))
        return conversation.rollout()

    async def main():
        async with Sampler(policy, slots=8) as sampler:
            together = await asyncio.gather(*(exchange(sampler, i) for i in range(6)))
            steps, alone = sampler.stats.steps, [await exchange(sampler, i) for i in range(6)]
            conversation = sampler.conversation()
            turn = asyncio.create_task(conversation.sample([1, 2]))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="still being sampled"):
                await conversation.sample([3])
            await turn
            return together, alone, steps

    together, alone, steps = asyncio.run(main())
    assert together == alone and steps < 6 * 27


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts, kwargs, message", [
    ([[]], {}, "prompt 0 is empty"),
    ([[1], [1] * 256], {}, "prompt 1 has 256 tokens"),
    ([[1, VOCAB]], {}, f"token id {VOCAB}"),
    ([[-1]], {}, "token id -1"),
    ([[1]], dict(group_size=0), "group_size must be at least 1"),
    ([1, 2, 3], {}, "list of token id lists"),
    ("text", {}, "list of token id lists"),
    ([[1]], dict(params=SamplingParams(stop_ids=(VOCAB,))), "stop_ids"),
    ([[1]], dict(seeds=[[1, 2]]), "seeds must be"),
])
def test_bad_requests_fail_alone(sampler, prompts, kwargs, message):
    good = sampler.submit(ragged_prompts(3), params=SamplingParams(max_new_tokens=20))
    with pytest.raises(ValueError, match=message):
        sampler.submit(prompts, **kwargs)
    assert [len(g[0].tokens) for g in good.result(timeout=10)] == [20] * 3


def test_an_empty_request_is_an_empty_answer(sampler):
    assert sampler.sample_sync([]) == []


@pytest.mark.parametrize("engine", ["llama", "hf"])
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


def test_the_worker_ends_when_idle_and_comes_back(policy, monkeypatch):
    monkeypatch.setattr("grpolab.decode.sampler.IDLE_SECONDS", 0.05)
    with Sampler(policy) as sampler:
        first = sampler.sample_sync([[1, 2]], params=GREEDY)
        worker = sampler._worker
        worker.join(timeout=5)
        assert not worker.is_alive() and sampler._worker is None
        assert sampler.sample_sync([[1, 2]], params=GREEDY) == first


def test_the_memory_for_keys_and_values_bounds_the_rows(policy):
    with Sampler(policy, slots=8) as sampler:
        sampler._scheduler.cache_bytes = sampler.engine.bytes_per_token() * 64 * 3
        groups = sampler.sample_sync(ragged_prompts(9, 5, 20), params=SamplingParams(max_new_tokens=40, seed=0))
        assert len(sampler._scheduler.store.users) <= 1.5 * (3 * 2 + FIRST)  # three rows of two pages
        assert sampler.stats.row_steps / sampler.stats.steps <= 3
    assert audit(policy, flat(groups)).max_error <= 1e-4


def test_a_request_that_comes_as_the_worker_goes_to_rest_is_not_left_waiting(sampler):
    """The worker's first wait ends while somebody holds the lock to put a request into the inbox."""
    params = SamplingParams(max_new_tokens=1, seed=0, ignore_eos=True)
    sampler.sample_sync(ragged_prompts(1), params=params)
    time.sleep(0.02)  # it waits
    with sampler._wake:
        time.sleep(0.2)  # longer than the wait
        request = sampler.submit(ragged_prompts(1), params=params)
        began = time.perf_counter()
    request.result()
    assert time.perf_counter() - began < 3  # else as long as a worker without requests lives, 5 s
