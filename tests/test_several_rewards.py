"""Several rewards as one, and reward functions of TRL's."""

import asyncio
import dataclasses

import pytest
import torch
from loop_helpers import flat as weights
from loop_helpers import rows_of
from test_sources import CONFIG, ROWS, train, vowels

from grpolab.env.curriculum import Curriculum
from grpolab.lab.rescore import rescore
from grpolab.lab.restore import restore
from grpolab.models.load import load_policy
from grpolab.rollouts import Group, Rollout
from grpolab.runs.rollout_log import COLUMNS
from grpolab.runs.run import Run
from grpolab.train import Several, grpo, trl_reward
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.rewards import score, scored


@pytest.fixture
def tiny():
    return load_policy("tiny")


def group_of(tiny, *texts):
    rollouts = []
    for text in texts:
        tokens = tuple(tiny.tokenizer.encode(text))
        zeros = (0.0,) * len(tokens)
        rollouts.append(Rollout((1,), tokens, (1,) * len(tokens), zeros, zeros, "eos"))
    return Group(tuple(rollouts))


def right(text, row, rollout):
    return float("7" in text)


async def brief(text, row, rollout):
    await asyncio.sleep(0)
    return 4 - len(text) if text else None


class Lengths:
    def batch(self, texts, rows, rollouts):
        return [len(r.tokens) for r in rollouts]


def totals(tiny, reward, *texts):
    groups = asyncio.run(scored(tiny, [{}], [group_of(tiny, *texts)], reward, []))
    return groups[0].rewards, [dict(r.parts) for r in groups[0]]


@pytest.mark.parametrize("combination", ["gated", "sum", "normalise_then_sum"])
def test_totals_and_what_they_are_made_of(tiny, combination):
    several = Several({"right": (right, 2.0), "brief": (brief, 0.2), "length": (Lengths(), 0.0)}, combination)
    rewards, parts = totals(tiny, several, "7", "abc", "12347")
    assert rewards == pytest.approx([2.6, 0.2, 1.8])
    assert parts[1] == {"right": 0.0, "brief": 1.0, "length": 3.0} and parts[2]["brief"] == -1.0
    (group,) = score(tiny, [{}], [group_of(tiny, "7", "abc", "12347")], several)  # from synchronous code
    assert group.rewards == rewards and [dict(r.parts) for r in group] == parts
    assert score(tiny, [{}], [group_of(tiny, "7")], brief)[0].rewards == [3.0]


def test_a_group_without_a_difference_in_success_teaches_nothing_unless_it_is_asked_to(tiny):
    """The length of failures is no signal by default, and a success is never paid less than an equal failure."""
    rewards = {"right": (right, 1.0), "brief": (brief, 2.0)}
    texts = ["a", "ab", "abc"], ["7", "7a", "7ab"], ["7", "7ab", "abc"]
    groups = [group_of(tiny, *of) for of in texts]
    a = {}
    for how in ("gated", "sum"):
        several = Several(rewards, how)
        done = asyncio.run(scored(tiny, [{}] * 3, groups, several, []))
        a[how] = several.advantages(done, "centred")
    plain = advantages(reward_tensor([g.rewards for g in done]))
    assert a["sum"] is None and a["gated"][:2].abs().max() == 0 and torch.equal(a["gated"][2], plain[2])
    assert a["gated"][2][1] > a["gated"][2][2]  # as long, and right


def test_what_is_counted_and_refilled_is_what_teaches(tiny):
    several = Several({"a": (lambda text, row, rollout: float(row["answer"] == 2), 1.0), "vowels": (vowels, 1.0)})
    row = train(tiny, reward=several)[0]
    assert row["mixed"] == 0 and row["trained_groups"] == 0 and tiny.version == 0
    rows = train(tiny, reward=several, config=dataclasses.replace(CONFIG, refills=1))
    assert rows[0]["refill_prompts"] == 3 and rows[0]["discarded_groups"] == 6


def test_who_abstains(tiny):
    later = {"right": (right, 1.0), "brief": (brief, 1.0)}
    assert totals(tiny, Several(later, "sum"), "7", "")[0] == [4.0, 0.0]
    first = {"brief": (brief, 1.0), "right": (right, 1.0)}
    assert totals(tiny, Several(first, "sum"), "7", "")[0] == [4.0, None]
    nan = {"right": (right, 1.0), "nan": (lambda *_: float("nan"), 1.0)}
    assert totals(tiny, Several(nan), "7", "")[0] == [1.0, 0.0]


def test_normalised_then_summed_is_the_papers_formula(tiny):
    several = Several({"right": (right, 1.0), "length": (Lengths(), 0.5)}, "normalise_then_sum")
    texts = ["7", "71", "abc", "abcde"], ["a", "b", "c", "defg"]
    groups = asyncio.run(scored(tiny, [{}, {}], [group_of(tiny, *of) for of in texts], several, []))
    table = torch.tensor([[[r.parts["right"], r.parts["length"]] for r in g] for g in groups])  # (B, G, 2)
    normal = (table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-4)
    a = (normal * torch.tensor([1.0, 0.5])).sum(-1)
    expected = (a - a.mean()) / (a.std() + 1e-4)
    assert several.advantages(groups, "centred") == pytest.approx(expected.double(), abs=1e-5)
    short = asyncio.run(scored(tiny, [{}], [group_of(tiny, "7", "71", "abc")], several, []))
    rewards = {"right": (lambda text, *_: None if text == "abcde" else right(text, *_), 1.0), "length": (Lengths(), 0.5)}
    abstained = Several(rewards, "normalise_then_sum")
    groups = asyncio.run(scored(tiny, [{}], [group_of(tiny, "7", "71", "abc", "abcde")], abstained, []))
    a = abstained.advantages(groups, "centred")  # who abstains moves nobody
    assert a[0, 3] == 0 and torch.equal(a[:, :3], several.advantages(short, "centred"))


def test_a_curriculum_gets_the_first_reward(tiny):
    """A rollout that succeeded and was a little long has succeeded."""
    curriculum = Curriculum([ROWS], seed=1)
    train(tiny, rows=curriculum, reward=Several({"right": (lambda *_: 1.0, 1.0), "length": (Lengths(), -0.01)}))
    assert curriculum.results == 6 and {row["rate"] for row in curriculum.table() if row["tries"]} == {1.0}


def test_one_of_several_trains_as_it_does_alone(tiny):
    other = load_policy("tiny")
    alone, several = train(tiny), train(other, reward=Several({"vowels": (vowels, 1.0), "brief": (brief, 0.0)}, "sum"))
    assert torch.equal(weights(tiny), weights(other))
    assert [r["reward"] for r in alone] == [r["reward"] for r in several] == [r["vowels"] for r in several]
    assert all(isinstance(r["brief"], float) for r in several)

    def fragile(text, row, rollout):
        return 1.0 if rollout.seed % 3 else {}["no such judge"]

    with pytest.warns(UserWarning, match="no such judge"):  # a part that raises costs its own rollout
        rows = train(tiny, reward=Several({"vowels": (vowels, 1.0), "fragile": (fragile, 1.0)}))
    assert all(0 < row["reward_errors"] < 12 for row in rows)


@pytest.mark.parametrize("combination", ["gated", "normalise_then_sum"])
def test_the_record_has_the_parts_and_the_advantages_that_were_trained_on(tiny, tmp_path, combination):
    several = Several({"vowels": (vowels, 1.0), "length": (Lengths(), -0.1)}, combination)
    run = Run("several", root=tmp_path, replay_every=5)
    train(tiny, reward=several, run=run)
    table = run.rollouts()
    assert {"vowels", "length"} <= set(table.columns) and len(table) == 24
    if combination == "gated":
        assert table["reward"].tolist() == pytest.approx((table["vowels"] - 0.1 * table["length"]).tolist())
        assert torch.equal(weights(restore(run, 2).policy), weights(tiny))  # the recorded updates, done again
        with pytest.raises(ValueError, match="give Several"):
            rescore(run, several)
    else:
        step = table[table["step"] == 0]
        assert step["advantage"].std() == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("rewards", [
    {"a": vowels}, {"a": (vowels, "1")}, {"a": (vowels, float("nan"))}, {"a": ("x", 1.0)}, {5: (vowels, 1.0)},
    {"": (vowels, 1.0)}, {"a": (Several({"b": (vowels, 1.0)}), 1.0)},
])
def test_what_is_no_reward_is_refused(rewards):
    with pytest.raises(ValueError, match="no reward with its weight"):
        Several(rewards)
    for wrong in ({}, rewards):
        with pytest.raises(ValueError, match="at least one|gated, sum"):
            Several(wrong, "gated" if not wrong else "product")


def test_a_name_stands_for_one_number(tiny):
    with pytest.raises(ValueError, match="'vowels'"):
        train(tiny, reward=Several({"vowels": (vowels, 1.0)}), watch={"vowels": vowels})
    config = dataclasses.replace(CONFIG, refills=1, kl_coef=0.1, sampler_cap=2.0, dual_clip=3.0)
    columns = rows_of(grpo(tiny, load_policy("tiny"), ROWS, config, reward=vowels), 1)[0]
    for name in {*columns, *COLUMNS, "curriculum", "tier", "version", "staleness", "staleness_max", "value_loss", "loss_scale"}:
        for wrong in ({"reward": Several({"a": (vowels, 1.0), name: (vowels, 1.0)})}, {"watch": {name: vowels}}):
            with pytest.raises(ValueError, match=f"'{name}'.*column"):
                train(tiny, **wrong)


# --- TRL's ------------------------------------------------------------------------------------------------------------

def test_a_reward_function_of_trl_gets_its_columns(tiny):
    seen = {}

    def reward(prompts, completions, completion_ids, answer, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, columns=columns)
        return [float(str(a) in c) if c else None for c, a in zip(completions, answer)]

    rows = [{"prompt": "1 + 2?", "answer": 3, "level": "a"}, {"prompt": "2 + 2?", "answer": 4, "completions": "4"}]
    groups = score(tiny, rows, [group_of(tiny, "3", ""), group_of(tiny, "3", "4")], trl_reward(reward))
    assert [g.rewards for g in groups] == [[1.0, None], [0.0, 1.0]]
    assert seen["prompts"] == ["1 + 2?"] * 2 + ["2 + 2?"] * 2 and seen["answer"] == [3, 3, 4, 4]
    assert seen["columns"] == {"level": ["a", "a", None, None]} and seen["ids"][0] == list(groups[0][0].tokens)


def test_messages_are_answered_by_messages_and_async_functions_are_awaited(tiny):
    async def reward(prompts, completions, **_):
        return [float(prompt[0]["role"] == "user" and completion == [{"role": "assistant", "content": "x"}])
                for prompt, completion in zip(prompts, completions)]

    class Awaited:
        async def __call__(self, **columns):
            return await reward(**columns)

    rows = [{"prompt": [{"role": "user", "content": "say x"}]}]
    for function in (reward, Awaited()):
        several = Several({"x": (trl_reward(function), 1.0)})
        assert asyncio.run(scored(tiny, rows, [group_of(tiny, "x", "y")], several, []))[0].rewards == [1.0, 0.0]
    with pytest.raises(TypeError, match="mappings"):
        score(tiny, ["x"], [group_of(tiny, "x")], trl_reward(lambda **_: [1.0]))
    rows = train(tiny, reward=trl_reward(lambda prompts, completions, answer, **_: [
        float(str(a)[0] in c) for a, c in zip(answer, completions)]))
    assert len(rows) == CONFIG.steps and len(ROWS) == 6
