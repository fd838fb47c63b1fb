"""Delivered tokens a second of the sampler against transformers' generate(), in one run.

    python benchmarks/decode.py --models tiny smollm2-fp32 smollm2-bf16 [--scale 1.0] [--rounds 3] [--threads 2]

Sampling at T = 1 with logps, prefill included, end tokens off, the same prompts and lengths for both. Engines take turns
within each round, so that drift hits both; a claim rests on the worst round's ratio. Set-up is timed apart, and so is a
warm-up call. generate() gets its best batching: num_return_sequences for groups; for spread lengths the better of two
batch sizes, in order of arrival (its caller cannot know the lengths), and once more sorted by true length, as an oracle.
`--scale` below 1 shortens the SmolLM2 workloads for busy machines. Writes benchmarks/decode.json.
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

import torch
import transformers

from grpolab.audit import audit
from grpolab.models import load_policy
from grpolab.sampler import Sampler
from grpolab.sampling import SamplingParams

MODELS = {"tiny": ("tiny", "float32"), "smollm2-fp32": ("smollm2-135m", "float32"),
          "smollm2-bf16": ("smollm2-135m", "bfloat16")}
TARGETS = {  # the ratios that the project set itself, by workload and model
    "fixed": {"tiny": 2.0, "smollm2-fp32": 2.5, "smollm2-bf16": 2.5},
    "grpo": {"tiny": 2.5, "smollm2-fp32": 3.0, "smollm2-bf16": 3.0},
    "spread": {"tiny": 4.0, "smollm2-fp32": 5.0, "smollm2-bf16": 5.0},
    "single": {"tiny": 2.0, "smollm2-fp32": 1.7, "smollm2-bf16": 1.6},
}


def random_prompts(n: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(n)]


def geometric_lengths(n: int, mean: float, cap: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [min(cap, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))) for _ in range(n)]


def workloads(model: str, vocab: int, scale: float) -> dict:
    """name -> (prompts, group_size, new tokens of every rollout or a list of them, slots)."""
    tiny = model == "tiny"
    new = 64 if tiny else max(8, int(64 * scale))
    rollouts, mean, cap = (256, 64, 512 - 41) if tiny else (max(32, int(256 * scale)), max(8, int(64 * scale)), 512)
    lengths = [min(cap, n) for n in geometric_lengths(rollouts, mean, cap)]
    return {
        "single": (random_prompts(1, 40, vocab), 1, new, 1),
        "fixed": (random_prompts(64 if tiny else 32, 40, vocab), 1, new, None),
        "grpo": (random_prompts(8, 40, vocab), 8, new, None),
        "spread": (random_prompts(rollouts, 40, vocab), 1, lengths, 64 if tiny else 32),
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
    ids = torch.tensor(prompts)
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


def timed(fn, *args) -> tuple[float, float]:
    """(tokens a second, share of one core that other processes took meanwhile)."""
    before, own, started = _busy_ticks(), time.process_time(), time.perf_counter()
    tokens = fn(*args)
    seconds = time.perf_counter() - started
    others = (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") - (time.process_time() - own)
    return tokens / seconds, max(0.0, others / seconds)


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


def decode_profile(sampler: Sampler, policy, read: float) -> dict:
    """Where the sampler's time went, and its traffic of weights and keys against the machine's reading speed."""
    s, model = sampler.stats, policy.model
    total = s.prefill_seconds + s.decode_seconds + s.sample_seconds
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    steps_per_second = s.steps / s.decode_seconds
    return dict(prefill_share=s.prefill_seconds / total, decode_share=s.decode_seconds / total,
                sample_share=s.sample_seconds / total, prefill_tokens_per_s=s.prefill_tokens / s.prefill_seconds,
                decode_tokens_per_s=s.row_steps / s.decode_seconds, mean_rows=s.row_steps / s.steps,
                weight_bytes_per_s=weights * steps_per_second, of_bandwidth=weights * steps_per_second / read)


def measure(name: str, args, read: float) -> list[dict]:
    hub_name, dtype = MODELS[name]
    policy = load_policy(hub_name, device="cpu", dtype=dtype)
    rows = []
    for label, (prompts, group_size, new, slots) in workloads(name, policy.model.config.vocab_size, args.scale).items():
        if args.workloads and label not in args.workloads:
            continue
        started = time.perf_counter()
        sampler = Sampler(policy, slots=slots)
        setup = time.perf_counter() - started
        greedy = sampler.sample_sync(prompts[:2], params=SamplingParams(greedy=True, max_new_tokens=8, ignore_eos=True))
        correct = audit(policy, [r for g in greedy for r in g])
        generated(policy.model, prompts[:2], 1, 4)
        kinds = {"generate": (policy.model, prompts, group_size, new)}
        if not isinstance(new, int):
            by_length = sorted(range(len(new)), key=new.__getitem__)
            ordered = [prompts[i] for i in by_length], 1, [new[i] for i in by_length]
            kinds = {"generate, 32 a batch": (policy.model, prompts, 1, new, 32),
                     "generate, 128 a batch": (policy.model, prompts, 1, new, 128),
                     "generate, sorted by an oracle": (policy.model, *ordered, 32)}
        speeds, noise = {"sampler": [], **{kind: [] for kind in kinds}}, []
        for _ in range(args.rounds):
            for kind, fn, call in [("sampler", ours, (sampler, prompts, group_size, new)),
                                   *((k, peer, c) for k, c in kinds.items())]:
                speed, others = timed(fn, *call)
                speeds[kind].append(speed)
                noise.append(others)
        fair = [k for k in kinds if "oracle" not in k]
        best = max(fair, key=lambda k: statistics.median(speeds[k]))
        ratios = [a / b for a, b in zip(speeds["sampler"], speeds[best])]
        rows.append(dict(
            model=name, workload=label, rollouts=len(prompts) * group_size, target=TARGETS[label][name], peer=best,
            ratio=statistics.median(ratios), ratio_worst=min(ratios), ratio_best=max(ratios),
            tokens_per_s={k: statistics.median(v) for k, v in speeds.items()}, rounds=args.rounds,
            setup_seconds=setup, engine=sampler.engine.name, slots=sampler.slots, others_cores=max(noise),
            greedy_disagreements=correct.disagreements, worst_ulps=correct.worst_ulps,
            logp_max_error=correct.raw_max_error, profile=decode_profile(sampler, policy, read)))
        sampler.close()
        print(line(rows[-1]), flush=True)
    return rows


def line(r: dict) -> str:
    speeds = "  ".join(f"{k} {v:.0f}" for k, v in r["tokens_per_s"].items())
    return (f"{r['model']:13} {r['workload']:7} {r['ratio']:5.2f}x [{r['ratio_worst']:.2f}..{r['ratio_best']:.2f}] "
            f"(set: {r['target']}x)  tok/s: {speeds}  others {r['others_cores']:.2f} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=MODELS)
    parser.add_argument("--workloads", nargs="*", choices=TARGETS)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("decode.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    read = bandwidth()
    machine = dict(machine=platform.machine(), cores=os.cpu_count(), threads=args.threads, read_bytes_per_s=read,
                   torch=torch.__version__, transformers=transformers.__version__, scale=args.scale)
    print(machine)
    rows = [row for name in args.models for row in measure(name, args, read)]
    args.out.write_text(json.dumps(dict(machine=machine, rows=rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
