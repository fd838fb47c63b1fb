"""Sabotage: break what a notebook teaches, run its own cells, and its own gate must fail by the right name.

The cells before the training loop are executed as they stand, with one function of the package broken; what training, and
cells that a sabotage does not touch, would have measured is filled in with good values, so a gate is judged in seconds.
"""

import ast
import asyncio
import dataclasses
import inspect
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from loop_helpers import rows_of

from grpolab import load_policy, losses, train
from grpolab.arithmetic import Task, generate
from grpolab.decode import sampling
from grpolab.decode.audit import FAULTS
from grpolab.env.guess import GuessEnv
from grpolab.evaluate import Interval
from grpolab.lab.gate import GateError
from grpolab.rollouts import given
from grpolab.train.sft import SFTConfig, demonstrations, sft

matplotlib.use("Agg")
REPOSITORY = Path(__file__).parent.parent


def cells(name):
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
    return [c for c in notebook.cells if c.cell_type == "code"]


def execute(source, namespace, runner):
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)  # noqa: S307  (the repository's own notebook)
    if inspect.iscoroutine(result):
        runner.run(result)


def run_until(name, stop, tmp_path, monkeypatch, runner, parameters, filled):
    """Execute a notebook's code cells (but the Colab one) up to the first that begins with `stop`; a cell that begins with a
    key of `filled` is not executed and leaves those values."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    namespace, unused = {"sys": sys}, set(filled)
    for cell in cells(name)[1:]:
        if cell.source.startswith(stop):
            assert not unused, f"no cell of {name} begins with {unused}"
            return namespace
        skipped = next((start for start in filled if cell.source.startswith(start)), None)
        if skipped is not None:
            unused.discard(skipped)
            namespace |= filled[skipped]
            continue
        execute(cell.source, namespace, runner)
        if "parameters" in cell.metadata.get("tags", []) or cell.source.startswith("tiny = model"):
            namespace |= parameters
    raise LookupError(f"no cell of {name} begins with {stop!r}")


def judge(name, namespace, runner=asyncio):
    """The names of the checks that fail in the notebook's own gate cell."""
    (gate,) = [c for c in cells(name) if "gate" in c.metadata.get("tags", [])]
    try:
        execute(gate.source, namespace, runner)
    except GateError as error:
        return [line.strip().split(":")[0] for line in str(error).splitlines()[1:]]
    return []


def failures_under(sabotage, name, stop, learned, tmp_path, monkeypatch, filled=None, **parameters):
    """The failing checks of a notebook under sabotage; None where its own assertion stops it before the gate."""
    if sabotage:
        sabotage(monkeypatch)
    with asyncio.Runner() as runner:  # one loop for all cells, as in a kernel: some leave a server open
        try:
            namespace = run_until(name, stop, tmp_path, monkeypatch, runner, parameters, filled or {})
        except AssertionError:
            return None
        finally:
            plt.close("all")
        return set(judge(name, namespace | learned, runner))


def one_fault(cases):
    """Of (sabotage, names of the checks that must fail), `make test` runs the first fault and leaves the honest run to nbval;
    that and further faults wait for `make test-full`."""
    honest, first, *others = cases
    return [first, *(pytest.param(*case, marks=pytest.mark.full) for case in (honest, *others))]


class Rates:
    def __init__(self, exact, form=0.999):
        self.exact, self.format = Interval(exact, exact - 0.05, exact + 0.05), Interval(form, form - 0.01, 1.0)


def report_logps_of_another_temperature(monkeypatch):
    honest = sampling.draw_mixed

    def wrong(*args, **kw):
        drawn = honest(*args, **kw)
        return dataclasses.replace(drawn, logps=drawn.logps * 1.3)

    monkeypatch.setattr("grpolab.decode.scheduler.draw_mixed", wrong)


# --- 01 sft -----------------------------------------------------------------------------------------------------------

class Plain:
    def __init__(self, value):
        self.rate = Interval(value, value - 0.03, value + 0.03)


ASKED = {"base": Rates(0.0, 0.0), "plain": Plain(0.75), "plain_sampled": Plain(0.64)}  # before anything is trained
SFT_LEARNED = ASKED | {
    "tuned": Rates(0.62), "tuned_sampled": Rates(0.5), "first": 6.0, "last": 0.1, "points": [(160, Interval(0.62, 0.6, 0.64))],
    "metrics": pd.DataFrame({"seconds": [1.0]}), "change": {"planted pairs": 0.1, "the rest": -0.25}, "rates": {}, "kinds": {},
    "plain_number": Interval(0.5, 0.45, 0.55),
}


def drop_the_mask(monkeypatch):
    honest = losses.sft_loss
    monkeypatch.setattr(losses, "sft_loss", lambda logps, mask, **kw: honest(logps, (logps != 0).float(), **kw))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (drop_the_mask, {"loss after the prompt's labels were replaced, change", "pull where a prompt token is predicted"}),
    ]),
)
def test_the_sft_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    filled = {"from grpolab.evaluate": ASKED}
    failed = failures_under(sabotage, "01_sft", "from grpolab.lab.dashboard", SFT_LEARNED, tmp_path, monkeypatch, filled)
    if failed is None:
        assert sabotage is drop_the_mask
    else:
        assert failed == names if not names else names & failed


# --- 02 decode engine -------------------------------------------------------------------------------------------------

RACES = {"sweep": pd.DataFrame({"tokens/s": [1.0]}), "read": 1e9, "arithmetic": 1e9}
CAUGHT = {"none": {"caught": False}} | {fault: {"caught": True} for fault in FAULTS}
RACED = {  # the cells of races, of bf16 and of the faults, which take most of the notebook's time
    "def seconds_of": {"gain": 5.0}, "fig, ax = plt.subplots()\nfor column": {},
    "rng = np.random": {"speed": {"static": 1.0, "refilled": 2.0}},
    "jobs = [": {"last_step": {"compacted": 300, "refilled": 150}}, "fig, axes = plt.subplots(3, 1": {},
    "stalls, order": {"stalls": [0.01], "elapsed": 1.0},
    "half = load_policy": {"bf16": SimpleNamespace(mean_error=3e-3), "own": 3e-3}, "on_cpu =": {"on_cpu": True, "unequal": 0},
    "from contextlib import nullcontext": {"caught": CAUGHT, "FAULTS": FAULTS}, "def spent_on": {}, "rates = [": {},
    "fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4))\n": {},
}


def let_the_slot_decide_the_draw(monkeypatch):
    honest = sampling.uniforms
    monkeypatch.setattr("grpolab.decode.batch.uniforms", lambda seeds, at: honest(seeds * 0 + range(len(seeds)), at))


def report_other_logps_and_let_the_slot_decide(monkeypatch):
    report_logps_of_another_temperature(monkeypatch)
    let_the_slot_decide_the_draw(monkeypatch)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (report_other_logps_and_let_the_slot_decide,
         {"sampler's logps against the forward, largest", "rollouts changed by refill"}),
    ]),
)
def test_the_decode_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    failed = failures_under(sabotage, "02_decode_engine", "await sampler.close", RACES, tmp_path, monkeypatch, RACED,
                            new_tokens=36)
    assert failed == names if not names else names <= failed


# --- 03 dpo -----------------------------------------------------------------------------------------------------------

DPO_POINTS = pd.DataFrame({
    "step": [0, 100], "margin": [0.0, 2.0], "accuracy": [Interval(0.1, 0.0, 0.2), Interval(0.8, 0.75, 0.85)],
    "logps_chosen": [-1.7, -1.6], "logps_rejected": [-4.7, -7.0],
})
DPO_LEARNED = {
    "before": Rates(0.46), "after": Rates(0.5), "before_sampled": Rates(0.3), "after_sampled": Rates(0.37),
    "gain": Interval(0.04, 0.0, 0.08), "gain_sampled": Interval(0.07, 0.05, 0.09), "points": DPO_POINTS,
    "last": DPO_POINTS.iloc[-1], "change": {"chosen": 0.1, "rejected": -2.3}, "rows": {},
    "metrics": pd.DataFrame({"seconds": [1.0]}), "plain": SimpleNamespace(rate=Interval(0.93, 0.91, 0.95)), "left_out": "",
    "over_sft": {"more demonstrations": Interval(0.05, 0.03, 0.07)}, "greedy": {}, "sampled": {},
    "far_look": [{"accuracy": 0.8}], "far_change": {}, "harm": Interval(-0.27, -0.31, -0.23),
    "told_apart": lambda share: Interval(share, share - 0.05, share + 0.05),
}
# The cells between the pairs and the appendix, which train and ask; what the gate needs of them is above.
DPO_TRAINED = dict.fromkeys((
    "plain = await", "reference = cache_logps", "columns = [", "metrics, points", "last = points", "kinds = {", "far = ",
    "fig, axes = plt.subplots(1, 2", "def chosen_alone", "rates = {", "suite_table", "side_by_side", "parts = {"), {})
COUNTED = {"def live_bytes": {"bits": 0, "alone": 4.0, "cached_bytes": 3.5, "resident_bytes": 7.5}}  # slow among many objects


def fewer_of(monkeypatch, module, name, options):
    honest = getattr(module, name)

    async def fewer(policy, problems, **kw):
        return await honest(policy, problems[:80], **(kw | options))

    monkeypatch.setattr(module, name, fewer)


def swap_chosen_and_rejected(monkeypatch):
    honest = losses.dpo_loss
    monkeypatch.setattr(losses, "dpo_loss", lambda c, r, rc, rr, **kw: honest(r, c, rr, rc, **kw))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (swap_chosen_and_rejected, {"naive loss − package loss"}),
    ]),
)
def test_the_dpo_gate_sees_sabotage(sabotage, names, taught, tmp_path, monkeypatch):
    from grpolab.train import preferences

    shutil.copytree(taught, tmp_path / "runs" / "01_sft" / "tiny" / "policy")  # where the notebook looks first
    fewer_of(monkeypatch, preferences, "sample_pairs", {"samples": 8})
    skipped = DPO_TRAINED | (COUNTED if sabotage else {})
    failed = failures_under(sabotage, "03_dpo", "with gate", DPO_LEARNED, tmp_path, monkeypatch, skipped)
    assert failed == names if not names else names <= failed


# --- 04 grpo ----------------------------------------------------------------------------------------------------------

ENDS = {"1 epoch": {"largest ratio": 1.0}, "careful": {"largest ratio": 7.0}, "step × 10": {"largest ratio": 50.0}}
GRPO_LEARNED = {
    "overfit_reward": 0.995, "gain": Interval(0.3, 0.28, 0.32), "gain_sampled": Interval(0.3, 0.28, 0.32),
    "plain": Plain(0.76), "before": Rates(0.62), "after": Rates(0.93), "before_sampled": Rates(0.5),
    "after_sampled": Rates(0.85), "pass_at": {"SFT": [Interval(0.5, 0.4, 0.6)], "GRPO": [Interval(0.85, 0.8, 0.9)]},
    "survived": {"careful": 0.7, "step × 10": 0.0}, "begun_at": 0.75, "ends": ENDS, "rollouts_used": 51200, "seconds": 1.0,
    "metrics": pd.DataFrame({"ratio": [1.0], "sampling_s": [1.0], "update_s": [1.0]}), "split": {}, "apart": Interval(0, -1, 1),
    "own": pd.DataFrame({"bias": {"leave one out": 0.0, "group mean": 0.5}}),
}


@pytest.fixture(scope="module")
def taught(taught_once, tmp_path_factory):
    """A folder with a policy that knows the format and gets some answers right."""
    def teach(policy):
        examples = demonstrations(policy, generate(400, 0, seed=1, task=Task("+-", max_operand=99))[0])
        rows_of(sft(policy, examples, SFTConfig(steps=60, lr=1e-3, batch_size=32, schedule="cosine")))

    return taught_once("taught", teach).save(tmp_path_factory.mktemp("taught") / "policy")


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (report_logps_of_another_temperature, {"sampler − trainer, nats a token"}),
    ]),
)
def test_the_grpo_gate_sees_sabotage(sabotage, names, taught, tmp_path, monkeypatch):
    shutil.copytree(taught, tmp_path / "runs" / "01_sft" / "tiny" / "policy")  # where the notebook looks first
    failed = failures_under(sabotage, "04_grpo", "fixed = doubtful", GRPO_LEARNED, tmp_path, monkeypatch)
    assert failed == names if not names else names & failed


# --- 05 reward model --------------------------------------------------------------------------------------------------

def a_run(truth, learned, kl):
    """The looks at a run: truth and learned reward at three steps, and the KL at the end."""
    return pd.DataFrame({"step": [0, 15, 30], "truth": truth, "learned": learned, "kl": [0.0, kl / 2, kl],
                         "distance": [0.0, 0.0, 0.0], "by_question": [[x] * 4 for x in truth]})


LOOKS = {
    "rule": a_run([0.3, 0.36, 0.4], [0.0, 0.1, 0.2], 1.0), "no KL penalty": a_run([0.3, 0.45, 0.05], [0.0, 0.6, 1.0], 9.0),
    "KL 0.2": a_run([0.3, 0.34, 0.33], [0.0, 0.1, 0.2], 0.5),
}
ALL_PAIRS = {"all pairs": Interval(0.7, 0.64, 0.76)}
REWARD_LEARNED = {
    "accuracy": {"scalar head": ALL_PAIRS, "implicit": ALL_PAIRS}, "judges": ["scalar head", "implicit"], "reload_error": 0.0,
    "looks": LOOKS, "free": LOOKS["no KL penalty"], "strongest": "KL 0.2", "first": 0.6, "final": 1.0,
    "gained": Interval(0.1, 0.08, 0.12), "risen": Interval(0.15, 0.13, 0.17), "fallen": Interval(-0.4, -0.42, -0.38),
    "spared": Interval(0.28, 0.26, 0.3), "answered": {}, "overpaid": 0.9, "altered": 0.4, "left_out": "",
    "best_n": {"scalar head": 2, "implicit": 16}, "drawn": 64, "ns": [], "of_n": {},
    "selected": lambda name, a, b: Interval(-0.2, -0.3, -0.1) if b == 64 else Interval(0.2, 0.1, 0.3),
}


def read_the_reward_before_the_end(monkeypatch):
    reward = import_module("grpolab.train.reward_model")
    honest = reward.lay_out
    monkeypatch.setattr(reward, "lay_out", lambda asked: honest([given(r.prompt, r.tokens[:-1], r.mask[1:]) for r in asked]))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (read_the_reward_before_the_end, {"naive loss − package loss"}),
    ]),
)
def test_the_reward_model_gate_sees_sabotage(sabotage, names, taught, tmp_path, monkeypatch):
    from grpolab.train import preferences

    async def learn(policy, examples, config, run=None):
        policy.model.load_state_dict(load_policy(str(taught), device="cpu").model.state_dict())
        yield {"step": config.steps - 1}

    monkeypatch.setattr(train, "sft", learn)
    fewer_of(monkeypatch, preferences, "sample_pairs", {})
    failed = failures_under(sabotage, "05_reward_model", "scorer = RewardModel.from_policy(policy)\nasync for", REWARD_LEARNED,
                            tmp_path, monkeypatch)
    assert failed == names if not names else names & failed


# --- 06 environment pool ----------------------------------------------------------------------------------------------

def let_sessions_hear_each_other(monkeypatch):
    """The sessions of the first group are told about the guess that came before theirs, whoever made it."""
    honest_init, honest_compare, first, said = GuessEnv.__init__, GuessEnv._compare, [], []

    def enter(self, *args, **kw):
        honest_init(self, *args, **kw)
        first.extend([self] * (len(first) < 4))

    def overhear(self, guess):
        said.append(guess)
        return honest_compare(self, said[-2] if any(env is self for env in first) and len(said) > 1 else guess)

    monkeypatch.setattr(GuessEnv, "__init__", enter)
    monkeypatch.setattr(GuessEnv, "_compare", overhear)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (let_sessions_hear_each_other, {"transcripts equal to those of lone sessions"}),
    ]),
)
def test_the_pool_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    failed = failures_under(sabotage, "06_env_pool", "await stack.aclose", {}, tmp_path, monkeypatch, size=4,
                            latency_ms=20)
    if failed is not None:
        failed -= {"serial / group wall clock", "wall clock of the group / of one session"}  # the clock's, on a busy machine
    assert failed == names if not names else names & failed


# --- 07 multi-turn grpo -----------------------------------------------------------------------------------------------

MULTI_TURN_LEARNED = {
    "head": Interval(0.0, 0.0, 0.01), "before": Interval(0.3, 0.26, 0.34), "after": Interval(0.98, 0.96, 0.99),
    "called_before": Interval(0.3, 0.26, 0.34), "called_after": Interval(1.0, 0.99, 1.0),
    "head_after": Interval(0.0, 0.0, 0.01), "tries": pd.Series([30, 10]),
    "tiered_config": SimpleNamespace(steps=10, prompts_per_step=4),
    "metrics": pd.DataFrame({"ratio": [1.0], "lost": [0], "turns": [2.0], "sampling_s": [1.0], "update_s": [1.0],
                             "reward": [0.5]}),
    "runs": {"without": pd.DataFrame({"ratio": [1.0], "reward": [0.5]})}, "longer": 9.0,
    "calls": {"with the mask": 0.9, "without": 0.6}, "nats": {"with the mask": 2.0, "without": 1.0},
    "after_imitation": Interval(0.98, 0.96, 0.99), "after_careless": Interval(0.98, 0.96, 0.99),
}
# The cells between the episodes and the appendix, which train and ask; what the gate needs of them is above.
MULTI_TURN_TRAINED = dict.fromkeys((
    "async def examine", "watched = ", "columns = [", "metrics, last", "ax = plots.curve", "fig, axes", "rate = ",
    "looks = run", "told = {", "def all_its_own", "def surprise", "right = [", "sizes = ("), {})


@pytest.fixture(scope="module")
def warmed_up():
    """In place of the notebook's warm-up: a short one, done once, of which each test takes the weights."""
    weights, honest = {}, train.sft

    async def warm_up(policy, examples, config, run=None):
        if not weights:
            async for _ in honest(policy, examples, config):
                pass
            weights.update({k: v.clone() for k, v in policy.model.state_dict().items()})
        policy.model.load_state_dict(weights)
        yield {"step": config.steps - 1}

    return warm_up


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (report_logps_of_another_temperature, {"recorded − recomputed logps of whole episodes, nats"}),
    ]),
)
def test_the_multi_turn_gate_sees_sabotage(sabotage, names, warmed_up, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "sft", warmed_up)
    on_the_clock = {"async def timed": {"same": True, "together": 1.0, "alone": 5.0}} if sabotage else {}
    failed = failures_under(sabotage, "07_multi_turn_grpo", "await pool.close", MULTI_TURN_LEARNED, tmp_path, monkeypatch,
                            MULTI_TURN_TRAINED | on_the_clock, warm_up_steps=40, n_eval=8)
    assert failed == names if not names else names & failed
