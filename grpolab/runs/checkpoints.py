"""Saved states of a run: a model's parameters and an optimiser's state by name, in one folder a step; hashes of weights and
data; and what the bits of a computation depend on beside them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from numbers import Number
from pathlib import Path

import safetensors.torch
import torch

from grpolab.files import atomic_folder, remove_folder


class Checkpoints:
    """The saved states `<name>-<step>` in a folder: what a loop needs to go on after so many steps. What it draws is a
    function of (seed, step), so parameters and optimiser are all there is; and `rows` of metrics, and `more` (JSON)."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name

    def saved(self) -> dict[int, Path]:
        """Steps done -> folder, in order."""
        folders = sorted(self.folder.glob(f"{self.name}-" + "[0-9]" * 8))
        return {int(folder.name[-8:]): folder for folder in folders}

    def save(self, step: int, config, policy, optimiser, rows: Iterable[dict] = (), **more) -> Path:
        target = self.folder / f"{self.name}-{step:08d}"
        with atomic_folder(target) as folder:
            safetensors.torch.save_file(weights(policy), folder / "model.safetensors")
            tensors, scalars = split(optimiser.state_dict())
            safetensors.torch.save_file(tensors, folder / "optimiser.safetensors")
            state = {"step": step, "version": policy.version, "loss_scale": policy.loss_scale,
                     "config": plain_config(config), "optimiser": scalars}
            (folder / "state.json").write_text(json.dumps(more | state))
            with open(folder / "metrics.jsonl", "w") as file:  # row by row: all at once would keep the event loop waiting
                file.writelines(json.dumps(row, default=float) + "\n" for row in rows)
        return target

    def drop(self, keep: Path | None = None) -> None:
        """Remove all, or all but one."""
        for folder in self.saved().values():
            if folder != keep:
                remove_folder(folder)


def load_state(folder: Path, policy, optimiser) -> dict:
    """Put a saved state back into the policy and the optimiser; returns what is saved beside them."""
    state = json.loads((folder / "state.json").read_text())
    optimiser.load_state_dict(join(safetensors.torch.load_file(folder / "optimiser.safetensors"), state["optimiser"]))
    put_weights(policy, folder / "model.safetensors")
    policy.loss_scale = state.get("loss_scale", 1.0)
    return state


def weights(policy) -> dict[str, torch.Tensor]:
    """The parameters that a loop trains, by name."""
    return {name: p.detach().cpu().contiguous() for name, p in policy.model.named_parameters() if p.requires_grad}


def put_weights(policy, path: Path) -> None:
    """The parameters that a file of `weights` holds, back into the policy."""
    saved = safetensors.torch.load_file(path)
    own = {name: p for name, p in policy.model.named_parameters() if name in saved or p.requires_grad}
    if missing := own.keys() - saved.keys():
        raise ValueError(f"{path} lacks {min(missing)!r}, which {policy.name!r} now trains: since it was written parameters "
                         "were unfrozen, or an adapter put in or merged. Load the policy anew, or give this run another name")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def split(state: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """An optimiser's state dict -> tensors by the path of their keys, and the rest as JSON with None in their places."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value, path):
        if isinstance(value, torch.Tensor):
            tensors["/".join(path)] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return None
        return {str(k): walk(v, (*path, str(k))) for k, v in value.items()} if isinstance(value, dict) else value

    return tensors, {"slots": walk(state["state"], ()), "param_groups": state["param_groups"]}


def join(tensors: dict[str, torch.Tensor], scalars: dict) -> dict:
    """The inverse of `split`."""
    slots = {int(i): values for i, values in json.loads(json.dumps(scalars["slots"])).items()}
    for key, value in tensors.items():
        i, *path, name = key.split("/")
        place = slots[int(i)]
        for part in path:
            place = place[part]
        place[name] = value
    return {"state": slots, "param_groups": scalars["param_groups"]}


def plain_config(config) -> dict:
    """A configuration as JSON."""
    return json.loads(json.dumps(asdict(config) if is_dataclass(config) else config, default=str))


# --- hashes, and the machine ------------------------------------------------------------------------------------------


def weights_hash(policy) -> str:
    """A hash of all parameters by name, and of an adapter's scale and dropout."""
    digest = hashlib.sha256()
    for adapter in getattr(policy.model, "peft_config", {}).values():
        digest.update(f"{adapter.lora_alpha} {adapter.lora_dropout}".encode())
    for name, p in policy.model.named_parameters():
        p = p.detach().cpu().contiguous()
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
        digest.update(p.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def data_hash(items: Iterable, reference=None) -> str:
    """A hash of what a loop trains on, in its order: JSON values, dataclasses, tensors and plain objects by their content;
    and of the weights of the policy that it is measured from, where there is one."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, default=_content, skipkeys=True).encode() + b"\n")
    digest.update(weights_hash(reference).encode() if reference else b"")
    return digest.hexdigest()


def _content(x):
    """What JSON can hold of a value. Never its address, which is another in every process."""
    if is_dataclass(x):
        return {f.name: getattr(x, f.name) for f in fields(x)}
    if hasattr(x, "tolist"):
        return x.tolist()
    return vars(x) if hasattr(x, "__dict__") else f"{type(x).__name__} {str(x) if isinstance(x, bytes | Number) else ''}"


def computed_on(policy, engine: str = "") -> dict:
    """What the bits of a rollout depend on beside weights, prompt and seed: versions, processor, threads."""
    return {
        "python": platform.python_version(), "grpolab": _version("grpolab"), "torch": torch.__version__,
        "transformers": _version("transformers"), "system": platform.system(), "processor": processor(),
        "device": torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else policy.device.type,
        "dtype": str(policy.dtype), "threads": torch.get_num_threads(), "policy": policy.name, "engine": engine,
        "training": any(m.training for m in policy.model.modules()),  # then the update had its dropout
    }


@cache
def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
