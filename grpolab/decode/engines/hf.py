"""Any causal LM of transformers through its own forward, with our cache of keys and values."""

from __future__ import annotations

import inspect

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from grpolab.decode.cache import SlotCache, round_up
from grpolab.decode.engines import attention
from grpolab.decode.engines.attention import EXACT
from grpolab.models.load import attention_of, core, evaluating, steady_context, text_config

ROWS = 16  # rows are computed in multiples of this: MKL multiplies fewer in kernels that round otherwise
KINDS = ("full_attention", "sliding_attention", "chunked_attention")


class _Shapes(DynamicCache):
    """Notes the shapes of what every layer caches: layer -> (heads, key size, value size)."""

    def __init__(self):
        super().__init__()
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.shapes[layer_idx] = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Rows(DynamicCache):
    """Our slots as transformers sees them: `update` writes each row at its own positions.

    Column c of what a layer reads is position c of every row; with `shift` (n,) it is position c - shift, which puts the
    newest position of all rows into the last column.
    """

    def __init__(self, cache: SlotCache, order: dict[int, int], positions: torch.Tensor, window: int, shift=None):
        super().__init__()
        self.tensors, self.order, self.window = cache.tensors, order, window
        self.rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.positions, self.shifted = positions, None
        if shift is not None:
            self.shifted = (torch.arange(window, device=positions.device) - shift[:, None]).clamp(min=0)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        at = 2 * self.order[layer_idx]
        return tuple(self._extended(self.tensors[at + i], new) for i, new in enumerate((key_states, value_states)))

    def _extended(self, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        by_time = slots.transpose(1, 2)
        by_time[self.rows, self.positions] = new.transpose(1, 2)
        if self.shifted is not None:
            return by_time[self.rows, self.shifted].transpose(1, 2)
        return slots[: len(self.rows), :, : self.window]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.window - self.positions.shape[1]


class HFEngine:
    """Any causal LM of transformers through its own forward: our cache, explicit positions and a 4-D mask.

    Sliding-window layers keep all their keys and mask those that they no longer see. Models that take a query's position
    from the number of keys (GPT-Neo's local attention) want `shifted`, see `_Rows`. ValueError for a model that does not
    keep plain keys and values. `context`: the most positions that it computes; `verified`: whether it was compared with the
    model's own forward; `single`: there will be one row alone, which then need not be computed as several.
    """

    name, verified = "hf", False

    def __init__(self, model, single: bool = False, shifted: bool = False):
        self.model, config = core(model), text_config(model)
        self.shifted, self.min_rows = shifted, 1 if single else ROWS
        weight = self.model.get_input_embeddings().weight
        self.dtype, self.device, self.vocab = weight.dtype, weight.device, weight.shape[0]
        arguments = takes(self.model)
        missing = [name for name in ("position_ids", "past_key_values", "attention_mask") if name not in arguments]
        if missing or model.config.is_encoder_decoder:
            raise ValueError(f"its forward does not take {', '.join(missing) or 'decoder tokens alone'}")
        if attention_of(model) not in ("eager", "sdpa", EXACT):
            attention.set_common(self.model)
        self.context = steady_context(config)
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self.shapes = self._layer_shapes()
        self.order = {layer: i for i, layer in enumerate(self.shapes)}
        self.sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self.chunk = getattr(config, "attention_chunk_size", None)
        kinds = set(getattr(config, "layer_types", None) or [])
        self.kinds = sorted(kinds) or ["sliding_attention" if self.sliding else "full_attention"]
        unknown = set(self.kinds) - set(KINDS)
        if unknown:
            raise ValueError(f"its attention is of the kind {sorted(unknown)}")

    @torch.no_grad()
    def _layer_shapes(self) -> dict[int, tuple[int, int, int]]:
        """(heads, key size, value size) of every layer that caches, seen on a forward over two tokens."""
        ids, cache = torch.zeros(1, 2, dtype=torch.long, device=self.device), _Shapes()
        try:
            with evaluating(self.model):
                self.model(ids, past_key_values=cache, use_cache=True)
        except Exception as error:  # each kind of other state has its own way to miss what it expects in the cache
            raise ValueError(f"some layers keep another kind of state ({error})") from error
        if not cache.shapes:
            raise ValueError("no layer keeps keys and values")
        return cache.shapes

    def refresh(self) -> None:
        """Nothing is copied: the module reads its own parameters."""

    def rows(self, n: int) -> int:
        """How many rows a step of n rows is computed with."""
        return round_up(n, self.min_rows)

    def bytes_per_token(self) -> int:
        return sum(h * (k + v) for h, k, v in self.shapes.values()) * self.dtype.itemsize

    def allocate(self, slots: int, width: int) -> SlotCache:
        make, slots = dict(dtype=self.dtype, device=self.device), self.rows(slots)
        tensors = [torch.zeros(slots, h, width, size, **make) for h, k, v in self.shapes.values() for size in (k, v)]
        return SlotCache(tensors, [-2] * len(tensors))

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor | None, cache: SlotCache,
                window: int) -> torch.Tensor:
        """As `LlamaEngine.forward`. Of a prompt the last token is fed once more, alone: its column differs by row.

        Padding may run past the context: it is computed at the last position, or left out where positions are counted.
        """
        (n, width), window = tokens.shape, min(window, self.context)
        with evaluating(self.model):
            if width > 1:
                if self.shifted and bool((start + width > window).any()):
                    for i, end in enumerate((last + 1).tolist()):
                        self._run(tokens[i: i + 1, :end], start[i: i + 1], cache.row(i), window)
                else:
                    self._run(tokens, start, cache, window)
                tokens, start = tokens.gather(1, last[:, None]), start + last
            more = min(self.rows(n), cache.slots) - n
            tokens, start = F.pad(tokens, (0, 0, 0, more)), F.pad(start, (0, more))
            return self._run(tokens, start, cache, window)[:n, -1].float()

    def _run(self, tokens, start, cache, window):
        width = tokens.shape[1]
        positions = start[:, None] + torch.arange(width, device=self.device)
        shift = window - width - start if self.shifted else None
        masks = {kind: self._mask(kind, positions, window, shift) for kind in self.kinds}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return self.model(tokens, attention_mask=mask, position_ids=positions.clamp(max=self.context - 1), use_cache=True,
                          past_key_values=_Rows(cache, self.order, positions, window, shift), **self.extra).logits

    def _mask(self, kind: str, positions, window: int, shift) -> torch.Tensor:
        """(n, 1, W, window) to add to the scores: 0 where the query at a position sees the column, else -inf."""
        span = self.sliding if kind == "sliding_attention" else None
        columns = torch.arange(window, device=self.device)[None, None]
        if shift is not None:
            columns = columns - shift[:, None, None]
        at = positions if shift is None else positions + shift[:, None]
        bias = attention.mask_bias(at, window, self.dtype, span)
        if shift is not None:
            bias.masked_fill_(columns < 0, -torch.inf)
        if kind == "chunked_attention":
            bias.masked_fill_(columns // self.chunk != positions[:, :, None] // self.chunk, -torch.inf)
        return bias[:, None]


def takes(model) -> set[str]:
    """The arguments of a model's forward, those included that a subclass hands on."""
    forwards = [vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind)]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}
