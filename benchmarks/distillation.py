"""What is a teacher worth? One student, the same number of sampled completions, seven ways to use them; three seeds.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py     # some five minutes a seed; fills results/distillation.json

The embedded model and notebook 04's task, 1,000 held-out questions, 250 of them for samples. The teacher is GRPO's policy:
notebook 04's run, from the best SFT of seed 9, on 3,200 questions that nothing else uses. The student is the best SFT on 100
demonstrations, chosen by seed as in baselines.py. Each way then has the same questions and as many completions, eight of each
question, in steps of 32:

    teacher_sft   the teacher writes them; SFT from the student on them
    reverse_kl    the student writes them; the reverse KL to the teacher over the whole vocabulary
    forward_kl    the same with the forward KL
    mixed         the same, but every other step (by chance) has completions of the teacher: GKD's lambda is 0.5
    sampled       the student writes them; the reverse KL of the sampled tokens alone
    rejection     the student writes them; SFT on one right completion a question and the 100 demonstrations
    grpo          the student writes them; GRPO with the checker

A step has 32 different questions (SFT and distillation), or 4 whole groups of eight (GRPO, which needs them). A number of
batches (BUDGETS) is a run of its own, with a schedule of its own. Seconds are those that the process computed, with the
sampling and without the evaluation. The step size of each way is the best of RATES on seed 9, 50 batches and 400 other
questions, found before the other seeds are run. What the record holds is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import baselines
import records
import torch
from baselines import CHOOSING, NEW_TOKENS, PRACTICE, SHOWN, answered, best_sft, digits

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.chat import prompt_ids
from grpolab.evaluate import evaluate
from grpolab.models.load import Policy
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, finished_and_correct, grpo, score, sft
from grpolab.train.distil import DistilConfig, distil

RESULTS = Path(__file__).parent / "results" / "distillation.json"
TEACHER = records.ROOT / "runs" / "distillation_teacher"  # kept for the next call
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/distillation.py"
SEEDS, PILOT_SEED, RATES = range(3), 9, (1e-4, 3e-4, 1e-3, 3e-3)
TAUGHT, QUESTIONS, SIZE, HELD_OUT = PRACTICE[800:4000], PRACTICE[:800], 8, baselines.HELD_OUT
BUDGETS, PILOT_BATCHES = (25, 50, 100), 50  # batches of 32
KINDS = {"reverse_kl": {}, "forward_kl": {"beta": 0.0}, "mixed": {"beta": 0.0, "on_policy": 0.5},
         "sampled": {"vocabulary": "sampled"}}  # of DistilConfig
WAYS = ("teacher_sft", *KINDS, "rejection", "grpo")


async def drained(steps) -> list[dict]:
    return [row async for row in steps]


async def made_teacher() -> Policy:
    if TEACHER.exists():
        return load_policy(str(TEACHER))
    policy, _ = await began(PILOT_SEED)
    config = GRPOConfig(steps=100, prompts_per_step=64, group_size=8, lr=1e-3, warmup=3, schedule="cosine",
                        max_new_tokens=NEW_TOKENS, seed=PILOT_SEED)
    await drained(grpo(policy, None, TAUGHT, config))
    policy.save(TEACHER)
    return policy


def copy_of(policy: Policy) -> Policy:
    other = load_policy("tiny")
    other.model.load_state_dict(policy.model.state_dict())
    return other


async def written(policy: Policy, questions: list, seed: int) -> list:
    """Completions of each question by a policy, with the checker's rewards."""
    async with Sampler(policy) as sampler:
        prompts = [prompt_ids(policy.tokenizer, p.question) for p in questions]
        params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=seed)
        groups = await sampler.sample(prompts, group_size=SIZE, params=params)
    return score(policy, questions, groups, finished_and_correct)


def imitable(policy: Policy, pairs: list) -> list:
    """(problem, rollout) pairs as examples."""
    return [answered(policy, p.question, policy.decode(r.tokens)) for p, r in pairs]


async def taken(way: str, batches: int, start: Policy, teacher: Policy, shown: list, lr: float, seed: int):
    """The student after one of the WAYS, and the tokens that were sampled for it."""
    policy, questions = copy_of(start), QUESTIONS[: 4 * batches]
    common = {"steps": batches, "lr": lr, "schedule": "cosine", "seed": seed}
    writer = {"teacher_sft": teacher, "mixed": teacher, "rejection": start}.get(way)
    asked = questions[: len(questions) // 2] if way == "mixed" else questions
    groups = await written(writer, asked, seed) if writer else []
    tokens = sum(len(r.tokens) for g in groups for r in g)
    if way in KINDS:
        examples = imitable(policy, [(p, r) for p, g in zip(asked, groups) for r in g])
        own = questions[len(asked) :] if way == "mixed" else questions
        config = DistilConfig(prompts_per_step=4 * SIZE, group_size=1, max_new_tokens=NEW_TOKENS, **KINDS[way], **common)
        steps = distil(policy, teacher, own, config, examples=examples)
        rows = [row for row in await drained(steps) if not row["off_policy"]]
    elif way == "grpo":
        config = GRPOConfig(prompts_per_step=4, group_size=SIZE, max_new_tokens=NEW_TOKENS, **common)
        rows = await drained(grpo(policy, None, questions, config))
    else:
        right = [(p, next((r for r in g if r.reward), None)) for p, g in zip(questions, groups)]
        pairs = [(p, r) for p, g in zip(questions, groups) for r in g] if way == "teacher_sft" else [x for x in right if x[1]]
        examples = imitable(policy, pairs) + (shown if way == "rejection" else [])
        await drained(sft(policy, examples, SFTConfig(batch_size=4 * SIZE, **common)))
        rows = []
    return policy, tokens + round(sum(row["completion_length"] for row in rows) * 4 * SIZE)


async def began(seed: int) -> tuple[Policy, list]:
    shown = demonstrations(load_policy("tiny"), random.Random(seed).sample(SHOWN, 100))
    return (await best_sft(shown, seed))[0], shown


async def pilot(teacher: Policy, record: dict) -> None:
    """Fill the share of right answers on CHOOSING of each way and step size that the record lacks."""
    lacking = [(way, lr) for way in WAYS for lr in RATES if str(lr) not in record["pilot"].setdefault(way, {})]
    start, shown = await began(PILOT_SEED) if lacking else (None, [])
    for way, lr in lacking:
        policy, _ = await taken(way, PILOT_BATCHES, start, teacher, shown, lr, PILOT_SEED)
        record["pilot"][way][str(lr)] = (await evaluate(policy, CHOOSING, max_new_tokens=NEW_TOKENS)).exact.value
        print(way, record["pilot"][way], flush=True)
        records.write(RESULTS, record)


async def main(seeds: list[int]) -> None:
    teacher = await made_teacher()
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "command": COMMAND, "threads": torch.get_num_threads(), "batches": BUDGETS, "batch": 4 * SIZE,
        "pilot": {}, "seeds": {}}
    if "teacher" not in record:
        record["teacher"] = await measure(teacher, 0, sampled=True)
    await pilot(teacher, record)
    for seed in seeds:
        row = record["seeds"].setdefault(str(seed), {})
        if set(WAYS) <= set(row):
            continue
        start, shown = await began(seed)
        row["student"] = await measure(start, seed, sampled=True)
        for way in WAYS:
            if way not in row:
                row[way] = await curve(way, start, teacher, shown, best_rate(record, way), seed)
                records.write(RESULTS, record)
                print(seed, way, row[way]["curve"], flush=True)


async def measure(policy: Policy, seed: int, sampled: bool) -> dict:
    """Right or wrong on each held-out question, greedily, and how many of four samples on every fourth."""
    greedy = await evaluate(policy, HELD_OUT, max_new_tokens=NEW_TOKENS)
    found = {"greedy": digits(greedy.exact_rates)}
    if sampled:
        four = await evaluate(policy, HELD_OUT[::4], samples=4, seed=seed, max_new_tokens=NEW_TOKENS)
        found["sampled"] = digits(4 * r for r in four.exact_rates)
    return found


def best_rate(record: dict, way: str) -> float:
    return float(max(record["pilot"][way], key=record["pilot"][way].get))


async def curve(way: str, start: Policy, teacher: Policy, shown: list, lr: float, seed: int) -> dict:
    """The measures after the last of BUDGETS; under "curve" the greedy rate, tokens and seconds of each."""
    points = []
    for batches in BUDGETS:
        before = time.process_time()
        policy, tokens = await taken(way, batches, start, teacher, shown, lr, seed)
        seconds = round(time.process_time() - before, 1)
        found = await measure(policy, seed, sampled=batches == BUDGETS[-1])
        points.append({"batches": batches, "greedy": found["greedy"].count("1") / len(HELD_OUT), "tokens": tokens,
                       "seconds": seconds})
    return found | {"curve": points}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    asyncio.run(main(parser.parse_args().seeds))
