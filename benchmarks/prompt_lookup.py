"""Prompt lookup: what drafts from earlier text save where text repeats, and what they cost where it does not.

    OMP_NUM_THREADS=2 python benchmarks/prompt_lookup.py    # six minutes; fills results/prompt_lookup.json

Episodes: the embedded model, warmed up on notebook 07's demonstrations, asks a calculator and copies its result, 64 episodes
together. SmolLM2 (fp32) copies a text, or a tool's result, one row and eight, greedy and at temperature 1; "free" asks for a
text that does not repeat. The same rollouts with each number of drafted tokens, which is checked; seconds are the
sampler's own, the median of three rounds in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path

import records
import torch

from grpolab import GrpoPool, Sampler, SamplingParams, load_policy
from grpolab.arithmetic import Task, generate
from grpolab.chat import prompt_ids
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.server import serve
from grpolab.train import SFTConfig, sft
from grpolab.train.episodes import Limits, demonstrate, play_all

RESULTS = Path(__file__).parent / "results" / "prompt_lookup.json"
COMMAND = "OMP_NUM_THREADS=2 python benchmarks/prompt_lookup.py"
LOOKUPS, ROUNDS, WARM_UP, EPISODES, NEW = (0, 4, 8), 3, 300, 64, 96
TEXT = ("Registers are the fastest storage of a processor. A cache line that was read once is kept near the cores, since code "
        "that reads a value often reads its neighbours next. A page that nobody has read for long goes to the disk.")
TASKS = {"text to be copied": f"Copy this text word for word:\n\n{TEXT}",
         "tool's result": "The tool returned " + json.dumps({"city": "Lisbon", "temperature_celsius": 21, "wind": "north-west"})
         + ". Write the same object as JSON, then say it in one sentence.",
         "free": "Write a short story about a lighthouse keeper who finds a letter."}


async def warmed_up() -> tuple:
    policy = load_policy("tiny")
    problems = generate(2400, 10, seed=1, task=Task(ops="*"))[0]
    examples = [demonstrate(policy.tokenizer, CalculatorEnv(), vars(p),
                            [f"calc: {p.a} * {p.b}"] * (i % 2) + [f"\\boxed{{{p.answer}}}"]) for i, p in enumerate(problems)]
    async for _ in sft(policy, examples, SFTConfig(steps=WARM_UP, batch_size=32, lr=2e-3, warmup=10, schedule="cosine")):
        pass
    return policy, [vars(p) for p in problems[:EPISODES]]


def spent(stats) -> float:
    return stats.prefill_seconds + stats.decode_seconds + stats.sample_seconds


async def episodes(policy, asked: list, lookup: int) -> tuple:
    async with serve(CalculatorEnv, max_sessions=EPISODES) as server, GrpoPool(server.url, size=EPISODES) as pool, \
            Sampler(policy, lookup=lookup) as sampler:
        played = await play_all(pool, sampler, asked, seeds=range(len(asked)), params=SamplingParams(max_new_tokens=24),
                                limits=Limits(max_turns=3, max_total_tokens=192))
        return sorted(e.rollout.prompt + e.rollout.tokens for e in played), sampler.stats


async def answers(policy, prompt: list[int], rows: int, params: SamplingParams, lookup: int) -> tuple:
    async with Sampler(policy, slots=rows, lookup=lookup) as sampler:
        groups = await sampler.sample([prompt], group_size=rows, params=params)
        return [r.tokens for r in groups[0]], sampler.stats


async def compare(label: dict, play) -> dict:
    """One row: play(lookup) -> (rollouts, stats), in turns; the first round of all warms up."""
    found, seconds = {}, {lookup: [] for lookup in LOOKUPS}
    for turn in range(ROUNDS + 1):
        for lookup in LOOKUPS:
            rollouts, stats = await play(lookup)
            if rollouts != found.setdefault("rollouts", rollouts):
                raise SystemExit(f"{label}: lookup={lookup} sampled something else")
            found[lookup] = stats
            if turn:
                seconds[lookup].append(spent(stats))
    median = {lookup: statistics.median(of) for lookup, of in seconds.items()}
    ratios = {lookup: [a / b for a, b in zip(seconds[0], of)] for lookup, of in seconds.items()}
    return label | {"new_tokens": found[0].new_tokens, "seconds": median[0], "by_lookup": [
        {"lookup": lookup, "steps": found[lookup].steps, "drafted": found[lookup].drafted, "accepted": found[lookup].accepted,
         "ratio": statistics.median(ratios[lookup]), "worst": min(ratios[lookup]), "best": max(ratios[lookup])}
        for lookup in LOOKUPS]}


async def main() -> None:
    policy, asked = await warmed_up()
    rows = [await compare({"model": "tiny", "what": "episodes with a calculator", "rows": EPISODES, "temperature": 1.0},
                          lambda lookup: episodes(policy, asked, lookup))]
    print(rows[-1], flush=True)
    large = load_policy("smollm2-135m", device="cpu", dtype="float32")
    for what, text in TASKS.items():
        prompt = prompt_ids(large.tokenizer, text)
        for count in (1, 8):
            for greedy in (True, False):
                params = SamplingParams(greedy=greedy, max_new_tokens=NEW, seed=0)
                rows.append(await compare(
                    {"model": "smollm2-135m", "what": what, "rows": count, "temperature": 0.0 if greedy else 1.0},
                    lambda lookup: answers(large, prompt, count, params, lookup)))  # noqa: B023
                print(rows[-1], flush=True)
    records.write(RESULTS, {"command": COMMAND, "threads": torch.get_num_threads(),
                            "instructions": records.instructions(), "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    asyncio.run(main())
