"""Weights kept for replay: parameters and optimiser before every n-th step of a run, from which any step can be done again."""

from __future__ import annotations

import shutil
from pathlib import Path

from grpolab.files import atomic_folder
from grpolab.runs.checkpoints import save_state, seal, weights_hash


class KeptWeights:
    """In `folder`, one of its own for each of every `every` steps (0: none), and `policy`, the model where the run began."""

    def __init__(self, folder: Path, every: int = 0):
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"replay_every must be 0 (keep no weights) or a number of steps, got {every!r}")
        self.folder, self.every = folder, every

    def kept(self) -> dict[int, Path]:
        """Step -> the folder with the weights and the optimiser before it."""
        folders = [d for d in self.folder.glob("step-*") if d.name.removeprefix("step-").isdigit()]
        return {int(d.name.removeprefix("step-")): d for d in sorted(folders)}

    def keep(self, step: int, plain: dict, policy, optimiser) -> None:
        """Keep the state before `step`, where it is one of every so many; `plain` is the configuration as JSON."""
        if self.every and step % self.every == 0:
            with atomic_folder(self.folder / f"step-{step:08d}") as folder:
                save_state(folder, policy, optimiser, step=step, version=policy.version, config=plain,
                           weights=weights_hash(policy))
                seal(folder)

    def begin(self, steps: int, plain: dict, policy, optimiser) -> None:
        """As a loop begins after so many steps: drop what was kept of those to come, tell what is going to be kept and how
        large it is, keep the start. ValueError where it does not fit the disk."""
        for step, folder in self.kept().items():
            if step > steps or not steps:
                shutil.rmtree(folder, ignore_errors=True)
        if not self.every or "steps" not in plain:
            return
        one = sum(p.numel() * p.element_size() for p in policy.model.parameters()) * 3  # AdamW: two moments a parameter
        number, free = plain["steps"] // self.every - (steps - 1) // self.every, shutil.disk_usage(self.folder.parent).free
        if one * number > free:
            raise ValueError(f"replay_every={self.every} keeps {number} times up to {one / 1e6:.0f} MB, and the disk of "
                             f"{self.folder} has {free / 1e6:.0f} MB left: keep them more rarely")
        print(f"weights and optimiser are kept for replay every {self.every} steps: {number} times up to {one / 1e6:.1f} MB, "
              f"{one * number / 1e6:.0f} MB in all")
        if not (self.folder / "policy").exists() or not steps:
            seal(policy.save(self.folder / "policy"))
        if steps not in self.kept():
            self.keep(steps, plain, policy, optimiser)
