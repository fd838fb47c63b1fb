"""Records short runs, healthy ones and one made to have each illness that `diagnose` knows: tests/recorded_runs.json.

    OMP_NUM_THREADS=1 python benchmarks/illnesses.py            # all of them, some ten minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/illnesses.py gamed      # those whose name begins so; the others stay

The bounds of grpolab/lab/diagnose.py lie between the two kinds, and tests/test_diagnose.py holds them to it: run this again
when the base model, the loops or the rows have changed. It prints, for each run, the numbers that the bounds are about and
what `diagnose` finds. All on the embedded model, with the questions of notebooks 04 and 07 and settings near theirs.
"""

import argparse
import asyncio
import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from grpolab import GrpoPool, load_policy
from grpolab.arithmetic import Task, generate
from grpolab.checker import parse_boxed_answer
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.curriculum import Curriculum
from grpolab.env.server import serve
from grpolab.files import atomic_write
from grpolab.lab.diagnose import diagnose
from grpolab.models.load import Policy
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, finished_and_correct, grpo, multi_turn_grpo, sft
from grpolab.train.episodes import Limits, demonstrate

RECORD = Path(__file__).parent.parent / "tests" / "recorded_runs.json"
COLUMNS = ("step", "reward", "uninformative", "all_wrong", "all_right", "completion_length", "truncated", "ratio_max",
           "ratio", "clip_low", "clip_high", "diff_mean", "diff_abs_mean", "diff_max", "sampler_kl", "low_logp", "policy_loss",
           "repetition", "entropy", "kl", "exact")
KNOWN, _ = generate(6400, 1000, seed=1, task=Task(ops="+-", max_operand=99))
DEMOS, PRACTICE = KNOWN[:100], KNOWN[400:]
PRODUCTS, _ = generate(6400, 1000, seed=1, task=Task(ops="*"))
LARGE = [p for p in PRODUCTS[2400:] if min(p.a, p.b) >= 10]

PLAIN = GRPOConfig(steps=30, prompts_per_step=32, group_size=8, lr=1e-3, warmup=3, schedule="cosine", max_new_tokens=24)
CAREFUL = GRPOConfig(steps=14, prompts_per_step=16, group_size=8, inner_epochs=4, lr=2e-4, schedule="constant", warmup=0,
                     max_new_tokens=24, kl_coef=0.02)
EPISODES = GRPOConfig(steps=16, prompts_per_step=12, group_size=8, lr=3e-4, warmup=5, schedule="cosine",
                      advantage_kind="standardised", kl_coef=0.005, max_new_tokens=24)


# --- rewards that lead astray ------------------------------------------------------------------------------------------


def long_numbers(text, problem, rollout):
    """What a careless judge likes: a box with many digits."""
    number = parse_boxed_answer(text) if rollout.finish_reason == "eos" else None
    return 0.0 if number is None else min(1.0, len(str(abs(number))) / 6)


def ones(text, problem, rollout):
    return float(text.count("1"))


def length(text, problem, rollout):
    return float(len(rollout.tokens))


# --- policies ----------------------------------------------------------------------------------------------------------


def copied(policy: Policy) -> Policy:
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.name, policy.eos_ids)


async def taught(seed: int) -> Policy:
    """Notebook 01's policy."""
    policy = load_policy("tiny", device="cpu")
    config = SFTConfig(steps=160, batch_size=32, lr=1e-3, schedule="cosine", seed=seed)
    async for _ in sft(policy, demonstrations(policy, DEMOS), config):
        pass
    return policy


async def caller() -> Policy:
    """Notebook 07's warm-up: half of the demonstrated episodes call the calculator."""
    policy, shown = load_policy("tiny", device="cpu"), PRODUCTS[:2400]
    examples = [demonstrate(policy.tokenizer, CalculatorEnv(), vars(p),
                            [f"calc: {p.a} * {p.b}"] * (i % 2) + [f"\\boxed{{{p.answer}}}"]) for i, p in enumerate(shown)]
    config = SFTConfig(steps=520, batch_size=32, lr=2e-3, warmup=10, schedule="cosine")
    async for _ in sft(policy, examples, config):
        pass
    return policy


# --- runs --------------------------------------------------------------------------------------------------------------


async def single(policy, config, questions=PRACTICE, reward=finished_and_correct, reference=None) -> list[dict]:
    watch = {"exact": finished_and_correct}
    return [row async for row in grpo(policy, reference, questions, config, reward=reward, watch=watch)]


async def other_forward(policy, config) -> list[dict]:
    """A trainer whose log-probs are not those of the sampler's model."""
    module = importlib.import_module("grpolab.train.grpo")
    honest = module.rollout_logps

    def other(*args, **options):
        logps, entropy = honest(*args, **options)
        return logps * 1.5, entropy

    module.rollout_logps = other
    try:
        return await single(policy, config)
    finally:
        module.rollout_logps = honest


async def played(policy, tasks, config) -> list[dict]:
    async with serve(CalculatorEnv, max_sessions=32) as server, GrpoPool(server.url, size=32) as pool:
        rows = multi_turn_grpo(copied(policy), copied(policy), tasks, config, pool, limits=Limits(3, 192))
        return [row async for row in rows]


def curriculum():
    sizes = ((10, 30), (30, 60), (60, 100))
    return Curriculum([[vars(p) for p in LARGE if low <= max(p.a, p.b) < high][:8] for low, high in sizes], seed=0)


def plans(base, start, calls) -> dict:
    """name -> (the illnesses that must be found, what to run)."""
    again = lambda: copied(start)  # noqa: E731
    runs = {f"grpo/seed-{s}": ((), lambda s=s: single(again(), replace(PLAIN, seed=s))) for s in (0, 1, 2)}
    doubtful = PRACTICE[:4]
    return runs | {
        "careful": ((), lambda: single(again(), CAREFUL, reference=again())),
        "careful/no_leash": ((), lambda: single(again(), replace(CAREFUL, kl_coef=0.0))),
        "overfit": ((), lambda: single(again(), replace(PLAIN, steps=40, prompts_per_step=4, group_size=32, lr=5e-4,
                                                        advantage_kind="standardised"), doubtful)),
        "bfloat16": ((), lambda: single(again(), replace(PLAIN, steps=10, autocast="bfloat16"))),
        "episodes/seed-0": ((), lambda: played(calls, LARGE, EPISODES)),
        "episodes/seed-1": ((), lambda: played(calls, LARGE, replace(EPISODES, seed=1))),
        "episodes/curriculum": ((), lambda: played(calls, curriculum(), replace(EPISODES, steps=24, prompts_per_step=8))),
        "no_demonstrations": (("groups without a difference", "the end is lost"),
                              lambda: single(copied(base), replace(PLAIN, steps=6))),
        "step_x10": (("steps that are too large", "the reward has fallen", "far from the reference"),
                     lambda: single(again(), replace(CAREFUL, lr=2e-3), reference=again())),
        "step_x10/no_leash": (("the reward has fallen", "groups without a difference", "tokens are driven out"),
                              lambda: single(again(), replace(CAREFUL, lr=2e-3, kl_coef=0.0))),
        "other_forward": (("sampler and trainer disagree",),
                          lambda: other_forward(again(), replace(PLAIN, steps=6, max_logp_diff=None))),
        # The weakest KL penalty: without it equal groups have no forward pass.
        "one_answer": (("the entropy is gone", "the same words again and again"),
                       lambda: single(again(), replace(PLAIN, steps=30, lr=3e-3, max_new_tokens=8, kl_coef=1e-6), reward=ones,
                                      reference=again())),
        "ever_longer": (("length runs away",), lambda: single(again(), replace(PLAIN, steps=16, lr=2e-3), reward=length)),
        "gamed": (("reward up while the judge falls",), lambda: single(again(), replace(PLAIN, steps=40), reward=long_numbers)),
    }


def columns(rows: list[dict]) -> dict:
    """Rows as columns with three digits each; what is not a number is null."""
    table = pd.DataFrame(rows)
    return {c: [int(v) if c == "step" else None if v != v else float(f"{v:.3g}") for v in table[c]]
            for c in COLUMNS if c in table}


def told(name: str, run: dict) -> str:
    """One line: the extremes that the bounds are about, and what is found."""
    table = pd.DataFrame(run["rows"])
    table["clipped"] = table["clip_low"] + table["clip_high"] if "clip_low" in table else float("nan")
    last = {c: f"{table[c].min():.3g}..{table[c].max():.3g}" for c in ("reward", "uninformative", "truncated", "clipped",
            "ratio_max", "ratio", "diff_mean", "diff_abs_mean", "sampler_kl", "low_logp", "policy_loss", "repetition",
            "entropy", "kl", "exact", "completion_length") if c in table}
    found = [f"{f.illness} from {f.step}" for f in diagnose(table, watched="exact" if "exact" in table else None)]
    missed = sorted(set(run["ill"]) - {f.rsplit(" from", 1)[0] for f in found})
    return f"{name}: {last}\n    found {found}" + f"; MISSED {missed}" * bool(missed)


async def main(wanted: list[str]) -> None:
    known = json.loads(RECORD.read_text()) if wanted else {}
    base, start = load_policy("tiny", device="cpu"), await taught(0)
    calls = await caller() if not wanted or any(name.startswith("episodes") for name in wanted) else None
    for name, (ill, work) in plans(base, start, calls).items():
        if not wanted or name.startswith(tuple(wanted)):
            known[name] = {"ill": list(ill), "rows": columns(await work())}
            print(told(name, known[name]), flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run, separators=(',', ':'))}" for name, run in sorted(known.items()))
    print(atomic_write(RECORD, "{\n" + lines + "\n}\n"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="those whose name begins so (default: all)")
    asyncio.run(main(parser.parse_args().runs))
