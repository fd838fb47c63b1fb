"""Selection: what is measured on the way, which policy is kept, and that the training is the same without it."""

import asyncio
import dataclasses
import math
import random

import pytest
import torch
from loop_helpers import flat as weights
from loop_helpers import rows_of

from grpolab.arithmetic import Problem
from grpolab.chat import Example, prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.evaluate import evaluate
from grpolab.files import atomic_folder
from grpolab.models.load import load_policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.run import Run
from grpolab.runs.selection import Selection
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, grpo, sft
from grpolab.train.rewards import held_out_reward
from grpolab.train.sft import sft_value

PROBLEMS = [Problem(a, "+", 7) for a in range(12)]
CONFIG = SFTConfig(steps=6, batch_size=4, lr=1e-3, save_every=4)


def scripted(values):
    """A measure that gives `values` in turn by the policy's steps, and notes the weights that it saw."""
    seen = {}

    async def measure(policy):
        steps = (policy.provenance or {}).get("steps") or 0
        seen[steps] = weights(policy)
        return values[steps]

    return measure, seen


def train(policy, run, config=CONFIG, stop=None):
    return rows_of(sft(policy, demonstrations(policy, PROBLEMS), config, run=run), stop)


def test_the_best_is_kept_beside_the_last(tmp_path):
    measure, seen = scripted({0: 0.1, 2: 0.7, 4: 0.7, 6: 0.3})
    run, policy = Run("x", root=tmp_path, select=Selection(measure, every=2)), load_policy("tiny")
    rows = train(policy, run)
    assert run.measured().to_dict("list") == {"steps": [0, 2, 4, 6], "score": [0.1, 0.7, 0.7, 0.3]}
    best = run.best()
    assert torch.equal(weights(best), seen[2]) and best.provenance["steps"] == 2  # of equal ones the earliest
    assert not torch.equal(weights(best), weights(policy)) and torch.equal(weights(policy), seen[6])
    assert [d.name for d in run.folder.glob("best-*")] == ["best-00000002"]
    assert {r["step"]: r["eval_score"] for r in rows if "eval_score" in r} == {1: 0.7, 3: 0.7, 5: 0.3}
    assert all("eval_score" not in r for r in run.metrics)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_selection_changes_no_bit_of_the_training(tmp_path, dropout):
    """Also where it draws from every generator that there is."""

    async def measure(policy):
        torch.manual_seed(99)
        random.seed(99)
        torch.rand(7)
        return (await evaluate(policy, PROBLEMS[:4], samples=2, seed=5)).exact.value

    def trained(run):
        policy = load_policy("tiny")
        policy.model.config.attention_dropout = dropout
        if dropout:
            policy.model.train()
            for layer in policy.model.model.layers:
                layer.self_attn.attention_dropout = dropout
        config = GRPOConfig(steps=4, prompts_per_step=2, group_size=4, max_new_tokens=6, lr=1e-3, max_logp_diff=None)

        reward = lambda text, row, rollout: float(text.count("1"))  # noqa: E731
        return policy, rows_of(grpo(policy, None, PROBLEMS, config, reward=reward, run=run))

    bare, rows = trained(Run("bare", root=tmp_path))
    watched, more = trained(Run("watched", root=tmp_path, select=Selection(measure, every=1)))
    assert torch.equal(weights(bare), weights(watched)) and not torch.equal(weights(bare), weights(load_policy("tiny")))
    for a, b in zip(rows, more):
        assert "eval_score" in b and all(a[k] == b[k] or a[k] != a[k] for k in a if not k.endswith("_s"))


def test_a_run_that_goes_on_keeps_the_earlier_best_and_measures_what_was_missed(tmp_path):
    values = {0: 0.1, 2: 0.9, 4: 0.5, 6: 0.6}
    whole, seen = scripted(values)
    train(load_policy("tiny"), Run("whole", root=tmp_path, select=Selection(whole, every=2)))
    first, _ = scripted(values)
    train(load_policy("tiny"), Run("cut", root=tmp_path, select=Selection(first, every=2)), stop=3)  # kept after 3 steps
    assert list(Run("cut", root=tmp_path).measured()["steps"]) == [0, 2]
    rest, later = scripted(values)
    run = Run("cut", root=tmp_path, select=Selection(rest, every=2))
    train(load_policy("tiny"), run)
    assert sorted(later) == [4, 6] and list(run.measured()["score"]) == [0.1, 0.9, 0.5, 0.6]
    assert torch.equal(weights(run.best()), seen[2])


def test_looks_taken_before_a_restart_are_there_after_it(tmp_path):
    """A run that was cut and goes on, with another policy and Run, as a new kernel has them, shows what a whole one does."""
    def looking(run):
        async def measure(policy):
            groups = await groups_of(policy)
            run.look(policy, [RecordedGroup(g, (0.5,) * len(g), p) for g, p in zip(groups, PROBLEMS)])
            return {"steps_seen": len(run.metrics)}

        return run.select(Selection(measure, every=2, by=None))

    async def groups_of(policy):
        async with Sampler(policy) as sampler:
            prompts = [prompt_ids(policy.tokenizer, p.question) for p in PROBLEMS[:2]]
            return await sampler.sample(prompts, group_size=2, params=SamplingParams(max_new_tokens=4))

    whole, cut = looking(Run("whole", root=tmp_path)), looking(Run("cut", root=tmp_path))
    train(load_policy("tiny"), whole)
    train(load_policy("tiny"), cut, stop=3)  # kept after 3 steps
    again = looking(Run("cut", root=tmp_path))
    assert again.looks.steps() == [0, 2]
    train(load_policy("tiny"), again)
    assert again.looks.steps() == whole.looks.steps() == [0, 2, 4, 6] == list(again.measured()["steps_seen"])
    shown = [[[r.tokens for r in g.group] for g in run.looks.groups(step)] for run in (whole, again) for step in (0, 2, 4, 6)]
    assert shown[:4] == shown[4:] and shown[0] != shown[3]
    train(load_policy("tiny"), looking(Run("cut", root=tmp_path)), dataclasses.replace(CONFIG, steps=2))  # anew, and shorter
    assert Run("cut", root=tmp_path).looks.steps() == [0, 2]
    train(load_policy("tiny"), Run("cut", root=tmp_path), dataclasses.replace(CONFIG, steps=3))  # anew, and not looked at
    assert Run("cut", root=tmp_path).looks.steps() == []


@pytest.mark.parametrize("at", [2, 6])
def test_a_measure_that_was_interrupted_is_asked_again(tmp_path, at):
    values = {0: 0.1, 2: 0.9, 4: 0.5, 6: 1.0}
    plain, seen = scripted(values)
    train(load_policy("tiny"), Run("whole", root=tmp_path, select=Selection(plain, every=2)))
    again, asked = scripted(values)

    async def broken(policy):
        if (policy.provenance or {}).get("steps") == at:
            raise ConnectionError("the judge is away")
        return await again(policy)

    with pytest.raises(ConnectionError):
        train(load_policy("tiny"), Run("cut", root=tmp_path, select=Selection(broken, every=2)))
    run = Run("cut", root=tmp_path, select=Selection(again, every=2))
    assert run.checkpointed() == at  # not even the last measure costs the run
    train(load_policy("tiny"), run)
    assert list(run.measured()["score"]) == list(values.values()) and not run.checkpointed()
    assert torch.equal(weights(run.best()), seen[6])


def test_a_cell_that_is_run_again_measures_the_start_as_the_start_and_another_run_forgets_the_best(tmp_path):
    measure, seen = scripted({0: 0.9, 6: 0.1})
    run, policy = Run("x", root=tmp_path, select=Selection(measure, every=6)), load_policy("tiny")
    train(policy, run)
    train(policy, run)
    assert list(run.measured()["score"]) == [0.9, 0.1] and torch.equal(weights(run.best()), seen[0])
    train(load_policy("tiny"), Run("x", root=tmp_path), dataclasses.replace(CONFIG, lr=1e-4))  # without a selection
    run = Run("x", root=tmp_path)
    assert not run.measured().size
    with pytest.raises(ValueError, match=r"has kept no best policy: Run\(..., select=Selection"):
        run.best()


def test_the_best_is_never_half_written(tmp_path, monkeypatch):
    measure, seen = scripted({0: 0.1, 3: 0.9, 6: 0.2})

    class Killed(BaseException):  # no KeyboardInterrupt: asyncio raises that past the task, whose exception is never retrieved,
        pass  # and is reported in a later collection; inside ast.parse, Python before 3.11.8 then raises a SystemError there

    def killed(path):
        if path.name == "best-00000003":
            raise Killed
        return atomic_folder(path)

    run = Run("x", root=tmp_path, select=Selection(measure, every=3))
    with monkeypatch.context() as patch:
        patch.setattr("grpolab.runs.selection.atomic_folder", killed)
        with pytest.raises(Killed):
            train(load_policy("tiny"), run)
    assert torch.equal(weights(run.best()), seen[0]) and list(run.measured()["steps"]) == [0]
    with monkeypatch.context() as patch:  # the new one stands, and the old one is dropped half-way
        patch.setattr("grpolab.runs.selection.remove_folder", lambda path: None)
        again = Run("x", root=tmp_path, select=Selection(measure, every=3))
        train(load_policy("tiny"), again)
    assert len(list(run.folder.glob("best-*"))) == 2 and torch.equal(weights(again.best()), seen[3])


def test_several_numbers_are_selected_by_one_or_watched_alone(tmp_path):
    async def measure(policy):
        steps = (policy.provenance or {}).get("steps") or 0
        return {"right": steps / 10, "brief": 1 - steps / 10}

    run = Run("x", root=tmp_path, select=Selection(measure, every=3, by="brief"))
    rows = train(load_policy("tiny"), run)
    assert run.selected.best()["steps"] == 0 and rows[-1]["eval_right"] == 0.6
    watching = Run("y", root=tmp_path, select=Selection(measure, every=3, by=None))
    train(load_policy("tiny"), watching)
    assert len(watching.measured()) == 3 and watching.selected.best() is None


@pytest.mark.parametrize("value", ["0.5", None, {"right": "x"}, {"right": 0.5}])
def test_a_measure_without_the_number_is_an_error_before_anything_is_trained(tmp_path, value):
    policy = load_policy("tiny")
    with pytest.raises(ValueError, match="gives a number, or numbers by name with the one to select by, 'score', among them"):
        train(policy, Run("x", root=tmp_path, select=Selection(lambda policy: value)))
    assert policy.version == 0
    with pytest.raises(ValueError, match="at least 1, got every=0"):
        Selection(lambda policy: 0.5, every=0)


def test_going_on_by_another_number_is_refused(tmp_path):
    async def measure(policy):
        return {"a": 0.5, "b": 0.5}

    train(load_policy("tiny"), Run("x", root=tmp_path, select=Selection(measure, every=3, by="a")), stop=3)
    with pytest.raises(ValueError, match="chosen by 'a', and the run would go on choosing by 'b'"):
        train(load_policy("tiny"), Run("x", root=tmp_path, select=Selection(measure, every=3, by="b")))


# --- ready-made measures ----------------------------------------------------------------------------------------------


def test_the_held_out_loss_is_that_of_the_same_weights_without_dropout():
    """Every so many steps and in the last row; training on the held-out examples themselves it is the loss of the row."""
    policy, other = load_policy("tiny"), load_policy("tiny")
    examples = demonstrations(policy, PROBLEMS[:4])
    rows = rows_of(sft(policy, examples, dataclasses.replace(CONFIG, held_out_every=2), held_out=examples))
    assert [r["step"] for r in rows if "held_out_loss" in r] == [0, 2, 4, 5]
    assert all(r["held_out_loss"] == pytest.approx(r["loss"], rel=1e-5) for r in rows if "held_out_loss" in r)
    rows_of(sft(other, examples, CONFIG))
    assert torch.equal(weights(policy), weights(other))
    plain = sft_value(policy, examples, CONFIG)
    policy.model.train()
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    small = dataclasses.replace(CONFIG, token_budget=64)
    assert sft_value(policy, examples, CONFIG) == plain == pytest.approx(sft_value(policy, examples, small), rel=1e-5)
    with pytest.raises(ValueError, match="held-out example 0 has no token to train on"):
        rows_of(sft(policy, examples, CONFIG, held_out=[Example((5, 6), (0, 0))]))


def test_the_held_out_reward_is_the_mean_of_what_the_policy_earns():
    policy = load_policy("tiny")
    rows = [{"prompt": f"What is {a} + 2?", "answer": a} for a in range(6)]
    asked = []

    async def even(text, row, rollout):
        asked.append((row["answer"], text))
        return None if row["answer"] == 5 else float(row["answer"] % 2 == 0)

    measure = held_out_reward(rows, even, max_new_tokens=4)
    assert asyncio.run(measure(policy)) == 0.6 and sorted(a for a, _ in asked) == list(range(6))
    first, asked[:] = sorted(asked), []
    assert asyncio.run(measure(policy)) == 0.6 and sorted(asked) == first  # the same again
    sampled = held_out_reward(rows, lambda text, row, rollout: float(rollout.seed), samples=3, max_new_tokens=2, seed=7)
    assert asyncio.run(sampled(policy)) == asyncio.run(sampled(policy))
    with pytest.raises(ValueError, match="no held-out rows"):
        held_out_reward([])
    assert math.isnan(asyncio.run(held_out_reward(rows, lambda *_: None)(policy)))


def test_nan_selects_nothing_and_says_so(tmp_path):
    measure, seen = scripted({0: 0.1, 6: float("nan")})
    run = Run("x", root=tmp_path, select=Selection(measure, every=6))
    with pytest.warns(UserWarning, match="nan for 'score' after 6 steps"):
        train(load_policy("tiny"), run)
    assert torch.equal(weights(run.best()), seen[0])
