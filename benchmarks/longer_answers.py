"""How often does a reward turn the rare long answer into the usual one? Notebook 09's ten-per-cent run, ten seeds.

    OMP_NUM_THREADS=1 python benchmarks/longer_answers.py     # three minutes a seed; fills results/longer_answers.json

For each seed a fresh model imitates the same 12,800 demonstrations, a tenth of them long, for 200 or 400 steps, and is then
trained by GRPO for 40. From the same imitation rejection sampling begins, in 4 and in 16 rounds, with as many sampled tokens as
GRPO: in each round all right answers are imitated twice. Its learning rate is the best of RATES on seeds 10 and 11, by the mean
over both numbers of rounds. Recorded: how often the long answers of the imitation are right, and the held-out exact
match (500 questions, greedy) and the probability of a long answer before and after. What the record holds is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
from pathlib import Path

import records
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.chat import Example, encode_chat, prompt_ids, user
from grpolab.evaluate import evaluate
from grpolab.models import Policy
from grpolab.parity import generate_parity, mixture
from grpolab.runs.run import seed_everything
from grpolab.train import GRPOConfig, SFTConfig, finished_and_correct, grpo, sft

RESULTS = Path(__file__).parent / "results" / "longer_answers.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/longer_answers.py"
SEEDS, STEPS, BITS, SHARE = range(10), (200, 400), 16, 0.1
ROUNDS, RATES, TUNED_ON, EPOCHS = (4, 16), (5e-4, 2e-3, 5e-3), (10, 11), 2
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


async def imitation(seed: int, steps: int) -> Policy:
    """SFT of a fresh model on the mixture."""
    policy = untrained(seed)
    examples = [encode_chat(policy.tokenizer, [*user(question), {"role": "assistant", "content": answer}])
                for question, answer in mixture(SHOWN, SHARE)]
    config = SFTConfig(steps=steps, batch_size=64, lr=5e-3, warmup=20, schedule="cosine", seed=seed)
    async for _ in sft(policy, examples, config):
        pass
    return policy


async def reinforce(policy: Policy, seed: int) -> int:
    """GRPO; the number of sampled tokens."""
    config = GRPOConfig(steps=40, prompts_per_step=32, group_size=8, lr=5e-4, warmup=5, max_new_tokens=BITS + 8, seed=seed)
    tokens = 0
    async for row in grpo(policy, None, PRACTICE, config):
        tokens += round(row["completion_length"] * config.prompts_per_step * config.group_size)
    return tokens


async def reject(policy: Policy, seed: int, *, tokens: int, rounds: int, lr: float) -> None:
    """Rejection sampling: imitate the right ones of its own answers, in so many rounds with so many sampled tokens in all."""
    used, questions = 0, itertools.cycle(PRACTICE)
    for number in range(rounds):
        own: list[Example] = []
        async with Sampler(policy) as sampler:
            while used < tokens * (number + 1) // rounds:
                asked = list(itertools.islice(questions, 32))
                params = SamplingParams(max_new_tokens=BITS + 8, seed=10**7 * (seed + 1) + used)
                prompts = [prompt_ids(policy.tokenizer, p.question) for p in asked]
                groups = await sampler.sample(prompts, group_size=8, params=params)
                answers = [(p, r) for p, group in zip(asked, groups) for r in group]
                used += sum(len(r.tokens) for _, r in answers)
                own += [Example((*r.prompt, *r.tokens), (0,) * len(r.prompt) + tuple(r.mask)) for p, r in answers
                        if finished_and_correct(policy.decode(r.tokens), p, r)]
        if not own:
            continue
        config = SFTConfig(steps=max(1, EPOCHS * len(own) // 64), batch_size=64, lr=lr, warmup=2, schedule="cosine", seed=seed)
        async for _ in sft(policy, own, config):
            pass


async def one(seed: int, steps: int, lr: float) -> dict:
    policy = await imitation(seed, steps)
    start, imitated = copy.deepcopy(policy.model.state_dict()), await measure(policy)
    sampled = await evaluate(policy, HELD_OUT, samples=4, seed=seed, max_new_tokens=BITS + 8)
    long = [(t, p) for p, texts in zip(HELD_OUT, sampled.texts) for t in texts if t[:1] in ("e", "o")]
    imitated["long_right"] = sum(t.endswith(p.short) for t, p in long) / len(long) if long else None
    tokens = await reinforce(policy, seed)
    found = {"sft": imitated, "grpo": await measure(policy), "tokens": tokens}
    for rounds in ROUNDS:
        policy.model.load_state_dict(start)
        await reject(policy, seed, tokens=tokens, rounds=rounds, lr=lr)
        found[f"rejection {rounds}"] = await measure(policy)
    return found


async def tune() -> dict[str, float]:
    """Of each learning rate what rejection sampling reaches with it on the seeds to tune on, after STEPS[-1] steps of SFT."""
    found = {}
    for lr in RATES:
        runs = [await one(seed, STEPS[-1], lr) for seed in TUNED_ON]
        found[str(lr)] = sum(run[f"rejection {rounds}"]["right"] for run in runs for rounds in ROUNDS) / len(runs) / len(ROUNDS)
        print(lr, json.dumps(runs), flush=True)
    return found


async def main(seeds: list[int]) -> None:
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {
        "command": COMMAND, "threads": torch.get_num_threads(), "held_out": len(HELD_OUT), "tuned": await tune(), "seeds": {}}
    lr = float(max(record["tuned"], key=record["tuned"].get))
    for seed in seeds:
        row = record["seeds"].setdefault(str(seed), {})
        for steps in STEPS:
            if str(steps) not in row:
                row[str(steps)] = await one(seed, steps, lr)
                records.write(RESULTS, record)
                print(seed, steps, json.dumps(row[str(steps)]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    asyncio.run(main(parser.parse_args().seeds))
