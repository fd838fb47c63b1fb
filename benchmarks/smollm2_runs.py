"""What the results on SmolLM2 share: a record that keeps each run as it ends, greedy answers, and one timed GRPO run."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (str(HERE.parent), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import records  # noqa: E402
import torch  # noqa: E402
from lora import forget_peak, memory  # noqa: E402

from grpolab import Sampler, SamplingParams  # noqa: E402
from grpolab.chat import Example, prompt_ids  # noqa: E402
from grpolab.evaluate import mean_interval, wilson  # noqa: E402
from grpolab.tasks import prompt_of  # noqa: E402
from grpolab.train import GRPOConfig, SFTConfig, grpo, sft  # noqa: E402

MODEL, DTYPE = "smollm2-135m", "bfloat16"


def words(doc: str) -> list[str]:
    """The words of a command line: names of recipes and seeds, behind `--one` what a process of its own measures."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="a recipe and seeds, as above")
    args = parser.parse_args()
    return ["--one"] * args.one + args.words


class Record:
    """A JSON file of named entries; `keep` writes it at once, so that a series that is stopped has lost one run at most.
    ValueError for a file of other `settings`. `made` holds what code made each entry, since they are made one by one."""

    def __init__(self, path: Path, settings: dict):
        self.path, settings = path, json.loads(json.dumps(settings))
        self.content = found = json.loads(path.read_text()) if path.exists() else {"settings": settings}
        before = found.get("settings", {})
        other = [key for key in settings | before if settings.get(key) != before.get(key)]
        if other:
            raise ValueError(f"{path} was measured with other settings ({', '.join(other)}): remove it to measure all anew")
        earlier = {name: {"provenance": found.get("provenance")} for name in self.content
                   if name not in ("settings", "provenance", "made")}
        self.content["made"] = earlier | self.content.get("made", {})

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def keep(self, name: str, entry: Any) -> None:
        self.content[name] = entry
        self.content["made"][name] = {"provenance": records.provenance(records.measured(self.path.stem))}
        records.write(self.path, self.content)
        print(name, json.dumps(entry)[:400], flush=True)


def in_process(script: str, *words: str) -> dict:
    """What `script --one words...` prints as its last line, in a process of its own, whose peak memory is its own."""
    done = subprocess.run([sys.executable, script, "--one", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(script).name} {' '.join(words)} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def demonstration(prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[int]) -> Example:
    """A prompt with a completion of which the tokens with mask 1 are imitated."""
    return Example((*prompt, *tokens), (0,) * len(prompt) + tuple(mask))


async def said(policy, rows: Sequence[Any], new_tokens: int, *, greedy: bool = True, temperature: float = 1.0
               ) -> list[tuple[str, Any]]:
    """Of each row the completion, greedy or sampled: its text and its rollout."""
    prompts = [prompt_ids(policy.tokenizer, prompt_of(row)) for row in rows]
    params = SamplingParams(greedy=greedy, temperature=temperature, max_new_tokens=new_tokens, seed=0)
    async with Sampler(policy) as sampler:
        groups = await sampler.sample(prompts, group_size=1, params=params)
    return [(policy.decode(g[0].tokens), g[0]) for g in groups]


def rate(passed: Sequence[bool]) -> str:
    return str(wilson(sum(passed), len(passed)))


def flags(passed: Sequence[bool]) -> str:
    """A sequence of outcomes as one word of 0 and 1, which keeps a record readable."""
    return "".join("01"[bool(p)] for p in passed)


def paired(before: str, after: str) -> str:
    """The difference of two rates on the same prompts, from their `flags`, with its 95 % interval."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} outcomes are not of the same prompts")
    return str(mean_interval([int(b) - int(a) for a, b in zip(before, after)]))


async def imitate(policy, examples: Sequence[Example], recipe: dict, seed: int) -> None:
    """SFT in this process; each step's loss goes to stderr."""
    async for row in sft(policy, examples, SFTConfig(seed=seed, **recipe)):
        print(json.dumps({"step": row["step"], "loss": round(row["loss"], 4)}), file=sys.stderr, flush=True)


async def trained(policy, rows: Sequence[Any], config: GRPOConfig, reward) -> dict:
    """GRPO in this process: mean reward of every step, median seconds a step and their sum, and the peak memory."""
    forget_peak()
    rewards, seconds, began = [], [], time.perf_counter()
    async for row in grpo(policy, None, rows, config, reward=reward):
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        rewards.append(round(row["reward"], 4))
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), file=sys.stderr, flush=True)
    count = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    return {"trained": count, "rewards": rewards, "step_s": round(statistics.median(seconds[1:] or seconds), 2),
            "seconds": round(sum(seconds), 1), "peak_gb": round(memory("VmHWM"), 3), "threads": torch.get_num_threads()}
