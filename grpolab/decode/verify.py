"""Which engine a model gets: the one that is proved, at the start, to compute the model's own forward."""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from torch.nn import functional as F

from grpolab.decode.cache import PAGE, Prefilled, round_up, store_for
from grpolab.decode.engines import attention
from grpolab.decode.engines.hf import GeneralEngine, takes
from grpolab.decode.engines.llama import LlamaEngine
from grpolab.models.load import attention_of, core, evaluating, llama_obstacle, steady_context

log = logging.getLogger(__name__)

STEPS = 3  # that a probe decodes after each of its prompts
LONG = 160  # positions that a probe goes to even where the configuration names no length
FLOPS = {"cpu": 2e12, "cuda": 4e14}  # that one forward of the probe may take: some ten seconds on a laptop
SCORES = 2**30  # bytes that the attention of one forward of the probe may take
THRESHOLD = re.compile("window|sliding|chunk|local|original_max_position|floor_scale")  # names of lengths in configurations


def choose_engine(model, engine: str = "auto", single: bool = False):
    """The engine for a model: "llama", "general", or "auto" (llama where the model allows it and the check passes).

    Whatever is chosen has reproduced the model's own forward (`disagreement`) and does so up to `.context` positions.
    ValueError where nothing does.
    """
    if engine not in ("auto", "llama", "general"):
        raise ValueError(f"engine must be 'auto', 'llama' or 'general', got {engine!r}")
    if engine != "general":
        why = llama_obstacle(core(model))
        if why is None:
            fast = LlamaEngine(core(model), single)
            why = disagreement(fast, model)
            if why is None:
                return _limited(fast, model)
        if engine == "llama":
            raise ValueError(f"the llama engine does not fit {type(model).__name__}: {why}; use engine='auto'")
        log.warning("general engine for %s, since %s", type(model).__name__, why)
    general, why = _general(model, single)
    if why is not None:
        raise ValueError(general._refusal(f"its cached step is not its own forward ({why})"))
    return _limited(general, model)


def _general(model, single: bool) -> tuple[GeneralEngine, str | None]:
    """The general engine, with positions counted where that is what this model wants, and what is wrong with it."""
    reasons = []
    for turned in (False, True):
        general = GeneralEngine(model, single, turned)
        try:
            why = disagreement(general, model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that cannot take such masks fails in a way of its own
            why = f"{type(error).__name__}: {error}"
        if why is None:
            return general, None
        reasons.append(why)
    return general, reasons[0]


def _limited(engine, model):
    """The engine, its `context` within the lengths past which the model may act otherwise and the probe did not go."""
    steady, named = steady_context(model.config), model.config.max_position_embeddings
    if steady < named:
        log.warning("%s is used up to %d of its %d positions: past them its rotary positions change with the length of the "
                    "sequence", type(model).__name__, steady, named)
    reach, beyond = _reach(model, engine)
    if beyond is not None:
        engine.context = min(engine.context, beyond)
        log.warning("%s is sampled up to %d positions: its configuration names that length as one where it may change, and a "
                    "probe past it would take too long here (it went to %d)", type(model).__name__, engine.context, reach)
    return engine


def thresholds(config) -> list[int]:
    """Lengths in a configuration (windows, chunks, scaling) past which its model may act in another way, ascending.

    Frequencies of llama3 and yarn name the length they were trained for, but are the same at every length.
    """
    found, open_ = set(), [config.to_dict()]
    for part in open_:  # grows
        fixed = part.get("rope_type") in ("llama3", "yarn", "linear", "default")
        for key, value in part.items():
            if isinstance(value, dict):
                open_.append(value)
            elif isinstance(value, int) and THRESHOLD.search(key) and value > 0 and not fixed:
                found.add(int(value))
    return sorted(found)


def _reach(model, engine) -> tuple[int, int | None]:
    """(positions that the probe goes to, None), or with the first threshold that it cannot afford to pass."""
    context, most = steady_context(model.config), affordable(model, engine.device)
    reach = min(context, LONG, most)
    for threshold in thresholds(model.config):
        wanted = min(context, threshold + threshold // 4 + 8)  # far enough that what it does there is seen
        if threshold >= context:
            break
        if wanted > most:
            return reach, max(threshold, reach)
        reach = max(reach, wanted)
    return reach, None


def affordable(model, device) -> int:
    """The longest row that the probe may compute: by the products, by the attention, and by its memory."""
    config, weights = model.config, sum(p.numel() for p in model.parameters())
    layers, width, heads = (getattr(config, name, None) or 1 for name in ("num_hidden_layers", "hidden_size",
                                                                          "num_attention_heads"))
    flops, square = FLOPS.get(torch.device(device).type, FLOPS["cpu"]), 4 * layers * width
    by_time = (((2 * weights) ** 2 + 4 * square * flops) ** 0.5 - 2 * weights) / (2 * square)  # 2 w P + square P^2 = flops
    matrices = 3 if attention_of(model) == "sdpa" else 3 * heads  # torch's own attention holds the masks alone
    return max(64, int(min(by_time, (SCORES / (4 * matrices)) ** 0.5)))


@torch.no_grad()
def disagreement(engine, model) -> str | None:
    """None when prompts of several lengths and 3 ragged steps give the logits of the model's own uncached forward.

    The longest goes past every `thresholds` of the configuration that can be afforded (`_reach`).
    fp32: to 1e-4 of the largest logit. Lower precision: mean |difference of logps| within twice what the model differs
    from itself by, with its own cache or its other attention, since there is no one right order of rounding. A banned
    token's -inf agrees with -inf alone.
    """
    engine.proved = True
    for ids, lengths in _probes(model, engine):
        why = _disagreement(engine, model, ids, lengths)
        if why is not None:
            return why
    return None


def _probes(model, engine) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Batches of random ids (n, .) with the lengths of their prompts."""
    generator, reach = torch.Generator().manual_seed(0), _reach(model, engine)[0]
    for lengths in (_probe_lengths(model), [max(1, min(100, reach // 2)), max(1, reach - STEPS)]):
        ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + STEPS), generator=generator)
        yield ids.to(engine.device), lengths


def _disagreement(engine, model, ids, lengths) -> str | None:
    with evaluating(model):
        ours = cached_logits(engine, ids, lengths, STEPS)
        own = _own_logits(model, ids, lengths, STEPS)
    if bool(own.isnan().any()) or not bool(own.isfinite().any()):
        engine.proved = False  # a broken policy says nothing about the engine; its rollouts report it
        return None
    worst, bound = float(_distance(ours, own).max()), 1e-4 * float(own[own.isfinite()].abs().max())
    if engine.dtype == torch.float32:
        return None if worst <= bound else f"logits differ by {worst:.2e}, bound {bound:.2e}, at {max(lengths)} positions"
    with evaluating(model):
        others = [_own_cached_logits(model, ids, lengths, STEPS)]
        if max(lengths) <= LONG:  # the other attention may hold the scores of all heads
            with _other_attention(model):
                others.append(_own_logits(model, ids, lengths, STEPS))
    mean, *floors = (float(_distance(o.log_softmax(-1), own.log_softmax(-1)).mean()) for o in (ours, *others))
    bound = 2 * max(floors)
    return None if mean <= bound else f"logps differ by {mean:.2e} on average, bound {bound:.2e}, at {max(lengths)} positions"


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|, 0 where both are the same infinity, infinite where one is NaN."""
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _own_logits(model, ids, lengths, steps) -> torch.Tensor:
    """The model's forward without a cache, a row at a time: logits (n, steps + 1, V) after the last positions."""
    last = {"logits_to_keep": steps + 1} if "logits_to_keep" in takes(core(model)) else {}
    whole = [model(row[None, : length + steps], use_cache=False, **last).logits[0] for row, length in zip(ids, lengths)]
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
    model, own = core(model), attention_of(model)
    if own == "eager":
        attention.set_common(model)
    else:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own or "sdpa")


def cached_logits(engine, ids: torch.Tensor, lengths: list[int], steps: int) -> torch.Tensor:
    """Logits (n, steps + 1, V) after each of the last positions: ids (n, .), prefill to lengths, then `steps` steps."""
    ends = torch.tensor(lengths, device=engine.device)
    window = round_up(max(lengths) + steps, store_for(engine, 1).unit)
    cache = engine.allocate(len(lengths), window)
    first = engine.forward(ids[:, : max(lengths)], torch.zeros_like(ends), ends - 1, cache, window)
    prompts = [Prefilled(cache, i, length) for i, length in enumerate(lengths)]
    return torch.stack([first, *stepped(engine, ids, prompts, steps)], 1)


def stepped(engine, ids: torch.Tensor, prompts: list[Prefilled], steps: int) -> list[torch.Tensor]:
    """Logits (n, V) of each of the steps that follow these prompts, which are ids[i, :length]."""
    n, lengths = len(prompts), np.array([p.length for p in prompts])
    store, rows, out = store_for(engine, n), engine.rows(n), []
    longest = int(lengths.max()) + steps
    window = round_up(longest, store.unit)
    store.enter(0, prompts, longest)
    store.fit(lengths, rows, steps, longest)
    ends = torch.from_numpy(lengths).to(ids.device)
    for t in range(steps):
        tokens, start = ids.gather(1, (ends + t)[:, None]), ends + t
        tokens, start = F.pad(tokens, (0, 0, 0, rows - n)), F.pad(start, (0, rows - n))
        out.append(engine.forward(tokens, start, None, store.cache, window)[:n])
    return out


@torch.no_grad()
def company_share(engine, rows: int = 7, steps: int = 2) -> float:
    """Share of steps whose logits differ in any bit when the row is alone, in another place, or beside longer rows.

    0 is what "a rollout does not depend on its company" rests on. It holds for the llama engine, and for the general one
    where products round a row alike in all multiples of `min_rows` rows: on processors that we tried, not on GPUs, nor
    for mixtures of experts, which group rows by expert.
    """
    lengths = [min(n, engine.context - steps) for n in ([9, 12, 15, 31, 50, 14, 90] * rows)[:rows]]
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, engine.vocab, (rows, max(lengths) + steps), generator=generator).to(engine.device)
    prompts = []
    for row, length in zip(ids, lengths):  # a prompt's columns are padded by its own length alone, as the scheduler does
        width = round_up(length, 8)
        cache, end = engine.allocate(1, round_up(width, PAGE)), torch.tensor([length - 1], device=engine.device)
        engine.forward(F.pad(row[None, :length], (0, width - length)), torch.zeros_like(end), end, cache, width)
        prompts.append(Prefilled(cache, 0, length))

    def together(order: list[int]) -> dict[int, torch.Tensor]:
        out = stepped(engine, ids[order], [prompts[i] for i in order], steps)
        return {row: torch.stack([logits[place] for logits in out]) for place, row in enumerate(order)}

    whole = together(list(range(rows)))
    others = [together([*range(rows)][::-1]), *(together([i]) for i in range(rows)), together([0, 2, 1])]
    pairs = [(whole[row], found[row]) for found in others for row in found]
    return float(np.mean([float((a != b).any(-1).float().mean()) for a, b in pairs]))


def _probe_lengths(model) -> list[int]:
    room = min(steady_context(model.config), 64) - STEPS
    return [max(1, min(length, room)) for length in (13, 5, PAGE - 1)]  # the last one's steps cross into a second page


@torch.no_grad()
def seconds_a_step(engine, rows: int, numbers: Sequence[int], rounds: int = 5) -> dict[int, float]:
    """Number of torch threads -> median seconds of a step of `rows` rows; they take turns, so that drift hits all."""
    last, store = 2 * PAGE - 1, store_for(engine, rows)
    store.enter(0, [Prefilled(engine.allocate(1, 2 * PAGE), 0, last)] * rows, 2 * PAGE)
    store.fit(np.full(rows, last), rows, 1, 2 * PAGE)
    start = torch.full((rows,), last, device=engine.device)
    tokens, seconds = torch.zeros(rows, 1, dtype=torch.long, device=engine.device), {n: [] for n in numbers}
    common = torch.get_num_threads()
    for n in [*numbers] * (rounds + 1):  # the first round warms up
        torch.set_num_threads(n)
        started = perf_counter()
        engine.forward(tokens, start, None, store.cache, 2 * PAGE)
        seconds[n].append(perf_counter() - started)
    torch.set_num_threads(common)
    return {n: statistics.median(times[1:]) for n, times in seconds.items()}


@torch.no_grad()
def inexact_share(engine, model) -> float:
    """Share of logps that differ in any bit between the engine's steps and the model's right-padded forward."""
    lengths, steps = _probe_lengths(model) * 2, STEPS
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + steps), generator=generator).to(engine.device)
    with evaluating(model):
        ours = cached_logits(engine, ids, lengths, steps)
        whole = model(ids, use_cache=False).logits.float()
    own = torch.stack([row[length - 1: length + steps] for row, length in zip(whole, lengths)])
    targets = torch.stack([row[length: length + steps] for row, length in zip(ids, lengths)])[..., None]
    a, b = (t[:, :-1].gather(2, targets) - t[:, :-1].logsumexp(-1, keepdim=True) for t in (ours, own))
    return float((a != b).float().mean())
