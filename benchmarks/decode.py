"""Delivered tokens a second of the sampler against transformers' generate(), in one run.

    OMP_NUM_THREADS=2 python benchmarks/decode.py                      # every model and workload, some ten quiet minutes
    OMP_NUM_THREADS=2 python benchmarks/decode.py --models tiny --workloads grpo spread

Sampling at T = 1 with logps, prefill included, end tokens off, the same prompts and lengths for all. Engines take turns
within each round, so that drift hits all; a round during which other processes took more than a quarter of a core is left
out where a quieter one exists, and a claim rests on the worst round's ratio. With one thread the ratio of processor time
says nearly the same on a machine that is never quiet. Loading, set-up and a first call are timed
apart. generate() gets its best batching: num_return_sequences for groups; for spread lengths the better of two batch sizes,
in order of arrival (its caller cannot know the lengths); for the tiny model once more sorted by true length, as an oracle.
Spread lengths are geometric; SIZES holds the full workload for the tiny model and a reduced one for SmolLM2, for which
generate() would take hours. llama.cpp takes part with the same BF16 weights where llama-cpp-python is installed.
benchmarks/results/decode.json keeps one row a model, workload and set of vector instructions, with its machine. A processor
with AVX-512 is measured without it where torch, its two libraries and the compiler of the step are told so, by an `avx2-g++`
of two lines, `#!/bin/sh` and `exec g++ "$@" -march=haswell`:

    GRPOLAB_CXX=./avx2-g++ ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \\
        OMP_NUM_THREADS=2 python benchmarks/decode.py --models tiny smollm2-fp32
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from pathlib import Path

import records
import torch
import transformers
from llama_peer import LlamaPeer, bf16_gguf
from llama_peer import obstacle as llama_obstacle

from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import load_policy

MODELS = {"tiny": ("tiny", "float32"), "smollm2-fp32": ("smollm2-135m", "float32"),
          "smollm2-bf16": ("smollm2-135m", "bfloat16")}
TARGETS = {  # the ratios aimed at, by workload and model
    "fixed": {"tiny": 2.0, "smollm2-fp32": 2.5, "smollm2-bf16": 2.8},
    "grpo": {"tiny": 2.5, "smollm2-fp32": 3.0, "smollm2-bf16": 3.5},
    "spread": {"tiny": 4.0, "smollm2-fp32": 5.0, "smollm2-bf16": 5.0},
    "single": {"tiny": 2.0, "smollm2-fp32": 1.7, "smollm2-bf16": 1.6},
}
SIZES = {  # spread: (rollouts, mean, cap); tiny: all that its context holds
    "tiny": (256, 64, 512 - 41), "smollm2-fp32": (96, 32, 256), "smollm2-bf16": (96, 32, 256),
}
ROUNDS = {"tiny": {"fixed": 5, "grpo": 5, "spread": 3, "single": 5},
          "smollm2-fp32": {"fixed": 3, "grpo": 2, "spread": 1, "single": 3},
          "smollm2-bf16": {"fixed": 3, "grpo": 2, "spread": 1, "single": 3}}
PROMPT, NEW = 40, 64
QUIET = 0.25  # cores that other processes may take during a round that counts
RESULTS = Path(__file__).with_name("results") / "decode.json"


def random_prompts(n: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(n)]


def geometric_lengths(n: int, mean: float, cap: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [min(cap, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))) for _ in range(n)]


def workloads(model: str, vocab: int) -> dict:
    """name -> (prompts, group_size, new tokens of every rollout or a list of them, slots)."""
    rows = 64 if model == "tiny" else 32
    rollouts, mean, cap = SIZES[model]
    return {
        "single": (random_prompts(1, PROMPT, vocab), 1, NEW, 1),
        "fixed": (random_prompts(rows, PROMPT, vocab), 1, NEW, rows),
        "grpo": (random_prompts(8, PROMPT, vocab), 8, NEW, 64),
        "spread": (random_prompts(rollouts, PROMPT, vocab), 1, geometric_lengths(rollouts, mean, cap), rows),
    }


def ours(sampler: Sampler, prompts, group_size: int, new) -> int:
    """Run one workload through the sampler; delivered tokens."""
    if isinstance(new, int):
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        groups = sampler.sample_sync(prompts, group_size=group_size, params=params)
    else:
        requests = [sampler.submit([p], params=SamplingParams(max_new_tokens=n, ignore_eos=True))
                    for p, n in zip(prompts, new)]
        groups = [r.result()[0] for r in requests]
    return sum(len(r.tokens) for group in groups for r in group)


def generated(model, prompts, group_size: int, new: int) -> None:
    ids = torch.tensor(prompts, device=model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, pad_token_id=0,
                   max_new_tokens=new, min_new_tokens=new, num_return_sequences=group_size, eos_token_id=None)


def peer(model, prompts, group_size: int, new, batch: int = 32) -> int:
    """Run one workload through generate(); delivered tokens. Spread lengths go in static batches."""
    if isinstance(new, int):
        generated(model, prompts, group_size, new)
        return len(prompts) * group_size * new
    for i in range(0, len(prompts), batch):
        generated(model, prompts[i: i + batch], 1, max(new[i: i + batch]))
    return sum(new)


def timed(fn, *args) -> tuple[float, float, float]:
    """(tokens a second, tokens a second of processor time, share of a core that other processes took meanwhile)."""
    before, own, started = _busy_ticks(), time.process_time(), time.perf_counter()
    tokens = fn(*args)
    seconds, own = time.perf_counter() - started, time.process_time() - own
    others = (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") - own
    return tokens / seconds, tokens / own, max(0.0, others / seconds)


def _busy_ticks() -> int:
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split("\n")[0].split()[1:])
    return user + nice + system + irq + softirq


def bandwidth() -> float:
    """Bytes a second of reading 256 MB, best of five."""
    data, best = torch.ones(64 * 2**20), math.inf
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


def arithmetic(side: int) -> float:
    """Floating-point operations a second of an fp32 product of this model's width, best of 20."""
    a, b, best = torch.randn(512, side), torch.randn(side, 4 * side), math.inf
    for _ in range(20):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 8 * 512 * side * side / best


def decode_profile(sampler: Sampler, policy, read: float) -> dict:
    """Where the sampler's time went, and what it read and computed against the machine's limits."""
    s, model = sampler.stats, policy.model
    total = s.prefill_seconds + s.decode_seconds + s.sample_seconds
    parameters = sum(p.numel() for p in model.parameters())
    weights, flops = parameters * policy.dtype.itemsize, arithmetic(model.config.hidden_size)
    steps_per_second, rows_per_second = s.steps / s.decode_seconds, s.row_steps / s.decode_seconds
    return dict(prefill_share=s.prefill_seconds / total, decode_share=s.decode_seconds / total,
                sample_share=s.sample_seconds / total, prefill_tokens_per_s=s.prefill_tokens / s.prefill_seconds,
                decode_tokens_per_s=rows_per_second, mean_rows=s.row_steps / s.steps,
                of_bandwidth=weights * steps_per_second / read, of_fp32_arithmetic=2 * parameters * rows_per_second / flops)


def contenders(sampler: Sampler, policy, prompts, group_size: int, new) -> dict:
    """name -> (function, arguments) of what races: the sampler and the ways to call generate()."""
    model, runs = policy.model, {"sampler": (ours, sampler, prompts, group_size, new)}
    if isinstance(new, int):
        return runs | {"generate": (peer, model, prompts, group_size, new)}
    for batch in (32, min(128, len(prompts))):
        runs[f"generate, {batch} a batch"] = (peer, model, prompts, 1, new, batch)
    if len(prompts) > 128:
        by_length = sorted(range(len(new)), key=new.__getitem__)
        runs["generate, sorted by an oracle"] = (peer, model, [prompts[i] for i in by_length], 1, [new[i] for i in by_length])
    return runs


def race(runs: dict, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """Tokens a second, of the clock and of processor time, of each contender in each round that counts, and the cores that
    others took in each round."""
    speeds, work, others = {name: [] for name in runs}, {name: [] for name in runs}, []
    for _ in range(rounds):
        worst = 0.0
        for name, (fn, *arguments) in runs.items():
            speed, per_cpu, taken = timed(fn, *arguments)
            speeds[name].append(speed)
            work[name].append(per_cpu)
            worst = max(worst, taken)
        others.append(worst)
    keep = [i for i, taken in enumerate(others) if taken <= QUIET] or range(rounds)
    return *({name: [v[i] for i in keep] for name, v in table.items()} for table in (speeds, work)), others


def versus(speeds: dict[str, list[float]], name: str) -> dict:
    ratios = [a / b for a, b in zip(speeds["sampler"], speeds[name])]
    return dict(ratio=statistics.median(ratios), ratio_worst=min(ratios), ratio_best=max(ratios))


def measure(name: str, label: str, policy, args, machine: dict) -> dict:
    """One row of the results."""
    prompts, group_size, new, slots = workloads(name, policy.model.config.vocab_size)[label]
    started = time.perf_counter()
    sampler = Sampler(policy, slots=slots, threads=args.sampler_threads)
    times = {"sampler set-up": time.perf_counter() - started}
    params = SamplingParams(greedy=True, max_new_tokens=8, ignore_eos=True)
    started = time.perf_counter()
    greedy = sampler.sample_sync(prompts[:2], params=params)
    times["sampler first call"] = time.perf_counter() - started
    correct = audit(policy, [r for g in greedy for r in g])
    started = time.perf_counter()
    with Sampler(policy, slots=slots, threads=args.sampler_threads) as second:
        assert second.engine is sampler.engine
        times["second sampler, until it has its engine"] = time.perf_counter() - started
    started = time.perf_counter()
    generated(policy.model, prompts[:2], 1, 8)
    times["generate first call"] = time.perf_counter() - started
    runs, llama = contenders(sampler, policy, prompts, group_size, new), None
    if name.endswith("bf16") and label in ("single", "fixed") and llama_obstacle() is None:
        path, started = bf16_gguf(), time.perf_counter()
        llama = LlamaPeer(path, len(prompts), PROMPT + new, torch.get_num_threads())
        times["llama.cpp load"] = time.perf_counter() - started
        llama.run(prompts, 2)
        runs["llama.cpp BF16"] = (llama.run, prompts, new)
    speeds, work, others = race(runs, args.rounds or ROUNDS[name][label])
    fair = [k for k in runs if k.startswith("generate") and "oracle" not in k]
    best = max(fair, key=lambda k: statistics.median(speeds[k]))
    fp32 = policy.dtype == torch.float32
    row = dict(
        model=name, workload=label, rollouts=len(prompts) * group_size, new_tokens=new if isinstance(new, int) else sum(new),
        target=TARGETS[label][name], peer=best, **versus(speeds, best),
        ratio_of_processor_time=versus(work, best)["ratio"],
        tokens_per_s={k: statistics.median(v) for k, v in speeds.items()}, rounds=len(others), others_cores=others,
        quiet=min(others) <= QUIET, seconds=times, engine=sampler.engine.name, slots=sampler.slots,
        sampler_threads=sampler.threads, greedy_disagreements=correct.disagreements, worst_ulps=correct.worst_ulps,
        logp_max_error=correct.raw_max_error,
        exact=correct.disagreements == 0 and correct.raw_max_error <= 1e-4 if fp32 else correct.worst_ulps <= 2,
        profile=decode_profile(sampler, policy, machine["read_bytes_per_s"]), machine=machine)
    if llama is not None:
        row["llama"] = versus(speeds, "llama.cpp BF16") | dict(
            ratio_of_processor_time=versus(work, "llama.cpp BF16")["ratio"])
        llama.close()
    sampler.close()
    return row


def line(r: dict) -> str:
    speeds = "  ".join(f"{k} {v:.0f}" for k, v in r["tokens_per_s"].items())
    llama = f"; to llama.cpp {r['llama']['ratio']:.2f}x" if "llama" in r else ""
    return (f"{r['model']:13} {r['workload']:7} {r['ratio']:5.2f}x [{r['ratio_worst']:.2f}..{r['ratio_best']:.2f}] "
            f"(set: {r['target']}x; of processor time {r['ratio_of_processor_time']:.2f}x{llama})  tok/s: {speeds}  "
            f"{'exact' if r['exact'] else 'GATE FAILED'}, others {min(r['others_cores']):.2f} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--rounds", type=int, help="instead of ROUNDS")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sampler-threads", type=int, help="of the sampler alone")
    parser.add_argument("--out", type=records.record_path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = dict(machine=platform.machine(), cores=os.cpu_count(), threads=args.threads, read_bytes_per_s=bandwidth(),
                   instructions=records.instructions(), torch=torch.__version__,
                   transformers=transformers.__version__)
    print(machine, f"llama.cpp: {llama_obstacle() or 'takes part'}", sep="\n", flush=True)
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for name in args.models:
        hub_name, dtype = MODELS[name]
        started = time.perf_counter()
        policy = load_policy(hub_name, device="cpu", dtype=dtype)
        print(f"{name}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
        for label in args.workloads:
            row = measure(name, label, policy, args, machine)
            print(line(row), flush=True)
            rows = [r for r in rows if (r["model"], r["workload"]) != (name, label)
                    or r["machine"].get("instructions") not in (None, machine["instructions"])] + [row]
            records.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
