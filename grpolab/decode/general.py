"""Any causal LM of transformers through its own forward, with our cache of keys and values."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from grpolab.decode import attention
from grpolab.decode.attention import EXACT
from grpolab.decode.cache import SlotCache


class _Layer(DynamicLayer):
    """One layer's slots as transformers sees them: `update` writes each row at its own position."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor, window: int):
        super().__init__()
        self.slots_k, self.slots_v, self.start, self.window = keys, values, start, window
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        n, width = key_states.shape[0], key_states.shape[2]
        rows = torch.arange(n, device=key_states.device)[:, None]
        positions = self.start[:, None] + torch.arange(width, device=key_states.device)
        self.slots_k.transpose(1, 2)[rows, positions] = key_states.transpose(1, 2)
        self.slots_v.transpose(1, 2)[rows, positions] = value_states.transpose(1, 2)
        return self.slots_k[:n, :, : self.window], self.slots_v[:n, :, : self.window]

    def get_seq_length(self) -> int:
        return self.window


class GeneralEngine:
    """Any causal LM of transformers through its own forward: our cache, explicit positions and a 4-D mask.

    Sliding-window layers keep all their keys and mask those that they no longer see. ValueError for a model that does
    not keep plain keys and values.
    """

    name, min_rows = "general", 1

    def __init__(self, model, single: bool = False):
        self.model, config = model, model.config
        weight = model.get_input_embeddings().weight
        self.dtype, self.device, self.vocab = weight.dtype, weight.device, weight.shape[0]
        takes = inspect.signature(model.forward).parameters
        missing = [name for name in ("position_ids", "past_key_values", "attention_mask") if name not in takes]
        if missing or config.is_encoder_decoder:
            raise ValueError(self._refusal(f"its forward does not take {', '.join(missing) or 'decoder tokens alone'}"))
        if config._attn_implementation not in ("eager", "sdpa", EXACT):
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.shapes = self._layer_shapes()
        kinds = list(getattr(config, "layer_types", None) or [])
        sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self.sliding = sliding
        self.kinds = sorted(set(kinds)) or ["sliding_attention" if sliding else "full_attention"]
        unknown = set(self.kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(self._refusal(f"its attention is of the kind {sorted(unknown)}"))

    def _refusal(self, why: str) -> str:
        return (f"{type(self.model).__name__} cannot be sampled with a cache of keys and values: {why}. "
                "Use a decoder-only model with full or sliding-window attention")

    @torch.no_grad()
    def _layer_shapes(self) -> list[tuple[int, int, int]]:
        """(heads, key size, value size) of every layer that caches, seen on a forward over two tokens."""
        ids, cache = torch.zeros(1, 2, dtype=torch.long, device=self.device), DynamicCache(config=self.model.config)
        with _evaluating(self.model):
            out = self.model(ids, past_key_values=cache, use_cache=True)
        layers = getattr(getattr(out, "past_key_values", None), "layers", [])
        plain = [isinstance(layer, DynamicLayer) and getattr(layer, "keys", None) is not None for layer in layers]
        if not layers or not all(plain):
            raise ValueError(self._refusal("some layers keep another kind of state"))
        return [(la.keys.shape[1], la.keys.shape[3], la.values.shape[3]) for la in layers]

    def refresh(self) -> None:
        """Nothing is copied: the module reads its own parameters."""

    def bytes_per_token(self) -> int:
        return sum(h * (k + v) for h, k, v in self.shapes) * self.dtype.itemsize

    def allocate(self, slots: int, width: int) -> SlotCache:
        make = dict(dtype=self.dtype, device=self.device)
        tensors = [torch.zeros(slots, h, width, size, **make) for h, k, v in self.shapes for size in (k, v)]
        return SlotCache(tensors, [-2] * len(tensors))

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor | None, cache: SlotCache,
                window: int) -> torch.Tensor:
        """As `LlamaEngine.forward`. Of a prompt the last token is fed once more, alone: its column differs by row."""
        with _evaluating(self.model):
            logits = self._run(tokens, start, cache, window)
            if tokens.shape[1] > 1:
                rows = torch.arange(len(tokens), device=self.device)
                logits = self._run(tokens[rows, last][:, None], start + last, cache, window)
        return logits[:, -1].float()

    def _run(self, tokens, start, cache, window):
        positions = start[:, None] + torch.arange(tokens.shape[1], device=self.device)
        spans = {"full_attention": None, "sliding_attention": self.sliding}
        masks = {kind: attention.mask_bias(positions, window, self.dtype, spans[kind])[:, None] for kind in self.kinds}
        keys, values = cache.tensors[::2], cache.tensors[1::2]
        layers = [_Layer(k, v, start, window) for k, v in zip(keys, values)]
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return self.model(tokens, attention_mask=mask, position_ids=positions, past_key_values=Cache(layers=layers),
                          use_cache=True, **self.extra).logits


@contextmanager
def _evaluating(model):
    """Eval mode for the while: a trainer may have left dropout on."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
