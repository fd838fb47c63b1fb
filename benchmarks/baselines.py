"""Does GRPO beat the plain methods on the same checker and the same number of rollouts? Eight seeds, six policies.

    OMP_NUM_THREADS=1 python benchmarks/baselines.py     # some ten minutes a seed; fills results/baselines.json

All on the embedded model and 1,000 held-out questions; the settings are those of notebooks 01 and 04, fixed before these seeds
were run. A seed draws its own 100 demonstrations of 400, the order of the questions, and everything that is sampled.

    base        as pretrained, asked in its own plain form, `28 + 47 =`
    sft         the best of 80 and 160 steps on the demonstrations, chosen on 400 questions that nothing else uses; the start of
                rejection and grpo
    mixed       SFT of as many steps on the demonstrations and as many plain sums that the base wrote: does it forget less?
    majority    no checker: for each practice question the base's most frequent of eight plain answers, put into the format;
                SFT on these and the demonstrations
    rejection   two rounds of 25,600 rollouts; one right rollout a question joins the demonstrations; SFT from the base
    grpo        51,200 rollouts, the same number

`mixed` and `majority` are controls and run on the first three seeds. Questions are split by whether the pretraining text of the
base states their pair of last digits wrongly on purpose (`planted`). What the record holds is kept, so that it can be filled in
several goes. The number of threads changes the rounding and with it the path of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import records
import torch

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.arithmetic import Task, generate, usual_mistakes
from grpolab.chat import Example, encode_chat, prompt_ids, user
from grpolab.checker import check_answer
from grpolab.evaluate import evaluate, evaluate_plain
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, finished_and_correct, grpo, score, sft

RESULTS = Path(__file__).parent / "results" / "baselines.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/baselines.py"
SEEDS, CONTROLS = range(8), range(3)  # named before any of them was run
NEW_TOKENS, STEPS = 24, (80, 160)

KNOWN, HELD_OUT = generate(6400, 1000, seed=1, task=Task(ops="+-", max_operand=99))
SHOWN, PRACTICE, CHOOSING = KNOWN[:400], KNOWN[400:], KNOWN[-400:]
ROUNDS = (PRACTICE[:3200], PRACTICE[-3600:-400])  # 25,600 rollouts each, eight a question; disjoint from CHOOSING


def planted() -> str:
    """For each held-out question 1 where the base's text states its pair of last digits wrongly on purpose, else 0."""
    mistakes = usual_mistakes()
    return "".join("01"[p.last_digits in mistakes] for p in HELD_OUT)


async def measure(policy, seed: int) -> dict:
    """Right or wrong on each held-out question: greedily (0 or 1), and how many of four samples."""
    greedy = await evaluate(policy, HELD_OUT, max_new_tokens=NEW_TOKENS)
    sampled = await evaluate(policy, HELD_OUT, samples=4, seed=seed, max_new_tokens=NEW_TOKENS)
    return {"greedy": digits(greedy.exact_rates), "sampled": digits(4 * r for r in sampled.exact_rates),
            "format": greedy.format.value}


def digits(counts) -> str:
    return "".join(str(round(count)) for count in counts)


async def tuned(examples: list[Example], steps: int, seed: int, batch_size: int = 32):
    """The base after SFT on these examples."""
    policy = load_policy("tiny")
    config = SFTConfig(steps=steps, batch_size=batch_size, lr=1e-3, schedule="cosine", seed=seed)
    async for _ in sft(policy, examples, config):
        pass
    return policy


def answered(policy, question: str, text: str) -> Example:
    return encode_chat(policy.tokenizer, [*user(question), {"role": "assistant", "content": text}])


async def best_sft(shown: list[Example], seed: int):
    """The policy of the number of steps that is best on CHOOSING, and that number."""
    found = {}
    for steps in STEPS:
        policy = await tuned(shown, steps, seed)
        found[steps] = (await evaluate(policy, CHOOSING, max_new_tokens=NEW_TOKENS)).exact.value, policy
    steps = max(STEPS, key=lambda s: found[s][0])
    return found[steps][1], steps


async def rejection(start, shown: list[Example], seed: int):
    """The policy of two rounds of rejection sampling, and the number of sampled tokens."""
    policy, own, tokens = start, [], 0
    for number, (questions, steps) in enumerate(zip(ROUNDS, (150, 400))):
        params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=1000 * number + seed)
        async with Sampler(policy) as sampler:
            prompts = [prompt_ids(policy.tokenizer, p.question) for p in questions]
            groups = score(policy, questions, await sampler.sample(prompts, group_size=8, params=params), finished_and_correct)
        tokens += sum(len(r.tokens) for g in groups for r in g)
        right = [(p, next((r for r in g if r.reward), None)) for p, g in zip(questions, groups)]
        own += [answered(policy, p.question, policy.decode(r.tokens)) for p, r in right if r]
        policy = await tuned(shown + own, steps, seed, batch_size=64)
    return policy, {"tokens": tokens, "kept": len(own)}


async def learned(start, seed: int):
    """The policy of GRPO with notebook 04's settings, and the number of sampled tokens."""
    config = GRPOConfig(steps=100, prompts_per_step=64, group_size=8, lr=1e-3, warmup=3, schedule="cosine",
                        max_new_tokens=NEW_TOKENS, seed=seed)
    tokens, questions = 0, PRACTICE[:-400]
    random.Random(seed).shuffle(questions)
    async for row in grpo(start, None, questions, config):
        tokens += round(row["completion_length"] * config.prompts_per_step * config.group_size)
    return start, {"tokens": tokens}


async def plain_answers(samples: int) -> list[tuple[str, ...]]:
    """What the base writes behind each practice question in its plain form, `28 + 47 =`, its first line."""
    found = await evaluate_plain(load_policy("tiny"), PRACTICE[:-400], samples=samples)
    return [tuple(text.split("\n")[0].strip() for text in texts) for texts in found.texts]


async def controls(shown: list[Example], plain: list[tuple[str, ...]], steps: int, seed: int) -> dict:
    policy = load_policy("tiny")
    written = [f"{p.a} {p.op} {p.b} = {texts[0]}\n" for p, texts in zip(PRACTICE, plain)][: len(shown)]
    ids = [tuple(policy.tokenizer.encode(text, add_special_tokens=False)) for text in written]
    mixed = await tuned(shown + [Example(i, (0,) + (1,) * (len(i) - 1)) for i in ids], 2 * steps, seed)
    votes = [(p, Counter(texts).most_common(1)[0][0]) for p, texts in zip(PRACTICE, plain)]
    voted = [answered(policy, p.question, f"{p.a} {p.op} {p.b} = \\boxed{{{vote}}}.") for p, vote in votes
             if vote.lstrip("-").isdigit()]
    majority = await tuned(shown + voted, 400, seed, batch_size=64)
    right = sum(check_answer(f"\\boxed{{{vote}}}", p.answer) for p, vote in votes) / len(votes)
    return {"mixed": await measure(mixed, seed), "majority": await measure(majority, seed) | {"votes_right": right}}


async def one_seed(seed: int, record: dict) -> None:
    """Fill what the record lacks of this seed, and write it."""
    row, began = record["seeds"].setdefault(str(seed), {}), time.perf_counter()
    policy = load_policy("tiny")
    shown = demonstrations(policy, random.Random(seed).sample(SHOWN, 100))
    start, steps = await best_sft(shown, seed)
    if "sft" not in row:
        row["sft"] = await measure(start, seed) | {"steps": steps}
    if "rejection" not in row:
        found, about = await rejection(start, shown, seed)
        row["rejection"] = await measure(found, seed) | about
    if "grpo" not in row:
        found, about = await learned(start, seed)
        row["grpo"] = await measure(found, seed) | about
    row["seconds"] = round(time.perf_counter() - began)
    records.write(RESULTS, record)
    shares = {name: sum(map(int, row[name]["greedy"])) / len(HELD_OUT) for name in ("sft", "rejection", "grpo")}
    print(f"seed {seed}, {row['seconds']} s: {shares}", flush=True)


async def main(seeds: list[int]) -> None:
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "command": COMMAND, "threads": torch.get_num_threads(), "planted": planted(), "seeds": {}}
    if "base" not in record:
        base = load_policy("tiny")
        greedy, sampled = await evaluate_plain(base, HELD_OUT), await evaluate_plain(base, HELD_OUT, samples=4)
        record["base"] = {"greedy": digits(greedy.rates), "sampled": digits(4 * r for r in sampled.rates)}
        records.write(RESULTS, record)
    for seed in seeds:
        if "grpo" not in record["seeds"].get(str(seed), {}):
            await one_seed(seed, record)
    left = [seed for seed in CONTROLS if seed in seeds and "majority" not in record["seeds"][str(seed)]]
    plain = await plain_answers(8) if left else []
    for seed in left:
        shown = demonstrations(load_policy("tiny"), random.Random(seed).sample(SHOWN, 100))
        row = record["seeds"][str(seed)]
        row |= await controls(shown, plain, row["sft"]["steps"], seed)
        records.write(RESULTS, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    asyncio.run(main(parser.parse_args().seeds))
