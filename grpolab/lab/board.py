"""A verified board: one task, recipes that solve it, and entries that anybody can replay.

The task is notebook 04's: from the SFT checkpoint of notebook 01, by GRPO with the checker's reward, to at least 90 % of the
held-out questions right, greedily, as the mean over three seeds; counted in sampled tokens, and in seconds of sampling and
updates on two cores at most. A recipe is a file of GRPO's options (TOML); model, questions, reward and seeds are the task's. An
entry is JSON: the recipe and what it gave, with hashes of the weights, and the questions that were asked. `verify` makes the
checkpoint and trains again: every bit must agree where processor, threads and versions do, else the means over the seeds.
Nothing of an entry is evaluated or unpickled.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from grpolab.arithmetic import Problem, Task, generate
from grpolab.evaluate import evaluate, student_t
from grpolab.files import atomic_write
from grpolab.lab.restore import with_threads
from grpolab.models.load import Policy, load_policy
from grpolab.runs.checkpoints import computed_on, data_hash, weights_hash
from grpolab.runs.run import Run, seed_everything
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, grpo, sft

FORMAT = 1  # of an entry
NEW_TOKENS = 24
MACHINE = ("python", "grpolab", "torch", "transformers", "system", "processor", "device", "dtype", "threads")  # decide the bits


@dataclass(frozen=True)
class Speedrun:
    """The task; other numbers are for tests."""

    target: float = 0.9  # held-out, greedy, mean over the seeds
    seeds: tuple[int, ...] = (0, 1, 2)
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(steps=160, batch_size=32, lr=1e-3, schedule="cosine"))
    questions: tuple[int, int] = (6400, 1000)  # known and held out
    shown: int = 100  # of the known ones, to imitate; those from 4 times as many on are to practise

    @cached_property
    def split(self) -> tuple[list[Problem], list[Problem], list[Problem]]:
        """Questions that are demonstrated, to practise, and held out."""
        known, held_out = generate(*self.questions, seed=1, task=Task(ops="+-", max_operand=99))
        return known[: self.shown], known[4 * self.shown :], held_out

    @cached_property
    def key(self) -> str:
        """A hash of the questions and of how the checkpoint is made."""
        return data_hash([self.sft, self.target, list(self.seeds), *self.split])

    async def start(self) -> Policy:
        """The checkpoint: notebook 01's best SFT."""
        seed_everything(self.sft.seed)
        policy = load_policy("tiny", device="cpu")
        async for _ in sft(policy, demonstrations(policy, self.split[0]), self.sft):
            pass
        return policy


STANDARD = Speedrun()


def config_of(recipe: str) -> GRPOConfig:
    """A recipe's options. ValueError for what is no TOML, sets what the task fixes, or is of another type than an option's."""
    try:
        entries = tomllib.loads(recipe)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the recipe is no TOML: {error}") from error
    method, options = entries.pop("method", None), {name.replace("-", "_"): value for name, value in entries.items()}
    names = {f.name for f in fields(GRPOConfig)} - {"seed"}
    if len(options) < len(entries):
        raise ValueError("the recipe sets an option twice, once with - and once with _")
    if method != "grpo" or (other := options.keys() - names):
        what = f"method = {method!r}" if method != "grpo" else f"{sorted(other)}"
        raise ValueError(f"the recipe has {what}: it says method = 'grpo' and options of GRPOConfig; model, questions, reward "
                         "and seeds are the task's")
    plain = json.dumps({name: None if v == "none" else v for name, v in options.items()}, default=str)
    return TypeAdapter(GRPOConfig).validate_json(plain, strict=True)  # strictly: true and 8.0 are no integers


async def trained(task: Speedrun, start: Policy, config: GRPOConfig) -> dict:
    """One seed's training and its result, as an entry holds it."""
    policy, reference = load_policy("tiny", device="cpu"), load_policy("tiny", device="cpu") if config.needs_reference else None
    for copy in filter(None, (policy, reference)):
        copy.model.load_state_dict(start.model.state_dict())
    _, practice, held_out = task.split
    with tempfile.TemporaryDirectory() as folder:
        run = Run("speedrun", root=folder)
        rows = [row async for row in grpo(policy, reference, practice, config, run=run)]
        steps = [run.recorder.groups(row["step"]) for row in rows]
    evaluation = await evaluate(policy, held_out, max_new_tokens=NEW_TOKENS)
    return {
        "accuracy": evaluation.exact.value, "tokens": sum(len(r.tokens) for groups in steps for g in groups for r in g.group),
        "seconds": round(sum(row["sampling_s"] + row["update_s"] for row in rows), 1), "weights": weights_hash(policy),
        "rewards": [row["reward"] for row in rows],
        "asked": [[f"{g.problem['a']} {g.problem['op']} {g.problem['b']}" for g in groups] for groups in steps]}


def speedrun(recipe: str, title: str, *, task: Speedrun = STANDARD, threads: int = 2, tries: int = 1) -> dict:
    """The entry of a recipe: the task done with each seed. `tries` is what its author says: how many recipes were tried."""
    config = config_of(recipe)

    async def run():
        start = await task.start()
        return {"board": FORMAT, "title": title, "tries": tries, "recipe": recipe, "task": task.key,
                "machine": {name: computed_on(start)[name] for name in MACHINE}, "start": weights_hash(start),
                "seeds": {str(seed): await trained(task, start, replace(config, seed=seed)) for seed in task.seeds}}

    if threads not in (1, 2):
        raise ValueError(f"the task is for one or two cores, got threads={threads}")
    return with_threads(threads, lambda: asyncio.run(run()))


def summary(entry: dict) -> dict[str, float]:
    """Means over the seeds."""
    return {name: sum(of[name] for of in entry["seeds"].values()) / len(entry["seeds"])
            for name in ("accuracy", "tokens", "seconds")}


def save(entry: dict, path: str | Path) -> Path:
    return atomic_write(path, json.dumps(entry, ensure_ascii=False) + "\n")


def read(path: str | Path) -> dict:
    """An entry from its file; ValueError for anything else."""
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8"))
        checks = [(entry, {"board": int, "title": str, "tries": int, "recipe": str, "task": str, "machine": dict, "start": str,
                           "seeds": dict})]
        checks += [(of, {"accuracy": float, "tokens": int, "seconds": float, "weights": str, "rewards": list, "asked": list})
                   for of in entry["seeds"].values()]
        if any(of.keys() != kinds.keys() or any(type(of[k]) is not kind for k, kind in kinds.items()) for of, kinds in checks):
            raise ValueError("its fields are others")
        if entry["board"] != FORMAT or entry["machine"].keys() != set(MACHINE):
            raise ValueError(f"it is of format {entry['board']}, not {FORMAT}")
        config = config_of(entry["recipe"])
        if not all(can_be(of, config) for of in entry["seeds"].values()):
            raise ValueError("its recipe cannot give such numbers")
        if not (entry["title"].isprintable() and entry["tries"] > 0):
            raise ValueError("its title is no line of text, or its tries are not positive")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no entry of the board: {error}") from error
    return entry


def can_be(of: dict, config: GRPOConfig) -> bool:
    """Whether a seed's numbers may be those of a recipe: as many steps, shares that are shares, a token or more a rollout."""
    rollouts = sum(map(len, of["asked"])) * config.group_size
    return (0 <= of["accuracy"] <= 1 and 0 < of["seconds"] < math.inf
            and rollouts <= of["tokens"] <= rollouts * config.max_new_tokens
            and len(of["rewards"]) == len(of["asked"]) == config.steps
            and all(type(x) is float for x in of["rewards"]) and all(type(q) is str for step in of["asked"] for q in step))


@dataclass(frozen=True)
class Verdict:
    """`refused` says in words what is wrong, "" for an entry that stands; `how` it was compared, and what was measured here."""

    refused: str
    how: str = ""
    measured: Any = None

    def __str__(self):
        if self.refused:
            return f"refused: {self.refused}"
        means = summary(self.measured)
        return (f"verified {self.how}: {means['accuracy']:.1%} of the held-out questions, {means['tokens']:,.0f} sampled "
                f"tokens, {means['seconds']:.0f} s here")


def verify(entry: dict, *, task: Speedrun = STANDARD) -> Verdict:
    """Refuse what its own text shows to be wrong, then train again and compare."""
    if why := refusal(entry, task):
        return Verdict(why)
    again = speedrun(entry["recipe"], entry["title"], task=task, threads=entry["machine"]["threads"])
    other = [name for name in MACHINE if entry["machine"][name] != again["machine"][name]]
    why = statistics(entry, again, task) if other else bits(entry, again)
    how = f"statistically (not the entry's {', '.join(other)})" if other else "in every bit"
    return Verdict(why, how, again)


def refusal(entry: dict, task: Speedrun) -> str:
    """What an entry's own text shows to be wrong."""
    _, practice, held_out = task.split
    known, secret = ({f"{p.a} {p.op} {p.b}" for p in of} for of in (practice, held_out))
    asked = {q for of in entry["seeds"].values() for step in of["asked"] for q in step}
    if entry["task"] != task.key:
        return "it was made for another task than this version's"
    if seen := asked & secret:
        return f"it trained on {len(seen)} of the held-out questions, {min(seen)} among them"
    if strange := asked - known:
        return f"it trained on {len(strange)} questions that are not the task's, {min(strange)} among them"
    if entry["machine"]["threads"] not in (1, 2):
        return f"it was made with {entry['machine']['threads']} threads, and the task is for one or two cores"
    if set(entry["seeds"]) != set(map(str, task.seeds)):
        return f"it has the seeds {sorted(entry['seeds'])}, and the task {list(task.seeds)}"
    if summary(entry)["accuracy"] < task.target:
        return f"it gets {summary(entry)['accuracy']:.1%} right, and the task asks for {task.target:.0%}"
    return ""


def bits(entry: dict, again: dict) -> str:
    """What differs from a replay on the same processor, threads and versions."""
    if entry["start"] != again["start"]:
        return "it did not start from the task's checkpoint: the weights made here have another hash"
    for seed, of in entry["seeds"].items():
        here = again["seeds"][seed]
        if of["weights"] != here["weights"]:
            first = next((i for i, (a, b) in enumerate(zip(of["rewards"], here["rewards"])) if a != b), len(here["rewards"]))
            return (f"its recipe does not give its weights (seed {seed}; the rewards part at step {first} of "
                    f"{len(here['rewards'])}): another recipe, other questions or another program made them")
        if edited := [name for name in ("accuracy", "tokens", "rewards", "asked") if of[name] != here[name]]:
            name = edited[0]
            shown = f": {of[name]} in the entry, {here[name]} here" if name in ("accuracy", "tokens") else ""
            return f"its result was edited (seed {seed}, {name}{shown})"
    return ""


def statistics(entry: dict, again: dict, task: Speedrun) -> str:
    """What differs from a replay elsewhere by more than chance over the seeds: more than Student's interval of the difference
    of two means, by the replay's variance, and a hundredth."""
    for name, unit in (("accuracy", 1.0), ("tokens", summary(again)["tokens"])):
        theirs, ours = (torch.tensor([float(of[name]) for of in e["seeds"].values()]) for e in (entry, again))
        chance = student_t(2) * (2 * ours.var() / len(ours)).sqrt() + 0.01 * unit
        if (theirs.mean() - ours.mean()).abs() > chance:
            return (f"its {name} is {theirs.mean():.4g} on average, and {ours.mean():.4g} here, where chance explains "
                    f"{chance:.2g}")
        if name == "accuracy" and ours.mean() + chance < task.target:
            return f"its recipe gets {ours.mean():.1%} right here, and the task asks for {task.target:.0%}"
    return ""
