"""The record of a run: every rollout, in one compressed file a step that can be read while the run goes on.

A line of JSON is one group: `prompt` and `prompt_ids` once, everything else one entry a rollout. Log-probs are fp32,
little-endian, base64, those of all rollouts of the group one behind another, so that every bit comes back. The first line of
a step spells its tokens (`vocabulary`), so that the record is read without a tokenizer. `zcat` shows a file.
"""

from __future__ import annotations

import base64
import gzip
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

import numpy as np

from grpolab.files import atomic_write
from grpolab.rollouts import Group, RecordedGroup, Rollout

FLOATS = ("logps", "raw_logps", "kept_mass")
COLUMNS = ("step", "group", "rollout", "prompt", "completion", "reward", "advantage", "finish_reason", "turns", "problem",
           "seed", "policy_version", "used", "prompt_ids", "tokens", "mask", *FLOATS)


class Recorder:
    """Writes the groups of each step into `folder`, and gives them back. `keep` is "all" or "none"."""

    def __init__(self, folder: Path, keep: Literal["all", "none"] = "all"):
        if keep not in ("all", "none"):
            raise ValueError(f"keep must be 'all' or 'none', got {keep!r}")
        self.folder, self.keep = folder, keep
        self._session: dict | None = None  # the last entry of sessions.json

    def add(self, step: int, groups: Sequence[RecordedGroup], decode: Callable[[Sequence[int]], str], session: dict,
            spell: Callable[[Sequence[int]], str] | None = None) -> None:
        """Write one step. `decode` gives the text of token ids, `spell` that of a single one (default: `decode`; it may leave
        out end tokens), `session` says on what it was computed (JSON)."""
        if self.keep == "none" or not groups:
            return
        if session != self._session:
            self._write_sessions([*self.sessions(), {"from": step} | session])
            self._session = session
        lines = [line_of(step, number, g, decode) for number, g in enumerate(groups)]
        tokens = {i for g in groups for r in g.group for i in (*r.tokens, *r.prompt)}
        lines[0]["vocabulary"] = {i: (spell or decode)([i]) for i in sorted(tokens)}
        text = "".join(json.dumps(line, default=_plain) + "\n" for line in lines)
        atomic_write(self.path(step), gzip.compress(text.encode(), compresslevel=1, mtime=0))

    def rewind(self, steps: int) -> None:
        """Keep what stands before step `steps` alone, as a loop that goes on from there needs it."""
        self._session = None
        for path in reversed(self.files()):  # the last first, so that a kill leaves no gap
            if step_of(path) >= steps:
                path.unlink()
        if self.folder.exists():
            self._write_sessions([s for s in self.sessions() if s["from"] < steps])

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.jsonl.gz"

    def _write_sessions(self, sessions: list[dict]) -> None:
        atomic_write(self.folder / "sessions.json", json.dumps(sessions, indent=1) + "\n")

    def sessions(self) -> list[dict]:
        """On what the run was computed: an entry for each loop that wrote here, from its first step on."""
        try:
            return json.loads((self.folder / "sessions.json").read_text())
        except (OSError, ValueError):
            return []

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.jsonl.gz"))

    def steps(self) -> list[int]:
        """The steps on record."""
        return [step_of(path) for path in self.files()]

    def lines(self, steps: Iterable[int] | None = None) -> Iterator[dict]:
        """The lines of these steps (None: all) in order. A warning names a file that cannot be read."""
        wanted = None if steps is None else set(steps)
        for path in self.files():
            if wanted is None or step_of(path) in wanted:
                try:
                    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
                except Exception as error:  # gzip, zlib and json each raise types of their own for a damaged file
                    warnings.warn(f"{path} is damaged and left out: {error}", stacklevel=2)
                else:
                    yield from lines

    def vocabulary(self) -> dict[int, str]:
        """Token id -> its text, of all tokens on record."""
        return {int(i): text for line in self.lines() for i, text in line.get("vocabulary", {}).items()}

    def groups(self, step: int) -> list[RecordedGroup]:
        """The groups of a step as the loop handed them over; ValueError where the record holds none."""
        lines = list(self.lines([step]))
        if not lines:
            held = self.steps()
            there = f"it holds {held[0]} to {held[-1]}" if held else (
                "it holds none (grpo and multi_turn_grpo fill it, unless keep='none')")
            raise ValueError(f"step {step} is not in the record {self.folder}: {there}")
        return [recorded(line) for line in lines]


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").split(".")[0])


# --- one group --------------------------------------------------------------------------------------------------------


def line_of(step: int, number: int, g: RecordedGroup, decode: Callable[[Sequence[int]], str]) -> dict:
    """One group as JSON. What is the same for all rollouts, as a mask of ones, is left out."""
    rollouts = g.group.rollouts
    line = {
        "step": step, "group": number, "used": g.used, "prompt": decode(rollouts[0].prompt),
        "problem": g.problem, "prompt_ids": rollouts[0].prompt,
        "completion": [decode(r.tokens) for r in rollouts], "reward": [r.reward for r in rollouts],
        "advantage": list(g.advantages), "finish_reason": [r.finish_reason for r in rollouts],
        "seed": [r.seed for r in rollouts], "policy_version": [r.policy_version for r in rollouts],
        "tokens": [r.tokens for r in rollouts], "logps": packed(r.logps for r in rollouts),
    }
    if any(r.raw_logps != r.logps for r in rollouts):
        line["raw_logps"] = packed(r.raw_logps for r in rollouts)
    if any(r.kept_mass for r in rollouts):
        line["kept_mass"] = packed(r.kept_mass or (1.0,) * len(r.tokens) for r in rollouts)
    if any(r.temperature is not None for r in rollouts):
        line["temperature"] = [r.temperature for r in rollouts]
    if any(r.versions for r in rollouts):  # of weights that changed while they were drawn
        line["versions"] = [r.versions for r in rollouts]
    if not all(all(r.mask) for r in rollouts):
        line["mask"] = [r.mask for r in rollouts]
    if any(r.prompt != rollouts[0].prompt for r in rollouts):  # of agents, which ask as they like
        line["prompts"] = [r.prompt for r in rollouts]
        line["prompt_texts"] = [decode(r.prompt) for r in rollouts]
    if g.parts:
        line["parts"] = {name: list(values) for name, values in g.parts.items()}
    if g.turns:  # of an episode, also of one without a turn
        line["turns"] = g.turns
    if any(g.absent):
        line["absent"] = g.absent
    return line


def _plain(x):
    """What JSON can hold of a question: numpy's numbers, a dataclass and other objects as their fields, else the text."""
    if hasattr(x, "tolist"):
        return x.tolist()
    return asdict(x) if is_dataclass(x) and not isinstance(x, type) else vars(x) if hasattr(x, "__dict__") else str(x)


def recorded(line: dict) -> RecordedGroup:
    """The inverse of `line_of`: the same numbers in every bit."""
    lengths = [len(t) for t in line["tokens"]]
    floats = {name: unpacked(line[name], lengths) for name in FLOATS if name in line}
    masks = line.get("mask") or [(1,) * n for n in lengths]
    prompts = line.get("prompts") or [line["prompt_ids"]] * len(lengths)
    rollouts = tuple(
        Rollout(tuple(prompts[i]), tuple(tokens), tuple(masks[i]), floats["logps"][i],
                floats.get("raw_logps", floats["logps"])[i], line["finish_reason"][i], line["seed"][i],
                line["policy_version"][i], line["reward"][i], kept_mass=floats["kept_mass"][i] if "kept_mass" in floats else (),
                versions=tuple(line["versions"][i]) if "versions" in line else (),
                temperature=line["temperature"][i] if "temperature" in line else None)
        for i, tokens in enumerate(line["tokens"])
    )
    turns = tuple(tuple((action, observation) for action, observation in turns) for turns in line.get("turns", ()))
    return RecordedGroup(Group(rollouts), tuple(line["advantage"]), line["problem"], line.get("parts", {}), turns,
                         line["used"], tuple(line.get("absent", ())))


def packed(values: Iterable[Sequence[float]]) -> str:
    """fp32, little-endian, base64."""
    return base64.b64encode(np.fromiter(chain.from_iterable(values), "<f4").tobytes()).decode()


def unpacked(text: str, lengths: Sequence[int]) -> list[tuple[float, ...]]:
    """The inverse of `packed`: so many numbers for each rollout."""
    flat = np.frombuffer(base64.b64decode(text), "<f4").tolist()
    ends = list(accumulate(lengths))
    return [tuple(flat[end - n : end]) for n, end in zip(lengths, ends)]


def table(lines: Iterable[dict], columns: Sequence[str] | None = None):
    """A DataFrame with a row a rollout: COLUMNS, and one for each of the parts; `columns` chooses among them."""
    import pandas as pd

    rows = []
    for line in lines:
        g = recorded(line)
        for i, r in enumerate(g.group):
            prompt = line["prompt_texts"][i] if "prompt_texts" in line else line["prompt"]
            values = (line["step"], line["group"], i, prompt, line["completion"][i], r.reward, g.advantages[i],
                      r.finish_reason, g.turns[i] if g.turns else (), g.problem, r.seed, r.policy_version, g.used,
                      list(r.prompt), line["tokens"][i], r.mask, r.logps, r.raw_logps, r.kept_mass)
            rows.append(dict(zip(COLUMNS, values, strict=True)) | {name: of[i] for name, of in g.parts.items()})
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(COLUMNS))
    if missing := [name for name in columns or () if name not in frame and rows]:
        raise ValueError(f"the record has no column {', '.join(missing)}; it has {', '.join(frame)}")
    return frame if columns is None else frame.reindex(columns=list(columns))
