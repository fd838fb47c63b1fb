"""`grpolab replay`."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from grpolab.cli import UsageError
from grpolab.lab.replay import bundle, replay, replay_bundle
from grpolab.models.load import load_policy
from grpolab.runs.run import Run


def is_bundle(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return "bundle.json" in file.namelist()


@dataclass(frozen=True)
class Replay:
    """Generate recorded rollouts again and compare them in every bit. Exits with 0 where all agree, else with 1."""

    source: Annotated[Positional[Path], arg(metavar="RUN")]  # a run's folder, or the file of a bundle
    steps: Annotated[Positional[tuple[int, ...]], arg(metavar="[STEP ...]")] = ()  # steps of the run; a bundle holds one
    group: int | None = None  # only this group of the step
    rollout: int | None = None  # only this rollout of the group, or of every group
    reference: str | None = None  # the reference model of a run with a KL penalty, where it is not the run's own start
    bundle: Path | None = None  # write the step to this file, so that it can be replayed elsewhere

    def run(self) -> int:
        replays = self.from_bundle() if self.source.is_file() else self.from_run()
        print("\n".join(map(str, replays)))
        return 0 if all(r.equal for r in replays) else 1

    def from_bundle(self) -> list:
        if self.steps or self.bundle or self.reference:
            raise UsageError("STEP, --bundle and --reference are for a run's folder; a bundle holds one step: leave them out")
        return [replay_bundle(self.source, self.group, self.rollout)]

    def from_run(self) -> list:
        if not (self.source / "run.json").is_file():
            raise ValueError(f"{self.source} is neither a run's folder (with run.json) nor the file of a bundle")
        if not self.steps or self.bundle and len(self.steps) > 1:
            wanted = "one step" if self.bundle else "the steps"
            raise UsageError(f"name {wanted} of {self.source}, e.g. grpolab replay {self.source} 12")
        if self.bundle and self.bundle.exists() and not is_bundle(self.bundle):
            raise UsageError(f"--bundle {self.bundle} holds something else, which would be written over: name another file")
        if self.bundle and (self.group is not None or self.rollout is not None):
            raise UsageError("--group and --rollout choose what to compare, and --bundle writes a whole step: leave them out")
        run, reference = Run(root=self.source), self.reference and load_policy(self.reference)
        if self.bundle:
            print(bundle(run, self.steps[0], self.bundle, reference=reference))
            return []
        return [replay(run, step, self.group, self.rollout, reference=reference) for step in self.steps]
