"""What is a teacher worth? One student, the same number of sampled completions, six ways to use them; three seeds.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py     # some five minutes a seed; fills results/distillation.json

The embedded model and notebook 04's task, 1,000 held-out questions. The teacher is the base after SFT on 3,200 right
demonstrations. The student is the best SFT on 100 of them, chosen by seed as in baselines.py. Each way then has the same 200
batches of 4 questions and 8 completions of each:

    teacher_sft   the teacher writes them; SFT from the student on them and on the 100 demonstrations
    reverse_kl    the student writes them; the reverse KL to the teacher over the whole vocabulary
    forward_kl    the same with the forward KL
    sampled       the same with the reverse KL of the sampled tokens alone
    rejection     the student writes them; SFT on one right completion a question and the 100 demonstrations
    grpo          the student writes them; GRPO with the checker

The step sizes (PILOT) were chosen among RATES on seed 9 and 400 other questions (`--pilot`), before seeds 0 to 2
were run. What the record holds is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import records
import torch
from baselines import CHOOSING, HELD_OUT, NEW_TOKENS, PRACTICE, SHOWN, answered, best_sft, measure

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.chat import prompt_ids
from grpolab.evaluate import evaluate
from grpolab.models.load import Policy
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, finished_and_correct, grpo, score, sft
from grpolab.train.distil import DistilConfig, distil

RESULTS = Path(__file__).parent / "results" / "distillation.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/distillation.py"
SEEDS, PILOT_SEED, RATES = range(3), 9, (1e-4, 3e-4, 1e-3, 3e-3)
TAUGHT, QUESTIONS, SIZE = PRACTICE[800:4000], PRACTICE[:800], 8
WAYS = ("teacher_sft", "reverse_kl", "forward_kl", "sampled", "rejection", "grpo")
PILOT = {"teacher_sft": 3e-4, "reverse_kl": 3e-4, "forward_kl": 3e-4, "sampled": 3e-4, "rejection": 1e-3, "grpo": 1e-4}


async def drained(steps) -> list[dict]:
    return [row async for row in steps]


async def made_teacher() -> Policy:
    policy = load_policy("tiny")
    await drained(sft(policy, demonstrations(policy, TAUGHT), SFTConfig(steps=400, batch_size=64, lr=1e-3, schedule="cosine")))
    return policy


def copy_of(policy: Policy) -> Policy:
    other = load_policy("tiny")
    other.model.load_state_dict(policy.model.state_dict())
    return other


async def written(policy: Policy, seed: int) -> list:
    """Completions of each question by a policy, with the checker's rewards."""
    async with Sampler(policy) as sampler:
        prompts = [prompt_ids(policy.tokenizer, p.question) for p in QUESTIONS]
        params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=seed)
        groups = await sampler.sample(prompts, group_size=SIZE, params=params)
    return score(policy, QUESTIONS, groups, finished_and_correct)


async def taken(way: str, start: Policy, teacher: Policy, shown: list, lr: float, seed: int) -> tuple[Policy, int]:
    """The student after one of the WAYS, and the tokens that were sampled for it."""
    policy, steps = copy_of(start), len(QUESTIONS) // 4
    common = {"steps": steps, "lr": lr, "schedule": "cosine", "seed": seed}
    if way in ("teacher_sft", "rejection"):
        groups = await written(teacher if way == "teacher_sft" else start, seed)
        tokens = sum(len(r.tokens) for g in groups for r in g)
        if way == "teacher_sft":
            chosen = [(p, r) for p, g in zip(QUESTIONS, groups) for r in g]
        else:
            chosen = [(p, r) for p, g in zip(QUESTIONS, groups) if (r := next((r for r in g if r.reward), None))]
        examples = shown + [answered(policy, p.question, policy.decode(r.tokens)) for p, r in chosen]
        await drained(sft(policy, examples, SFTConfig(batch_size=4 * SIZE, **common)))
        return policy, tokens
    sampled = {"prompts_per_step": 4, "group_size": SIZE, "max_new_tokens": NEW_TOKENS}
    if way == "grpo":
        rows = await drained(grpo(policy, None, QUESTIONS, GRPOConfig(**sampled, **common)))
    else:
        kind = {"beta": 0.0} if way == "forward_kl" else {"vocabulary": "sampled"} if way == "sampled" else {}
        rows = await drained(distil(policy, teacher, QUESTIONS, DistilConfig(**sampled, **kind, **common)))
    return policy, round(sum(row["completion_length"] for row in rows) * 4 * SIZE)


async def began(seed: int) -> tuple[Policy, list]:
    shown = demonstrations(load_policy("tiny"), random.Random(seed).sample(SHOWN, 100))
    return (await best_sft(shown, seed))[0], shown


async def pilot(teacher: Policy) -> None:
    start, shown = await began(PILOT_SEED)
    for way in WAYS:
        for lr in RATES:
            policy, _ = await taken(way, start, teacher, shown, lr, PILOT_SEED)
            found = await evaluate(policy, CHOOSING, max_new_tokens=NEW_TOKENS)
            print(f"{way}, {lr:g}: {found.exact}", flush=True)


async def main(seeds: list[int], only_pilot: bool = False) -> None:
    teacher = await made_teacher()
    if only_pilot:
        return await pilot(teacher)
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "command": COMMAND, "threads": torch.get_num_threads(), "rates": PILOT, "completions": len(QUESTIONS) * SIZE,
        "teacher": await measure(teacher, 0), "seeds": {}}
    for seed in seeds:
        row = record["seeds"].setdefault(str(seed), {})
        if set(WAYS) <= set(row):
            continue
        start, shown = await began(seed)
        row["student"] = await measure(start, seed)
        for way in WAYS:
            if way not in row:
                before = time.perf_counter()
                policy, tokens = await taken(way, start, teacher, shown, PILOT[way], seed)
                seconds = round(time.perf_counter() - before)
                row[way] = await measure(policy, seed) | {"tokens": tokens, "seconds": seconds}
                records.write(RESULTS, record)
                print(seed, way, sum(map(int, row[way]["greedy"])) / len(HELD_OUT), tokens, seconds, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--pilot", action="store_true")
    asked = parser.parse_args()
    asyncio.run(main(asked.seeds, asked.pilot))
