"""A run's folder: metrics.csv, figures, a checkpoint, and where the run started; exact resume. The gate adds results.json.

Longer than most: what may be asked of a run is in one class. Every rollout (`rollout_log`) and the weights for replay
(`kept_weights`) have modules of their own."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import random
import shutil
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from grpolab.files import HELD, append_line, atomic_folder, atomic_write, lock_folder, remove_folder, unlock_folder
from grpolab.models.load import load_policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.checkpoints import (
    check_seal,
    computed_on,
    load_state,
    put_weights,
    save_state,
    seal,
    weights,
    weights_hash,
)
from grpolab.runs.figures import png
from grpolab.runs.kept_weights import KeptWeights
from grpolab.runs.rollout_log import Recorder, table
from grpolab.runs.selection import PREFIX, Selected, Selection

FORKED = "forked.json"  # in a fork's folder: the step at which it left the run in the folder above


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

    A run is one training from one start, and running its cell twice gives the same numbers. A loop notes a hash of the
    weights that it starts from, and keeps the weights themselves (start.safetensors) for as long as the process holds the
    model. Later, in the same folder:
    - a policy that this run has trained goes back to that start, or to a checkpoint of the same configuration, whatever
      was done with it since; one printed line says so;
    - any other policy is taken as it is: it goes on from a checkpoint where start and configuration are the same. Where they
      differ, what an earlier process left in the folder is moved into a folder beside it, `tiny.1`, and a line says so.
    Checkpoints exist only while a loop is unfinished: every `save_every` steps, and when it is interrupted, cancelled, left
    or fails. One that was trained on other data or against another reference is refused (that a reward is another function
    is not noticed). Another seed in the same folder is refused, and so is a second loop at the same time, in this process
    or another; the lock goes with its process, however that ends.

    The folder also keeps every rollout (`rollouts`; with `keep="none"` none), from which `lab.replay` and
    its neighbours tell later what happened; with `replay_every=n` also the weights before every n-th step (`kept_weights`).

    `sinks` are told each row's numbers too: objects with `.log(dict, step=...)`, as a run of Weights & Biases or trackio, or
    with `.add_scalar(name, value, step)`, as TensorBoard's SummaryWriter. One that raises is warned of and asked no more.

    With `select` the policy is measured on the way, and the best one is kept beside the last (`selection`): `best()`.
    """

    def __init__(self, *names: str, root: str | Path | None = None, seed: int | None = None,
                 keep: Literal["all", "none"] = "all", replay_every: int = 0, sinks: Sequence[Any] = (),
                 select: Selection | None = None):
        for name in names:
            if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
                raise ValueError(f"a run's names are plain text such as Run('04_grpo', 'tiny'), got {name!r}; a folder to put "
                                 "it in is Run(..., root=folder)")
        if not (seed is None or isinstance(seed, int) and seed >= 0):
            raise ValueError(f"a run's seed is None or an integer from 0, got {seed!r}")
        for sink in sinks:
            if not (hasattr(sink, "log") or hasattr(sink, "add_scalar")):
                raise ValueError(f"a sink has .log(dict, step=...) or .add_scalar(name, value, step), got {sink!r:.80}")
        parts = [n.replace("/", "--") for n in names] + ([f"seed-{seed}"] if seed else [])
        self.folder = Path(root or runs_folder()).joinpath(*parts)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began = time.time()
        self.metrics: list[dict] = []
        self._data = ""  # a hash of what its loop trains on
        self.base = ""  # where the policy of its loop came from
        self.recorder = Recorder(self.folder / "rollouts", keep)
        self.looks = Recorder(self.folder / "looks")  # rollouts that were sampled on the way to be looked at
        self.weights = KeptWeights(self.folder / "replay", replay_every)
        self.sinks = list(sinks)
        self.selected = Selected(self.folder, select)
        self._session: dict | None = None  # on what the present loop computes
        self._columns: tuple[str, ...] = ()  # of the metrics.csv that holds self.metrics; none while it does not

    @staticmethod
    def shown(path: Path) -> Path:
        """A path as a notebook prints it: relative to the repository where it lies inside."""
        return path.relative_to(repository()) if path.is_relative_to(repository()) else path

    def child(self, name: str) -> Run:
        """A run of its own in a folder below this one."""
        return Run(name, root=self.folder, keep=self.recorder.keep, replay_every=self.weights.every)

    def log(self, row: dict) -> dict:
        """Add one row of metrics and append it to the table. A kill leaves whole lines, or a last one without its end."""
        self.metrics.append(row)
        path = self.folder / "metrics.csv"
        if self._columns and row.keys() <= set(self._columns) and path.exists():
            append_line(path, _lines([row], self._columns))
        else:  # the first row, or one with a new column
            self._write_table()
        self._tell_sinks(row)
        return row

    def _tell_sinks(self, row: dict) -> None:
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

    def select(self, selection: Selection) -> Run:
        """From the next loop on, measure by this selection; returns the run. For a notebook, whose run begins before its policy
        is there to be measured."""
        self.selected.selection = selection
        return self

    def look(self, policy, groups: Sequence[RecordedGroup]) -> None:
        """Keep rollouts that are no part of the training, sampled after the steps done so far: for a selection's measure.
        `looks` gives them back by that number of steps, also in a kernel that was started since."""
        done = len(self.metrics)
        self.looks.rewind(done)
        self.looks.add(done, groups, policy.decode, computed_on(policy), policy.tokenizer.decode)

    async def measure(self, steps: int, last: int, policy, in_thread) -> dict:
        """What `select` measures of the policy after so many of `last` steps, as columns of a row; nothing where it is not due.
        `in_thread(policy, work)` runs work with the policy at rest."""
        if not self.selected.due(steps, last):
            return {}
        numbers = await self.selected.selection.ask(policy)
        await in_thread(policy, lambda: self.selected.take(steps, numbers, policy))
        if steps == last:  # not before: a kill while the last policy is measured must not cost the run
            self.drop_checkpoint()
        row = {PREFIX + name: value for name, value in numbers.items()}
        self._tell_sinks({"step": max(0, steps - 1)} | row)
        return row

    def measured(self):
        """What `select` measured as a DataFrame: `steps`, and a column for each number."""
        import pandas as pd

        return pd.DataFrame([{"steps": steps} | row for steps, row in sorted(self.selected.read().items())])

    def best(self, load=load_policy):
        """The policy that `select` has kept, loaded by `load(folder)` (for a reward model: RewardModel.load). ValueError where
        none was kept."""
        found = self.selected.best()
        if found is None:
            raise ValueError(f"{self.shown(self.folder)} has kept no best policy: Run(..., select=Selection(measure)) does")
        print(f"{self.shown(found['folder'])}: {found['by']} {found['value']:.4g} after {found['steps']} steps")
        return load(str(found["folder"]))

    def _write_table(self) -> None:
        self._columns = tuple(dict.fromkeys(name for row in self.metrics for name in row))
        head = dict(zip(self._columns, self._columns))
        atomic_write(self.folder / "metrics.csv", _lines([head, *self.metrics], self._columns))

    def table(self):
        """The metrics as a DataFrame, one row a step: of the loop that this Run has seen, else those in the folder."""
        import pandas as pd

        path = self.folder / "metrics.csv"
        if self.metrics or not path.exists():
            return pd.DataFrame(self.metrics)
        return pd.read_csv(path)

    def record(self, step: int, policy, groups: Sequence[RecordedGroup], engine: str = "") -> None:
        """Keep the rollouts of a step, before its update; `engine` names the sampler's."""
        self._session = self._session or computed_on(policy, engine)
        self.recorder.add(step, groups, policy.decode, self._session, policy.tokenizer.decode)

    def rollouts(self, steps: int | Iterable[int] | None = None, columns: Sequence[str] | None = None):
        """The recorded rollouts as a DataFrame, a row each, also while a loop is writing: of these steps (a number, a range;
        None: all), with these columns (None: `record.COLUMNS` and the parts of the reward).

        Only the files that hold these steps are read. A warning names what a damaged one has lost."""
        steps = [int(steps)] if hasattr(steps, "__index__") else steps
        return table(self.recorder.lines(steps, tell=warnings.warn), columns)

    def figure(self, name: str, figure) -> Path:
        """Save a matplotlib figure (or the figure of an Axes) as figures/<name>.png in the run's folder, at double
        resolution."""
        figure = getattr(figure, "figure", figure)
        return atomic_write(self.folder / "figures" / f"{name}.png", png(figure))

    def made(self) -> str:
        """One line: what lies in the folder and was written since this Run was made, figures by name."""
        files = [p for p in sorted(self.folder.iterdir()) if not p.name.startswith((".", "start."))]
        files = [p for p in files if p.name != "figures" and any(self._fresh(f) for f in (p, *p.rglob("*")))]
        figures = [p.stem for p in sorted((self.folder / "figures").glob("*.png")) if self._fresh(p)]
        names = ", ".join(p.name + "/" * p.is_dir() for p in files) or "nothing"
        return f"{self.shown(self.folder)}: {names}" + (f"; figures: {', '.join(figures)}" if figures else "")

    def _fresh(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_mtime >= self.began - 1  # some file systems count in whole seconds

    # -- one loop at a time --------------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """The right to train into this folder; RuntimeError while another loop has it. It ends with the process."""
        lock, owner = lock_folder(self.folder), self.folder / ".process"
        if lock == HELD:
            process = owner.read_text() if owner.exists() else "another"
            who = "another loop of this process is" if process == str(os.getpid()) else f"process {process} is"
            raise RuntimeError(
                f"{self.shown(self.folder)} is in use: {who} training into it. Let that end (a generator by its aclose()), or "
                "give this run a folder of its own: another name, or Run(..., seed=...)"
            )
        try:
            owner.write_text(str(os.getpid()))
            yield
        finally:
            unlock_folder(lock)

    # -- where it started, and checkpoints -----------------------------------------------------------------------------

    def begin(self, config, policy, optimiser, data: str = "") -> int:
        """Bring policy, optimiser and metrics to where this run stands (see the class), and return the steps done.

        `data` is a hash of what the loop trains on, "" where it is not known. Raises ValueError for a damaged checkpoint or
        one that was trained on other data, and where the folder holds a run of another seed."""
        self._clear_partial()
        note, plain, key = self._note(), plain_config(config), weights_hash(policy)
        self._refuse_another_seed(note, plain)
        trained, name = _trained_by.setdefault(policy.model, {}), str(self.folder.resolve())
        if name not in _begun and (other := _difference(note, plain, key)):
            self._set_aside(other)
            note = {}
        _begun.add(name)
        mine = name in trained and trained[name] == note.get("start") and self._start.exists()
        if not mine:
            if name in trained and trained[name] != key:
                print(f"the start of {self.shown(self.folder)} is gone; {policy.name} is trained on from where it is")
            elif note and note["start"] != key:
                print(f"{self.shown(self.folder)} starts over, from other weights than before")
            if note.get("start") != key:
                self.drop_checkpoint()
            self._keep_start(policy)
            note = {"start": key, "base": origin(policy)}
        self.metrics, self._columns, self.base, self._data, self._session = [], (), note["base"], data, None
        steps = self._load_checkpoint(plain, policy, optimiser, mine)
        self.selected.begin(steps)
        if mine and not steps and note["start"] != key:
            put_weights(policy, self._start)
            policy.version += 1
            print(f"{policy.name} goes back to the weights from which {self.shown(self.folder)} started")
        atomic_write(self.folder / "run.json", json.dumps(note | {"config": plain, "data": data}, indent=1) + "\n")
        self.recorder.rewind(steps)
        self.looks.rewind(steps + 1 if steps else 0)
        self.weights.begin(steps, plain, policy, optimiser)
        for later in list(trained)[list(trained).index(name) :] if name in trained else ():
            del trained[later]
        trained[name] = note["start"]
        return steps

    def _set_aside(self, what: str) -> None:
        """Move what an earlier process left in the folder to one beside it; runs in folders below stay."""
        beside = (self.folder.with_name(f"{self.folder.name}.{n}") for n in count(1))
        target = next(folder for folder in beside if not folder.exists())
        earlier = [p for p in self.folder.iterdir() if not (p.name.startswith(".") or (p / "run.json").exists()
                                                            or any(self._fresh(f) for f in (p, *p.rglob("*"))))]
        if earlier:
            target.mkdir()
            for path in earlier:
                os.rename(path, target / path.name)
            print(f"{self.shown(self.folder)} held {what}: it is now {self.shown(target)}")

    @property
    def _start(self) -> Path:
        return self.folder / "start.safetensors"

    def _note(self) -> dict:
        """What the last loop wrote about itself; nothing where there was none."""
        try:
            return json.loads((self.folder / "run.json").read_text())
        except (OSError, ValueError):
            return {}

    def _refuse_another_seed(self, note: dict, plain: dict) -> None:
        old, new = note.get("config", {}).get("seed"), plain.get("seed")
        if None not in (old, new) and old != new:
            raise ValueError(
                f"{self.shown(self.folder)} holds the run of seed {old}, and this one has seed {new}: give it a folder of its "
                f"own with Run(..., seed={new}), or delete that one"
            )

    def _keep_start(self, policy) -> None:
        """The weights as they are, until the model or the process goes: only then can a policy have moved away from them."""
        from safetensors.torch import save_file

        partial = self.folder / ".start.safetensors.partial"
        save_file(weights(policy), partial)
        os.replace(partial, self._start)
        weakref.finalize(policy.model, _forget, self._start, os.getpid(), self._start.stat().st_ino)

    def save_checkpoint(self, step: int, config, policy, optimiser) -> Path:
        """Everything the loop needs to go on after `step` steps, under a name of its own; older ones are then dropped.

        What a loop draws is a function of (seed, step), so parameters, optimiser and metrics are all there is to keep.
        """
        self.recorder.sync()
        self.looks.sync()
        target = self.folder / f"checkpoint-{step:08d}"
        with atomic_folder(target) as folder:
            save_state(folder, policy, optimiser, step=step, version=policy.version, config=plain_config(config),
                       data=self._data)
            with open(folder / "metrics.jsonl", "w") as file:  # row by row: all at once would keep the event loop waiting
                file.writelines(json.dumps(row) + "\n" for row in self.metrics)
            seal(folder)
        self._drop_checkpoints(keep=target)
        return target

    def _load_checkpoint(self, plain: dict, policy, optimiser, mine: bool) -> int:
        """Restore the newest checkpoint of the same configuration and return its steps; 0 when there is none. One of
        another configuration is dropped."""
        newest = max(self._checkpoints(), default=None)
        if newest is None:
            return 0
        try:
            check_seal(newest)
            state = json.loads((newest / "state.json").read_text())
            if state["config"] != plain:
                self.drop_checkpoint()
                return 0
            if same_data := "" in (self._data, state["data"]) or state["data"] == self._data:
                metrics = [json.loads(line) for line in (newest / "metrics.jsonl").read_text().splitlines()]
                load_state(newest, policy, optimiser)
        except Exception as error:  # safetensors, json and torch each raise types of their own for a damaged file
            raise ValueError(f"the checkpoint {newest} is damaged ({error}); delete that folder to start over") from error
        if not same_data:
            raise ValueError(
                f"{self.shown(newest)} was trained on other data, or against another reference, than it would now go on with: "
                "bring those back, or delete that folder to start over, or give this run another name")
        policy.version = max(state["version"], policy.version + mine)  # never one that stood for other weights of this policy
        self.metrics = metrics
        self._write_table()
        if (self.folder / FORKED).exists():
            print(f"{self.shown(self.folder)} begins after step {state['step']}, where it was forked")
        else:
            print(f"going on after step {state['step']} of an interrupted run (delete {self.shown(newest)} to start over)")
        return state["step"]

    def keep_for_replay(self, step: int, config, policy, optimiser) -> None:
        self.weights.keep(step, plain_config(config), policy, optimiser)

    def kept(self) -> dict[int, Path]:
        """Step -> the weights and optimiser before it that are kept for replay."""
        return self.weights.kept()

    def checkpointed(self) -> int:
        """The steps after which the newest checkpoint was kept; 0 without one."""
        return max((int(d.name.removeprefix("checkpoint-")) for d in self._checkpoints()), default=0)

    def drop_checkpoint(self) -> None:
        """The loop is done: nothing is left to go on from."""
        self._drop_checkpoints(keep=None)

    def _checkpoints(self) -> list[Path]:
        return [d for d in self.folder.glob("checkpoint-*") if d.name.removeprefix("checkpoint-").isdigit()]

    def _drop_checkpoints(self, keep: Path | None) -> None:
        for folder in self._checkpoints():
            if folder != keep:
                remove_folder(folder)

    def _clear_partial(self) -> None:
        """Remove what a killed process was writing."""
        for left in self.folder.glob(".*.partial"):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


# --- where policies come from -----------------------------------------------------------------------------------------

# A model -> the folders of the runs that trained it in this process, in order, each with the hash of its start.
_trained_by: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


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


def _forget(path: Path, process: int, inode: int) -> None:
    """Delete a start whose model is gone, unless a fork asks or the file is another's by now."""
    with suppress(FileNotFoundError):
        if os.getpid() == process and path.stat().st_ino == inode:
            path.unlink()


def _difference(note: dict, plain: dict, start: str) -> str | None:
    """What a folder with this note (empty: none) holds other than the run of this configuration from this start, in words."""
    before = note.get("config", {})
    changed = [f"{k} {before.get(k)!r} -> {plain.get(k)!r}" for k in {**before, **plain} if before.get(k) != plain.get(k)]
    if note and changed:
        return f"a run of another configuration ({', '.join(changed[:4])}{', ...' * (len(changed) > 4)})"
    return "a run that started from other weights" if note and note.get("start") != start else None


def plain_config(config) -> dict:
    return json.loads(json.dumps(asdict(config) if is_dataclass(config) else config, default=str))


def _lines(rows: list[dict], columns: tuple[str, ...]) -> str:
    """Rows as CSV; what is absent or not a number stands empty."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writerows({k: "" if v is None or v != v else v for k, v in row.items()} for row in rows)
    return text.getvalue()
