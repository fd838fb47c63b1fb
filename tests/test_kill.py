"""Resume after a real SIGKILL, wherever it falls: in a step, in the middle of a save, between two renames.

A script loads the model once and forks: every attempt is a process of its own that dies by the signal.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import asyncio, hashlib, json, math, os, random, shutil, signal, sys, time
from pathlib import Path

import pandas as pd
import safetensors.torch
import torch

from grpolab.train import loop as optimise
from grpolab.arithmetic import Task, generate
from grpolab.models.load import load_policy
from grpolab.runs import run as lab_run
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo
from grpolab.train.sft import SFTConfig, demonstrations, sft

method, root = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
policy = load_policy("tiny", device="cpu")
problems, _ = generate(40, 0, seed=2, task=Task("+-", max_operand=20))
TIMES = {"seconds", "tokens_per_s", "sampling_s", "update_s", "sampled_tokens_per_s", "updated_tokens_per_s"}


def digits(text, problem, rollout):
    return float(sum(c.isdigit() for c in text) % 2 == 0)


def start(run):
    if method == "sft":
        return sft(policy, demonstrations(policy, problems), SFTConfig(steps=12, batch_size=4, save_every=1), run=run)
    config = GRPOConfig(steps=12, prompts_per_step=4, group_size=4, max_new_tokens=10, inner_epochs=2, refills=1, save_every=1)
    return grpo(policy, None, problems, config, reward=digits, run=run)


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


async def attempt(folder):
    made, kept = optimise.make_optimiser, []
    optimise.make_optimiser = lambda *a: kept.append(made(*a)) or kept[-1]
    run = Run("run", root=folder)
    async for _ in start(run):
        pass
    states = kept[0].state_dict()["state"]
    rows = [{k: v for k, v in r.items() if k not in TIMES and v == v} for r in run.metrics]
    left = sorted(p.name for p in run.folder.iterdir())
    found = {"parameters": digest(policy.model.parameters()), "version": policy.version, "metrics": rows, "left": left,
             "optimiser": digest(v for s in states.values() for v in s.values())}
    found["rollouts"] = list(run.recorder.lines())
    (folder / "done.json").write_text(json.dumps(found))


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def half(rows, columns, header=True):
    # a row of metrics of which the disk got a half
    text = whole_csv(rows, columns, header)
    if header:
        return text
    with open(cut / "run" / "metrics.csv", "a") as file:
        file.write(text[: len(text) // 2])
    die()


def dying(function, at):
    # the function, which dies at its at-th call
    calls = iter(range(1, 10**9))
    return lambda *a, **k: die() if next(calls) == at else function(*a, **k)


def install(place, at):
    if place == "append":
        lab_run._csv = half
        return
    module, name = {"save": (safetensors.torch, "save_file"), "state": (json, "dumps"), "rename": (os, "rename"),
                    "drop": (shutil, "rmtree"), "sync": (os, "fsync"), "replace": (os, "replace")}[place]
    setattr(module, name, dying(getattr(module, name), at))


def forked(folder, place=None, at=0, after=None):
    # True when the child was killed
    pid = os.fork()
    if pid == 0:
        try:
            if place:
                install(place, at)
            asyncio.run(attempt(folder))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    if (table := folder / "run" / "metrics.csv").exists():
        readable.append(list(pd.read_csv(table)["step"]) == list(range(len(pd.read_csv(table)))))
    return os.WIFSIGNALED(status)


readable, whole_csv = [], lab_run._csv
whole, cut = root / "whole", root / "cut"
assert not forked(whole)
killed, saw_partial, steps = [], False, []
# the start's weights, the first and second file of a save, its flush, its rename, the removal of the last one, a half row of
# metrics, the note of where the run started
deaths = [("save", 1), ("save", 3), ("save", 5), ("sync", 7), ("rename", 1), ("drop", 6), ("append", 1), ("replace", 2),
          ("save", 3), ("rename", 2)]
for place, at in deaths:
    killed.append(forked(cut, place, at))
    saw_partial |= any((cut / "run").glob(".checkpoint-*.partial"))
    steps.append(max((int(p.name[-8:]) for p in (cut / "run").glob("checkpoint-0*")), default=0))
rng = random.Random(0)
for _ in range(2):  # at any moment
    if not (cut / "done.json").exists():
        forked(cut, after=rng.uniform(0.1, 1.5))
if not (cut / "done.json").exists():
    forked(cut)
found = {"killed": killed, "saw_partial": saw_partial, "readable": readable, "steps": steps}
print(json.dumps(found | {of.name: json.loads((of / "done.json").read_text()) for of in (whole, cut)}))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
@pytest.mark.full
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, method):
    done = subprocess.run([sys.executable, "-c", SCRIPT, method, str(tmp_path)], capture_output=True, text=True, timeout=300,
                          cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found["killed"]) and found["saw_partial"] and all(found["readable"])
    assert found["steps"] == sorted(found["steps"]) and found["steps"][-1] >= 3
    for of in (found["whole"], found["cut"]):
        of["left"] = [name for name in of["left"] if not name.startswith(".start-")]
    assert found["cut"] == found["whole"] and len(found["whole"]["metrics"]) == 12
    left = [".process", "metrics.csv", *["rollouts"] * (method == "grpo"), "run.json"]
    assert found["whole"]["left"] == left
