"""load_policy(name): the embedded base model, SmolLM2-135M-Instruct, or any Hugging Face causal LM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpolab.chat import CHAT_TEMPLATE
from grpolab.files import MODEL_FILES, atomic_folder, data_path
from grpolab.models import lora
from grpolab.models.lora import LoRA
from grpolab.models.smollm2 import SMOLLM2, refuse_gaps, smollm2_source
from grpolab.sync import MODEL_LOADING, FairLock

PROVENANCE = "provenance.json"  # beside saved weights: which run made them, by which method, from what
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a torch module
NAMES = {"tiny": "the embedded base model (0.8 M parameters, characters)", "smollm2-135m": SMOLLM2}


@dataclass
class Policy:
    """A causal LM and what is needed to run it. `version` counts the optimiser steps taken on it: whoever changes the
    parameters adds one, and whoever keeps a copy of them compares. Whoever computes with the model in a thread holds
    `lock`, so that a training step and a sampling step never overlap; it goes to those who wait in order of arrival.
    `provenance` says where the weights come from: the last training loop sets it, else it is what was found at loading.
    `loss_scale` is what losses are multiplied by before their backward; it is 1 but where float16 is trained."""

    model: Any
    tokenizer: Any
    name: str
    eos_ids: tuple[int, ...]
    version: int = 0
    loss_scale: float = 1.0
    lock: FairLock = field(default_factory=FairLock, repr=False)
    provenance: dict | None = field(default=None, repr=False)  # of the last training loop, or of provenance.json
    bare: bool = False  # its adapter is switched off while it computes (`without_adapter`)
    verified: tuple | None = field(default=None, init=False, repr=False, compare=False)  # see `decode.snapshot.verified_of`

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together; see `steady_context`."""
        return steady_context(self.model.config)

    @property
    def pad_id(self) -> int:
        """What fills the right of short rows; never read, since masks come from lengths."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.eos_ids[0]

    def decode(self, tokens) -> str:
        """The text of a completion without the end tokens that close it. Any other special token stays visible, so that no
        text appears that the policy did not write: "1<|endoftext|>2" is not 12."""
        tokens = list(tokens)
        while tokens and int(tokens[-1]) in self.eos_ids:
            tokens.pop()
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """How a reference computes: without dropout, and where it is `bare` without its adapter."""
        with evaluating(self.model), lora.switched_off(self.model) if self.bare else nullcontext():
            yield

    def without_adapter(self) -> Policy:
        """The same model with its adapter switched off while it computes: a reference that takes no memory of its own."""
        if not lora.layers(self.model):
            raise ValueError(f"{self.name!r} has no adapter to switch off: load the reference as a policy of its own")
        return Policy(self.model, self.tokenizer, f"{self.name} without adapter", self.eos_ids, lock=self.lock, bare=True)

    def merge_adapter(self) -> None:
        """Write the adapter into the weights and take it out: a plain model with all weights trainable, a new version."""
        with self.lock:
            lora.merge(self.model)
            self.version += 1

    def save(self, folder: str | Path) -> Path:
        """Model (safetensors; with an adapter that alone, in peft's form), tokenizer and provenance.json in one folder that
        `load_policy` reads; replaced as a whole or not at all. ValueError for a folder that holds anything but a model."""
        with self.lock:
            critic = getattr(self.model, "critic", None)  # PPO's, beside the model while it trains
            if critic is None:
                return self._save(folder)
            del self.model.critic
            try:
                return self._save(folder)
            finally:
                self.model.add_module("critic", critic)

    def _save(self, folder: str | Path) -> Path:
        if str(folder) in NAMES:
            raise ValueError(f"{folder!r} names a model that is shipped, and load_policy would load that: save elsewhere")
        folder = Path(folder).expanduser()
        adapted = bool(lora.layers(self.model))
        if adapted and (folder / "config.json").is_file() and lora.is_base(self.model, folder):
            raise ValueError(f"{folder} holds the model of this adapter, which would be lost: save it elsewhere")
        with self.lock, atomic_folder(folder, MODEL_FILES) as partial:  # never in the middle of a step
            lora.save(self.model, partial) if adapted else self.model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
            if self.provenance:
                (partial / PROVENANCE).write_text(json.dumps(self.provenance, indent=1) + "\n")
        return folder

    @property
    def origin(self) -> str:
        """Name and provenance in one line."""
        known = ", ".join(f"{key} {value}" for key, value in (self.provenance or {}).items() if value is not None)
        return f"{self.name} ({known or 'where its weights come from is not recorded'})"

    def __repr__(self):
        n = sum(p.numel() for p in self.model.parameters())
        kind = type(self).__name__
        return f"{kind}({self.name!r}, {n / 1e6:.1f} M parameters, {self.dtype}, {self.device}, version {self.version})"


def choose_device(device: str | None = None, dtype: torch.dtype | str | None = None) -> tuple[torch.device, torch.dtype]:
    """The one place that chooses: CUDA, else Apple's MPS, else the CPU; parameters in float32 unless asked otherwise, since a
    step of 1e-6 is lost in bfloat16's eight bits. Compute may be lower through autocast."""
    if device is None:
        device = _own_gpu() if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if isinstance(dtype, str):
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype {dtype!r} is not a torch dtype; use 'float32', 'bfloat16' or 'float16'")
        dtype = getattr(torch, dtype)
    return torch.device(device), dtype or torch.float32


def _own_gpu() -> str:
    """The GPU of this process: the first, or the one that a launcher of several processes says by LOCAL_RANK."""
    number = int(os.environ.get("LOCAL_RANK", 0))
    if number >= torch.cuda.device_count():
        raise ValueError(f"LOCAL_RANK={number} has no GPU of its own: this machine has {torch.cuda.device_count()}; start "
                         "at most so many processes on it, or name the device: load_policy(..., device='cuda:0')")
    return f"cuda:{number}" if "LOCAL_RANK" in os.environ else "cuda"


def describe_machine() -> str:
    """One line for the top of a notebook: processor threads, GPU, and the versions that numbers depend on."""
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, {gpu}"


def load_policy(
    name: str = "tiny", *, device: str | None = None, dtype: torch.dtype | str | None = None, adapter: LoRA | None = None,
) -> Policy:
    """A Policy by name: 'tiny', 'smollm2-135m', a Hugging Face id, or a folder with a saved model or a saved adapter (its
    model is loaded by the name in it); `origin` says where its weights come from. With an `adapter`, a
    fresh one is put in and trained alone.

    Raises ValueError for a name that is none of these, for a model that has no end token, and for a checkpoint that is
    broken or lacks a tensor of the model or holds another: nothing is filled in and nothing is left out.
    """
    name, (target, dtype) = str(name), choose_device(device, dtype)
    source, saved = _source(name)
    folder = Path(source).expanduser()
    if saved and adapter:
        raise ValueError(f"{source} is an adapter already, and a model takes one: load it without adapter=, or merge it first")
    if saved:
        try:
            whole = load_policy(lora.base_of(folder), device=device, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"the model of the adapter {source}, base_model_name_or_path in {lora.CONFIG}: {error}") from error
        model, tokenizer = whole.model, load_tokenizer(name)
        lora.exchange(model, folder)
    else:
        model, tokenizer = _load(source, dtype)
    shown = Path(name).name if Path(name).expanduser().is_dir() else name
    if adapter:
        lora.inject(model, adapter, name)
    policy = Policy(in_own_memory(model).to(target).eval(), tokenizer, shown, _eos_ids(model, tokenizer, shown))
    policy.provenance = read_provenance(name, source)
    return policy


def load_tokenizer(name: str):
    """The tokenizer of the policy that `load_policy` loads, without its weights."""
    source, saved = _source(name)
    folder = Path(source).expanduser()
    if saved and not (folder / "tokenizer_config.json").is_file():  # peft writes none
        return load_tokenizer(lora.base_of(folder))
    return read_checkpoint("", folder, None)[2] if saved else _load(source, None)[1]


def _source(name: str) -> tuple[str, bool]:
    """The folder or Hugging Face id that a name stands for, and whether that is a saved adapter."""
    source = str(data_path("tiny")) if name == "tiny" else smollm2_source() if name == "smollm2-135m" else name
    folder = Path(source).expanduser()
    return source, (folder / lora.CONFIG).is_file() and not (folder / "config.json").is_file()


def read_provenance(name: str, source: str) -> dict:
    """What is known of where the weights of `source` come from: its provenance.json, else what its name says."""
    path = Path(source).expanduser() / PROVENANCE
    if path.is_file():
        try:
            return dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            return {"its": f"{PROVENANCE} cannot be read"}
    if name in NAMES:
        return {"made by": "data/make_tiny.py"} if name == "tiny" else {"made by": SMOLLM2}
    return {} if path.parent.is_dir() else {"from": "the Hugging Face hub"}


def in_own_memory(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its parameters moved out of the mapped checkpoint: a product may sum in another order at an unaligned
    address, and a model saved and loaded would differ from itself in the last bit."""
    for p in model.parameters():
        p.data = p.data.clone()
    return model


def _eos_ids(model, tokenizer, name: str) -> tuple[int, ...]:
    """Every id that ends a turn, the tokenizer's first: a model may stop on several."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{name!r} has no end token, so its completions could never end: "
            "set tokenizer.eos_token to one of its tokens, save_pretrained, and load that folder"
        )
    all_ids = [tokenizer.eos_token_id]
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        all_ids += ids if isinstance(ids, list | tuple) else [ids]
    return tuple(dict.fromkeys(i for i in all_ids if i is not None))


def _load(source: str, dtype: torch.dtype | None):
    """(model, tokenizer), which has a chat template; (None, tokenizer) without a dtype."""
    folder = Path(source).expanduser()
    looks_local = folder.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1
    known = "; ".join(f"{k!r}: {v}" for k, v in NAMES.items())
    if looks_local and not (folder / "config.json").is_file():
        raise ValueError(f"{source!r} has no config.json, so it holds no saved model. Names: {known}; or a Hugging Face id")
    source = str(folder) if looks_local else source
    try:
        model, report, tokenizer = read_checkpoint("AutoModelForCausalLM", source, dtype)
    except Exception as error:  # transformers raises a different type for each way a checkpoint can be missing or broken
        if looks_local:
            raise ValueError(f"{source} is not a readable checkpoint, save it again or restore it: {error}") from error
        raise ValueError(f"no model {source!r}: {error}\nNames: {known}; or a Hugging Face id or folder") from error
    if model is not None:
        refuse_gaps(report, source)
    return model, tokenizer


def read_checkpoint(kind: str, source: str | Path, dtype: torch.dtype | None):
    """(model by transformers' Auto class `kind`, its loading info, tokenizer); without a dtype the tokenizer alone, beside None
    and {}. One thread at a time, the first import of transformers included: two at once fail there, too."""
    with MODEL_LOADING:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # a bar for milliseconds of a local file; downloads keep theirs
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        tokenizer.clean_up_tokenization_spaces = False  # it shows what nobody wrote: "x!= y" of "x != y"
        tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
        if dtype is None:
            return None, {}, tokenizer
        model, report = getattr(transformers, kind).from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
        return model, report, tokenizer


def core(model):
    """The transformers model itself where an adapter library wrapped it (PEFT's `get_base_model`), else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attention_of(model) -> str | None:
    """The attention implementation that the model is set to, or None where transformers does not say: it has a public way
    to set it (`set_attn_implementation`) and none to ask."""
    return getattr(model.config, "_attn_implementation", None)


@contextmanager
def evaluating(model) -> Iterator[None]:
    """No dropout for the while, whatever a trainer left on; each module gets its own mode back."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


def text_config(model):
    """The configuration of the language model inside one of text and images; else the model's own."""
    return model.config.get_text_config(decoder=True)


def steady_context(config) -> int:
    """The most positions over which the model is one function: its context, or under longrope, whose frequencies are other
    ones for a sequence longer than its original context, that one. Past it a token's logits depend on how long its
    sequence becomes later, so keys cannot be kept, nor rows of different lengths share a batch."""
    config = config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    if limits == [None]:
        raise ValueError(f"the configuration of {config.model_type!r} names no context: set max_position_embeddings in it")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(r for r in ropes.values() if isinstance(r, dict))]:
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
            limits.append(rope["original_max_position_embeddings"])
    return min(limits)


def llama_obstacle(model) -> str | None:
    """Why the parameters alone do not say what this model computes, or None: a Llama-shaped model of transformers, all of
    whose modules are its own and unaltered."""
    config = model.config
    if config.model_type not in ("llama", "qwen2", "qwen3", "mistral"):
        return f"model type {config.model_type!r} is not one that the llama engine knows"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (config.model_type == "mistral" and config.sliding_window):
        return "it has sliding-window layers"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary positions of type {rope!r} change with the length"
    linears = [model.lm_head] if hasattr(model, "lm_head") else []  # a reward model has another head
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        linears += [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]
    for linear in linears:
        if type(linear) is not nn.Linear and not lora.is_adapted(linear):
            return f"a projection is a {type(linear).__name__}, not a plain Linear"
    for name, module in model.named_modules():
        if why := _foreign(module, config.model_type):
            return f"{name or 'the model'} {why}"
    if len({(p.dtype, p.device) for p in model.parameters()}) != 1:
        return "its parameters differ in dtype or device"
    return None


def _foreign(module: nn.Module, model_type: str) -> str | None:
    """What keeps a module from being read instead of called: another's class (a subclass, an adapter other than LoRA), a hook,
    a forward of its own."""
    kind = type(module)
    homes = (f"transformers.models.{model_type}.", "transformers.activations", "torch.nn.modules.")
    if not kind.__module__.startswith(homes) and not lora.is_adapted(module):
        return f"is a {kind.__name__}, not one of the classes of transformers"
    if any(vars(module)[name] for name in HOOKS):
        return "has a hook"
    return "has a forward of its own" if "forward" in vars(module) else None
