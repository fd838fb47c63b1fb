"""How old may rollouts be, and what does sampling ahead save? Staleness 0 to 8, three corrections, three seeds.

    OMP_NUM_THREADS=1 python benchmarks/async_grpo.py              # some ten minutes of CPU time; fills results/async_grpo.json
    OMP_NUM_THREADS=1 python benchmarks/async_grpo.py --timing     # three minutes; wants a quiet machine

The embedded model and notebook 04's task, 1,000 held-out questions. Each run starts from SFT on 100 demonstrations, drawn by
seed as in baselines.py, and takes the same STEPS steps of 16 questions with 8 completions each. Staleness 0 is synchronous
GRPO. With staleness s step k trains on completions of the weights before step max(0, k - s).

    none     no correction: old completions are taken as if they were new (-A log pi)
    clip     PPO's clipped ratio to the log-probs of whoever drew a token
    weights  each token weighed by min(pi / pi_drawn, 2), truncated importance sampling

    rejection  the same number of completions of the start, all at once; SFT on one right completion a question and the 100
               demonstrations (its learning rate: distillation.py's pilot)

Since the schedule is a function of the step, learning does not depend on the clock: these runs wait for nothing, and
`--timing` measures seconds a step apart from them, with the checker as it is and with one that takes half a second to a second
a completion (`slow`, by its seed). Both must give the same rewards in every bit. The learning rate (LR) is the one of RATES
with the highest reward over the last ten steps at staleness 0 on seed 9 (`--pilot`: 0.500, 0.557, 0.342, 0.000), chosen before
seeds 0 to 2 were run. Clipping was run at staleness 4 and 8 alone. What the record holds is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path

import records
import torch
from baselines import CHOOSING, HELD_OUT, NEW_TOKENS, PRACTICE, SHOWN, answered, digits, tuned

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.chat import prompt_ids
from grpolab.evaluate import evaluate
from grpolab.models.load import Policy
from grpolab.train import AsyncGRPOConfig, SFTConfig, async_grpo, demonstrations, finished_and_correct, score, sft

RESULTS = Path(__file__).parent / "results" / "async_grpo.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/async_grpo.py"
SEEDS, PILOT_SEED, RATES, LR = range(3), 9, (1e-4, 3e-4, 1e-3, 2e-3), 3e-4
STALENESS, STEPS, TIMED, PROMPTS, SIZE = (0, 1, 2, 4, 8), 48, 20, 16, 8
CORRECTIONS = {"none": {"objective": "cispo", "clip_eps": (0.0, 0.0)}, "clip": {}, "weights": {"sampler_cap": 2.0}}
ARMS = [(0, "clip"), *((s, kind) for s in STALENESS[1:] for kind in CORRECTIONS if kind != "clip" or s > 2)]
SECONDS = (0.5, 1.0)  # that a slow checker takes for a completion
QUESTIONS = PRACTICE[: STEPS * PROMPTS]


async def slow(text, row, rollout) -> float:
    """The checker behind a service that takes half a second to a second."""
    await asyncio.sleep(random.Random(rollout.seed).uniform(*SECONDS))
    return finished_and_correct(text, row, rollout)


def settings(staleness: int, kind: str, seed: int, steps: int, lr: float = LR, **more) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        steps=steps, prompts_per_step=PROMPTS, group_size=SIZE, lr=lr, warmup=3, max_new_tokens=NEW_TOKENS, seed=seed,
        max_staleness=staleness, max_logp_diff=None, **CORRECTIONS[kind], **more)


def copy_of(policy: Policy) -> Policy:
    other = load_policy("tiny")
    other.model.load_state_dict(policy.model.state_dict())
    return other


async def learned(start: Policy, config: AsyncGRPOConfig, reward=finished_and_correct) -> tuple[Policy, list[dict]]:
    """A copy of the start after the training, and its rows; each has `at`, the seconds since the training began."""
    policy, rows, began = copy_of(start), [], None
    async for row in async_grpo(policy, None, QUESTIONS, config, reward=reward):
        began = began or time.perf_counter() - row["sampling_s"] - row["update_s"]
        rows.append(row | {"at": time.perf_counter() - began})
    return policy, rows


async def right(policy: Policy) -> str:
    """For each held-out question whether the greedy answer is right, 0 or 1."""
    return digits((await evaluate(policy, HELD_OUT, max_new_tokens=NEW_TOKENS)).exact_rates)


async def rejection(start: Policy, shown: list, seed: int) -> tuple[Policy, int]:
    """The start after SFT on right completions of its own, and the tokens sampled for them."""
    async with Sampler(start) as sampler:
        prompts = [prompt_ids(start.tokenizer, p.question) for p in QUESTIONS]
        params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS, seed=seed)
        groups = score(start, QUESTIONS, await sampler.sample(prompts, group_size=SIZE, params=params), finished_and_correct)
    chosen = [(p, r) for p, g in zip(QUESTIONS, groups) if (r := next((r for r in g if r.reward), None))]
    examples = shown + [answered(start, p.question, start.decode(r.tokens)) for p, r in chosen]
    policy, config = copy_of(start), SFTConfig(steps=200, batch_size=32, lr=1e-3, schedule="cosine", seed=seed)
    async for _ in sft(policy, examples, config):
        pass
    return policy, sum(len(r.tokens) for g in groups for r in g)


async def began(seed: int) -> tuple[Policy, list]:
    shown = demonstrations(load_policy("tiny"), random.Random(seed).sample(SHOWN, 100))
    return await tuned(shown, 80, seed), shown


def tokens_of(row: dict) -> int:
    return round(row["completion_length"] * PROMPTS * SIZE)


async def pilot() -> None:
    start, _ = await began(PILOT_SEED)
    for lr in RATES:
        policy, rows = await learned(start, settings(0, "clip", PILOT_SEED, STEPS, lr))
        found = await evaluate(policy, CHOOSING, max_new_tokens=NEW_TOKENS)
        print(f"{lr:g}: {found.exact}; the last ten rewards {sum(r['reward'] for r in rows[-10:]) / 10:.3f}", flush=True)


async def timing() -> dict:
    """Seconds a step, in wall time and on the processor, without the beginning and the end: the pipeline is full, and does
    not run empty yet."""
    start, _ = await began(PILOT_SEED)
    found, rewards = {}, {}
    cases = [(s, how, reward, False) for how, reward in (("checker", finished_and_correct), ("slow", slow)) for s in STALENESS]
    for s, how, reward, in_flight in [*cases, (2, "slow, in flight", slow, True)]:
        cpu = time.process_time()
        _, rows = await learned(start, settings(s, "weights", PILOT_SEED, TIMED, in_flight=in_flight), reward)
        cpu = (time.process_time() - cpu) / len(rows)
        first, last = TIMED // 5, TIMED - s
        middle = rows[first:last]

        def mean(name):
            return sum(r[name] for r in middle) / len(middle)  # noqa: B023

        if not in_flight:
            rewards.setdefault(s, [r["reward"] for r in rows])
            if rewards[s] != [r["reward"] for r in rows]:
                raise AssertionError(f"staleness {s}: other rewards where the checker is slow")
        found[f"{s}, {how}"] = {
            "seconds": (rows[last - 1]["at"] - rows[first - 1]["at"]) / len(middle), "cpu": cpu,
            "waiting": mean("sampling_s"), "update": mean("update_s"), "staleness": mean("staleness"),
            "staleness_max": max(r["staleness_max"] for r in middle)}
        print(s, how, found[f"{s}, {how}"], flush=True)
    return found | {"load": os.getloadavg(), "cores": os.cpu_count()}


async def main(seeds: list[int]) -> None:
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record = {"command": COMMAND, "threads": torch.get_num_threads(), "lr": LR, "steps": STEPS, "completions": PROMPTS * SIZE,
              "seeds": {}} | record
    for seed in seeds:
        of_seed = record["seeds"].setdefault(str(seed), {})
        wanted = ["start", "rejection", *(f"{s}, {kind}" for s, kind in ARMS)]
        if set(wanted) <= set(of_seed):
            continue
        start, shown = await began(seed)
        for name in wanted:
            if name in of_seed:
                continue
            cpu = time.process_time()
            if name == "start":
                found = {"greedy": await right(start)}
            elif name == "rejection":
                policy, tokens = await rejection(start, shown, seed)
                found = {"greedy": await right(policy), "tokens": tokens}
            else:
                s, kind = name.split(", ")
                policy, rows = await learned(start, settings(int(s), kind, seed, STEPS))
                found = {"greedy": await right(policy), "tokens": sum(map(tokens_of, rows))}
                found |= {c: [round(r[c], 5) for r in rows] for c in ("reward", "diff_abs_mean", "entropy", "staleness")}
                found["step_tokens"] = [tokens_of(r) for r in rows]
                found["ess"] = [round(r["ess"], 4) for r in rows if r.get("ess", float("nan")) == r.get("ess")]
            of_seed[name] = found | {"cpu": round(time.process_time() - cpu, 1)}
            records.write(RESULTS, record)
            print(seed, name, sum(map(int, found["greedy"])) / len(HELD_OUT), of_seed[name]["cpu"], flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--pilot", action="store_true")
    parser.add_argument("--timing", action="store_true")
    options = parser.parse_args()
    if options.timing:
        measured = asyncio.run(timing())
        records.write(RESULTS, (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) | {"timing": measured})
    else:
        asyncio.run(pilot() if options.pilot else main(options.seeds))
