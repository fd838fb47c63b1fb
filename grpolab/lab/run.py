"""A run's folder: metrics.csv, figures and a checkpoint, written atomically; exact resume. The gate adds results.json."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import asdict, is_dataclass
from pathlib import Path

import torch

from grpolab.files import atomic_folder, atomic_write


def repository() -> Path:
    """The nearest folder at or above the working directory that holds notebooks/, else the working directory."""
    here = Path.cwd()
    return next((d for d in (here, *here.parents) if (d / "notebooks").is_dir()), here)


def runs_folder() -> Path:
    return repository() / "runs"


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators; grpolab's own randomness is seeded by its configs."""
    random.seed(seed)
    torch.manual_seed(seed)


class Run:
    """Where one training run leaves what it did: `Run("04_grpo", "tiny")` is the folder runs/04_grpo/tiny.

    A checkpoint exists only while a loop is unfinished: a loop that starts with the same configuration goes on from it,
    and drops it at its end. Rows of metrics are written as they come.
    """

    def __init__(self, *names: str, root: str | Path | None = None):
        self.folder = Path(root or runs_folder()).joinpath(*(n.replace("/", "--") for n in names))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.metrics: list[dict] = []

    @staticmethod
    def shown(path: Path) -> Path:
        """A path as a notebook prints it: relative to the repository where it lies inside."""
        return path.relative_to(repository()) if path.is_relative_to(repository()) else path

    def child(self, name: str) -> Run:
        """A run of its own in a folder below this one."""
        return Run(name, root=self.folder)

    def log(self, row: dict) -> dict:
        """Add one row of metrics and write the table."""
        self.metrics.append(row)
        atomic_write(self.folder / "metrics.csv", self.table().to_csv(index=False))
        return row

    def table(self):
        """The metrics as a DataFrame, one row a step."""
        import pandas as pd

        return pd.DataFrame(self.metrics)

    def figure(self, name: str, figure) -> Path:
        """Save a matplotlib figure (or the figure of an Axes) as figures/<name>.png in the run's folder."""
        from io import BytesIO

        figure = getattr(figure, "figure", figure)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
        return atomic_write(self.folder / "figures" / f"{name}.png", buffer.getvalue())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, config, policy, optimizer) -> Path:
        """Everything the loop needs to go on after `step` steps, under a name of its own; older ones are then dropped.

        What a loop draws is a function of (seed, step), so parameters, optimiser and metrics are all there is to keep.
        """
        from safetensors.torch import save_file

        target = self.folder / f"checkpoint-{step:08d}"
        shutil.rmtree(target, ignore_errors=True)
        with atomic_folder(target) as folder:
            weights = {k: v.detach().cpu().contiguous() for k, v in policy.model.named_parameters()}
            save_file(weights, folder / "model.safetensors")
            tensors, scalars = _split(optimizer.state_dict())
            save_file(tensors, folder / "optimizer.safetensors")
            state = {"step": step, "version": policy.version, "config": _plain_config(config)}
            state |= {"optimizer": scalars, "metrics": self.metrics}
            (folder / "state.json").write_text(json.dumps(state))
        self._drop_checkpoints(keep=target)
        return target

    def load_checkpoint(self, config, policy, optimizer) -> int:
        """Go on from the newest checkpoint of the same configuration: restores policy, optimiser and metrics and returns
        the number of steps done; 0 when there is none. One of another configuration is dropped. Raises ValueError for a
        damaged one."""
        from safetensors.torch import load_file

        self._clear_partial()
        newest = max(self._checkpoints(), default=None)
        if newest is None:
            return 0
        try:
            state = json.loads((newest / "state.json").read_text())
            if state["config"] != _plain_config(config):
                self.drop_checkpoint()
                return 0
            weights = load_file(newest / "model.safetensors")
            tensors = load_file(newest / "optimizer.safetensors")
            optimizer.load_state_dict(_join(tensors, state["optimizer"]))
            with torch.no_grad():
                for name, parameter in policy.model.named_parameters():
                    parameter.copy_(weights[name])
            policy.version = state["version"]
        except Exception as error:  # safetensors, json and torch each raise types of their own for a damaged file
            raise ValueError(f"the checkpoint {newest} is damaged ({error}); delete that folder to start over") from error
        self.metrics = state["metrics"]
        print(f"going on after step {state['step']} of an interrupted run (delete {self.shown(newest)} to start over)")
        return state["step"]

    def drop_checkpoint(self) -> None:
        """The loop is done: nothing is left to go on from."""
        self._drop_checkpoints(keep=None)

    def _checkpoints(self) -> list[Path]:
        return [d for d in self.folder.glob("checkpoint-*") if d.name.removeprefix("checkpoint-").isdigit()]

    def _drop_checkpoints(self, keep: Path | None) -> None:
        for folder in self._checkpoints():
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _clear_partial(self) -> None:
        """Remove what a killed process was writing."""
        for left in self.folder.glob(".*.partial"):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _plain_config(config) -> dict:
    return json.loads(json.dumps(asdict(config) if is_dataclass(config) else config, default=str))


def _split(state: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """An optimiser's state dict -> tensors by the path of their keys, and the rest as JSON with None in their places."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value, path):
        if isinstance(value, torch.Tensor):
            tensors["/".join(path)] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return None
        return {str(k): walk(v, (*path, str(k))) for k, v in value.items()} if isinstance(value, dict) else value

    return tensors, {"slots": walk(state["state"], ()), "param_groups": state["param_groups"]}


def _join(tensors: dict[str, torch.Tensor], scalars: dict) -> dict:
    slots = {int(i): values for i, values in json.loads(json.dumps(scalars["slots"])).items()}
    for key, value in tensors.items():
        i, *path, name = key.split("/")
        place = slots[int(i)]
        for part in path:
            place = place[part]
        place[name] = value
    return {"state": slots, "param_groups": scalars["param_groups"]}
