"""Which engine a model gets: the one that is proved, at the start, to compute the model's own forward."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from grpolab.decode.cache import PAGE, Prefilled, round_up, store_for
from grpolab.decode.general import GeneralEngine, _evaluating
from grpolab.decode.llama import LlamaEngine
from grpolab.models import llama_obstacle

log = logging.getLogger(__name__)


def choose_engine(model, engine: str = "auto", single: bool = False):
    """The engine for a model: "llama", "general", or "auto" (llama where the model allows it and the check passes).

    Whatever is chosen has reproduced the model's own forward (`disagreement`). ValueError where nothing does.
    """
    if engine not in ("auto", "llama", "general"):
        raise ValueError(f"engine must be 'auto', 'llama' or 'general', got {engine!r}")
    if engine != "general":
        why = llama_obstacle(model)
        if why is None:
            fast = LlamaEngine(model, single)
            why = disagreement(fast, model)
            if why is None:
                return fast
        if engine == "llama":
            raise ValueError(f"the llama engine does not fit {type(model).__name__}: {why}; use engine='auto'")
        log.warning("general engine for %s, since %s", type(model).__name__, why)
    general = GeneralEngine(model, single)
    why = disagreement(general, model)
    if why is not None:
        raise ValueError(general._refusal(f"its cached step is not its own forward ({why})"))
    return general


@torch.no_grad()
def disagreement(engine, model) -> str | None:
    """None when prompts of 3 lengths and 3 ragged steps give the logits of the model's own uncached forward.

    fp32: to 1e-4 of the largest logit. Lower precision: mean |difference of logps| within twice what the model differs
    from itself by, with its own cache or its other attention, since there is no one right order of rounding.
    """
    lengths, steps = _probe_lengths(model), 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + steps), generator=generator).to(engine.device)
    with _evaluating(model):
        ours = cached_logits(engine, ids, lengths, steps)
        own = _own_logits(model, ids, lengths, steps)
    if not bool(torch.isfinite(own).all()):
        return None  # a broken policy says nothing about the engine; its rollouts report it
    worst, bound = float((ours - own).abs().max()), 1e-4 * float(own.abs().max())
    if engine.dtype == torch.float32:
        return None if worst <= bound else f"logits differ by {worst:.2e}, bound {bound:.2e}"
    with _evaluating(model):
        others = [_own_cached_logits(model, ids, lengths, steps)]
        with _other_attention(model):
            others.append(_own_logits(model, ids, lengths, steps))
    mean, *floors = (float((o.log_softmax(-1) - own.log_softmax(-1)).abs().mean()) for o in (ours, *others))
    bound = 2 * max(floors)
    return None if mean <= bound else f"logps differ by {mean:.2e} on average, bound {bound:.2e}"


def _own_logits(model, ids, lengths, steps) -> torch.Tensor:
    """The model's forward without a cache, a row at a time: logits (n, steps + 1, V) after the last positions."""
    whole = [model(row[None, : length + steps], use_cache=False).logits[0] for row, length in zip(ids, lengths)]
    return torch.stack([logits[-steps - 1:] for logits in whole]).float()


def _own_cached_logits(model, ids, lengths, steps) -> torch.Tensor:
    rows = []
    for row, length in zip(ids, lengths):
        out = model(row[None, :length], use_cache=True)
        parts = [out.logits[0, -1:]]
        for t in range(length, length + steps):
            out = model(row[None, t: t + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits[0])
        rows.append(torch.cat(parts))
    return torch.stack(rows).float()


@contextmanager
def _other_attention(model):
    """The same model with eager attention in place of sdpa, or the reverse, for the while."""
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if own == "eager" and model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def cached_logits(engine, ids: torch.Tensor, lengths: list[int], steps: int) -> torch.Tensor:
    """Logits (n, steps + 1, V) after each of the last positions: ids (n, .), prefill to lengths, then `steps` steps."""
    n, ends = len(lengths), torch.tensor(lengths, device=engine.device)
    places = store_for(engine, n)
    window = round_up(max(lengths) + steps, places.unit)
    prompts, cache = ids[:, : max(lengths)], engine.allocate(n, window)
    out = [engine.forward(prompts, torch.zeros_like(ends), ends - 1, cache, window)]
    places.enter(0, [Prefilled(cache, i, length) for i, length in enumerate(lengths)], window)
    places.fit(np.array(lengths), n, steps, window)
    for t in range(steps):
        tokens = ids.gather(1, (ends + t)[:, None])
        out.append(engine.forward(tokens, ends + t, None, places.cache, window))
    return torch.stack(out, 1)


def _probe_lengths(model) -> list[int]:
    room = min(getattr(model.config, "max_position_embeddings", 64), 64) - 3
    return [max(1, min(length, room)) for length in (13, 5, PAGE - 1)]  # the last one's steps cross into a second page


@torch.no_grad()
def seconds_a_step(engine, rows: int, numbers: Sequence[int], rounds: int = 5) -> dict[int, float]:
    """Number of torch threads -> median seconds of a step of `rows` rows; they take turns, so that drift hits all."""
    last, places = 2 * PAGE - 1, store_for(engine, rows)
    places.enter(0, [Prefilled(engine.allocate(1, 2 * PAGE), 0, last)] * rows, 2 * PAGE)
    places.fit(np.full(rows, last), rows, 1, 2 * PAGE)
    start = torch.full((rows,), last, device=engine.device)
    tokens, seconds = torch.zeros(rows, 1, dtype=torch.long, device=engine.device), {n: [] for n in numbers}
    common = torch.get_num_threads()
    for n in [*numbers] * (rounds + 1):  # the first round warms up
        torch.set_num_threads(n)
        started = perf_counter()
        engine.forward(tokens, start, None, places.cache, 2 * PAGE)
        seconds[n].append(perf_counter() - started)
    torch.set_num_threads(common)
    return {n: statistics.median(times[1:]) for n, times in seconds.items()}


@torch.no_grad()
def inexact_share(engine, model) -> float:
    """Share of logps that differ in any bit between the engine's steps and the model's right-padded forward."""
    lengths, steps = _probe_lengths(model) * 2, 3
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + steps), generator=generator).to(engine.device)
    with _evaluating(model):
        ours = cached_logits(engine, ids, lengths, steps)
        whole = model(ids, use_cache=False).logits.float()
    own = torch.stack([row[length - 1: length + steps] for row, length in zip(whole, lengths)])
    targets = torch.stack([row[length: length + steps] for row, length in zip(ids, lengths)])[..., None]
    a, b = (t[:, :-1].gather(2, targets) - t[:, :-1].logsumexp(-1, keepdim=True) for t in (ours, own))
    return float((a != b).float().mean())
