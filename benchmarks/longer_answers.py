"""How often does a reward turn the rare long answer into the usual one? Notebook 09's ten-per-cent run, ten seeds.

    OMP_NUM_THREADS=1 python benchmarks/longer_answers.py     # a minute a seed; fills results/longer_answers.json

For each seed a fresh model imitates the same 12,800 demonstrations, a tenth of them long, for 200 or 400 steps, and is then
trained by GRPO for 40. Recorded: how often the long answers of the imitation are right, and the held-out exact match (500
questions, greedy) and the probability of a long answer before and after. What the record holds is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import records
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab import load_policy
from grpolab.chat import encode_chat, prompt_ids, user
from grpolab.evaluate import evaluate
from grpolab.models import Policy
from grpolab.parity import generate_parity, mixture
from grpolab.runs.run import seed_everything
from grpolab.train import GRPOConfig, SFTConfig, grpo, sft

RESULTS = Path(__file__).parent / "results" / "longer_answers.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/longer_answers.py"
SEEDS, STEPS, BITS, SHARE = range(10), (200, 400), 16, 0.1
KNOWN, HELD_OUT = generate_parity(12_800 + 1280, 500, bits=BITS, seed=1)
SHOWN, PRACTICE = KNOWN[:12_800], KNOWN[12_800:]


def untrained(seed: int) -> Policy:
    """Notebook 09's model: two layers with random weights, and the embedded tokenizer."""
    embedded = load_policy("tiny")
    seed_everything(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(embedded.tokenizer), hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.12, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=embedded.tokenizer.eos_token_id, pad_token_id=embedded.tokenizer.pad_token_id))
    return Policy(model.to(embedded.device).eval(), embedded.tokenizer, "untrained", embedded.eos_ids)


@torch.no_grad()
def long_probability(policy: Policy) -> float:
    """The mean probability that an answer begins with a letter of the long way."""
    ids = torch.tensor([prompt_ids(policy.tokenizer, p.question) for p in HELD_OUT])
    letters = policy.tokenizer.convert_tokens_to_ids(["e", "o"])
    return policy.model(ids.to(policy.device)).logits[:, -1].float().softmax(-1)[:, letters].sum(-1).mean().item()


async def measure(policy: Policy) -> dict:
    greedy = await evaluate(policy, HELD_OUT, max_new_tokens=BITS + 8)
    return {"right": greedy.exact.value, "long": long_probability(policy)}


async def one(seed: int, steps: int) -> dict:
    policy = untrained(seed)
    examples = [encode_chat(policy.tokenizer, [*user(question), {"role": "assistant", "content": answer}])
                for question, answer in mixture(SHOWN, SHARE)]
    imitation = SFTConfig(steps=steps, batch_size=64, lr=5e-3, warmup=20, schedule="cosine", seed=seed)
    async for _ in sft(policy, examples, imitation):
        pass
    imitated = await measure(policy)
    sampled = await evaluate(policy, HELD_OUT, samples=4, seed=seed, max_new_tokens=BITS + 8)
    long = [(t, p) for p, texts in zip(HELD_OUT, sampled.texts) for t in texts if t[:1] in ("e", "o")]
    imitated["long_right"] = sum(t.endswith(p.short) for t, p in long) / len(long) if long else None
    config = GRPOConfig(steps=40, prompts_per_step=32, group_size=8, lr=5e-4, warmup=5, max_new_tokens=BITS + 8, seed=seed)
    async for _ in grpo(policy, None, PRACTICE, config):
        pass
    return {"sft": imitated, "grpo": await measure(policy)}


async def main(seeds: list[int]) -> None:
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "command": COMMAND, "threads": torch.get_num_threads(), "held_out": len(HELD_OUT), "seeds": {}}
    for seed in seeds:
        row = record["seeds"].setdefault(str(seed), {})
        for steps in STEPS:
            if str(steps) not in row:
                row[str(steps)] = await one(seed, steps)
                records.write(RESULTS, record)
                print(seed, steps, json.dumps(row[str(steps)]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    asyncio.run(main(parser.parse_args().seeds))
