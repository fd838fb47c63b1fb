"""Sabotage: break what a notebook teaches, run its own cells, and its own gate must fail by the right name.

The cells before the training loop are executed as they stand, with one function of the package broken; what training
would have measured is filled in with good values (or, in turn, with a bad one), so a gate is judged in seconds.
"""

import ast
import asyncio
import dataclasses
import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import nbformat
import pandas as pd
import pytest
import torch

from grpolab import chat, engines, load_policy, losses, sampling
from grpolab.arithmetic import Task, generate
from grpolab.audit import FAULTS
from grpolab.evaluate import Interval
from grpolab.gate import GateError
from grpolab.train import SFTConfig, demonstrations, sft

matplotlib.use("Agg")
REPOSITORY = Path(__file__).parent.parent


def cells(name):
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
    return [c for c in notebook.cells if c.cell_type == "code"]


def execute(source, namespace):
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)  # noqa: S307  (the repository's own notebook)
    if inspect.iscoroutine(result):
        asyncio.run(result)


def run_until(name, stop, tmp_path, monkeypatch):
    """Execute a notebook's code cells (but the Colab one) up to the first that begins with `stop`."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for cell in cells(name)[1:]:
        if cell.source.startswith(stop):
            return namespace
        execute(cell.source, namespace)
    raise AssertionError(f"no cell of {name} begins with {stop!r}")


def judge(name, namespace):
    """The names of the checks that fail in the notebook's own gate cell."""
    (gate,) = [c for c in cells(name) if "gate" in c.metadata.get("tags", [])]
    try:
        execute(gate.source, namespace)
    except GateError as error:
        return [line.strip().split(":")[0] for line in str(error).splitlines()[1:]]
    return []


def failures_under(sabotage, name, stop, learned, tmp_path, monkeypatch):
    """The failing checks of a notebook under sabotage; None where its own assertion stops it before the gate."""
    if sabotage:
        sabotage(monkeypatch)
    try:
        namespace = run_until(name, stop, tmp_path, monkeypatch)
    except AssertionError:
        return None
    return set(judge(name, namespace | learned))


class Rates:
    def __init__(self, exact, form=0.999):
        self.exact, self.format = Interval(exact, exact - 0.05, exact + 0.05), Interval(form, form - 0.01, 1.0)


# --- 01 sft -----------------------------------------------------------------------------------------------------------

SFT_LEARNED = {
    "base": Rates(0.0, 0.0), "tuned": Rates(0.46), "tuned_sampled": Rates(0.3), "first": 6.0, "last": 0.1,
    "metrics": pd.DataFrame({"seconds": [1.0]}),
}  # fmt: skip


def drop_the_mask(monkeypatch):
    honest = losses.sft_loss
    monkeypatch.setattr(losses, "sft_loss", lambda logps, mask, **kw: honest(logps, (logps != 0).float(), **kw))


def mask_everything_off_by_one(monkeypatch):
    honest = chat.pad
    monkeypatch.setattr(chat, "pad", lambda batch, pad_id=0: honest(
        [chat.Example(e.ids, (*e.mask[1:], 0)) for e in batch], pad_id))


def let_packed_examples_see_each_other(monkeypatch):
    honest = chat.pack

    def leaking(examples, width, pad_id=0):
        packed = honest(examples, width, pad_id)
        n = packed.ids.shape[1]
        everything = torch.ones(n, n, dtype=torch.bool).tril().expand(len(packed.ids), 1, n, n)
        return chat.Packed(packed.ids, packed.mask, packed.positions, None if width == 1 else everything)

    monkeypatch.setattr(chat, "pack", leaking)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [
        (None, set()),
        (drop_the_mask, {"pull on prompt tokens"}),
        (mask_everything_off_by_one, {"pull on prompt tokens"}),
        (let_packed_examples_see_each_other, {"packed loss / padded loss", "relative gradient difference, packed to padded"}),
    ],
    ids=["honest", "no mask", "shifted mask", "leaking packs"],
)
def test_the_sft_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    failed = failures_under(sabotage, "01_sft", "base = await", SFT_LEARNED, tmp_path, monkeypatch)
    if failed is None:
        assert sabotage is mask_everything_off_by_one
    else:
        assert failed == names if not names else names & failed


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"tuned": Rates(0.46, form=0.98)}, "SFT: format"),
        ({"tuned": Rates(0.04)}, "SFT: lower end of exact match"),
        ({"base": Rates(0.0, 0.5)}, "base: format"),
        ({"last": 5.0}, "loss, last / first"),
        ({"answer_pull": 0.0}, "pull on answer tokens"),
        ({"naive": float("nan")}, "naive loss / package loss"),
    ],
)
def test_every_claim_of_the_sft_gate_can_fail(bad, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from grpolab import gate
    from grpolab.runs import Run

    measured = {"naive": 1.0, "ours": 1.0, "prompt_pull": 0.0, "answer_pull": 0.1, "loss_packed": 1.0, "loss_padded": 1.0,
                "packing_error": 1e-6, "gate": gate, "run": Run("01_sft", root=tmp_path)} | SFT_LEARNED  # fmt: skip
    assert judge("01_sft", dict(measured)) == []
    assert [n for n in judge("01_sft", measured | bad)] == [name.split(":")[0]]


# --- 04 grpo ----------------------------------------------------------------------------------------------------------

GRPO_LEARNED = {
    "overfit_reward": 0.995, "gain": Interval(0.1, 0.08, 0.12), "gain_sampled": Interval(0.2, 0.18, 0.22),
    "before": Rates(0.46), "after": Rates(0.56), "before_sampled": Rates(0.3), "after_sampled": Rates(0.5),
    "doomed": Rates(0.0),
    "metrics": pd.DataFrame({"ratio": [1.0], "sampling_s": [1.0], "update_s": [1.0]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder with a policy that knows the format and gets some answers right."""
    policy = load_policy("tiny", device="cpu")
    examples = demonstrations(policy, generate(400, 0, seed=1, task=Task("+-", max_operand=99))[0])

    async def learn():
        async for _ in sft(policy, examples, SFTConfig(steps=60, lr=1e-3, batch_size=32, schedule="cosine")):
            pass

    asyncio.run(learn())
    return policy.save(tmp_path_factory.mktemp("taught") / "policy")


def report_logps_of_another_temperature(monkeypatch):
    honest = sampling.draw_mixed

    def wrong(*args, **kw):
        drawn = honest(*args, **kw)
        return dataclasses.replace(drawn, logps=drawn.logps * 1.3)

    monkeypatch.setattr("grpolab.scheduler.draw_mixed", wrong)


def give_equal_groups_a_gradient(monkeypatch):
    monkeypatch.setattr("grpolab.advantages.advantages", lambda rewards, kind="centred": torch.full_like(rewards, 0.05))


def move_the_policy_before_the_first_step(monkeypatch):
    honest = losses.kl_penalty

    def moved(logps, ref_logps, mask, **kw):
        return honest(logps + 0.05, ref_logps, mask, **kw)

    monkeypatch.setattr(losses, "kl_penalty", moved)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [
        (None, set()),
        (report_logps_of_another_temperature, {"sampler − trainer, nats a token"}),
        (give_equal_groups_a_gradient, {"gradient of groups with equal rewards", "advantages of a group sum to"}),
        (move_the_policy_before_the_first_step, {"KL at step 0"}),
    ],
    ids=["honest", "wrong logps", "equal rewards", "moved policy"],
)
def test_the_grpo_gate_sees_sabotage(sabotage, names, taught, tmp_path, monkeypatch):
    shutil.copytree(taught, tmp_path / "runs" / "01_sft" / "tiny" / "policy")  # where the notebook looks first
    failed = failures_under(sabotage, "04_grpo", "candidates = ", GRPO_LEARNED, tmp_path, monkeypatch)
    if failed is None:
        assert sabotage is give_equal_groups_a_gradient
    else:
        assert failed == names if not names else names & failed


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"overfit_reward": 0.98}, "overfit"),
        ({"gain": Interval(0.02, -0.001, 0.04)}, "greedy gain"),
        ({"gain_sampled": Interval(0.0, -0.02, 0.02)}, "sampled gain"),
        ({"after": Rates(0.56, form=0.9)}, "format after"),
        ({"doomed": Rates(0.45)}, "no leash"),
        ({"equal_gradient": 1e-9}, "gradient of groups with equal rewards"),
        ({"kl0": 1e-3}, "KL at step 0"),
        ({"naive": 0.6}, "naive loss − package loss"),
        ({"metrics": pd.DataFrame({"ratio": [1.2], "sampling_s": [1.0], "update_s": [1.0]})}, "ratio at step 0"),
    ],
)
def test_every_claim_of_the_grpo_gate_can_fail(bad, name, tmp_path):
    from grpolab import gate
    from grpolab.runs import Run

    measured = {"naive": 0.5, "ours": torch.tensor(0.5), "a": torch.zeros(2, 8), "equal_gradient": 0.0, "logp_error": 1e-6,
                "kl0": 0.0, "tiny": True, "gate": gate, "run": Run("04_grpo", root=tmp_path)} | GRPO_LEARNED  # fmt: skip
    assert judge("04_grpo", dict(measured)) == []
    assert judge("04_grpo", measured | bad) == [name]


# --- 02 decode engine -------------------------------------------------------------------------------------------------

RACES = {"sweep": pd.DataFrame({"tokens/s": [1.0]}), "read": 1e9, "arithmetic": 1e9}
FOUND = {"disagreements": 0, "tokens": 2000, "margin": 9.0, "max_error": 1e-5, "mean_error": 1e-6, "after_stop": 0,
         "worst_ulps": 1.0}  # fmt: skip
CAUGHT = {"none": {"caught": False}} | {fault: {"caught": True} for fault in FAULTS}


def let_the_slot_decide_the_draw(monkeypatch):
    honest = sampling.uniforms
    monkeypatch.setattr("grpolab.scheduler.uniforms", lambda seeds, at: honest(seeds * 0 + range(len(seeds)), at))


def scale_the_attention_of_fp32(monkeypatch):
    honest = engines.LlamaEngine._attend
    monkeypatch.setattr(engines, "disagreement", lambda *_: None)  # the start-up check would choose another engine
    monkeypatch.setattr(engines.LlamaEngine, "_attend",
                        lambda self, q, *rest: honest(self, q * 1.02 if self.fp32 else q, *rest))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [
        (None, set()),
        (report_logps_of_another_temperature, {"sampler's logps against the forward, largest"}),
        (let_the_slot_decide_the_draw, {"rollouts changed by refill"}),
        (scale_the_attention_of_fp32, {"sampler's logps against the forward, largest"}),
    ],
    ids=["honest", "wrong logps", "draw by slot", "wrong attention"],
)
def test_the_decode_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    failed = failures_under(sabotage, "02_decode_engine", "def best_seconds", RACES, tmp_path, monkeypatch)
    if failed is None:
        assert sabotage is scale_the_attention_of_fp32  # stopped by the notebook's own comparison with the naive loop
    else:
        failed -= {"longest stall of the loop / time of the decode"}  # the clock's, on a busy machine
        assert failed == names if not names else names & failed


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"exact_tokens": [True, False]}, "greedy rollouts equal to full recompute"),
        ({"fp32": SimpleNamespace(**FOUND | {"disagreements": 1})}, "greedy tokens off the forward's argmax"),
        ({"fp32": SimpleNamespace(**FOUND | {"tokens": 1000})}, "tokens compared"),
        ({"fp32": SimpleNamespace(**FOUND | {"margin": 1.5})}, "margin"),
        ({"sampled_audit": SimpleNamespace(**FOUND | {"max_error": 2e-4})}, "sampler's logps against the forward, largest"),
        ({"sampled_audit": SimpleNamespace(**FOUND | {"mean_error": 2e-5})}, "sampler's logps against the forward, mean"),
        ({"sampled_audit": SimpleNamespace(**FOUND | {"after_stop": 1})}, "tokens after an end token"),
        ({"dialogue_audit": SimpleNamespace(**FOUND | {"max_error": 1.0})}, "three turns"),
        ({"same_refilled": 59}, "rollouts changed by refill"),
        ({"same_alone": 7}, "rollouts changed by company"),
        ({"bf16": SimpleNamespace(**FOUND | {"worst_ulps": 3.0})}, "bf16"),
        ({"unequal": 1}, "exact mode"),
        ({"chi_square": 200.0}, "chi-square of the draw"),
        ({"fed": 70}, "tokens that three turns fed"),
        ({"stalls": [5.0]}, "longest stall of the loop / time of the decode"),
        ({"gain": 0.9}, "cached / recompute, tokens a second"),
        ({"speed": {"static": 1.0, "refilled": 0.9}}, "refilled / static, tokens a second"),
        ({"caught": CAUGHT | {FAULTS[0]: {"caught": False}}}, "faults caught"),
        ({"caught": CAUGHT | {"none": {"caught": True}}}, "false alarm without a fault"),
    ],
)
def test_every_claim_of_the_decode_gate_can_fail(bad, name, tmp_path):
    from grpolab import gate
    from grpolab.runs import Run

    good = SimpleNamespace(**FOUND)
    measured = {"exact_tokens": [True, True], "fp32": good, "sampled_audit": good, "dialogue_audit": good, "bf16": good,
                "same_refilled": 60, "same_alone": 8, "alone": [None] * 8, "prompts": [None] * 15, "unequal": 0, "on_cpu": True,
                "chi_square": 70.0, "chi_bound": 120.0, "fed": 71, "given": 69, "caught": CAUGHT, "FAULTS": FAULTS,
                "stalls": [0.01], "elapsed": 1.0, "gain": 5.0, "speed": {"static": 1.0, "refilled": 2.0}, "tiny": True,
                "gate": gate, "run": Run("02_decode_engine", root=tmp_path)} | RACES  # fmt: skip
    assert judge("02_decode_engine", dict(measured)) == []
    assert judge("02_decode_engine", measured | bad) == [name]
