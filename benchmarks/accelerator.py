"""Decoding, a GRPO step and notebook 04's identities on the CUDA GPU or the Mac that this runs on.

    python benchmarks/accelerator.py                     # some minutes; fills results/accelerator.json
    python benchmarks/accelerator.py --models tiny       # without SmolLM2 (pip install 'grpolab[smollm2]')

Each model is measured in float32 and in 16 bits: bfloat16, but float16 with scaled losses where the GPU only emulates bfloat16
(a T4); `--dtypes` asks for others. Decoding is 8 prompts x 8 rollouts beside transformers' generate(), in turns, as in
decode.py. A step of GRPO is 8 prompts x 8 rollouts of 32 tokens; the first of a process is warm-up. The identities have the
bounds of the notebook's gate in float32, and in 16 bits those of training (`GRPOConfig.max_logp_diff`). The record keeps one
row a device, model and precision; `--device cpu` tries the script without one and needs `--out FOLDER/accelerator.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import records
import torch
from decode import contenders, race, random_prompts, versus

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.arithmetic import Task, generate
from grpolab.chat import prompt_ids
from grpolab.models.load import choose_device
from grpolab.rollouts import collate
from grpolab.runs.checkpoints import computed_on
from grpolab.train import GRPOConfig, grpo, losses
from grpolab.train.advantages import advantages
from grpolab.train.layout import lay_out
from grpolab.train.logps import rollout_logps
from grpolab.train.loop import in_thread

RESULTS = Path(__file__).with_name("results") / "accelerator.json"
COMMAND = "python benchmarks/accelerator.py"
PROBLEMS, _ = generate(64, 0, seed=5, task=Task("+-", max_operand=99))


def low_dtype(device: torch.device) -> str:
    """The 16-bit dtype that the device computes in itself: float16 on CUDA GPUs older than compute capability 8.0."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return "float16" if old else "bfloat16"


def wait_for(device: torch.device) -> None:
    {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)()


def peak_gb(device: torch.device) -> float | None:
    """Of the device's memory since `measure` began; None where it is not counted."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def decoding(policy, new: int, rounds: int) -> dict:
    """Tokens a second of the sampler and of generate(), and the ratio of the rounds."""
    prompts = random_prompts(8, 40, policy.model.config.vocab_size)
    with Sampler(policy, slots=64) as sampler:
        runs = contenders(sampler, policy, prompts, 8, new)
        race(runs, 1)  # warm-up
        speeds, _, _ = race(runs, rounds)
        return versus(speeds, "generate") | {
            "engine": sampler.engine.name, "tokens_per_s": {name: statistics.median(of) for name, of in speeds.items()}}


def variety(text: str, row, rollout) -> float:
    """A reward that differs within each group, whatever the model."""
    return float(len(set(rollout.tokens)))


def stepping(policy, steps: int) -> dict:
    """Seconds of a GRPO step and of its update; and what became of the losses' scale."""
    config = GRPOConfig(steps=steps, prompts_per_step=8, group_size=8, max_new_tokens=32, lr=1e-5, warmup=0)

    async def rows() -> list[tuple[float, dict]]:
        out, began = [], time.perf_counter()
        async for row in grpo(policy, None, PROBLEMS, config, reward=variety):
            await in_thread(policy, lambda: wait_for(policy.device))
            out.append((time.perf_counter() - began, row))
            began = time.perf_counter()
        return out

    (_, first), *rest = asyncio.run(rows())
    return {"step_s": statistics.median(s for s, _ in rest), "update_s": statistics.median(r["update_s"] for _, r in rest),
            "ratio at step 0": first["ratio"], "diff_max": max(r["diff_max"] for _, r in rest),
            "steps left out": sum(r["lr"] == 0 for _, r in rest), "loss_scale": rest[-1][1].get("loss_scale"),
            "peak_gb": peak_gb(policy.device)}


def identities(policy, reference) -> dict[str, tuple[float, float]]:
    """Name -> (the value, the most that it may be). The `reference` is another copy of the same weights."""
    fp32 = policy.dtype == torch.float32
    prompts = [prompt_ids(policy.tokenizer, p.question) for p in PROBLEMS[:4]]
    params = SamplingParams(max_new_tokens=24, seed=0)
    with Sampler(policy) as sampler:
        groups = sampler.sample_sync(prompts, group_size=4, params=params)
        again = sampler.sample_sync(prompts, group_size=4, params=params)
    rollouts = [r for g in groups for r in g]
    rewards = torch.arange(16.0).view(4, 4)
    a = advantages(rewards)
    batch, layout = collate(rollouts, a.flatten()), lay_out(rollouts)
    with torch.no_grad():
        logps, ref_logps = (rollout_logps(p, layout, batch.mask.shape, 1.0)[0].float().cpu() for p in (policy, reference))
    flat = logps.clone().requires_grad_()
    equal = advantages(torch.full_like(rewards, 0.7)).flatten()
    losses.policy_loss(flat, batch.old_logps, equal, batch.mask, denominator=batch.mask.sum())[0].backward()
    return {
        "rollouts that differ when sampled again": (sum(
            x.tokens != y.tokens for g, h in zip(groups, again) for x, y in zip(g, h)), 0),
        "sampler − trainer, nats a token": (float(((logps - batch.old_logps).abs() * batch.mask).max()), 1e-3 if fp32 else 2.0),
        "advantages of a group sum to": (float(a.sum(1).abs().max()), 1e-5),
        "gradient of groups with equal rewards": (float(flat.grad.abs().max()), 0.0),
        "KL at step 0": (float(losses.kl_penalty(logps, ref_logps, batch.mask, denominator=batch.mask.sum())[0]), 1e-6),
    }


def measure(model: str, device: torch.device, dtype: str, *, new: int, rounds: int, steps: int) -> dict:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    policy = load_policy(model, device=str(device), dtype=dtype)
    machine = computed_on(policy)
    found = {"device": f"{machine['processor']}, {machine['device']}", "model": model, "dtype": dtype,
             "torch": machine["torch"], "decode": decoding(policy, new, rounds)}
    checked = identities(policy, load_policy(model, device=str(device), dtype=dtype))
    found["grpo"] = stepping(policy, steps)
    checked["ratio at step 0 − 1"] = (abs(found["grpo"].pop("ratio at step 0") - 1), 1e-3 if dtype == "float32" else 0.1)
    return found | {"identities": {name: {"value": value, "most": most, "holds": value <= most}
                                   for name, (value, most) in checked.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="instead of the GPU that is found")
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"])
    parser.add_argument("--dtypes", nargs="+", help="instead of float32 and the 16-bit dtype of the device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=records.record_path, default=RESULTS)
    args = parser.parse_args()
    device, _ = choose_device(args.device)
    if device.type == "cpu" and args.out == RESULTS:
        raise SystemExit("there is no CUDA GPU and no MPS here, and the record is of these; this tries the script without one: "
                         "--device cpu --out FOLDER/accelerator.json")
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for model in args.models:
        for dtype in args.dtypes or ("float32", low_dtype(device)):
            row = measure(model, device, dtype, new=args.tokens, rounds=args.rounds, steps=args.steps)
            print(json.dumps(row), flush=True)
            place = ("device", "model", "dtype")
            rows = [r for r in rows if [r[k] for k in place] != [row[k] for k in place]] + [row]
            records.write(args.out, {"command": COMMAND, "rows": rows})
    broken = [f"{r['model']}, {r['dtype']}: {name} is {of['value']:.3g}, at most {of['most']}" for r in rows
              for name, of in r["identities"].items() if not of["holds"]]
    if broken:
        raise SystemExit("identities that do not hold:\n" + "\n".join(broken))


if __name__ == "__main__":
    main()
