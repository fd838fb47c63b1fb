"""The loops: the gradient does not depend on how the work is cut, a run goes on exactly where it stopped, and it learns."""

import asyncio
import dataclasses
import math
import random
import sys

import pytest
import torch
from loop_helpers import NAMES, flat, fresh, untimed
from loop_helpers import rows_of as collect

from grpolab.arithmetic import Problem, Task, generate
from grpolab.chat import Example, encode_chat, prompt_ids, user
from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.runs.run import Run
from grpolab.train import forward
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.dpo import DPOConfig, dpo, dpo_gradient, implicit_rewards
from grpolab.train.grpo import GRPOConfig, describe, grpo, grpo_gradient, grpo_update
from grpolab.train.loop import OPTIMISERS, epoch_batches, make_optimiser
from grpolab.train.preferences import Pair, load_preferences
from grpolab.train.reference import cache_logps
from grpolab.train.reward_model import RewardConfig, RewardModel, reward_gradient, reward_model
from grpolab.train.rewards import finished_and_correct
from grpolab.train.sft import SFTConfig, demonstrations, sft, sft_gradient

PROBLEMS, _ = generate(40, 0, seed=2, task=Task("+-", max_operand=20))


def gradient(policy):
    out = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    return out


def digits(text, problem, rollout):
    """A reward that an untaught policy, too, gets now and then: whether it wrote an even number of digits."""
    return float(sum(c.isdigit() for c in text) % 2 == 0)


def rollouts_of(policy, problems, group_size=3, rewards=(0.0, 1.0, 0.0)):
    """Groups with texts of several lengths, near-true logps and the given rewards."""
    groups = []
    for k, p in enumerate(problems):
        prompt = tuple(prompt_ids(policy.tokenizer, p.question))
        texts = [p.target, f"{p.answer}", f"\\boxed{{{p.answer + k}}} or so"][:group_size]
        made = []
        for text, value in zip(texts, rewards):
            tokens = tuple(policy.tokenizer.encode(text)) + (policy.eos_ids[0],)
            n = len(tokens)
            made.append(Rollout(prompt, tokens, (1,) * n, (-1.0,) * n, (-1.0,) * n, "eos", reward=value))
        groups.append(Group(tuple(made)))
    return groups


# --- cutting the work -------------------------------------------------------------------------------------------------


def test_uninformative_groups_change_nothing(tiny):
    mixed, equal = rollouts_of(tiny, PROBLEMS[:2]), rollouts_of(tiny, PROBLEMS[2:5], rewards=(1.0, 1.0, 1.0))
    config = GRPOConfig(clip_eps=(10.0, 10.0), max_logp_diff=None)  # the logps are made up
    start = flat(tiny)
    optimiser = make_optimiser(tiny, config)
    silent = grpo_update(tiny, None, equal, config, optimiser, 0)
    assert silent["trained_groups"] == silent["trained_tokens"] == 0 and math.isnan(silent["entropy"])
    assert torch.equal(flat(tiny), start) and tiny.version == 0
    row = grpo_update(tiny, None, mixed + equal, config, optimiser, 0)
    assert row.keys() == silent.keys()  # a row's names do not depend on the rewards
    assert row["trained_groups"] == 2 and tiny.version == 1 and not torch.equal(flat(tiny), start)


def test_the_steps_walk_through_everything_before_they_repeat():
    seen = [x for step in range(4) for x in epoch_batches(range(10), 5, 1)(step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert epoch_batches(range(10), 25, 1)(0)[:20] == seen
    assert epoch_batches(range(10), 5, 2)(3) != epoch_batches(range(10), 5, 1)(3)
    batch_of = epoch_batches(range(10), 3, 1)
    assert [batch_of(s) for s in (7, 0, 3, 7)] == [epoch_batches(range(10), 3, 1)(s) for s in (7, 0, 3, 7)]  # in any order


def preferences(policy, problems=PROBLEMS[:9]):
    """Right against wrong answers of several lengths; a number may end after its first digit."""
    rows = [{"prompt": p.question, "chosen": p.target, "rejected": f"{p.answer + k} or so" * (1 + k % 3)}
            for k, p in enumerate(problems)]
    return load_preferences(rows, policy.tokenizer)


def trained_scorer(tiny):
    """A reward model with a head that is not zero, so that its decoder has a gradient."""
    model = RewardModel.from_policy(tiny)
    collect(reward_model(model, preferences(tiny), RewardConfig(steps=3, batch_size=9, lr=1e-3)))
    return model


def work_of(method, tiny):
    """The model that a method trains, and its gradient's metrics as a function of options."""
    tiny.model.double()
    if method == "sft":
        examples = demonstrations(tiny, PROBLEMS[:9])
        return tiny, lambda **options: sft_gradient(tiny, examples, SFTConfig(**options))
    if method == "grpo":
        groups = rollouts_of(tiny, PROBLEMS[:5])
        rollouts, a = [r for g in groups for r in g], advantages(reward_tensor([g.rewards for g in groups])).flatten()
        return tiny, lambda **options: grpo_gradient(tiny, None, rollouts, a, GRPOConfig(clip_eps=(10.0, 10.0), **options))
    pairs = preferences(tiny)
    if method == "dpo":
        ref_logps = cache_logps(tiny, pairs).values + torch.linspace(-2, 3, 18).view(9, 2)
        return tiny, lambda **options: dpo_gradient(tiny, pairs, ref_logps, DPOConfig(**options))
    model = trained_scorer(tiny)
    return model, lambda **options: reward_gradient(model, pairs, RewardConfig(margin=0.5, centering=0.01, **options))


SMALL, APART = {"token_budget": 1}, {"share_prompts": False}
CUTS = [("sft", {}, {"token_budget": 60}), ("sft", {}, SMALL),
        *[("grpo", {}, change) for change in ({"token_budget": 40}, APART, APART | {"token_budget": 100})],
        *[pytest.param("dpo", kind, change, marks=[pytest.mark.full] if kind else [])
          for change in ({"token_budget": 100}, APART, SMALL)
          for kind in ({}, {"kind": "ipo"}, {"kind": "hinge"}, {"length_normalised": True})],
        ("reward_model", {}, {"token_budget": 100}), ("reward_model", {}, SMALL)]


@pytest.mark.parametrize(("method", "options", "change"), CUTS)
def test_the_gradient_ignores_micro_batches_and_shared_rows(tiny, method, options, change):
    model, work = work_of(method, tiny)
    whole, expected = work(**options), gradient(model)
    cut = work(**options | change)
    assert expected.norm() > 1e-3 and (gradient(model) - expected).norm() < 1e-5 * expected.norm()
    assert {k: pytest.approx(v, rel=1e-5, abs=1e-6) for k, v in whole.items()} == cut


def test_no_method_computes_padding(tiny, monkeypatch):
    """Examples of any lengths, and pairs whose sides begin alike, cost their distinct tokens alone, but the last of each."""
    seen = []
    own = forward.states
    monkeypatch.setattr(forward, "states", lambda decoder, ids, *rest: seen.append(len(ids)) or own(decoder, ids, *rest))
    examples = [Example(tuple(range(6, 6 + n)), (0,) * (n - 2) + (1, 1)) for n in (3, 40, 11, 90)]
    sft_gradient(tiny, examples, SFTConfig())
    assert seen == [3 + 40 + 11 + 90 - 4]
    seen.clear()
    pairs = [Pair((5,) * n, Example((6, 7, 8, 9), (1,) * 4), Example((6, 7, 7), (1,) * 3)) for n in (1, 30)]
    reward_gradient(RewardModel.from_policy(tiny), pairs, RewardConfig())
    dpo_gradient(tiny, pairs, torch.zeros(2, 2), DPOConfig())
    assert seen == [1 + 30 + 2 * (2 + 2 + 1), 1 + 30 + 2 * (2 + 1)]


# --- the loops --------------------------------------------------------------------------------------------------------


def taught(tiny) -> Policy:
    """A policy that answers four questions in the format, right or wrong by chance."""
    wrong = [Problem(p.a, p.op, p.b + d) for p in PROBLEMS[:4] for d in (0, 1, 2)]
    examples = [
        encode_chat(tiny.tokenizer, user(p.question) + [{"role": "assistant", "content": f"\\boxed{{{w.answer}}}"}])
        for k, w in enumerate(wrong) for p in [PROBLEMS[k // 3]]
    ]
    collect(sft(tiny, examples, SFTConfig(steps=60, batch_size=12, lr=2e-3)))
    return tiny


FAST = GRPOConfig(steps=40, prompts_per_step=4, group_size=32, lr=2.5e-4, max_new_tokens=14, advantage_kind="standardised")


class Shuffled:
    """The true rewards, dealt out anew within each group: the same values, about other completions."""

    def batch(self, texts, problems, rollouts):
        true, g = [finished_and_correct(*x) for x in zip(texts, problems, rollouts)], FAST.group_size
        rng = random.Random(rollouts[0].seed)
        return [r for i in range(0, len(true), g) for r in rng.sample(true[i : i + g], g)]


@pytest.mark.full
def test_grpo_reaches_the_optimum_and_shuffled_rewards_do_not(tiny):
    """The learning gate with its control. A shuffled group has the same mean, so both rewards are the true rate."""
    start = taught(tiny)
    control = fresh(start)
    right = [r["reward"] for r in collect(grpo(start, None, PROBLEMS[:4], FAST))]
    shuffled = [r["reward"] for r in collect(grpo(control, None, PROBLEMS[:4], FAST, reward=Shuffled()))]
    assert right[0] == shuffled[0] < 0.6
    assert sum(right[-3:]) / 3 >= 0.99
    assert sum(shuffled[-3:]) / 3 < 0.8


def test_the_first_step_is_on_policy_and_at_the_reference(tiny):
    reference = Policy(type(tiny.model)(tiny.model.config), tiny.tokenizer, "reference", tiny.eos_ids)
    reference.model.load_state_dict(tiny.model.state_dict())
    config = dataclasses.replace(FAST, steps=3, kl_coef=0.1)
    rows = collect(grpo(tiny, reference, PROBLEMS[:8], config, reward=digits))
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-7) and rows[0]["diff_max"] < 1e-4
    assert rows[0]["clip_low"] == rows[0]["clip_high"] == 0
    assert rows[-1]["kl"] > 0
    assert rows[0]["all_wrong"] + rows[0]["mixed"] + rows[0]["all_right"] == pytest.approx(1)


def test_a_kl_penalty_to_the_sampler_needs_no_reference_and_holds_the_updates_of_a_step_back(tiny):
    """It is nothing in the first update, which is on-policy, and less distance in the later ones."""
    def rows(**options):
        config = dataclasses.replace(FAST, steps=1, inner_epochs=6, group_size=8, lr=2e-4, warmup=0, **options)
        return collect(grpo(fresh(tiny), None, PROBLEMS[:4], config, reward=digits))[0]

    free, held = rows(), rows(kl_coef=3.0, kl_to="sampler")
    assert 0 < held["sampler_kl"] < 0.3 * free["sampler_kl"] and "kl" not in held
    one = {"inner_epochs": 1, "steps": 1, "group_size": 8, "max_grad_norm": 1e9}
    first = [collect(grpo(fresh(tiny), None, PROBLEMS[:4], dataclasses.replace(FAST, **one, **o), reward=digits))[0]
             for o in ({}, {"kl_coef": 3.0, "kl_to": "sampler"})]
    assert first[1]["sampler_kl"] < 1e-9 and first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-4)


def sometimes(text, problem, rollout):
    """Differs within the groups of even answers alone."""
    return float(problem.answer % 2 == 0 and rollout.seed % 2)


def test_refills_replace_groups_without_signal_and_report_their_cost(tiny):
    config = dataclasses.replace(FAST, steps=2, prompts_per_step=8, group_size=4, max_new_tokens=6)
    plain = collect(grpo(fresh(tiny), None, PROBLEMS, config, reward=sometimes))
    assert all(r["trained_groups"] < 8 and "refill_prompts" not in r for r in plain)
    rows = collect(grpo(fresh(tiny), None, PROBLEMS, dataclasses.replace(config, refills=6), reward=sometimes))
    assert [r["trained_groups"] for r in rows] == [8, 8]
    for row in rows:
        assert row["refill_prompts"] > 0 and row["discarded_groups"] == row["refill_prompts"]  # 8 were drawn and 8 trained
        assert row["trained_tokens"] <= 8 * 4 * 6 and 0 < row["discarded_tokens"] <= row["discarded_groups"] * 4 * 6
        drawn = 8 * 4 * row["completion_length"]
        assert row["refill_tokens"] == pytest.approx(row["trained_tokens"] + row["discarded_tokens"] - drawn)
    assert rows[0]["mixed"] == plain[0]["mixed"]  # health and reward are those of the first draw


def test_refills_end_where_questions_do_and_a_step_without_signal_changes_nothing(tiny):
    config = dataclasses.replace(FAST, steps=1, prompts_per_step=4, group_size=2, max_new_tokens=3, refills=50)
    before = flat(tiny)
    row = collect(grpo(tiny, None, PROBLEMS[:10], config, reward=lambda *_: 0.5))[0]
    assert row["refill_prompts"] == 6 and row["discarded_groups"] == 10 and row["trained_groups"] == 0
    assert torch.equal(flat(tiny), before) and tiny.version == 0


def test_a_row_tells_lengths_health_and_speed(tiny):
    def two(text, problem, rollout):
        return rollout.seed % 2

    row = collect(grpo(taught(tiny), None, PROBLEMS[:4], dataclasses.replace(FAST, steps=1, inner_epochs=2), reward=two))[0]
    assert {"all_wrong", "mixed", "all_right", "clip_low", "clip_high", "entropy", "diff_abs_mean", "diff_max", "ended_length",
            "truncated_length", "truncated", "sampled_tokens_per_s", "updated_tokens_per_s"} <= set(row)
    n, cut = row["completion_length"], row["truncated"]
    longer = 0 if math.isnan(row["truncated_length"]) else row["truncated_length"]
    assert n == pytest.approx((1 - cut) * row["ended_length"] + cut * longer)
    assert longer in (0, FAST.max_new_tokens)
    assert row["sampled_tokens_per_s"] * row["sampling_s"] == pytest.approx(4 * FAST.group_size * n)
    assert row["updated_tokens_per_s"] * row["update_s"] == pytest.approx(2 * row["trained_tokens"])
    assert row["diff_max"] < 1e-4 < abs(row["ratio"] - 1)  # the sampler's, not the second pass's


def test_dpo_starts_at_log_two_and_learns_the_preference(tiny):
    pairs, config = preferences(tiny), DPOConfig(steps=30, batch_size=9, lr=3e-4)
    reference = cache_logps(tiny, pairs)
    rows = collect(dpo(tiny, reference, pairs, config))
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert [rows[0][k] for k in ("margin", "reward_chosen", "reward_rejected")] == pytest.approx([0, 0, 0], abs=1e-5)
    assert rows[-1]["accuracy"] == 1 and rows[-1]["margin"] > 1 and rows[-1]["loss"] < 0.3
    rewards, logps = implicit_rewards(tiny, reference, pairs, config)
    assert rewards == pytest.approx((logps - reference.values) * config.beta, abs=1e-5)
    assert (rewards[:, 0] - rewards[:, 1]).mean() >= rows[-1]["margin"] - 0.5


def test_the_reward_model_learns_the_preference_and_shuffled_pairs_teach_it_none(tiny):
    pairs, config = preferences(tiny, PROBLEMS), RewardConfig(steps=20, batch_size=10, lr=1e-3)
    train, held = pairs[:30], pairs[30:]

    def held_out(train):
        model = RewardModel.from_policy(tiny)
        rows = collect(reward_model(model, train, config))
        scores = model.score([r.prompt + r.tokens for p in held for r in p.sides])
        return rows, sum(a > b for a, b in zip(scores[::2], scores[1::2])) / len(held)

    rows, accuracy = held_out(train)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[-1]["loss"] < 0.1 and accuracy == 1
    swap = lambda p: dataclasses.replace(p, chosen=p.rejected, rejected=p.chosen)  # noqa: E731
    assert held_out([swap(p) for p in train])[1] == 0


def test_grpo_takes_a_learned_reward_and_watches_the_rule(tiny):
    model, calls = trained_scorer(tiny), []
    honest = model.score
    model.score = lambda sequences: calls.append(len(sequences)) or honest(sequences)
    config = dataclasses.replace(FAST, steps=2)
    watch = {"exact": finished_and_correct, "learned": model}
    rows = collect(grpo(tiny, None, PROBLEMS[:4], config, reward=model, watch=watch))
    assert calls == [4 * FAST.group_size] * 2 and all(r["exact"] == 0 and math.isfinite(r["reward"]) for r in rows)
    assert all(r["learned"] == r["reward"] for r in rows)


class Lengths:
    """A reward for whole batches, as a learned one is."""

    def batch(self, texts, problems, rollouts):
        return [float(len(r.tokens)) for r in rollouts]

    def __call__(self, text, problem, rollout):
        raise AssertionError("a batch was to be asked")


ONE_STEP = GRPOConfig(steps=1, prompts_per_step=2, group_size=2, max_new_tokens=4)


def test_a_stray_stop_iteration_is_an_error(tiny):
    careless = Lengths()
    careless.batch = lambda *_: next(iter(()))
    with pytest.raises(RuntimeError, match="StopIteration left"):
        collect(grpo(tiny, None, PROBLEMS[:2], ONE_STEP, reward=careless))


def test_a_step_that_waits_for_a_step_is_refused(tiny):
    inner = Lengths()
    inner.batch = lambda *_: collect(grpo(tiny, None, PROBLEMS[:2], ONE_STEP, reward=Lengths()))
    with pytest.raises(RuntimeError, match="await both from one loop"):
        collect(grpo(tiny, None, PROBLEMS[:2], ONE_STEP, reward=inner))


# --- going on ---------------------------------------------------------------------------------------------------------


def resumable(method, policy, run):
    """A loop of seven steps that saves after every second one."""
    common = {"steps": 7, "batch_size": 4, "save_every": 2}
    if method == "dpo":
        return dpo(policy, cache_logps(policy, preferences(policy)), preferences(policy), DPOConfig(**common), run=run)
    if method == "reward_model":
        return reward_model(policy, preferences(policy), RewardConfig(**common), run=run)
    if method == "grpo":
        config = dataclasses.replace(FAST, steps=7, save_every=2, group_size=4, inner_epochs=2, minibatches=2, refills=2)
        return grpo(policy, None, PROBLEMS, config, reward=digits, run=run)
    optimiser = method if method in OPTIMISERS else "adamw"
    return sft(policy, demonstrations(policy, PROBLEMS), SFTConfig(**common, optimiser=optimiser), run=run)


@pytest.mark.parametrize("method", [*NAMES, *(pytest.param(name, marks=pytest.mark.full) for name in ("bfloat16", "dpo")),
                                    "reward_model", "grpo"])
def test_an_interrupted_run_goes_on_bit_for_bit(tiny, tmp_path, method):
    if method == "bfloat16":
        tiny.model.bfloat16()
    whole, cut, again = ((RewardModel.from_policy if method == "reward_model" else fresh)(tiny) for _ in range(3))
    one, two = Run("whole", root=tmp_path), Run("cut", root=tmp_path)
    collect(resumable(method, whole, one))
    collect(resumable(method, cut, two), 5)  # saved after 2 and 4 steps, and as it was left
    assert [p.name for p in two.folder.glob("checkpoint-*")] == ["checkpoint-00000005"]
    resumed = Run("cut", root=tmp_path)
    collect(resumable(method, again, resumed))
    assert torch.equal(flat(whole), flat(again)) and whole.version == again.version
    assert not torch.equal(flat(whole), flat(cut)) and untimed(one.metrics) == untimed(resumed.metrics)
    assert not list(resumed.folder.glob("*checkpoint*"))


@pytest.mark.full
def test_a_cancelled_step_leaves_a_policy_that_goes_on(tiny, tmp_path):
    """An interrupt in the middle of a step: the await ends at once, nothing is left running, and the next call goes on."""
    config = dataclasses.replace(FAST, steps=6, save_every=2)

    async def interrupted(policy, run):
        rows = []

        async def consume():
            async for row in grpo(policy, None, PROBLEMS, config, reward=digits, run=run):
                rows.append(row)

        task = asyncio.create_task(consume())
        while len(rows) < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # inside the fourth step
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        assert not others

    whole, cut = fresh(tiny), fresh(tiny)
    one = Run("whole", root=tmp_path)
    collect(grpo(whole, None, PROBLEMS, config, reward=digits, run=one))
    asyncio.run(interrupted(cut, Run("cut", root=tmp_path)))
    resumed = Run("cut", root=tmp_path)
    collect(grpo(cut, None, PROBLEMS, config, reward=digits, run=resumed))  # the same policy object, as in a notebook
    assert torch.equal(flat(whole), flat(cut))
    assert untimed(one.metrics) == untimed(resumed.metrics)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused(tiny, monkeypatch):
    made = []
    monkeypatch.setattr(sys.modules[grpo.__module__], "Sampler", lambda *args, **options: made.append(args))
    with pytest.raises(ValueError, match="data set is empty"):
        collect(sft(tiny, [], SFTConfig(steps=1)))
    with pytest.raises(ValueError, match="data set is empty"):
        collect(grpo(tiny, None, [], FAST))
    with pytest.raises(ValueError, match="kl_coef=0.1 needs a reference"):
        collect(grpo(tiny, None, PROBLEMS, dataclasses.replace(FAST, kl_coef=0.1)))
    with pytest.raises(ValueError, match="the reference is the policy itself"):
        collect(grpo(tiny, tiny, PROBLEMS, FAST))
    with pytest.raises(ValueError, match="context of 'tiny' is 512"):
        collect(grpo(tiny, None, PROBLEMS, dataclasses.replace(FAST, max_new_tokens=500)))
    assert not made  # so much is seen before a sampler is there
    long = encode_chat(tiny.tokenizer, user("x" * 600) + [{"role": "assistant", "content": "1"}])
    with pytest.raises(ValueError, match="context of 'tiny' is 512"):
        collect(sft(tiny, [long], SFTConfig(steps=1)))
    pairs = preferences(tiny)
    with pytest.raises(ValueError, match="the reference is the policy itself"):
        collect(dpo(tiny, tiny, pairs, DPOConfig(steps=1)))
    with pytest.raises(ValueError, match="of other pairs"):
        collect(dpo(tiny, cache_logps(tiny, pairs[1:]), pairs, DPOConfig(steps=1)))
    for loop in (lambda p: dpo(tiny, fresh(tiny), p, DPOConfig(steps=1)),
                 lambda p: reward_model(RewardModel.from_policy(tiny), p, RewardConfig(steps=1))):
        with pytest.raises(ValueError, match="data set is empty"):
            collect(loop([]))
        with pytest.raises(ValueError, match="context of 'tiny' is 512"):
            collect(loop([dataclasses.replace(pairs[0], prompt=(5,) * 600)]))
        with pytest.raises(ValueError, match="token id 99999, beyond the vocabulary"):
            collect(loop([dataclasses.replace(pairs[0], prompt=(99999,))]))
    assert tiny.version == 0


def test_a_gradient_that_is_not_finite_changes_nothing(tiny):
    before = flat(tiny)
    policy = fresh(tiny)
    handle = policy.model.get_output_embeddings().weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(FloatingPointError, match="gradient norm at step 0 is nan"):
        collect(grpo(policy, None, PROBLEMS, dataclasses.replace(FAST, steps=1), reward=digits))
    handle.remove()
    assert torch.equal(flat(policy), before) and policy.version == 0


def test_a_gradient_that_somebody_left_is_not_taken(tiny):
    examples, config = demonstrations(tiny, PROBLEMS), SFTConfig(steps=1, batch_size=4)
    start = flat(tiny)
    clean = collect(sft(tiny, examples, config))[0]["grad_norm"]
    torch.nn.utils.vector_to_parameters(start, tiny.model.parameters())
    ids = torch.tensor([examples[0].ids])
    (50 * tiny.model(ids, labels=ids).loss).backward()
    assert collect(sft(tiny, examples, config))[0]["grad_norm"] == clean


async def test_two_loops_on_one_policy_are_an_error(tiny):
    async def alone():
        return [row async for row in sft(tiny, demonstrations(tiny, PROBLEMS), SFTConfig(steps=3, batch_size=2))]

    found = await asyncio.gather(alone(), alone(), return_exceptions=True)
    assert any(isinstance(x, RuntimeError) and "one loop at a time" in str(x) for x in found)


def test_the_first_token_of_an_example_counts_nowhere(tiny):
    whole = [Example((5, 6, 7), (1, 1, 1))] * 4
    asked = [Example((5, 6, 7), (0, 1, 1))] * 4
    first, second = (sft_gradient(tiny, batch, SFTConfig()) for batch in (whole, asked))
    tiny.model.zero_grad()
    assert first == second


UNTAUGHT = [((5,), (1,)), ((5, 6), (0, 0)), ((5, 6), (1, 0)), ((5, 6), (0, 1, 1)), ((), ()), ((5, 6), (0, 2))]


@pytest.mark.parametrize("wrong", [Example(*parts) for parts in UNTAUGHT])
def test_an_example_without_a_token_to_train_on_is_named(tiny, wrong):
    good = demonstrations(tiny, PROBLEMS[:1])
    with pytest.raises(ValueError, match="example 1 has"):
        collect(sft(tiny, good + [wrong], SFTConfig(steps=1)))


def test_a_reward_needs_the_end_token(tiny):
    p = Problem(1, "+", 2)
    rollout = rollouts_of(tiny, [p])[0][0]
    assert finished_and_correct(p.target, p, rollout) == 1.0
    assert finished_and_correct(p.target, p, dataclasses.replace(rollout, finish_reason="length")) == 0.0
    assert finished_and_correct("\\boxed{4}", p, rollout) == 0.0


def test_what_the_policy_did_not_end_counts_as_truncated():
    reasons = {"eos": 1, "stop_string": 2, "length": 3, "context": 4, "cancelled": 5, "lost": 0}
    rollouts = [Rollout((1,), (7,) * n, (1,) * n, (0.0,) * n, (0.0,) * n, why, reward=1.0) for why, n in reasons.items()]
    row = describe([Group(tuple(rollouts))])
    assert (row["truncated"], row["truncated_length"], row["ended_length"]) == (3 / 5, 4.0, 1.5)
