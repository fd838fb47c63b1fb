"""What the decode tests share: a tiny random policy, ragged prompts, a tokenizer of one letter a token."""

import random
import shutil

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab.models.load import Policy

VOCAB = 100
COMPILER = shutil.which("g++") is not None
ENGINES = [*["compiled"] * COMPILER, "llama", "hf"]


class Letters:
    """A fake tokenizer: token i is one character."""

    def decode(self, ids):
        return "".join(chr(0x100 + i) for i in ids)


def tiny_policy(context=256, eos=(), seed=0, dtype=torch.float32, model=None, **config):
    torch.manual_seed(seed)
    shape = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
                 intermediate_size=176, tie_word_embeddings=True, initializer_range=0.3, max_position_embeddings=context)
    if model is None:
        model = LlamaForCausalLM(LlamaConfig(**shape | config))
        for name, p in model.named_parameters():
            if name.endswith("bias"):  # which begin at 0
                torch.nn.init.normal_(p, std=0.3)
    return Policy(model.to(dtype).eval(), Letters(), "tiny", tuple(eos))


def ragged_prompts(n, low=3, high=40, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(n)]


def flat(groups):
    return [r for group in groups for r in group]
