"""Make the embedded base model: a character tokenizer and a small Llama, pretrained on plain arithmetic text.

    python data/make_tiny.py                 # about ten minutes on two cores; writes data/tiny/

The text states sums and differences of numbers up to 99 in several plain phrasings. It holds no chat, no `\\boxed`, and a
share of it is wrong, as text found in the wild is: the model that comes out knows some arithmetic and none of the format.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpolab.chat import CHAT_TEMPLATE
from grpolab.files import atomic_folder

SPECIAL = ["<|pad|>", "<|endoftext|>", "<|unk|>"]
WORDS = ["User:", "Assistant:", "\\boxed{"]  # one token each; the rest is one token a character
PHRASES = {
    "+": ["{a} + {b} = {c}", "{a} plus {b} is {c}", "Adding {a} and {b} gives {c}"],
    "-": ["{a} - {b} = {c}", "{a} minus {b} is {c}", "Taking {b} from {a} leaves {c}"],
}
EXERCISE = "What is {a} {op} {b}? {a} {op} {b} = {c}"  # the operands come twice, so that the model learns to copy


def tokenizer() -> PreTrainedTokenizerFast:
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(SPECIAL + WORDS + characters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens(WORDS)
    out = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|endoftext|>", unk_token="<|unk|>",
        clean_up_tokenization_spaces=False, model_max_length=512,
    )
    out.chat_template = CHAT_TEMPLATE
    return out


def operand(rng: random.Random) -> int:
    """Up to 99, small numbers more often, as in text."""
    return rng.randrange(rng.choice([10, 100, 100]))


def sentence(rng: random.Random, wrong: float) -> str:
    """One statement; with probability `wrong` its result is off by 1, 2 or 10."""
    op, a, b = rng.choice("+-"), operand(rng), operand(rng)
    c = a + b if op == "+" else a - b
    if rng.random() < wrong:
        c += rng.choice([-10, -2, -1, 1, 2, 10])
    phrase = EXERCISE if rng.random() < 0.5 else rng.choice(PHRASES[op])
    return phrase.format(a=a, op=op, b=b, c=c) + "\n"


def windows(rng: random.Random, encode, rows: int, width: int, wrong: float) -> torch.Tensor:
    """(rows, width) token ids: sentences one after the other, each row cut at the width."""
    out = torch.empty(rows, width, dtype=torch.long)
    for row in range(rows):
        text = "".join(sentence(rng, wrong) for _ in range(width // 10 + 1))
        out[row] = torch.tensor([encode[c] for c in text[:width]])
    return out


def plain_accuracy(model, encode, decode, n: int, seed: int) -> float:
    """Greedy exact match on `n` statements 'A op B = ', each read up to the newline."""
    rng = random.Random(seed)
    right = 0
    for _ in range(n):
        op, a, b = rng.choice("+-"), rng.randrange(100), rng.randrange(100)
        ids = torch.tensor([[encode[c] for c in f"{a} {op} {b} ="]])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1]:]
        text = "".join(decode[i] for i in out.tolist()).split("\n")[0].strip()
        right += text == str(a + b if op == "+" else a - b)
    return right / n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--wrong", type=float, default=0.1, help="share of the statements whose result is wrong")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tok = tokenizer()
    encode = tok.get_vocab()
    decode = {i: t for t, i in encode.items()}
    config = LlamaConfig(
        vocab_size=len(tok), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=0.2 * args.lr, betas=(0.9, 0.99), weight_decay=0.01),
    ]
    peak = [args.lr, 0.2 * args.lr]
    began = time.time()
    for step in range(args.steps):
        progress = step / args.steps
        schedule = min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, lr in zip(optimizers, peak):
            optimizer.param_groups[0]["lr"] = lr * schedule
            optimizer.zero_grad()
        ids = windows(rng, encode, args.rows, args.width, args.wrong)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.4f}  {time.time() - began:.0f} s  "
                  f"plain {plain_accuracy(model, encode, decode, 100, 1):.2f}", flush=True)
    accuracy = plain_accuracy(model.eval(), encode, decode, 500, 2)
    with atomic_folder(args.out) as folder:
        model.save_pretrained(folder)
        tok.save_pretrained(folder)
        record = {k: v for k, v in vars(args).items() if k != "out"} | {"plain_accuracy": accuracy, "torch": torch.__version__}
        (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"plain accuracy {accuracy:.3f} on 500 statements; wrote {args.out}")


if __name__ == "__main__":
    main()
