"""Several processes, started by torchrun, do what one does: gradients, rows, rollouts, weights; also killed and resumed, and
with ranks that fail, are lost, or bring something else. What they run is distributed_program.py."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import distributed_program
import pytest
import torch
from safetensors.torch import load_file

from grpolab.models.load import choose_device
from grpolab.runs.run import Run
from grpolab.train import distributed

PROGRAM = Path(distributed_program.__file__)
METHODS = ["sft", "dpo", "grpo", "multiturn", "reward", "options"]
LONG = set(METHODS) - {"grpo"}  # these in the full suite alone
TORCHRUN = Path(sysconfig.get_path("scripts")) / "torchrun"
ENV = os.environ | {"PYTHONPATH": str(PROGRAM.parent.parent), "OMP_NUM_THREADS": "1"}


def each(methods):
    return pytest.mark.parametrize("what", [pytest.param(m, marks=pytest.mark.full) if m in LONG else m for m in methods])


def torchrun(processes, *arguments):
    return subprocess.run([TORCHRUN, "--nproc-per-node", str(processes), *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, env=ENV, cwd=PROGRAM.parent.parent)


def script(what, base, out):
    """A scenario whose ranks are forked."""
    done = subprocess.run([sys.executable, PROGRAM, base, out, what], capture_output=True, text=True, timeout=300, env=ENV)
    assert done.returncode == 0, done.stderr


def found(out, rank, size):
    return json.loads((out / f"{rank}-of-{size}.json").read_text()), load_file(out / f"{rank}-of-{size}.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    distributed_program.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def methods(request):
    """Those that the tests of this run ask for."""
    asked = {item.callspec.params.get("what") for item in request.session.items if hasattr(item, "callspec")}
    return [m for m in METHODS if m in asked | {"grpo"}]


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory, methods):
    out, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    distributed_program.main(base, out, *methods)
    torch.set_num_threads(threads)
    return found(out, 0, 1)


@pytest.fixture(scope="module")
def pair(request, base, tmp_path_factory, methods):
    """The folder of two ranks by every method; and in the full suite by GRPO once more, where one rank was killed before, in
    step 1."""
    out = tmp_path_factory.mktemp("pair")
    killed = ["killed"] * any(item.name == "test_killed_and_resumed" for item in request.session.items)
    if killed:
        script("kill", base, out)
        assert Run("killed", root=out / "rank-0").checkpointed() == 1
    done = torchrun(2, PROGRAM, base, out, *methods, *killed)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("going on after step 1") == len(killed)  # said once
    return out


@each(METHODS)
def test_two_ranks_take_the_steps_of_one(alone, pair, what):
    """In float64, so that rounding hides nothing: 5 examples, 3 pairs, 3 groups on two ranks; with "options" minibatches,
    refills, KL, another sampler's weights, rewards that raise."""
    (told, tensors), (ours, theirs) = alone, found(pair, 0, 2)
    gradient = tensors[f"{what} gradient"]
    assert gradient.dtype == torch.float64 and gradient.norm() > 0.01
    assert (theirs[f"{what} gradient"] - gradient).norm() < 1e-6 * gradient.norm()
    assert (theirs[f"{what} weights"] - tensors[f"{what} weights"]).abs().max() < 1e-5
    told, ours = told[what], ours[what]
    assert told["version"] == ours["version"] and len(told["rows"]) == len(ours["rows"]) == ours["metrics"] > 1
    for row, other in zip(told["rows"], ours["rows"]):
        assert {k: pytest.approx(v, rel=1e-4, abs=1e-6, nan_ok=True) for k, v in row.items()} == other


@each(["grpo", "options", "multiturn"])
def test_a_step_draws_the_same_rollouts_whatever_the_number_of_ranks(alone, pair, what):
    """And the record of rank 0 holds those of all, in the order of one process, with the seeds of one process."""
    told, ours = alone[0][what]["rollouts"], found(pair, 0, 2)[0][what]["rollouts"]
    assert told == ours and len({seed for *_, seed, _, _ in told}) == len(told) > 7
    assert len({reward for *_, reward, _ in told}) > 1


def test_ranks_end_alike_and_the_first_alone_writes(alone, pair, methods):
    (told, tensors), (other, theirs) = found(pair, 0, 2), found(pair, 1, 2)
    assert all(torch.equal(x, theirs[name]) for name, x in tensors.items())
    for what in methods:
        assert other[what]["files"] == [] and other[what]["metrics"] == told[what]["metrics"]
        assert set(told[what]["files"]) == set(alone[0][what]["files"]) > {"metrics.csv", "run.json"}


def same_end(told, tensors, alone):
    """Of a GRPO run that was killed in step 1 and resumed, as of one that never was."""
    assert (tensors["killed weights"] - alone[1]["grpo weights"]).abs().max() < 1e-12
    assert told["killed"]["metrics"] == 3 and [row["step"] for row in told["killed"]["rows"]] == [1, 2]
    assert told["killed"]["version"] == alone[0]["grpo"]["version"]
    assert told["killed"]["rollouts"] in (None, alone[0]["grpo"]["rollouts"])


@pytest.mark.full
def test_killed_and_resumed(alone, pair):
    for rank in range(2):
        told, tensors = found(pair, rank, 2)
        same_end(told, tensors, alone)
        assert (told["killed"]["rollouts"] is None) == (rank == 1)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The folder of three ranks of which one was killed."""
    return tmp_path_factory.mktemp("faults") / "SIGKILL"


@pytest.fixture(scope="module")
def faults(base, three):
    out = three.parent
    script("faults", base, out)
    return json.loads((out / "faults.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize(("how", "others"), [("killed", "02"), ("silent", "0"), ("error", "0")])
def test_a_lost_rank_ends_the_others_and_rank_0_saves(faults, how, others):
    for rank in others:
        message, seconds = faults[how]["ended"][rank]
        assert message.startswith("RankError: a rank is lost") and seconds < 50
    own = faults[how]["ended"]["1"]
    assert own[0].startswith("TypeError: the reward 'reward' gave 'one'") if how == "error" else own is None
    assert faults[how]["saved"] == 1


@pytest.mark.full
def test_two_ranks_go_on_where_three_were(alone, faults, three):
    """Of the three, one had no group to sample."""
    assert [error for error, _ in faults["resumed"].values()] == [None, None]
    for rank in range(2):
        same_end(*found(three, rank, 2), alone)


REFUSED = {
    "weights": "the weights differ between rank 0 and rank 1: load the same", "together": "",
    "place": "the ranks are not at the same place of the program: rank 0 at 'the one', rank 1 at 'the other'",
    "data": "the data differ", "configuration": "the configurations differ",
    "tasks": "the groups of step 0: the tasks differ between rank 0 and rank 1",
    "groups": "the groups of step 0 differ between rank 0 and rank 1: a source gives every rank all groups",
    "drift": "the weights after step 2 differ",
}


@pytest.mark.full
@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_bring_something_else_are_refused_on_both(faults, what):
    for rank in "01":
        message = faults["refusals"][rank][0][what]
        assert message.startswith(f"RankError: {REFUSED[what]}") if REFUSED[what] else message == ""


# --- one process, and the GPUs of several -----------------------------------------------------------------------------


def test_a_single_process_is_left_alone(monkeypatch):
    items, metrics = [1, 2, 3], {"loss": 1.0}
    assert distributed.shard(items) is items and distributed.add_up(None, metrics, "") is metrics
    assert distributed.exchange("", items) == [items]
    assert distributed.first() and not torch.distributed.is_initialized()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)  # torchrun --nproc-per-node 1
    assert distributed.world() == distributed.ALONE and not torch.distributed.is_initialized()


def test_each_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device()[0] == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device()[0] == torch.device("cuda:1") and choose_device("cpu")[0] == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"LOCAL_RANK=2 has no GPU of its own: this machine has 2"):
        choose_device()
