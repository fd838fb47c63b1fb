"""The flight recorder: every rollout of a run, in append-only compressed files that can be read while they are written.

A file holds the steps of one range, RANGE of them, as gzip members one behind another, a member a step; `zcat` shows it.
A line of JSON is one group: `prompt` and `prompt_ids` once, everything else one entry a rollout. Log-probs are fp32,
little-endian, base64, those of all rollouts of the group one behind another, so that every bit comes back. The first line of
a step spells its tokens (`vocabulary`), so that the record is read without a tokenizer. A step is one write: a kill leaves
whole steps, or a last one cut short, which readers leave out and the next loop removes.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

import numpy as np

from grpolab.files import append_bytes, atomic_write
from grpolab.rollouts import Group, RecordedGroup, Rollout

RANGE = 25  # steps a file
MAGIC = b"\x1f\x8b\x08"  # how a gzip member begins
FLOATS = ("logps", "raw_logps", "kept_mass")


class Recorder:
    """Writes the groups of each step into `folder`, and gives them back.

    `keep` is "all" or "none"."""

    def __init__(self, folder: Path, keep: Literal["all", "none"] = "all"):
        if keep not in ("all", "none"):
            raise ValueError(f"keep must be 'all' or 'none', got {keep!r}")
        self.folder, self.keep = folder, keep
        self._unsynced: set[Path] = set()  # files that were written since the last `sync`
        self._session: dict | None = None  # what the last entry of the file of sessions says

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, step: int, groups: Sequence[RecordedGroup], decode: Callable[[Sequence[int]], str], session: dict,
            spell: Callable[[Sequence[int]], str] | None = None) -> None:
        """Append one step. `decode` gives the text of token ids, `spell` that of a single one (default: `decode`; it may leave
        out end tokens), `session` says on what it was computed (JSON)."""
        if self.keep != "none" and groups:
            if session != self._session:
                self._write_sessions([*self.sessions(), {"from": step} | session])
                self._session = session
            lines = [line_of(step, number, g, decode) for number, g in enumerate(groups)]
            tokens = {i for g in groups for r in g.group for i in (*r.tokens, *r.prompt)}
            lines[0]["vocabulary"] = {i: (spell or decode)([i]) for i in sorted(tokens)}
            lines = "".join(json.dumps(line, default=_plain) + "\n" for line in lines)
            data = gzip.compress(lines.encode(), compresslevel=1, mtime=0)
            append_bytes(self.path(step), data, "the rollouts of a step")
            self._unsynced.add(self.path(step))

    def rewind(self, steps: int) -> None:
        """Keep what stands before step `steps` alone, as a loop that goes on from there needs it: the last file first, so
        that a kill in between leaves no gap."""
        self._session = None
        self._unsynced.clear()
        for path in reversed(self.files()):
            if first_step(path) >= steps:
                path.unlink()
            else:
                end = 0
                for stop, lines in members(path):
                    if step_of(lines) >= steps:
                        break
                    end = stop
                if end < path.stat().st_size:
                    os.truncate(path, end)
        if self.folder.exists():
            self._write_sessions([s for s in self.sessions() if s["from"] < steps])

    def sync(self) -> None:
        """See that what was written is on the disk: a checkpoint must not outlive the record before it."""
        for path in sorted(self._unsynced):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        self._unsynced.clear()

    def path(self, step: int) -> Path:
        return self.folder / f"steps-{step // RANGE * RANGE:08d}.jsonl.gz"

    def _write_sessions(self, sessions: list[dict]) -> None:
        atomic_write(self.folder / "sessions.json", json.dumps(sessions, indent=1) + "\n")

    # -- reading -------------------------------------------------------------------------------------------------------

    def sessions(self) -> list[dict]:
        """On what the run was computed: an entry for each loop that wrote here, from its first step on."""
        try:
            found = json.loads((self.folder / "sessions.json").read_text())
        except (OSError, ValueError):
            return []
        known = isinstance(found, list) and all(isinstance(s, dict) and isinstance(s.get("from"), int) for s in found)
        return found if known else []

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("steps-*.jsonl.gz"))

    def lines(self, steps: Iterable[int] | None = None, tell: Callable[[str], None] | None = None) -> Iterator[dict]:
        """The lines of these steps (None: all) in order. `tell` hears of what cannot be read."""
        wanted = None if steps is None else set(steps)
        for path in self.files():
            span = range(first_step(path), first_step(path) + RANGE)
            if wanted is None or not wanted.isdisjoint(span):
                for _, lines in members(path, tell):
                    if wanted is None or step_of(lines) in wanted:
                        yield from map(json.loads, lines.splitlines())

    def vocabulary(self) -> dict[int, str]:
        """Token id -> its text, of all tokens on the record."""
        firsts = (json.loads(step[: step.index(b"\n")]) for path in self.files() for _, step in members(path))
        return {int(i): text for line in firsts for i, text in line["vocabulary"].items()}

    def steps(self) -> list[int]:
        """The steps that the record holds."""
        return [step_of(lines) for path in self.files() for _, lines in members(path)]

    def groups(self, step: int) -> list[RecordedGroup]:
        """The groups of a step as the loop handed them over; ValueError where the record holds none."""
        lines = list(self.lines([step]))
        if not lines:
            held = self.steps()
            there = f"it holds {held[0]} to {held[-1]}" if held else (
                "it holds none (grpo and multi_turn_grpo fill it, unless keep='none')")
            raise ValueError(f"step {step} is not in the record {self.folder}: {there}")
        return [recorded(line) for line in lines]


# --- one step, one group ----------------------------------------------------------------------------------------------


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
    if not all(all(r.mask) for r in rollouts):
        line["mask"] = [r.mask for r in rollouts]
    if any(r.prompt != rollouts[0].prompt for r in rollouts):  # of agents, which ask as they like
        line["prompts"] = [r.prompt for r in rollouts]
    if g.parts:
        line["parts"] = {name: list(values) for name, values in g.parts.items()}
    if g.turns:  # of an episode, also of one without a turn
        line["turns"] = g.turns
    if any(g.absent):
        line["absent"] = g.absent
    return line


def _plain(x):
    """What JSON can hold of a question: a dataclass and other objects as their fields, else the text."""
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
                line["policy_version"][i], line["reward"][i], kept_mass=floats["kept_mass"][i] if "kept_mass" in floats else ())
        for i, tokens in enumerate(line["tokens"])
    )
    turns = tuple(tuple((wrote, told) for wrote, told in turns) for turns in line.get("turns", ()))
    return RecordedGroup(Group(rollouts), tuple(line["advantage"]), line["problem"], line.get("parts", {}), turns,
                         line["used"], tuple(line.get("absent", ())))


def packed(values: Iterable[Sequence[float]]) -> str:
    """fp32, little-endian, base64."""
    return base64.b64encode(np.fromiter(chain.from_iterable(values), "<f4").tobytes()).decode()


def unpacked(text: str, lengths: Sequence[int]) -> list[tuple[float, ...]]:
    """The inverse of `packed`: so many numbers for each rollout."""
    flat = np.frombuffer(base64.b64decode(text), "<f4").tolist()
    if len(flat) != sum(lengths):
        raise ValueError(f"the record holds {len(flat)} log-probs for {sum(lengths)} tokens: the line is damaged")
    ends = list(accumulate(lengths))
    return [tuple(flat[end - n : end]) for n, end in zip(lengths, ends)]


# --- files ------------------------------------------------------------------------------------------------------------


def first_step(path: Path) -> int:
    return int(path.name.removeprefix("steps-").split(".")[0])


def step_of(lines: bytes) -> int:
    """Of a member: its first line begins {"step": 12, ..."""
    return int(lines[9 : lines.index(b",")])


def members(path: Path, tell: Callable[[str], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """(where it ends in the file, its content) of each whole step in a file. What is cut short or fails its checksum is passed
    over, and `tell` hears of it."""
    data, at, after = path.read_bytes(), 0, "at its beginning"
    while at < len(data):
        reader = zlib.decompressobj(wbits=31)
        with suppress(zlib.error):
            content = reader.decompress(data[at:])
            if reader.eof and content.startswith(b'{"step": '):
                at, after = len(data) - len(reader.unused_data), f"after step {step_of(content)}"
                yield at, content
                continue
        following = data.find(MAGIC, at + 1)
        if tell is not None:
            tell(f"{path} {'ends in the middle of a step' if following < 0 else 'is damaged'} {after}")
        at = following if following > 0 else len(data)


# --- the table --------------------------------------------------------------------------------------------------------

SHARED = ("step", "group", "prompt", "problem", "prompt_ids", "used")  # of a group; the rest are of a rollout
COLUMNS = ("step", "group", "rollout", "prompt", "completion", "reward", "advantage", "finish_reason", "turns", "problem",
           "seed", "policy_version", "used", "prompt_ids", "tokens", "mask", *FLOATS)


def table(lines: Iterable[dict], columns: Sequence[str] | None = None):
    """A DataFrame with a row a rollout: COLUMNS, and one for each of the parts; `columns` chooses among them."""
    import pandas as pd

    rows: list[dict] = []
    known, empty = dict.fromkeys(COLUMNS), True
    for line in lines:
        known, empty = known | dict.fromkeys(line.get("parts", ())), False
        rows += rows_of(line, columns)
    missing = [c for c in columns or () if c not in known]
    if missing and not empty:
        raise ValueError(f"the record has no column {', '.join(missing)}; it has {', '.join(known)}")
    return pd.DataFrame(rows, columns=list(columns or known))


def rows_of(line: dict, columns: Sequence[str] | None = None) -> list[dict]:
    """A row for each rollout of a line."""
    n, lengths = len(line["tokens"]), [len(t) for t in line["tokens"]]
    cells = {name: [line[name]] * n for name in SHARED} | {"rollout": range(n)}
    cells |= {name: line[name] for name in ("completion", "reward", "advantage", "finish_reason", "seed", "policy_version",
                                            "tokens")}
    cells |= {"turns": line.get("turns") or [()] * n, "mask": line.get("mask") or [(1,) * k for k in lengths]}
    cells |= line.get("parts", {})
    for name in FLOATS:
        if columns is None or name in columns:
            source = line.get(name, line["logps"] if name == "raw_logps" else None)
            cells[name] = unpacked(source, lengths) if source is not None else [()] * n
    wanted = [name for name in columns if name in cells] if columns else list(cells)
    return [dict(zip(wanted, row)) for row in zip(*(cells[name] for name in wanted))]
