"""A run's folder: metrics.csv, figures, a checkpoint, and where the run started; exact resume. The gate adds results.json.

Longer than most: what may be asked of a run is in one class. Every rollout (`rollout_log`), saved states (`checkpoints`) and
the best policy so far (`selection`) have modules of their own."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from safetensors.torch import save_file

from grpolab.files import append, atomic_write, locked, naming, png, restore_folder
from grpolab.models.load import load_policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.checkpoints import Checkpoints, computed_on, load_state, plain_config, put_weights, weights, weights_hash
from grpolab.runs.rollout_log import Recorder, table
from grpolab.runs.selection import PREFIX, Selected, Selection


def repository() -> Path:
    """The working directory; the one above it where that is the notebooks/ of a project, as for a notebook's kernel."""
    here = Path.cwd()
    return here.parent if here.name == "notebooks" and (here.parent / "pyproject.toml").exists() else here


def runs_folder() -> Path:
    """Where runs lie by default: runs/, and for notebooks that a test shortens (GRPOLAB_QUICK) a folder of their own in it."""
    shortened = os.environ.get("GRPOLAB_QUICK", "0") not in ("", "0")
    return repository() / "runs" / ("quick" if shortened else "")


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators; grpolab's own randomness is seeded by its configs."""
    random.seed(seed)
    torch.manual_seed(seed)


class Run:
    """Where one training run leaves what it did: `Run("04_grpo", "tiny")` is the folder runs/04_grpo/tiny, and with a
    `seed` other than 0 runs/04_grpo/tiny/seed-<seed>.

    A run is one training from one start, and running its cell twice gives the same numbers: a loop keeps a copy of the weights
    that it starts from for as long as the process holds the model. Later, in the same folder:
    - a policy that this run has trained goes back to that start, or to a checkpoint of the same configuration, whatever
      was done with it since;
    - any other policy is taken as it is: it goes on from a checkpoint where start and configuration are the same. Where they,
      or the data of a finished run, differ, what an earlier process left in the folder is moved into a folder beside it,
      `tiny.1`, and what this process has made there is replaced.
    Printed lines say so. Checkpoints exist only while a loop is unfinished: every `save_every` steps, and when it is
    interrupted or fails. One that was trained on other data or against another reference is refused (that a reward is another
    function is not noticed), and so is a second loop at the same time, in this process or another.

    The folder also keeps every rollout (with `keep="none"` none), and with `replay_every=n` the weights before every n-th
    step: `lab.replay` and its neighbours read them. With `select` the best policy is kept, too (`selection`).

    `sinks` get each row's numbers: objects with `.log(dict, step=...)`, as a run of Weights & Biases or trackio, or with
    `.add_scalar(name, value, step)`, as TensorBoard's SummaryWriter. One that raises is warned of and asked no more.
    """

    def __init__(self, *names: str, root: str | Path | None = None, seed: int | None = None,
                 keep: Literal["all", "none"] = "all", replay_every: int = 0, sinks: Sequence[Any] = (),
                 select: Selection | None = None):
        if not all(isinstance(name, str) and name not in ("", ".", "..") for name in names):
            raise ValueError(f"a run's names are plain text such as Run('04_grpo', 'tiny'), got {names!r}; a folder to put "
                             "it in is Run(..., root=folder)")
        if not (seed is None or isinstance(seed, int) and seed >= 0):
            raise ValueError(f"seed={seed!r}: a whole number from 0 on")
        for sink in sinks:
            if not (hasattr(sink, "log") or hasattr(sink, "add_scalar")):
                raise ValueError(f"a sink has .log(dict, step=...) or .add_scalar(name, value, step), got {sink!r:.80}")
        parts = [n.replace("/", "--") for n in names] + ([f"seed-{seed}"] if seed else [])
        self.folder = Path(root or runs_folder()).expanduser().joinpath(*parts)
        self.recorder = Recorder(self.folder / "rollouts", keep)
        self.looks = Recorder(self.folder / "looks")  # rollouts that were sampled on the way to be looked at
        self.checkpoints = Checkpoints(self.folder, "checkpoint")
        self.replay_states, self.replay_every = Checkpoints(self.folder / "replay", "step"), replay_every
        self.selected = Selected(self.folder, select)
        self.sinks = list(sinks)
        self.options: dict[str, Any] | None = None  # with others of which it is another training; None: not known
        self.keeps_end = False  # whether the checkpoint of the last step stays, until `drop_checkpoint`
        self.metrics: list[dict] = []
        self.base = ""  # where the policy of its loop came from
        self._data = ""  # a hash of what its loop trains on
        self._session: dict | None = None  # on what the present loop computes
        self._columns: list[str] = []  # of the metrics.csv that holds self.metrics; none while it does not
        self._opened = time.time()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._found = set(self.folder.iterdir())  # when this Run was opened

    @staticmethod
    def shown(path: Path) -> Path:
        """A path as a notebook prints it: relative to the repository where it lies inside."""
        return path.relative_to(repository()) if path.is_relative_to(repository()) else path

    def child(self, name: str) -> Run:
        """A run of its own in a folder below this one."""
        return Run(name, root=self.folder, keep=self.recorder.keep, replay_every=self.replay_every)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def log(self, row: dict) -> dict:
        """Add one row of metrics and append it to the table."""
        self.metrics.append(row)
        path = self.folder / "metrics.csv"
        if self._columns and row.keys() <= set(self._columns) and path.exists():
            append(path, _csv([row], self._columns, header=False))
        else:  # the first row, or one with a new column
            self.write_table()
        self._to_sinks(row)
        return row

    def write_table(self) -> None:
        self._columns = list(dict.fromkeys(name for row in self.metrics for name in row))
        atomic_write(self.folder / "metrics.csv", _csv(self.metrics, self._columns))

    def _to_sinks(self, row: dict) -> None:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
        for sink in list(self.sinks):
            try:
                if hasattr(sink, "log"):
                    sink.log(numbers, step=row.get("step", 0))
                else:
                    for name, value in numbers.items():
                        sink.add_scalar(name, value, row.get("step", 0))
            except Exception as error:  # somebody else's service: the run is worth more
                self.sinks.remove(sink)
                warnings.warn(f"{type(sink).__name__} took no more of this run's rows after step {row.get('step')}: {error!r}",
                              stacklevel=3)

    def table(self) -> pd.DataFrame:
        """The metrics, one row a step: of the loop that this Run has seen, else those in the folder."""
        path = self.folder / "metrics.csv"
        return pd.DataFrame(self.metrics) if self.metrics or not path.exists() else pd.read_csv(path)

    # -- measured on the way -------------------------------------------------------------------------------------------

    def select(self, selection: Selection) -> Run:
        """From the next loop on, measure by this selection; returns the run. For a notebook, whose run begins before its policy
        is there to be measured."""
        self.selected.selection = selection
        return self

    async def measure(self, steps: int, last: int, policy, in_thread) -> dict:
        """What `select` measures of the policy after so many of `last` steps, as columns of a row; nothing where it is not due.
        `in_thread(policy, work)` runs work with the policy at rest."""
        if not self.selected.due(steps, last):
            return {}
        numbers = await self.selected.selection.numbers(policy)
        await in_thread(policy, lambda: self.selected.add(steps, numbers, policy))
        if steps == last and not self.keeps_end:  # not before: a kill while the last policy is measured must not cost the run
            self.drop_checkpoint()
        row = {PREFIX + name: value for name, value in numbers.items()}
        self._to_sinks({"step": max(0, steps - 1)} | row)
        return row

    def measured(self) -> pd.DataFrame:
        """What `select` measured: `steps`, and a column for each number."""
        return self.selected.table()

    def best(self, load=load_policy):
        """The policy that `select` has kept, loaded by `load(folder)` (for a reward model: RewardModel.load). ValueError where
        none was kept."""
        best = self.selected.best()
        if best is None:
            raise ValueError(f"{self.shown(self.folder)} has kept no best policy: Run(..., select=Selection(measure)) does")
        print(f"{self.shown(best['folder'])}: {best['by']} {best['value']:.4g} after {best['steps']} steps")
        return load(str(best["folder"]))

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def record(self, step: int, policy, groups: Sequence[RecordedGroup], engine: str = "") -> None:
        """Keep the rollouts of a step, before its update; `engine` names the sampler's."""
        self._session = self._session or computed_on(policy, engine)
        self.recorder.add(step, groups, policy.decode, self._session, policy.tokenizer.decode)

    def rollouts(self, steps: int | Iterable[int] | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The recorded rollouts, a row each, also while a loop is writing: of these steps (a number, a range; None: all), with
        these columns (None: `rollout_log.COLUMNS` and the parts of the reward). A warning names a damaged file."""
        return table(self.recorder.lines([int(steps)] if hasattr(steps, "__index__") else steps), columns)

    def look(self, policy, groups: Sequence[RecordedGroup]) -> None:
        """Keep rollouts that are no part of the training, sampled after the steps done so far: for a selection's measure.
        `looks` gives them back by that number of steps, also in a kernel that was started since."""
        done = len(self.metrics)
        self.looks.rewind(done)
        self.looks.add(done, groups, policy.decode, computed_on(policy), policy.tokenizer.decode)

    # -- files ---------------------------------------------------------------------------------------------------------

    def figure(self, name: str, figure) -> Path:
        """Save a matplotlib figure (or the figure of an Axes) as figures/<name>.png in the run's folder, at double
        resolution."""
        return atomic_write(self.folder / "figures" / f"{name}.png", png(getattr(figure, "figure", figure)))

    def made(self) -> str:
        """One line: what lies in the folder and was written since this Run was opened, figures by name."""
        new = [p for p in sorted(self.folder.iterdir()) if not p.name.startswith(".") and self._is_new(p)]
        figures = [p.stem for p in sorted((self.folder / "figures").glob("*.png")) if self._is_new(p)]
        names = ", ".join(p.name + "/" * p.is_dir() for p in new if p.name != "figures") or "nothing"
        return f"{self.shown(self.folder)}: {names}" + (f"; figures: {', '.join(figures)}" if figures else "")

    def _is_new(self, path: Path, slack: float = 1.0) -> bool:  # some file systems count in whole seconds
        files = [file for file in (path, *path.rglob("*")) if file.is_file()]
        return any(file.stat().st_mtime >= self._opened - slack for file in files)

    # -- a loop begins -------------------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """The right to train into this folder; RuntimeError while another loop has it. It ends with the process."""
        try:
            with locked(self.folder / ".process"):
                yield
        except BlockingIOError as error:
            process = str(error.args[0])
            who = "another loop of this process" if process == str(os.getpid()) else f"process {process}"
            raise RuntimeError(
                f"{self.shown(self.folder)} is in use: {who} is training into it. Let that end (a generator by its aclose()), "
                "or give this run a folder of its own: another name, or Run(..., seed=...)") from error

    def begin(self, config, policy, optimiser, data: str = "") -> int:
        """Bring policy, optimiser and metrics to where this run stands (see the class), and return the steps done.

        `data` is a hash of what the loop trains on, "" where it is not known. Raises ValueError for a damaged checkpoint or
        one that was trained on other data."""
        for place in ("", "rollouts/", "looks/", "replay/", "figures/"):
            for partial in self.folder.glob(f"{place}.*.partial"):  # of a killed process
                restore_folder(partial)
                if partial.exists() and not partial.name.endswith(".jsonl.partial"):  # those are of `grpolab pairs`
                    shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        name, plain, key = str(self.folder.resolve()), plain_config(config), weights_hash(policy)
        path, note = self.folder / "run.json", self._note()
        data_told = "" if self.checkpointed() else data  # a checkpoint of other data is refused
        other = _difference(note, plain, key, data_told, self.options)
        if other and not self.begun_here:
            if path.stat().st_mtime >= self._opened:  # another process has trained here since
                self._found, self._opened = set(self.folder.iterdir()), time.time()
            self.set_aside(other)
            note = {}
        elif other and other != OTHER_START:
            print(f"{self.shown(self.folder)} held {other}: this one takes its place")
        _begun.add(name)
        starts = _starts.get(policy.model, {})
        start = starts.get(name)
        again = start is not None and start.file.exists()
        if not again:
            if start is not None and start.key != key:
                print(f"the weights that {self.shown(self.folder)} started from are gone: {policy.name} trains on from its own")
            elif note and note["start"] != key:
                print(f"{self.shown(self.folder)} starts over, from other weights than before")
            start = self._save_start(policy, key)
        if note.get("start") != start.key or _changed(note.get("options"), self.options):
            self.drop_checkpoint()
        self.metrics, self._columns, self._session, self._data, self.base = [], [], None, data, start.base
        steps = self._load_checkpoint(plain, policy, optimiser, key if again else None)
        self.selected.begin(steps)
        if not steps:
            (self.folder / "metrics.csv").unlink(missing_ok=True)
        if again and not steps and start.key != key:
            put_weights(policy, start.file)
            policy.version += 1
            print(f"{policy.name} goes back to the weights from which {self.shown(self.folder)} started")
        options = note.get("options") if self.options is None else self.options
        note = {"start": start.key, "base": start.base, "config": plain, "data": data, "options": options}
        atomic_write(path, json.dumps(note, indent=1) + "\n")
        self.recorder.rewind(steps)
        self.looks.rewind(steps + 1 if steps else 0)
        self._begin_replay(steps, config, policy, optimiser)
        # What this policy was trained on after this run is undone.
        _starts[policy.model] = dict(takewhile(lambda item: item[0] != name, starts.items())) | {name: start}
        return steps

    def set_aside(self, what: str) -> None:
        """Move what an earlier process left in the folder to one beside it; runs in folders below stay."""
        earlier = [p for p in self._found.intersection(self.folder.iterdir())
                   if not (p.name.startswith(".") or any(p.rglob("run.json")) or self._is_new(p, slack=0))]
        if not earlier:
            return
        target = next(f for n in count(1) if not (f := self.folder.with_name(f"{self.folder.name}.{n}")).exists())
        target.mkdir()
        for path in earlier:
            os.rename(path, target / path.name)
        print(f"{self.shown(self.folder)} held {what}: it is now {self.shown(target)}", file=sys.stderr)

    def _save_start(self, policy, key: str) -> Start:
        """The weights as they are, on the disk until the model or the process goes: only then can a policy have moved away
        from them."""
        for earlier in self.folder.glob(".start-*"):
            shutil.rmtree(earlier)
        folder = tempfile.mkdtemp(dir=self.folder, prefix=".start-")
        weakref.finalize(policy.model, shutil.rmtree, folder, ignore_errors=True)
        with naming(Path(folder)):
            save_file(weights(policy), Path(folder, "model.safetensors"))
        return Start(key, Path(folder, "model.safetensors"), origin(policy))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, config, policy, optimiser) -> Path:
        """Everything the loop needs to go on after `step` steps, under a name of its own; older ones are then dropped."""
        path = self.checkpoints.save(step, config, policy, optimiser, self.metrics, data=self._data)
        self.checkpoints.drop(keep=path)
        return path

    def _load_checkpoint(self, plain: dict, policy, optimiser, known: str | None) -> int:
        """Restore the newest checkpoint of the same configuration and return its steps; 0 when there is none. One of
        another configuration is dropped. `known`: the hash of the weights, for a policy that this run has trained."""
        _, newest = max(self.checkpoints.saved().items(), default=(0, None))
        if newest is None:
            return 0
        try:
            state = json.loads((newest / "state.json").read_text())
            same_data = "" in (self._data, state["data"]) or state["data"] == self._data
            if state["config"] == plain and same_data:
                metrics = [json.loads(line) for line in (newest / "metrics.jsonl").read_text().splitlines()]
                load_state(newest, policy, optimiser)
        except Exception as error:  # safetensors, json and torch each raise types of their own for a damaged file
            raise ValueError(f"the checkpoint {newest} is damaged ({error}); delete that folder to start over") from error
        if state["config"] != plain:
            self.drop_checkpoint()
            return 0
        if not same_data:
            raise ValueError(
                f"{self.shown(newest)} was trained on other data, or against another reference, than it would now go on with: "
                "bring those back, or delete that folder to start over, or give this run another name")
        moved = known is not None and weights_hash(policy) != known
        policy.version = max(state["version"], policy.version + moved)  # never one that stood for other weights of this policy
        self.metrics = metrics
        self.write_table()
        print(f"going on after step {state['step']} (delete {self.shown(newest)} to start over)", file=sys.stderr)
        return state["step"]

    def differs(self, config, policy) -> str | None:
        """What this folder holds other than a run of this configuration from this policy, in words; None for such a run."""
        return _difference(self._note(), plain_config(config), weights_hash(policy), options=self.options)

    def _note(self) -> dict:
        """What the last loop wrote about itself; nothing where there was none."""
        path = self.folder / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def begun_here(self) -> bool:
        """Whether a loop of this process has trained into the folder."""
        return str(self.folder.resolve()) in _begun

    def checkpointed(self) -> int:
        """The steps after which the newest checkpoint was kept; 0 without one."""
        return max(self.checkpoints.saved(), default=0)

    def drop_checkpoint(self) -> None:
        """The loop is done: nothing is left to go on from."""
        self.checkpoints.drop()

    # -- weights for replay --------------------------------------------------------------------------------------------

    def kept(self) -> dict[int, Path]:
        """Step -> the weights and optimiser before it that are kept for replay."""
        return self.replay_states.saved()

    def keep_for_replay(self, step: int, config, policy, optimiser) -> None:
        """Keep the state before `step`, where it is one of every `replay_every`."""
        if self.replay_every and step % self.replay_every == 0:
            self.replay_states.save(step, config, policy, optimiser)

    def _begin_replay(self, steps: int, config, policy, optimiser) -> None:
        """Drop what was kept of the steps to come, and keep the start. ValueError where what follows does not fit the disk."""
        for step, folder in self.kept().items():
            if step > steps or not steps:
                shutil.rmtree(folder)
        if not self.replay_every:
            return
        one = sum(p.numel() * p.element_size() for p in policy.model.parameters()) * 3 / 1e6  # AdamW: two moments a parameter
        number, free = (config.steps - steps) // self.replay_every + 1, shutil.disk_usage(self.folder).free / 1e6
        print(f"weights and optimiser are kept for replay every {self.replay_every} steps: {number} times up to {one:.1f} MB, "
              f"{one * number:.0f} MB in all", file=sys.stderr)
        if one * number > free:
            raise ValueError(f"replay_every={self.replay_every} keeps {one * number:.0f} MB, and the disk of {self.folder} has "
                             f"{free:.0f} MB left: keep weights more rarely")
        start = self.replay_states.folder / "policy"
        if not start.exists() or not steps:
            policy.save(start)
        if steps not in self.kept():
            self.keep_for_replay(steps, config, policy, optimiser)


# --- where policies come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The weights from which a run in this process trained a model: their hash, their file, and where they came from."""

    key: str
    file: Path
    base: str


# A model -> the folders of the runs that trained it in this process, in order, each with its start.
_starts: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Start]] = weakref.WeakKeyDictionary()
_begun: set[str] = set()  # the folders that a loop of this process has trained into


def origin(policy) -> str:
    """Where the weights of a policy come from: the folder of the run that trained it, else its name."""
    return (policy.provenance or {}).get("run") or policy.name


def provenance(config, run: Run | None, steps: int, base: str) -> dict:
    """Where a policy comes from after `steps` steps of a loop, as `Policy.save` leaves it beside the weights."""
    plain = plain_config(config)
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return {
        "run": str(run.shown(run.folder)) if run else None, "method": type(config).__name__.removesuffix("Config").lower(),
        "steps": steps, "seed": plain.get("seed"), "base": base, "config": digest[:12],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


OTHER_START = "a run that started from other weights"


def _changed(before: dict | None, now: dict | None) -> list[str]:
    """What differs, in words; nothing where one is not known."""
    if before is None or now is None:
        return []
    now = json.loads(json.dumps(now))
    return [f"{k} {before.get(k)!r} -> {now.get(k)!r}" for k in {**before, **now} if before.get(k) != now.get(k)]


def _difference(note: dict, plain: dict, start: str, data: str = "", options: dict | None = None) -> str | None:
    """What a folder with this note (empty: none) holds other than the run of this configuration and these options from this
    start on this data ("": not known), in words."""
    changed = _changed(note.get("config", {}), plain) + _changed(note.get("options"), options)
    if note and changed:
        return f"a run of another configuration ({', '.join(changed)})"
    if note and note.get("start") != start:
        return OTHER_START
    return "a run on other data, or against another reference" if data and note.get("data", data) not in ("", data) else None


def _csv(rows: list[dict], columns: list[str], header: bool = True) -> str:
    """Rows as CSV; what is absent or not a number stands empty. Row by row: all at once would keep the event loop waiting."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({name: "" if value is None or value != value else value for name, value in row.items()} for row in rows)
    return text.getvalue()
