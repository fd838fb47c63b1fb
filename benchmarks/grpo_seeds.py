"""Does a checker teach what a hundred demonstrations do not hold? SFT, rejection sampling and GRPO, over seeds.

    OMP_NUM_THREADS=1 python benchmarks/grpo_seeds.py 0 1 2     # ten minutes a seed; fills results/grpo_seeds.json

All on the embedded model, with the questions and the settings of notebooks 01 and 04. For each seed: SFT at several numbers
of steps (the first seed has the whole curve), and from the best of them rejection sampling (one right rollout of each
practice question is a further demonstration) and GRPO. A seed changes what is drawn and in which order; the questions stay.
Of the steps of SFT, 80 and 160 give the best greedy answers (on 400 questions apart from the held-out ones they cannot be told
apart), and sampled answers are better at 160.
GRPO is trained a second time with bf16 parameters (over fp32 master weights, sampled and trained in bf16 with the first ratio
exactly 1) from the same start: does it learn like fp32?
Seeds that the record holds are kept. The number of threads changes the rounding and with it the path of a run.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import records
import torch

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.arithmetic import Task, generate
from grpolab.chat import encode_chat, prompt_ids, user
from grpolab.evaluate import evaluate, evaluate_plain, improvement
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, finished_and_correct, grpo, score, sft

RESULTS = Path(__file__).parent / "results" / "grpo_seeds.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/grpo_seeds.py 0 1 2"
DEMONSTRATIONS, BEST, CURVE, NEW_TOKENS = 100, 160, (20, 40, 80, 160, 320, 640), 24

KNOWN, HELD_OUT = generate(6400, 1000, seed=1, task=Task(ops="+-", max_operand=99))
DEMOS, PRACTICE, CHOOSING = KNOWN[:DEMONSTRATIONS], KNOWN[400:], KNOWN[-400:]


def sft_config(steps: int, seed: int, batch_size: int = 32) -> SFTConfig:
    return SFTConfig(steps=steps, batch_size=batch_size, lr=1e-3, schedule="cosine", seed=seed)


def grpo_config(seed: int) -> GRPOConfig:
    """That of notebook 04."""
    return GRPOConfig(steps=100, prompts_per_step=64, group_size=8, lr=1e-3, warmup=3, schedule="cosine",
                      max_new_tokens=NEW_TOKENS, seed=seed)


async def measure(policy, seed: int, many: bool = False) -> tuple[dict, tuple]:
    """The row of a policy, and its greedy and sampled evaluation; with `many`, pass@k of the first 200 questions too."""
    greedy = await evaluate(policy, HELD_OUT, max_new_tokens=NEW_TOKENS)
    sampled = await evaluate(policy, HELD_OUT, samples=4, seed=seed, max_new_tokens=NEW_TOKENS)
    row = {"greedy": str(greedy.exact), "sampled": str(sampled.exact), "format": str(greedy.format)}
    if many:
        row["pass_at"] = pass_at(await evaluate(policy, HELD_OUT[:200], samples=64, seed=seed, max_new_tokens=NEW_TOKENS))
    return row, (greedy, sampled)


def pass_at(evaluation) -> dict[str, str]:
    return {str(k): str(evaluation.pass_at(k)) for k in (1, 8, 64)}


async def run(rows) -> float:
    """Seconds that a training loop took."""
    began = time.perf_counter()
    async for _ in rows:
        pass
    return round(time.perf_counter() - began, 1)


async def base() -> dict:
    policy = load_policy("tiny")
    many = await evaluate_plain(policy, HELD_OUT[:200], samples=64)
    return {"greedy": str((await evaluate_plain(policy, HELD_OUT)).rate),
            "sampled": str((await evaluate_plain(policy, HELD_OUT, samples=4)).rate), "pass_at": pass_at(many)}


async def tuned(steps: int, seed: int, many: bool = False, demos=DEMOS):
    """SFT from the base on demonstrations: its policy, its row, its evaluations."""
    policy = load_policy("tiny")
    seconds = await run(sft(policy, demonstrations(policy, demos), sft_config(steps, seed)))
    row, found = await measure(policy, seed, many)
    chosen = await evaluate(policy, CHOOSING, max_new_tokens=NEW_TOKENS)
    return policy, row | {"seconds": seconds, "answers": len(demos), "choosing": str(chosen.exact)}, found


async def rejection(start, seed: int):
    """One right rollout of every practice question that has one, beside the demonstrations; SFT on both from the base."""
    began, policy = time.perf_counter(), load_policy("tiny")
    params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=seed)
    async with Sampler(start) as sampler:
        prompts = [prompt_ids(start.tokenizer, p.question) for p in PRACTICE]
        groups = score(start, PRACTICE, await sampler.sample(prompts, group_size=8, params=params), finished_and_correct)
    right = [(p, next((r for r in g if r.reward), None)) for p, g in zip(PRACTICE, groups)]
    own = [encode_chat(policy.tokenizer, [*user(p.question), {"role": "assistant", "content": policy.decode(r.tokens)}])
           for p, r in right if r]
    await run(sft(policy, demonstrations(policy, DEMOS) + own, sft_config(500, seed, batch_size=64)))
    seconds = round(time.perf_counter() - began, 1)
    row, _ = await measure(policy, seed)
    return row | {"seconds": seconds, "rollouts": sum(len(g) for g in groups), "kept": len(own)}


async def one_seed(seed: int, whole_curve: bool) -> dict:
    curve = {}
    for steps in CURVE if whole_curve else ():
        if steps != BEST:
            curve[str(steps)] = (await tuned(steps, seed))[1]
    policy, row, before = await tuned(BEST, seed, many=True)
    curve[str(BEST)] = row
    rejected = await rejection(policy, seed)
    config = grpo_config(seed)
    seconds = await run(grpo(policy, None, PRACTICE, config))
    learned, after = await measure(policy, seed, many=True)
    gains = {"gain": str(improvement(before[0], after[0])), "gain_sampled": str(improvement(before[1], after[1]))}
    learned |= gains | {"seconds": seconds, "rollouts": config.steps * config.prompts_per_step * config.group_size}
    return {"sft": curve, "rejection": rejected, "grpo": learned}


async def in_bf16(seed: int) -> dict:
    """GRPO from the best SFT as in `one_seed`, its parameters rounded to bf16, which also answers the questions."""
    policy, start, _ = await tuned(BEST, seed)
    with tempfile.TemporaryDirectory() as folder:
        policy.save(folder)
        policy = load_policy(folder, dtype="bfloat16")
    rounded, before = await measure(policy, seed)
    config, drift = replace(grpo_config(seed), exact=True), []
    began = time.perf_counter()
    async for row in grpo(policy, None, PRACTICE, config):
        drift.append(row["diff_max"])
    seconds = round(time.perf_counter() - began, 1)
    learned, after = await measure(policy, seed)
    gains = {"gain": str(improvement(before[0], after[0])), "gain_sampled": str(improvement(before[1], after[1]))}
    drift = [d for d in drift if d == d]  # a step without a signal has none
    told = {"start": start["greedy"], "rounded": rounded["greedy"], "diff_max": max(drift, default=None),
            "seconds": seconds}
    return told | learned | gains


async def main(seeds: list[str]) -> None:
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if record.get("command") != COMMAND:
        record = {"command": COMMAND, "threads": torch.get_num_threads(), "held_out": len(HELD_OUT), "best": BEST,
                  "demonstrations": len(DEMOS), "practice": len(PRACTICE), "base": await base(), "seeds": {}}
    for seed in seeds:
        if seed not in record["seeds"]:
            record["seeds"][seed] = await one_seed(int(seed), whole_curve=not record["seeds"])
            records.write(RESULTS, record)
            print(seed, json.dumps(record["seeds"][seed]), flush=True)
        if "bf16" not in record["seeds"][seed]:
            record["seeds"][seed]["bf16"] = await in_bf16(int(seed))
            records.write(RESULTS, record)
            print(seed, json.dumps(record["seeds"][seed]["bf16"]), flush=True)
    if "four_times" not in record:  # what four times as many demonstrations would have given
        record["four_times"] = (await tuned(BEST, 0, demos=KNOWN[: 4 * DEMONSTRATIONS]))[1]
        records.write(RESULTS, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", default=["0", "1", "2"])
    asyncio.run(main(parser.parse_args().seeds))
