"""A run knows where its policy started: its cell can be run again, interrupted, and never shares its folder unnoticed."""

import asyncio
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from loop_helpers import flat, fresh, rows_of, untimed

from grpolab.arithmetic import Task, generate
from grpolab.runs import run as lab_run
from grpolab.runs.checkpoints import data_hash
from grpolab.runs.run import Run, repository
from grpolab.train import DPOConfig, RewardConfig, RewardModel, dpo, reward_model
from grpolab.train.grpo import GRPOConfig, grpo
from grpolab.train.preferences import load_preferences
from grpolab.train.reference import cache_logps
from grpolab.train.sft import SFTConfig, demonstrations, sft

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = SFTConfig(steps=5, batch_size=6, lr=1e-3, save_every=2)


def train(policy, run, config=CONFIG, stop=None):
    """The cell: train, and return the numbers."""
    rows_of(sft(policy, demonstrations(policy, PROBLEMS), config, run=run), stop)
    return untimed(run.metrics) if run else None


def test_a_cell_run_twice_gives_the_same_numbers(tiny, tmp_path, capsys):
    """On the policy that the first time has trained, in the run object of the first time or a new one."""
    run = Run("x", root=tmp_path)
    first = train(tiny, run)
    end = flat(tiny)
    assert len(first) == 5 and not capsys.readouterr().out
    for again in (run, Run("x", root=tmp_path)):
        version = tiny.version
        assert train(tiny, again) == first and torch.equal(flat(tiny), end)
        assert tiny.version == version + 6  # five steps, and the way back: a sampler that lives on must notice
        assert capsys.readouterr().out.count("tiny goes back to the weights from which") == 1
    table = pd.read_csv(run.folder / "metrics.csv")
    assert table["step"].tolist() == list(range(5)) and table["loss"].tolist() == [r["loss"] for r in first]


def test_what_was_done_in_between_is_undone(tiny, tmp_path, capsys):
    """Two runs one after another on one policy: either cell can be run again."""
    one, two = Run("one", root=tmp_path), Run("two", root=tmp_path)
    first, then = train(tiny, one), train(tiny, two)
    assert then[0]["loss"] < first[-1]["loss"] * 1.5 and then != first
    assert train(tiny, two) == then
    assert train(tiny, one) == first
    assert train(tiny, two) == then
    train(tiny, one, replace(CONFIG, lr=1e-4))  # the second goes on from what the first now gives
    assert train(tiny, two)[0]["loss"] > then[0]["loss"] * 1.2


def test_a_version_never_stands_for_two_weights(tiny, tmp_path):
    """A checkpoint is loaded into a policy that has gone on: who holds its weights of then must notice."""
    whole = train(fresh(tiny), Run("whole", root=tmp_path))
    run, seen = Run("x", root=tmp_path), []
    train(tiny, run, stop=2)
    train(tiny, None)
    assert tiny.version == 7

    async def cell():
        async for _ in sft(tiny, demonstrations(tiny, PROBLEMS), CONFIG, run=run):
            seen.append(tiny.version)

    asyncio.run(cell())
    assert seen == [9, 10, 11] and untimed(run.metrics) == whole


def test_a_new_policy_is_never_taken_back_to_an_old_start(tiny, tmp_path, capsys):
    """The policy of an earlier notebook was made anew: the run starts from it, not from what it once started from."""
    train(fresh(tiny), Run("x", root=tmp_path), stop=3)
    new = fresh(tiny)
    train(new, None)
    capsys.readouterr()
    rows = train(new, Run("x", root=tmp_path))
    assert [r["step"] for r in rows] == list(range(5))  # the checkpoint is of another start
    assert "x starts over, from other weights than before" in capsys.readouterr().out
    assert train(new, Run("x", root=tmp_path)) == rows


def interrupted(policy, run, config, moment):
    """The cell, cancelled once `moment()`."""

    async def cell():
        async for _ in sft(policy, demonstrations(policy, PROBLEMS), config, run=run):
            pass

    async def main():
        task = asyncio.create_task(cell())
        while not moment():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_an_interrupt_before_the_first_checkpoint_costs_nothing(tiny, tmp_path, monkeypatch):
    """In the same process, on the policy that has moved; with the checkpoint that the interrupt leaves, and without."""
    config = replace(CONFIG, save_every=100)
    whole, run = train(fresh(tiny), Run("whole", root=tmp_path), config), Run("cut", root=tmp_path)
    interrupted(tiny, run, config, lambda: tiny.version >= 2)
    (left,) = run.folder.glob("checkpoint-*")
    assert int(left.name[-1]) == tiny.version >= 2
    assert train(tiny, run, config) == whole
    monkeypatch.setattr(Run, "save_checkpoint", lambda *_: None)
    interrupted(tiny, run, config, lambda: len(run.metrics) in (2, 3))
    assert not list(run.folder.glob("checkpoint-*"))
    assert train(tiny, run, config) == whole


def test_a_step_whose_update_failed_half_way_is_not_kept(tiny, tmp_path):
    """The second of its two optimiser steps fails, and the weights of the first are those of no step."""
    config = GRPOConfig(steps=3, prompts_per_step=4, group_size=2, max_new_tokens=4, minibatches=2, save_every=100)

    def cell(policy, run, spoil=lambda row: None):
        async def walk():
            async for row in grpo(policy, None, PROBLEMS, config, reward=lambda *a: float(a[2].seed % 7), run=run):
                spoil(row)

        asyncio.run(walk())
        return flat(policy)

    def fail_in_the_third_step(row):
        calls = iter([1.0, float("nan")])
        if row["step"] == 1:
            hooks.append(weight.register_hook(lambda g: g * next(calls)))

    policy, hooks = fresh(tiny), []
    weight = policy.model.get_output_embeddings().weight
    with pytest.raises(FloatingPointError, match="step 2"):
        cell(policy, Run("x", root=tmp_path), fail_in_the_third_step)
    assert policy.version == 5 and not list((tmp_path / "x").glob("checkpoint-*"))
    hooks.pop().remove()
    assert torch.equal(cell(policy, Run("x", root=tmp_path)), cell(fresh(tiny), Run("whole", root=tmp_path)))


# --- one folder, one loop ---------------------------------------------------------------------------------------------


async def test_a_second_loop_of_the_process_is_refused_while_the_first_lives(tiny, tmp_path):
    examples = demonstrations(tiny, PROBLEMS)
    first = sft(tiny, examples, CONFIG, run=Run("x", root=tmp_path))
    await anext(first)
    with pytest.raises(RuntimeError, match="in use: another loop of this process is training into it"):
        await anext(sft(fresh(tiny), examples, CONFIG, run=Run("x", root=tmp_path)))
    await first.aclose()
    async for _ in sft(tiny, examples, CONFIG, run=Run("x", root=tmp_path)):
        pass
    async for _ in sft(tiny, examples, CONFIG, run=Run("x", root=tmp_path)):
        break  # unnamed and left: gone by the next turn of the event loop
    await asyncio.sleep(0.3)
    await anext(sft(tiny, examples, CONFIG, run=Run("x", root=tmp_path)))


OTHER = """
import os, sys, time
from grpolab.runs.run import Run
run = Run("x", root=sys.argv[1])
with run.held():
    child = os.fork()  # which outlives its parent and must not keep the lock
    if child == 0:
        sys.stdout.close()
        time.sleep(30)
        os._exit(0)
    print(child, flush=True)
    time.sleep(30)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_second_process_is_refused_until_the_first_is_dead(tiny, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parent.parent)
    child = int(other.stdout.readline())
    try:
        with pytest.raises(RuntimeError, match=rf"in use: process {other.pid} is training into it.*Run\(\.\.\., seed="):
            train(tiny, Run("x", root=tmp_path))
        assert tiny.version == 0
        other.send_signal(signal.SIGKILL)
        other.wait()
        os.kill(child, 0)  # alive
        assert len(train(tiny, Run("x", root=tmp_path))) == 5
    finally:
        os.kill(child, signal.SIGKILL)
        other.kill()
        other.wait()
        other.stdout.close()


def test_a_shortened_notebook_leaves_its_runs_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for quick, folder in (("1", "runs/quick/x"), ("0", "runs/x"), ("", "runs/x")):
        monkeypatch.setenv("GRPOLAB_QUICK", quick)
        assert Run("x").folder == tmp_path / folder


# --- a folder that holds a run ----------------------------------------------------------------------------------------


@pytest.fixture
def earlier(tiny, tmp_path):
    """The rows of a finished run of another process: a folder that no loop of this one has trained into."""
    rows = train(fresh(tiny), Run("first", root=tmp_path))
    shutil.copytree(tmp_path / "first", tmp_path / "x", ignore=shutil.ignore_patterns(".start-*"))
    for path in (tmp_path / "x").rglob("*"):
        os.utime(path, (0, 0))
    return rows


def test_an_earlier_run_is_opened_done_again_or_moved_aside(tiny, earlier, tmp_path, capsys):
    """Opened later it has its table; its cell gives the same numbers; another configuration overwrites nothing of it, nor a run
    in a folder below, nor what this process drew before its loop."""
    assert untimed(Run("x", root=tmp_path).table().to_dict("records")) == earlier and Run("new", root=tmp_path).table().empty
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert train(fresh(tiny), Run("y", root=tmp_path)) == earlier and not (tmp_path / "y.1").exists()
    run = Run("x", root=tmp_path)
    run.child("below").figure("curve", plt.figure())
    (run.folder / "below" / "run.json").write_text("{}")  # a run of its own
    run.figure("before", plt.figure())
    assert train(fresh(tiny), run, replace(CONFIG, lr=2e-3)) != earlier
    assert "x held a run of another configuration (lr 0.001 -> 0.002)" in (err := capsys.readouterr().err) and "x.1" in err
    assert untimed(Run("x.1", root=tmp_path).table().to_dict("records")) == earlier
    assert (run.folder / "figures" / "before.png").exists() and (run.folder / "below" / "figures").exists()
    shutil.copytree(tmp_path / "y", tmp_path / "z")  # written a moment ago
    for path in (tmp_path / "z").rglob("*"):
        os.utime(path)
    train(fresh(tiny), Run("z", root=tmp_path), replace(CONFIG, lr=2e-3))
    assert untimed(Run("z.1", root=tmp_path).table().to_dict("records")) == earlier
    for name, what in (("v", "a run that started from other weights"), ("w", "a run on other data")):
        shutil.copytree(tmp_path / "y", tmp_path / name)
        policy, rows = fresh(tiny), demonstrations(tiny, PROBLEMS)
        if name == "v":
            policy.model.get_input_embeddings().weight.data.add_(1e-3)
        rows_of(sft(policy, rows if name == "v" else rows[1:], CONFIG, run=Run(name, root=tmp_path)))
        assert f"{name} held {what}" in capsys.readouterr().err
        assert untimed(Run(f"{name}.1", root=tmp_path).table().to_dict("records")) == earlier
    train(fresh(tiny), run, replace(CONFIG, lr=3e-3))  # the cell again, changed: this process may replace what it wrote
    assert not (tmp_path / "x.2").exists() and "x held a run of another configuration (lr 0.002 -> 0.003): this" in (
        capsys.readouterr().out)
    with pytest.raises(ZeroDivisionError):  # in the first step, before its row
        rows_of(grpo(fresh(tiny), None, PROBLEMS, GRPOConfig(steps=1), reward=lambda *_: 1 / 0, run=run))
    assert run.table().empty and not (run.folder / "metrics.csv").exists()


def test_what_lies_below_a_run_stays_and_what_a_kill_left_goes(tiny, earlier, tmp_path):
    below = tmp_path / "x" / "grid" / "lr-1" / "run.json"
    below.parent.mkdir(parents=True)
    below.write_text("{}")
    left = [tmp_path / "x" / name / ".y.partial" for name in ("", "rollouts", "replay")]
    for partial in left:
        partial.parent.mkdir(exist_ok=True)
        partial.write_text("half")
    train(fresh(tiny), Run("x", root=tmp_path), replace(CONFIG, lr=2e-3))
    assert not any(partial.exists() for partial in left)
    assert below.exists() and (tmp_path / "x.1" / "metrics.csv").exists()


def test_what_another_process_trained_since_the_run_was_opened_is_moved_aside(tiny, earlier, tmp_path):
    run = Run("late", root=tmp_path)
    shutil.copytree(tmp_path / "x", run.folder, dirs_exist_ok=True)
    for path in run.folder.rglob("*"):
        os.utime(path)
    train(fresh(tiny), run, replace(CONFIG, lr=2e-3))
    assert untimed(Run("late.1", root=tmp_path).table().to_dict("records")) == earlier


def test_half_made_pairs_in_a_runs_folder_and_a_policy_that_a_kill_renamed_are_kept(tiny, earlier, tmp_path):
    (tmp_path / "x" / ".pairs.jsonl.partial").write_text("{}")
    (tmp_path / "x" / ".policy.gone.partial").mkdir()
    train(fresh(tiny), Run("x", root=tmp_path))
    assert (tmp_path / "x" / ".pairs.jsonl.partial").read_text() == "{}" and (tmp_path / "x" / "policy").is_dir()


def test_a_start_that_lacks_what_is_trained_now_is_an_error_and_puts_nothing_back(tiny, tmp_path):
    run = Run("x", root=tmp_path)
    tiny.model.requires_grad_(False)
    tiny.model.lm_head.requires_grad_(True)
    train(tiny, run)
    tiny.model.requires_grad_(True)
    before = flat(tiny)
    with pytest.raises(ValueError, match="which 'tiny' now trains"):
        train(tiny, run)
    assert torch.equal(flat(tiny), before)


def test_the_start_lies_on_the_disk_only_while_the_model_lives(tiny, tmp_path):
    policy, run = fresh(tiny), Run("x", root=tmp_path)
    train(policy, run)
    assert len(list(run.folder.glob(".start-*/model.safetensors"))) == 1 and not list(run.folder.glob("checkpoint-*"))
    del policy
    gc.collect()
    assert sorted(p.name for p in run.folder.iterdir()) == [".process", "metrics.csv", "run.json"]


# --- what it leaves ---------------------------------------------------------------------------------------------------


def test_a_saved_policy_says_where_it_comes_from(tiny, tmp_path):
    run, two = Run("one", root=tmp_path), Run("two", root=tmp_path)
    assert not (tiny.save(tmp_path / "p") / "provenance.json").exists()
    train(tiny, run, replace(CONFIG, seed=3))
    found = json.loads((tiny.save(tmp_path / "p") / "provenance.json").read_text())
    assert found.pop("time").startswith("20") and len(found.pop("config")) == 12
    assert found == {"run": str(run.folder), "method": "sft", "steps": 5, "seed": 3, "base": "tiny"}
    train(tiny, two, stop=2)
    assert tiny.provenance["base"] == str(run.folder) and tiny.provenance["steps"] == 2
    train(tiny, run, replace(CONFIG, seed=3))  # back to its own start, and so to its own base
    assert tiny.provenance["base"] == "tiny" and tiny.provenance["run"] == str(run.folder)


def test_metrics_are_appended_and_a_new_column_rewrites_them(tmp_path, monkeypatch):
    run, rewritten = Run("x", root=tmp_path), []
    honest = lab_run.atomic_write
    monkeypatch.setattr(lab_run, "atomic_write", lambda path, text: rewritten.append(path.name) or honest(path, text))
    for step in range(50):
        run.log({"step": step, "loss": 0.1 + step, "nothing": float("nan"), "text": "a,b"})
        assert len(pd.read_csv(run.folder / "metrics.csv")) == step + 1
    assert rewritten == ["metrics.csv"]
    run.log({"step": 50, "late": 2})
    run.log({"step": 51, "loss": 1 / 3})
    table = pd.read_csv(run.folder / "metrics.csv")
    assert rewritten == ["metrics.csv"] * 2 and table["step"].tolist() == list(range(52))
    assert table["loss"].tolist()[:50] == [0.1 + s for s in range(50)] and table["loss"][51] == 1 / 3
    assert table["late"].isna().sum() == 51 and table["nothing"].isna().all() and table["text"][0] == "a,b"


# --- what it was trained on -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_data_is_refused(tiny, tmp_path):
    def cell(problems, stop=None):
        rows = sft(fresh(tiny), demonstrations(tiny, problems), replace(CONFIG, save_every=1), run=Run("x", root=tmp_path))
        return rows_of(rows, stop)

    cell(PROBLEMS, 2)
    for other in (PROBLEMS[:-1], PROBLEMS[::-1]):
        with pytest.raises(ValueError, match="checkpoint-00000002 was trained on other data"):
            cell(other)
    assert [row["step"] for row in cell(list(PROBLEMS))] == [2, 3, 4]
    cell(PROBLEMS[:-1])  # a run that has ended starts over


@pytest.mark.full
def test_pairs_problems_and_references_are_part_of_the_data(tiny, tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "chosen": f"{i + 1}", "rejected": "no"} for i in range(6)]
    pairs, moved = load_preferences(rows, tiny.tokenizer), fresh(tiny)
    train(moved, None, replace(CONFIG, steps=1))
    options = {"steps": 3, "save_every": 1}
    penalised = GRPOConfig(prompts_per_step=2, group_size=2, kl_coef=0.1, max_new_tokens=3, **options)
    loops = {
        "dpo": (lambda policy, data, ref, run: dpo(policy, ref, data, DPOConfig(batch_size=2, **options), run=run),
                [(pairs, fresh(tiny)), (pairs[1:], fresh(tiny)), (pairs, moved)]),
        "cached": (lambda policy, data, ref, run: dpo(policy, cache_logps(ref, data), data, DPOConfig(batch_size=2, **options),
                                                      run=run), [(pairs, fresh(tiny)), (pairs, moved)]),
        "reward": (lambda policy, data, ref, run: reward_model(RewardModel.from_policy(policy), data,
                                                               RewardConfig(batch_size=2, **options), run=run),
                   [(pairs, None), ([replace(p, meta={"margin": 2.0}) for p in pairs], None)]),
        "grpo": (lambda policy, data, ref, run: grpo(policy, ref, data, penalised, run=run),
                 [(PROBLEMS, fresh(tiny)), (PROBLEMS[1:], fresh(tiny)), (PROBLEMS, moved)]),
    }

    for name, (make, ((data, reference), *others)) in loops.items():
        rows_of(make(fresh(tiny), data, reference, Run(name, root=tmp_path)), 1)
        for other in others:
            with pytest.raises(ValueError, match="other data, or against another reference"):
                rows_of(make(fresh(tiny), *other, Run(name, root=tmp_path)), 1)
        rows_of(make(fresh(tiny), data, reference, Run(name, root=tmp_path)), 1)


def test_a_hash_of_data_is_of_its_content(tiny):
    class Plain:
        def __init__(self, x):
            self.x = x

    same = [lambda: {"a": [1, None]}, lambda: PROBLEMS[0], lambda: torch.ones(2), lambda: Plain(3), lambda: object()]
    assert all(data_hash([make()]) == data_hash([make()]) for make in same)
    assert len({data_hash([make()]) for make in same} | {data_hash([Plain(4)]), data_hash([PROBLEMS[1]])}) == 7


def test_names_are_text_and_a_seed_is_a_whole_number_with_a_folder_of_its_own(tmp_path):
    for names in ((Path("runs"),), ("x", None), ("",), ("..",), (3,)):
        with pytest.raises(ValueError, match=r"a run's names are plain text .* root=folder"):
            Run(*names, root=tmp_path)
    for seed in ("1/2", -1, 0.5):
        with pytest.raises(ValueError, match="a whole number from 0 on"):
            Run("x", root=tmp_path, seed=seed)
    assert not list(tmp_path.iterdir())
    folders = [Run("a/b", root=tmp_path, seed=seed).folder for seed in (None, 0, 1)]
    assert folders == [tmp_path / "a--b", tmp_path / "a--b", tmp_path / "a--b" / "seed-1"]


def test_runs_lie_in_the_working_directory_or_beside_the_notebooks_of_a_project(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert repository() == tmp_path / "notebooks"  # of nobody's project
    (tmp_path / "pyproject.toml").touch()
    assert repository() == tmp_path
    monkeypatch.chdir(tmp_path)
    assert repository() == tmp_path
