"""What a checkpoint holds: a model's parameters and an optimiser's state as tensors by name, and hashes of
the former and of the data. And what the bits of a computation depend on beside them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from numbers import Number
from pathlib import Path

import safetensors.torch
import torch


def weights_hash(policy) -> str:
    """A hash of all parameters by name."""
    digest = hashlib.sha256()
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


def weights(policy) -> dict[str, torch.Tensor]:
    """The parameters that a loop trains, by name."""
    return {name: p.detach().cpu().contiguous() for name, p in policy.model.named_parameters() if p.requires_grad}


def put_weights(policy, path: Path) -> None:
    """The parameters that a file of `weights` holds, back into the policy."""
    saved = safetensors.torch.load_file(path)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in saved or parameter.requires_grad:
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
    slots = {int(i): values for i, values in json.loads(json.dumps(scalars["slots"])).items()}
    for key, value in tensors.items():
        i, *path, name = key.split("/")
        place = slots[int(i)]
        for part in path:
            place = place[part]
        place[name] = value
    return {"state": slots, "param_groups": scalars["param_groups"]}


SEAL = "sha256.json"


def seal(folder: Path) -> None:
    """Note the hash of every file in a folder that is whole now."""
    (folder / SEAL).write_text(json.dumps({p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.name != SEAL}))


def check_seal(folder: Path) -> None:
    """ValueError for a file that is not as it was when the folder was sealed. A folder without a seal is taken as it is."""
    if not (folder / SEAL).exists():
        return
    try:
        noted = json.loads((folder / SEAL).read_text())
        other = [name for name, digest in noted.items() if _sha256(folder / name) != digest]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{SEAL} or what it names cannot be read: {error}") from error
    if other:
        raise ValueError(f"{', '.join(other)}: not the bytes that were written")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_state(folder: Path, policy, optimiser, **more) -> None:
    """Parameters, optimiser and `more` (JSON) into a folder, for `load_state`."""
    safetensors.torch.save_file(weights(policy), folder / "model.safetensors")
    tensors, scalars = split(optimiser.state_dict())
    safetensors.torch.save_file(tensors, folder / "optimiser.safetensors")
    (folder / "state.json").write_text(json.dumps(more | {"optimiser": scalars}))


def load_state(folder: Path, policy, optimiser) -> dict:
    """What `save_state` left, back into the policy and the optimiser; returns `more`."""
    state = json.loads((folder / "state.json").read_text())
    optimiser.load_state_dict(join(safetensors.torch.load_file(folder / "optimiser.safetensors"), state["optimiser"]))
    put_weights(policy, folder / "model.safetensors")
    return state


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
