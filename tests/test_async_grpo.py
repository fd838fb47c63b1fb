"""Sampling ahead of the updates: equal to the synchronous loop at staleness 0, reproducible and resumed in every bit beyond."""

import asyncio
import importlib
import random
import shutil
import threading
import time
from contextlib import aclosing

import pytest
import torch
from loop_helpers import DEVICE, digits, flat, fresh, rows_of, untimed
from transformers import DynamicCache

from grpolab.arithmetic import Problem
from grpolab.decode.scheduler import Scheduler
from grpolab.env.curriculum import Curriculum
from grpolab.lab.counterfactual import fork
from grpolab.lab.credit import credit_of
from grpolab.lab.replay import bundle, replay
from grpolab.runs.rollout_log import Recorder
from grpolab.runs.run import Run
from grpolab.serve.remote import RemoteSampler
from grpolab.serve.service import serve_policy
from grpolab.serve.weight_sync import SharedFile
from grpolab.train import AsyncGRPOConfig, GRPOConfig, async_grpo, grpo
from grpolab.train.async_grpo import Actor

module, grpo_module = (importlib.import_module(f"grpolab.train.{name}") for name in ("async_grpo", "grpo"))
replay_module = importlib.import_module("grpolab.lab.replay")
PROBLEMS = [Problem(a, "+", 7) for a in range(12)]
SMALL = {"steps": 6, "prompts_per_step": 3, "group_size": 4, "max_new_tokens": 12, "lr": 3e-3, "warmup": 1, "seed": 4,
         "max_logp_diff": None}
OWN = {"version", "staleness", "staleness_max"}


async def late(text, row, rollout):
    """As `digits`, after a time that differs from run to run."""
    await asyncio.sleep(random.random() / 50)
    return digits(text, row, rollout)


def config(staleness, **more):
    return AsyncGRPOConfig(**SMALL | {"max_staleness": staleness} | more)


def train(policy, staleness=1, n=None, reward=late, run=None, **more):
    return rows_of(async_grpo(policy, None, PROBLEMS, config(staleness, **more), reward=reward, run=run), n)


def test_a_kl_penalty_to_the_sampler_acts_on_rollouts_of_older_weights(tiny):
    rows = [train(fresh(tiny), 2, lr=3e-4, **o) for o in ({}, {"kl_coef": 3.0, "kl_to": "sampler"})]
    assert rows[0][0]["sampler_kl"] < 1e-9 and "kl" not in rows[1][0]
    free, held = (sum(r["sampler_kl"] for r in of[3:]) for of in rows)  # the first are of the start's weights
    assert 0 < held < 0.5 * free


def recorded(run):
    return [(step, [(g.group, g.advantages, g.problem) for g in run.recorder.groups(step)]) for step in run.recorder.steps()]


def test_staleness_0_is_grpo_in_every_bit(tiny, tmp_path):
    runs = [Run(name, root=tmp_path) for name in ("sync", "async")]
    other = fresh(tiny)
    plain = rows_of(grpo(tiny, None, PROBLEMS, GRPOConfig(**SMALL), reward=digits, run=runs[0]))
    ours = train(other, 0, reward=digits, run=runs[1])
    assert untimed(plain) == untimed(ours, OWN) and torch.equal(flat(tiny), flat(other))
    assert recorded(runs[0]) == recorded(runs[1]) and len(recorded(runs[0])) == 6
    assert [r["staleness_max"] for r in ours] == [0] * 6 and not (runs[1].folder / "ahead").exists()


@pytest.mark.parametrize("staleness", [2, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 4))])
def test_the_schedule_is_a_function_of_the_step(tiny, tmp_path, staleness):
    run, other = Run("one", root=tmp_path), fresh(tiny)
    rows = train(tiny, staleness, run=run)
    versions = [{v for g in run.recorder.groups(k) for r in g.group for v in r.token_versions} for k in range(6)]
    assert versions == [{max(0, k - staleness)} for k in range(6)] and tiny.version == 6
    assert [r["staleness"] for r in rows] == [min(k, staleness) for k in range(6)] == [r["staleness_max"] for r in rows]
    assert rows[0]["diff_abs_mean"] < 1e-4 < 1e-3 < rows[-1]["diff_abs_mean"]
    assert untimed(rows) == untimed(train(other, staleness)) and torch.equal(flat(tiny), flat(other))


async def test_steps_ahead_are_scored_at_once_and_never_more_than_the_bound(tiny):
    open_now, most = set(), []

    async def slow(text, row, rollout):
        open_now.add(rollout.seed)
        await asyncio.sleep(0.15)
        most.append(len(open_now))
        open_now.remove(rollout.seed)
        return digits(text, row, rollout)

    async for _ in async_grpo(tiny, None, PROBLEMS, config(2), reward=slow):
        pass
    assert max(most) == 3 * 12 and len(most) == 6 * 12


@pytest.fixture
def actors(monkeypatch):
    """The actors that a training makes."""
    made = []
    monkeypatch.setattr(module, "Actor", lambda policy: made.append(Actor(policy)) or made[-1])
    return made


def test_sampling_goes_on_while_the_update_runs(tiny, actors, monkeypatch):
    """Each update waits for a token that the actor draws meanwhile."""
    seen, update = [], grpo_module.grpo_update

    def waiting(policy, reference, groups, config, optimiser, step, *rest):
        stats = actors[0].sampler.stats
        before, end = stats.new_tokens, time.monotonic() + 20
        while 0 < step < config.steps - 1 and stats.new_tokens == before and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(stats.new_tokens - before)
        return update(policy, reference, groups, config, optimiser, step, *rest)

    monkeypatch.setattr(grpo_module, "grpo_update", waiting)
    slow_decode(monkeypatch)
    train(tiny, 1)
    assert len(seen) == 6 and all(seen[1:-1])  # steps 0 and 1 begin together


def slow_decode(monkeypatch, seconds=0.01):
    decode = Scheduler._decode
    monkeypatch.setattr(Scheduler, "_decode", lambda self: (time.sleep(seconds), decode(self))[1])


def in_flight(policy, run=None, **more):
    """The rows of a training whose weights change between decode steps, and the models by version."""
    models = {0: fresh(policy).model}

    async def go():
        rows = []
        async for row in async_grpo(policy, None, PROBLEMS, config(2, in_flight=True, **more), reward=late, run=run):
            rows.append(row)
            models[policy.version] = fresh(policy).model
        return rows

    return asyncio.run(go()), models


@torch.no_grad()
def drawn_from(models, rollout, versions):
    """Log-probs of a rollout's tokens by the models' own forward: `versions` drew them, and fed what stood before them."""
    cache, feed, logps = DynamicCache(), rollout.prompt, []
    for version, token in zip(versions, rollout.tokens, strict=True):
        logits = models[version](torch.tensor([feed], device=DEVICE), past_key_values=cache, use_cache=True).logits[0, -1]
        logps.append(logits.log_softmax(-1)[token].item())
        feed = [token]
    return torch.tensor(logps)


@pytest.mark.full
def test_in_flight_each_token_carries_its_version_and_its_exact_log_prob(tiny, tmp_path, monkeypatch):
    slow_decode(monkeypatch, 0.08)  # a step of training falls within it on busy cores, too
    run = Run("flight", root=tmp_path)
    rows, models = in_flight(tiny, run, max_new_tokens=24)
    mixed, wrong = 0, 0.0
    for step in range(6):
        for r in (r for g in run.recorder.groups(step) for r in g.group[:2]):
            versions = r.token_versions
            assert list(versions) == sorted(versions) and versions[0] == r.policy_version
            assert max(0, step - 2) <= versions[0] and versions[-1] <= step
            torch.testing.assert_close(drawn_from(models, r, versions), torch.tensor(r.logps), atol=1e-4, rtol=0)
            if r.versions:
                mixed += 1
                other = drawn_from(models, r, (r.policy_version,) * len(r.tokens))
                wrong = max(wrong, (other - torch.tensor(r.logps)).abs().max().item())
    assert mixed > 5 and wrong > 1e-2
    assert all(0 <= r["staleness"] <= r["staleness_max"] <= 2 for r in rows)


@pytest.mark.full
def test_in_flight_rollouts_are_replayed_in_every_bit(tiny, tmp_path, monkeypatch):
    slow_decode(monkeypatch, 0.08)  # a step of training falls within it on busy cores, too
    run = Run("flight", root=tmp_path, replay_every=1)
    in_flight(tiny, run, max_new_tokens=24, steps=4)
    found = replay(run, 3, group=1)
    assert any(r.recorded.versions for r in found.rollouts) and found.equal, str(found)
    monkeypatch.setattr(replay_module, "_drawn_ahead", lambda sampler, policy, earlier, rollouts, params: iter(
        [g[0] for g in sampler.sample_sync([r.prompt for r in rollouts], params=params)]))
    assert not replay(run, 3, group=1).equal  # from the weights before the step


@pytest.mark.full
def test_a_step_of_older_weights_is_replayed_and_its_fork_is_refused(tiny, tmp_path):
    run = Run("ahead", root=tmp_path, replay_every=2)
    train(tiny, 2, run=run, steps=4)
    assert replay(run, 3, group=0).equal and replay(run, 1, group=0).equal
    for what in (lambda: bundle(run, 3, tmp_path / "b"), lambda: credit_of(run, 3, 0, 0, digits),
                 lambda: asyncio.run(fork(run, 3, "no", PROBLEMS, reward=digits, lr=1e-4))):
        with pytest.raises(ValueError, match="needs rollouts of the weights before their step.*max_staleness=2"):
            what()


@pytest.mark.parametrize("in_flight", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_right_after_a_checkpoint_it_repeats_what_was_drawn(tiny, tmp_path, monkeypatch, in_flight):
    """Resumed from the folder as it was when the checkpoint after step 3 had just been written."""
    slow_decode(monkeypatch)
    start, save = fresh(tiny), Run.save_checkpoint

    def saved(run, *rest):
        path = save(run, *rest)
        shutil.copytree(run.folder, tmp_path / "killed")
        return path

    settings = {"steps": 8, "save_every": 4, "in_flight": in_flight}
    whole = Run("whole", root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save_checkpoint", saved)
        rows = train(tiny, 2, run=whole, **settings)
    again = Run("killed", root=tmp_path)
    assert {4, 5} <= set(Recorder(again.folder / "ahead").steps()) <= set(range(6))
    rest, same = train(start, 2, run=again, **settings), 6 if in_flight else 8  # then the clock decides in flight
    assert untimed(rest)[: same - 4] == untimed(rows)[4:same] and recorded(again)[:same] == recorded(whole)[:same]
    assert in_flight or torch.equal(flat(tiny), flat(start))
    assert not (again.folder / "ahead").exists()


@pytest.mark.parametrize("cancel", [False, pytest.param(True, marks=pytest.mark.full)])
def test_stopped_anywhere_it_goes_on_in_every_bit(tiny, tmp_path, cancel):
    start, cut = fresh(tiny), fresh(tiny)
    rows = train(tiny, 2)
    run = Run("cut", root=tmp_path)

    async def stopped():
        async def go():
            async with aclosing(async_grpo(cut, None, PROBLEMS, config(2), reward=late, run=run)) as rows:
                async for row in rows:
                    if row["step"] == 2:
                        reached.set()
                        await asyncio.sleep(0)

        reached = asyncio.Event()
        training = asyncio.create_task(go())
        await reached.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert asyncio.all_tasks() == {asyncio.current_task()}

    if cancel:
        asyncio.run(stopped())
    else:
        train(cut, 2, n=3, run=run)
    done = run.checkpointed()
    assert 3 <= done < 6 and set(range(done, min(6, done + 2))) <= set(Recorder(run.folder / "ahead").steps())
    run, policy = Run("cut", root=tmp_path), cut if cancel else start  # the one that was stopped, or one made anew
    train(policy, 2, run=run)
    assert untimed(run.metrics) == untimed(rows) and torch.equal(flat(tiny), flat(policy))


def test_what_was_drawn_is_gone_with_its_file_and_that_is_said(tiny, tmp_path):
    train(fresh(tiny), 2, n=3, run=Run("cut", root=tmp_path))
    (tmp_path / "cut" / "ahead" / "step-00000004.jsonl.gz").unlink()
    with pytest.warns(UserWarning, match=r"holds no rollouts of steps \[4\].*drawn anew"):
        train(tiny, 2, run=Run("cut", root=tmp_path))


async def test_cancelled_in_flight_it_drops_what_is_drawn_and_leaves_nothing(tiny, monkeypatch, capsys, actors):
    slow_decode(monkeypatch, 0.05)
    threads, tasks = threading.active_count(), asyncio.all_tasks()

    async def go():
        async for _ in async_grpo(tiny, None, PROBLEMS, config(2, in_flight=True, max_new_tokens=200), reward=digits):
            pass

    training = asyncio.create_task(go())
    while not actors or actors[0].sampler.stats.new_tokens < 100:  # all three steps have begun
        await asyncio.sleep(0.01)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert asyncio.all_tasks() == tasks and not actors[0].sampler.busy
    assert "36 rollouts in flight were dropped" in capsys.readouterr().out
    assert tiny.version == 0 and threading.active_count() <= threads + 2  # the thread of the steps, and asyncio's own


def test_a_broken_reward_ends_the_training_with_its_error(tiny, tmp_path):
    def broken(text, row, rollout):
        if rollout.policy_version == 1:
            raise KeyError("answer key")
        return digits(text, row, rollout)

    run = Run("broken", root=tmp_path)
    with pytest.raises(KeyError, match="answer key"):
        train(tiny, 1, reward=broken, run=run)
    assert run.checkpointed() == 2 == len(run.metrics)  # steps 0 and 1 were of version 0


def test_the_served_policy_is_a_sampler_too(tiny, tmp_path):
    """The same schedule, with completions, log-probs and weights as in this process."""
    rows, other = train(fresh(tiny), 1, reward=digits, steps=4), fresh(tiny)

    async def served():
        path = tmp_path / "weights.safetensors"
        async with serve_policy(fresh(tiny), weights=path) as service:
            async with RemoteSampler(service.url, other, bridge=SharedFile(path)) as sampler:
                steps = async_grpo(other, None, PROBLEMS, config(1, steps=4), reward=digits, sampler=sampler)
                return [row async for row in steps]

    theirs = asyncio.run(served())
    assert [r["staleness_max"] for r in theirs] == [0, 1, 1, 1] and untimed(theirs) == untimed(rows)


@pytest.mark.parametrize("wrong, message", [
    ({"max_staleness": -1}, "max_staleness must be finite and at least 0"), ({"refills": 1}, "refills=1"),
    ({"exact": True}, "exact=True"),
    ({"in_flight": True, "max_staleness": 0}, "set 1 or more")])
def test_what_it_cannot_do_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        AsyncGRPOConfig(**wrong)


def test_a_curriculum_and_in_flight_elsewhere_are_refused(tiny):
    async def go(problems, sampler=None, **more):
        async for _ in async_grpo(tiny, None, problems, config(1, **more), sampler=sampler):
            pass

    with pytest.raises(ValueError, match="a curriculum chooses by the results"):
        asyncio.run(go(Curriculum([[{"prompt": p.question, "answer": p.answer} for p in PROBLEMS]])))
    with pytest.raises(ValueError, match="a served policy changes between completions"):
        asyncio.run(go(PROBLEMS, object(), in_flight=True))


def test_old_rollouts_beyond_the_bound_stop_the_training(tiny):
    with pytest.raises(RuntimeError, match="beyond max_logp_diff=.*set sampler_cap"):
        train(tiny, 4, max_logp_diff=(0.01, 5.0), lr=1e-2)
