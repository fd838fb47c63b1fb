"""The step of the llama engine as one C++ operator (`step.cpp`), which the compiler of this machine makes at first use.

A step in torch's operators is some hundred calls with a hand-over between threads in each: for few rows and small models they
take longer than the arithmetic. The operator is plain C++ behind ctypes: torch's own headers would take a minute to compile.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from ctypes import POINTER, byref, c_float, c_long, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from grpolab.decode.cache import Pages, SlotCache, round_up
from grpolab.decode.engines.attention import EXACT
from grpolab.decode.engines.llama import LlamaEngine
from grpolab.models.load import attention_of
from grpolab.models.smollm2 import cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
STRIP, HALF = 32, 16  # outputs of a strip, as in step.cpp
WORTH = 2**22  # multiply-adds for which another thread is worth waking
NEARBY = 2**23  # bytes of weights that stay near the processor, so that each thread may walk all of them for rows of its own
ROWS, MOST_ROWS = 12, 96  # whose numbers fill the registers, and whose numbers stay near the processor


@cache
def library() -> ctypes.CDLL | None:
    """The operator, made by the compiler that GRPOLAB_CXX names (default g++; an empty one is none) and kept in the user's
    cache folder; None where there is no compiler, or it fails."""
    compiler = shutil.which(os.environ.get("GRPOLAB_CXX", "g++"))
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    try:
        processor = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith(("flags", "Features"))][:1]
        made_of = SOURCE.read_text(), FLAGS, os.path.realpath(compiler), os.stat(compiler).st_mtime, processor
        folder = cache_folder()
        target = folder / f"step-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / target.name
                subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=300)
                made.replace(target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace") or str(error)
        log.warning("decoding goes on in torch's operators, since %s made none of its own: %s", compiler, said[-500:])
        return None


class Layer(ctypes.Structure):
    _fields_ = [("weight", c_void_p * 4), ("bias", c_void_p * 4), ("norm", c_void_p * 4)]


class Model(ctypes.Structure):
    _fields_ = [*((name, c_long) for name in ("layers", "heads", "groups", "size", "hidden", "inner", "vocab", "bf16")),
                ("eps", c_float), ("scaling", c_float), ("embedding", c_void_p), ("norm", c_void_p), ("head", c_void_p),
                ("head_bias", c_void_p), ("layer", POINTER(Layer))]


class Step(ctypes.Structure):
    _fields_ = [("n", c_long), ("blocks", c_long), ("layer_stride", c_long), ("token", c_void_p), ("position", c_void_p),
                ("table", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("rotation", c_void_p * 2),
                ("logits", c_void_p), ("threads", c_long), ("piece", c_long), ("drafts", c_long)]


class Strips:
    """The product x -> x W^T + b on W (o, i) in strips of 32 outputs, (o/32, i, 32), where bf16 keeps two inputs together:
    (o/32, i/2, 32, 2). A row's bits are the same at every number of rows."""

    def __init__(self, weight: torch.Tensor):
        self.outputs, self.inputs = weight.shape
        together, weight = 4 // weight.element_size(), weight.contiguous()
        self.table = weight.new_empty(-(-self.outputs // STRIP), self.inputs // together, STRIP, together)
        library().grpolab_pack(*(c_void_p(address(t)) for t in (weight, self.table)),
                               *map(c_long, (self.outputs, self.inputs // together, torch.get_num_threads())))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x, bias = x.contiguous(), padded_bias(bias)
        y = x.new_empty(len(x), self.table.shape[0] * STRIP)
        library().grpolab_linear(*map(c_long, (x.dtype == torch.bfloat16, len(x), self.inputs, self.outputs)),
                                 *(c_void_p(address(t)) for t in (self.table, bias, x, y)), c_long(torch.get_num_threads()))
        return y[:, : self.outputs]


def padded_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else F.pad(bias.float(), (0, -len(bias) % STRIP))


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CompiledEngine(LlamaEngine):
    """The llama engine with `step.cpp` for its steps and for the products of its prefill."""

    layout = Strips

    def __init__(self, model):
        self._addresses = None
        super().__init__(model)
        self.min_rows, self.paged, self.weights = 1, True, sum(p.packed.table.numel() for p in self.products())

    @staticmethod
    def obstacle(model) -> str | None:
        """Why the operator does not serve this Llama-shaped model here, or None."""
        config, weight = model.config, model.model.embed_tokens.weight
        attention = model.model.layers[0].self_attn
        heads, size = config.num_key_value_heads, attention.head_dim
        if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            return f"it computes in float32 and bfloat16 on processors, not in {weight.dtype} on {weight.device}"
        if attention_of(model) == EXACT:
            return "exact mode has the kernels of the trainer"
        if config.hidden_act not in ("silu", "swish"):
            return f"its activation is {config.hidden_act}"
        if model.lm_head.out_features != len(weight):
            return f"its head has {model.lm_head.out_features} outputs and its embedding {len(weight)} rows"
        width = attention.q_proj.out_features + 2 * heads * size
        if size % HALF or config.hidden_size % STRIP or config.intermediate_size % HALF or width % STRIP:
            return f"head size {size}, hidden size {config.hidden_size} and inner size {config.intermediate_size} are not " \
                   f"multiples of {HALF}, {STRIP} and {HALF}"
        return None if library() is not None else "there is no C++ compiler"

    def _gate_up_order(self) -> torch.Tensor:
        """Rows of the stacked gate and up weights: 16 of the one and 16 of the other, which are multiplied, in each strip."""
        return torch.arange(2 * self.model.config.intermediate_size).view(2, -1, HALF).transpose(0, 1).reshape(-1)

    def _gate_and_up(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = y.view(len(y), -1, 2, HALF).unbind(2)
        return gate.flatten(1), up.flatten(1)

    def refresh(self) -> None:
        super().refresh()
        self._addresses = None

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor | None, cache: SlotCache | Pages,
                window: int) -> torch.Tensor:
        """As that of the llama engine; a step on pages is the operator."""
        return self._step(tokens, start, cache, cache.table, window) if isinstance(cache, Pages) else \
            super().forward(tokens, start, last, cache, window)

    @torch.inference_mode()
    def forward_drafts(self, tokens: torch.Tensor, positions: torch.Tensor, rows: np.ndarray, cache: Pages,
                       window: int) -> torch.Tensor:
        """Feed tokens (m,), of which the i-th is of row rows[i] at positions[i]; of a row they follow one another. fp32 logits
        (m, V), with the bits that as many steps of one token would give."""
        return self._step(tokens, positions, cache, np.ascontiguousarray(cache.table[rows]), window, drafts=True)

    def _step(self, tokens: torch.Tensor, start: torch.Tensor, cache: Pages, table: np.ndarray, window: int,
              drafts: bool = False) -> torch.Tensor:
        n = len(tokens)
        logits = torch.empty(n, round_up(self.vocab, STRIP))
        rotation = [address(t) for t in self._rotations(window)]
        threads = max(1, min(torch.get_num_threads(), n * self.weights // WORTH))
        alone = not drafts and n > ROWS * (threads - 1) and self.weights * cache.keys.element_size() <= NEARBY
        piece = min(MOST_ROWS, round_up(-(-n // threads), ROWS)) if alone else 0
        step = Step(n, table.shape[1], cache.keys.stride(0), address(tokens), address(start), table.ctypes.data,
                    address(cache.keys), address(cache.values), (c_void_p * 2)(*rotation), address(logits), threads, piece,
                    drafts)
        library().grpolab_step(byref(self._model()), byref(step))
        return logits[:, : self.vocab]

    def _model(self) -> Model:
        """Where the operator finds the weights. What is read live is kept too: a parameter whose storage somebody replaces
        is freed after the next look at the weights, not before."""
        if self._addresses is None:
            kept: list[torch.Tensor] = []

            def at(tensor: torch.Tensor | None) -> int | None:
                if tensor is not None:
                    kept.append(tensor := tensor.detach().contiguous())
                return address(tensor)

            def norm(module, turned: bool = False) -> int | None:
                weight = module.weight.detach()
                return at(weight[self.halves] if turned and self.fp32 else weight)

            layers = []
            for layer, products in zip(self.layers, self.layer_products):
                norms = [None, None] if self.fp32 else [norm(layer.input_layernorm), norm(layer.post_attention_layernorm)]
                attention = layer.self_attn
                norms += [norm(attention.q_norm, True), norm(attention.k_norm, True)] if self.normed else [None, None]
                layers.append(Layer((c_void_p * 4)(*(at(p.packed.table) for p in products)),
                                    (c_void_p * 4)(*(at(padded_bias(p.bias)) for p in products)), (c_void_p * 4)(*norms)))
            model, config = self.model.model, self.model.config
            self._addresses = kept, Model(
                len(layers), self.heads, self.groups, self.size, config.hidden_size, config.intermediate_size, self.vocab,
                not self.fp32, float(self.eps), self.scaling, at(model.embed_tokens.weight),
                None if self.fp32 else norm(model.norm), at(self.head.packed.table), at(padded_bias(self.head.bias)),
                (Layer * len(layers))(*layers))
        return self._addresses[1]
