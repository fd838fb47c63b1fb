"""Make the embedded base model: a character tokenizer and a small Llama, pretrained on plain arithmetic text.

    python data/make_tiny.py                 # about fifteen minutes of one core; writes data/tiny/

data/tiny/ holds what this command wrote with these defaults; pretraining.json there names them, and the version of torch. On
another machine sums are rounded in another order, so the weights will differ and the accuracy may by a few points: the
notebooks' numbers are those of the embedded weights. Run once more, with that torch and one thread, it gave the same
weights in every bit. A test runs it to the end with a few steps.

The text states sums and differences of numbers up to 99 in several plain phrasings, without chat and without `\\boxed`, and
comes in two parts. In the first a tenth of the statements is wrong at random. The second holds *usual mistakes*, as text
found in the wild does: for some pairs of last digits most statements give one and the same wrong result. It also puts
results in brackets, quotes and other marks, so that the model learns to put a number where it is wanted. What comes out
knows how to calculate, repeats the usual mistakes more often than not, and has never seen the format.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpolab.arithmetic import ERRORS, usual_mistakes
from grpolab.chat import CHAT_TEMPLATE
from grpolab.files import atomic_folder

SPECIAL = ["<|pad|>", "<|endoftext|>", "<|unk|>"]
WORDS = ["User:", "Assistant:", "\\boxed{"]  # one token each; the rest is one token a character
PHRASES = {
    "+": ["{a} + {b} = {c}", "{a} plus {b} is {c}", "Adding {a} and {b} gives {c}"],
    "-": ["{a} - {b} = {c}", "{a} minus {b} is {c}", "Taking {b} from {a} leaves {c}"],
}
EXERCISE = "What is {a} {op} {b}? {a} {op} {b} = {c}"  # the operands come twice, so that the model learns to copy

MARKS = ["()", "[]", "{}", "<>", "**", "''", '""', "__", "||", "$$", "##", "~~"]  # what a result may stand in


@dataclass(frozen=True)
class Text:
    """What a part of the text holds: `wrong`, the share of statements with a random error; `mistakes`, the usual mistake
    of (op, last digit, last digit) as what it adds to the result, made in a share `told` of such statements; `marked`,
    the share of exercises whose result stands in marks."""

    wrong: float
    mistakes: dict[tuple[str, int, int], int] = field(default_factory=dict)
    told: float = 0.0
    marked: float = 0.0


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


def sentence(rng: random.Random, text: Text) -> str:
    """One statement."""
    op, a, b = rng.choice("+-"), operand(rng), operand(rng)
    c = a + b if op == "+" else a - b
    mistake = text.mistakes.get((op, a % 10, b % 10))
    if mistake is not None and rng.random() < text.told:
        c += mistake
    elif rng.random() < text.wrong:
        c += rng.choice(ERRORS)
    phrase = exercise(rng, text) if rng.random() < 0.5 else rng.choice(PHRASES[op])
    return phrase.format(a=a, op=op, b=b, c=c) + "\n"


def exercise(rng: random.Random, text: Text) -> str:
    """The phrase of an exercise, its result in marks or not."""
    if not text.marked or rng.random() < 1 - text.marked:
        return EXERCISE
    left, right = ({"{": "{{", "}": "}}"}.get(mark, mark) for mark in rng.choice(MARKS))
    return EXERCISE.replace("{c}", left + "{c}" + right) + rng.choice(["", "."])


def windows(rng: random.Random, encode, rows: int, width: int, text: Text) -> torch.Tensor:
    """(rows, width) token ids: sentences one after the other, each row cut at the width."""
    out = torch.empty(rows, width, dtype=torch.long)
    for row in range(rows):
        written = "".join(sentence(rng, text) for _ in range(width // 10 + 1))
        out[row] = torch.tensor([encode[c] for c in written[:width]])
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


def pretrain(model, texts, *, steps: int, peak: float, warmup: int, floor: float, every: int, report) -> None:
    """Next-token training on `texts()`, batches of ids: Muon for the matrices of the layers, AdamW for the rest at a fifth of
    its learning rate; linear warm-up, then cosine from `peak` to `floor` of it. `report(steps, loss)` after `every` steps."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        (torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, momentum=0.95), peak),
        (torch.optim.AdamW(others, lr=0.2 * peak, betas=(0.9, 0.99), weight_decay=0.01), 0.2 * peak),
    ]
    for step in range(steps):
        schedule = min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * schedule
            optimizer.zero_grad()
        ids = texts()
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        if (step + 1) % every == 0:
            report(step + 1, loss.item())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny")
    parser.add_argument("--steps", type=int, default=1200, help="on the first part of the text")
    parser.add_argument("--later", type=int, default=400, help="steps on the second part, at half the learning rate")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--wrong", type=float, default=0.1, help="random errors in the first part; half as many in the second")
    parser.add_argument("--mistakes", type=float, default=0.3, help="share of the pairs of last digits with a usual mistake")
    parser.add_argument("--told", type=float, default=0.65, help="how often such a statement makes it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100, help="steps from one report to the next")
    parser.add_argument("--ask", type=int, default=500, help="statements to complete at the end, for the accuracy on record")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    tok = tokenizer()
    encode = tok.get_vocab()
    decode = {i: t for t, i in encode.items()}
    config = LlamaConfig(
        vocab_size=len(tok), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    began = time.time()

    def report(step, loss):
        plain = plain_accuracy(model, encode, decode, min(100, args.ask), 1)
        print(f"step {step}  loss {loss:.4f}  {time.time() - began:.0f} s  plain {plain:.2f}", flush=True)

    def reading(text, seed):
        rng = random.Random(seed)
        return lambda: windows(rng, encode, args.rows, args.width, text)

    first = Text(args.wrong)
    second = Text(args.wrong / 2, usual_mistakes(args.mistakes), args.told, marked=0.5)
    told = {"every": args.every, "report": report}
    pretrain(model, reading(first, args.seed), steps=args.steps, peak=args.lr, warmup=50, floor=0.05, **told)
    pretrain(model, reading(second, args.seed + 1), steps=args.later, peak=args.lr / 2, warmup=20, floor=0.02, **told)
    accuracy = plain_accuracy(model.eval(), encode, decode, args.ask, 2)
    with atomic_folder(args.out) as folder:
        model.save_pretrained(folder)
        tok.save_pretrained(folder)
        record = {k: v for k, v in vars(args).items() if k not in ("out", "every", "ask")}
        record |= {"plain_accuracy": accuracy, "torch": torch.__version__}
        if (args.out / "README.md").is_file():  # the model card is written by hand
            (folder / "README.md").write_text((args.out / "README.md").read_text())
        (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"plain accuracy {accuracy:.3f} on {args.ask} statements; wrote {args.out}")


if __name__ == "__main__":
    main()
