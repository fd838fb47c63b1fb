"""Low-rank adapters through peft (extra `grpolab[lora]`): small matrices beside frozen weights, of which alone a loop trains.

LoRA (Hu et al. 2021, arXiv 2106.09685): a projection computes W x + s B A x with W (o, i) frozen, A (r, i), B (o, r) and
s = alpha / r; B starts at zero, so the policy starts as it was. The modules are peft's, inside the model, whose class stays.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # names that peft reads from the hub
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's own names of its files
PREFIX = "base_model.model."  # of tensors' names in such a file: a PeftModel holds the model there
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class LoRA:
    """An adapter: its `rank`, its scale `alpha` / rank, and the names of the projections that it stands beside (`target`).
    `seed` draws A. `dropout` is the share of its inputs that an update leaves out (`dropping`): A x becomes A dropout(x).
    Raises ValueError for a rank or scale that is not positive, or a share that is none."""

    rank: int = 8
    alpha: float = 16.0
    target: tuple[str, ...] = ATTENTION
    seed: int = 0
    dropout: float = 0.0

    def __post_init__(self):
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is a share from 0 to below 1, got {self.dropout}")
        if self.rank < 1 or not self.alpha > 0 or not self.target or isinstance(self.target, str):
            raise ValueError(f"rank and alpha are positive and target holds names of projections, got {self}")


def _peft():
    # peft imports bitsandbytes where it is installed, which warns on some CPUs about a 4-bit kernel that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError("adapters need peft: pip install 'grpolab[lora]'") from error


def inject(model: nn.Module, adapter: LoRA, base: str) -> None:
    """Put a fresh adapter into the model and freeze everything else; `base` names the model in what is saved.

    Raises ValueError for targets that are no linear projections of the model."""
    if not isinstance(adapter, LoRA):
        raise TypeError(f"an adapter is a LoRA(rank=..., alpha=..., target=...), got {adapter!r:.80}")
    peft = _peft()
    head = model.get_output_embeddings()  # often the embedding too, and what losses read as a plain weight
    linear = {name.rpartition(".")[2]: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if missing := sorted(set(adapter.target) - set(linear)):
        raise ValueError(f"the model has no projections {missing} to adapt; it has {sorted(linear)}")
    if small := [name for name in adapter.target if adapter.rank > min(linear[name].weight.shape)]:
        raise ValueError(f"rank {adapter.rank} is more than the projection {small[0]!r} of shape "
                         f"{tuple(linear[small[0]].weight.shape)} has: lower it, or train that projection whole")
    config = peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.target),
                             lora_dropout=adapter.dropout, task_type="CAUSAL_LM",
                             base_model_name_or_path=HUB_IDS.get(base, base))
    with torch.random.fork_rng():
        torch.manual_seed(adapter.seed)
        _put(peft, config, model)


def _put(peft, config, model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.requires_grad_(False)
    with torch.random.fork_rng():  # of A, which is drawn and then written over where a saved adapter comes
        peft.inject_adapter_in_model(config, model)
    for layer in layers(model):
        for name, p in layer.named_parameters():
            if "lora_" in name:  # in the model's dtype, as one forward needs them
                p.data = p.data.to(dtype)
    model.peft_config = {"default": config}  # where peft's own functions look for it


def layers(model: nn.Module) -> list[nn.Module]:
    """The adapted projections of a model."""
    return [m for m in model.modules() if is_adapted(m)]


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is peft's LoRA beside a plain projection, which computes W x + s B A x and nothing else."""
    if not type(module).__module__.startswith("peft.tuners.lora"):
        return False
    kinds = {name.split(".")[0] for name, _ in module.named_parameters()}
    biased = any(b.bias is not None for b in module.lora_B.values()) if hasattr(module, "lora_B") else True
    plain = kinds <= {"base_layer", "lora_A", "lora_B"} and not biased and not getattr(module, "lora_variant", None)
    return plain and type(module.get_base_layer()) is nn.Linear


def effective_weight(module: nn.Module) -> torch.Tensor:
    """The weight (o, i) by which a projection multiplies: its own, and with an adapter W + s B A."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    weight = module.get_base_layer().weight.detach()
    if module.disable_adapters or module.merged:
        return weight
    return weight + sum(module.get_delta_weight(name).detach() for name in module.active_adapters)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapter, for the while."""
    on = [layer for layer in layers(model) if not layer.disable_adapters]
    try:
        for layer in on:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in on:
            layer.enable_adapters(True)


def dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The dropout of the adapter at each projection; none where nothing is left out."""
    return [d for layer in layers(model) for d in layer.lora_dropout.values() if isinstance(d, nn.Dropout) and d.p]


@contextmanager
def dropping(model: nn.Module, on: bool = True) -> Iterator[None]:
    """The adapter with its dropout, or without it, for the while. It has none but in an update."""
    modes = [(d, d.training) for d in dropouts(model)]
    try:
        for d, _ in modes:
            d.train(on)
        yield
    finally:
        for d, mode in modes:
            d.train(mode)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return _peft().get_peft_model_state_dict(model, save_embedding_layers=False)


def save(model: nn.Module, folder: Path) -> None:
    """peft's two files, which `PeftModel.from_pretrained(base, folder)` reads."""
    tensors = {PREFIX + name: t.detach().cpu().contiguous() for name, t in _state(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(str(folder))


def is_base(model: nn.Module, folder: Path) -> bool:
    """Whether the folder is the one that the adapter's model was loaded from."""
    return Path(model.peft_config["default"].base_model_name_or_path or "").expanduser().resolve() == folder.resolve()


def base_of(folder: Path) -> str:
    """The name of the model that a saved adapter stands beside; ValueError where it is not said."""
    try:
        base = str(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
        return next((name for name, hub_id in HUB_IDS.items() if hub_id == base), base)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} does not say which model the adapter is for (base_model_name_or_path)") from error


def exchange(model: nn.Module, folder: Path) -> None:
    """Put a saved adapter in the place of the one that the model has, if any. ValueError, by name, for tensors that are
    missing, unexpected or of another shape, and the model is as it was. An adapter of the same form only has its numbers
    written over, so that no module changes."""
    peft, (config, saved) = _peft(), _read(folder)
    before = (model.peft_config["default"], {n: t.clone() for n, t in _state(model).items()}) if layers(model) else None
    if before and _form(before[0]) == _form(config):
        return _fill(model, saved, folder)
    training = model.training
    take_out(model)
    try:
        _put(peft, config, model)
        _fill(model, saved, folder)
    except Exception as error:  # peft raises types of its own for targets that the model lacks
        take_out(model)
        if before:
            _put(peft, before[0], model)
            peft.set_peft_model_state_dict(model, before[1])
        raise error if isinstance(error, ValueError) else ValueError(f"the adapter {folder} does not fit: {error}") from error
    finally:
        model.train(training)


def _read(folder: Path):
    """peft's configuration of a saved adapter and its tensors."""
    try:
        config = _peft().LoraConfig.from_pretrained(str(folder))
        saved = {name.removeprefix(PREFIX): t for name, t in load_file(folder / WEIGHTS).items()}
    except ImportError:
        raise
    except Exception as error:  # peft and safetensors raise types of their own
        raise ValueError(f"{folder} holds no readable adapter: {error}") from error
    more = [name for name in ("use_dora", "lora_bias", "modules_to_save") if getattr(config, name, None)]
    if more or not isinstance(config, _peft().LoraConfig):
        raise ValueError(f"{folder} is more than LoRA beside projections ({', '.join(more) or config.peft_type}): merge it "
                         "with peft (merge_and_unload) and load the merged model")
    config.inference_mode = False
    return config, saved


def _form(config) -> dict:
    """What decides the modules and scales of an adapter."""
    about = ("inference_mode", "base_model_name_or_path", "revision", "peft_version", "task_type")
    return {k: v for k, v in config.to_dict().items() if k not in about}


def _fill(model: nn.Module, saved: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = _state(model)
    wrong = {"lacks": wanted.keys() - saved.keys(), "also holds": saved.keys() - wanted.keys(),
             "has in another shape": {n for n in wanted.keys() & saved.keys() if wanted[n].shape != saved[n].shape}}
    if parts := [f"{verb} {sorted(names)[:4]}" for verb, names in wrong.items() if names]:
        raise ValueError(f"the adapter {folder} is not for this model: of tensors, it {'; it '.join(parts)}. Load it with the "
                         "model that it was trained on")
    _peft().set_peft_model_state_dict(model, saved)


def take_out(model: nn.Module) -> None:
    """Leave the projections as they are without their adapter; everything is trainable again."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_adapted(child):
                setattr(module, name, child.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(True)


def merge(model: nn.Module) -> None:
    """Write W + s B A into the weights and take the adapter out; everything is trainable again."""
    for layer in layers(model):
        layer.merge()
    take_out(model)
