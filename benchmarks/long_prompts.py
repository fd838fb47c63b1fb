"""What a long prompt costs an update of GRPO: computed once a group, beside once a rollout and beside as many tokens in plain
sequences.

    OMP_NUM_THREADS=1 python benchmarks/long_prompts.py     # four minutes; fills results/long_prompts.json

A Llama of 4 layers and 256 hidden units with random weights, so that prompts may be long; 4 groups of 8 completions of 50
tokens. A plain sequence is a group's prompt and its 8 completions one behind the other, so that it has the same tokens, of
which as many are trained on, under plain causal attention: what the update would cost if it had no groups. The ways in one
process, in turns, the best processor time of three; gradients of the first two must agree.
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
PROMPTS, GROUPS, SIZE, COMPLETION, ROUNDS = (64, 460, 1000, 2000, 4000), 4, 8, 50, 3
LONGEST_APART = 1000  # tokens of a prompt that is also computed once a rollout
WAYS = {"once a group": GRPOConfig(), "plain sequences": GRPOConfig(), "once a rollout": GRPOConfig(share_prompts=False)}


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


def in_sequences(rollouts: list[Rollout]) -> list[Rollout]:
    """A group's completions one behind the other, as one rollout."""
    joined = [sum((r.tokens for r in rollouts[i : i + SIZE]), ()) for i in range(0, len(rollouts), SIZE)]
    zeros = (-1.0,) * SIZE * COMPLETION
    return [Rollout(r.prompt, t, (1,) * len(t), zeros, zeros, "eos") for r, t in zip(rollouts[::SIZE], joined)]


def measure(policy: Policy, prompt: int) -> dict:
    rollouts, seconds, gradients = rollouts_of(prompt), {way: [] for way in WAYS}, {}
    if prompt > LONGEST_APART:
        del seconds["once a rollout"]
    for _ in range(ROUNDS):
        for way, times in seconds.items():
            of = in_sequences(rollouts) if way == "plain sequences" else rollouts
            signs = torch.tensor([1.0, -1.0]).repeat(len(of) // 2)
            began = time.process_time()
            grpo_gradient(policy, None, of, signs, WAYS[way])
            times.append(time.process_time() - began)
            gradients[way] = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
            policy.model.zero_grad()
    best = {way: round(min(times), 3) for way, times in seconds.items()}
    distinct, computed = GROUPS * (prompt + SIZE * COMPLETION), GROUPS * SIZE * (prompt + COMPLETION)
    row = {"prompt": prompt, "tokens once a group": distinct, "tokens once a rollout": computed, "seconds": best,
           "of plain sequences": best["once a group"] / best["plain sequences"]}
    if prompt <= LONGEST_APART:
        a, b = gradients["once a group"], gradients["once a rollout"]
        row |= {"ratio": best["once a rollout"] / best["once a group"], "gradients apart": float((a - b).norm() / b.norm())}
    return row


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
