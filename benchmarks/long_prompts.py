"""What a long prompt costs an update of GRPO that computes it once a group, beside once a rollout.

    OMP_NUM_THREADS=1 python benchmarks/long_prompts.py     # two minutes; fills results/long_prompts.json

A Llama of 4 layers and 256 hidden units with random weights, so that prompts may be long; 4 groups of 8 completions of 50
tokens. Both ways in one process, in turns, the best processor time of three; gradients must agree.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import records
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab import load_policy
from grpolab.models import Policy
from grpolab.rollouts import Rollout
from grpolab.train import GRPOConfig
from grpolab.train.grpo import grpo_gradient
from grpolab.train.verify import verify_forward

RESULTS = Path(__file__).parent / "results" / "long_prompts.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/long_prompts.py"
PROMPTS, GROUPS, SIZE, COMPLETION, ROUNDS = (64, 460, 1000, 2000), 4, 8, 50, 3
WAYS = {"once a group": GRPOConfig(), "once a rollout": GRPOConfig(share_prompts=False)}


def untrained() -> Policy:
    torch.manual_seed(0)
    embedded = load_policy("tiny")
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(embedded.tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=8192)).eval()
    return Policy(model, embedded.tokenizer, "untrained", embedded.eos_ids)


def rollouts_of(prompt: int) -> list[Rollout]:
    draw, out = random.Random(prompt), []
    for _ in range(GROUPS):
        shared = tuple(draw.choices(range(6, 90), k=prompt))
        zeros = (-1.0,) * COMPLETION
        out += [Rollout(shared, tuple(draw.choices(range(6, 90), k=COMPLETION)), (1,) * COMPLETION, zeros, zeros, "eos")
                for _ in range(SIZE)]
    return out


def measure(policy: Policy, prompt: int) -> dict:
    rollouts, seconds, gradients = rollouts_of(prompt), {way: [] for way in WAYS}, {}
    signs = torch.tensor([1.0, -1.0]).repeat(len(rollouts) // 2)
    for _ in range(ROUNDS):
        for way, config in WAYS.items():
            began = time.process_time()
            grpo_gradient(policy, None, rollouts, signs, config)
            seconds[way].append(time.process_time() - began)
            gradients[way] = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
            policy.model.zero_grad()
    a, b = gradients.values()
    best = {way: round(min(times), 3) for way, times in seconds.items()}
    distinct, computed = GROUPS * (prompt + SIZE * COMPLETION), GROUPS * SIZE * (prompt + COMPLETION)
    return {"prompt": prompt, "tokens once a group": distinct, "tokens once a rollout": computed, "seconds": best,
            "ratio": best["once a rollout"] / best["once a group"], "gradients apart": float((a - b).norm() / b.norm())}


def main() -> None:
    policy = untrained()
    for config in WAYS.values():
        verify_forward(policy, config, max(PROMPTS) + COMPLETION)
    rows = []
    for prompt in PROMPTS:
        rows.append(measure(policy, prompt))
        print(rows[-1], flush=True)
    records.write(RESULTS, {"command": COMMAND, "threads": torch.get_num_threads(), "completion": COMPLETION,
                            "group_size": SIZE, "rows": rows})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
