"""The check that a forward is the model's own.

A probe computes random tokens with the model's plain forward, one sequence and no cache, and with the forward in question: a
sampler's engine here, a trainer's in `train/verify.py`. Both choose their lengths (`reach`), judge (`difference`) and take the
first that is right (`first_right`) alike, and the result is remembered while the model stays as it is (`verified_of`).
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from grpolab.decode.cache import PAGE, Prefilled, round_up, store_for
from grpolab.decode.engines.attention import restore_attention, share_attention
from grpolab.decode.engines.compiled import CompiledEngine
from grpolab.decode.engines.hf import HFEngine, takes
from grpolab.decode.engines.llama import LlamaEngine, UnpackedEngine
from grpolab.decode.snapshot import Snapshot, update, verified_of
from grpolab.models.load import core, evaluating, llama_obstacle, steady_context, text_config

T, U = TypeVar("T"), TypeVar("U")
log = logging.getLogger(__name__)

EXACT = 1e-4  # fp32: bound on the largest difference, as a share of the largest value
ROUNDING = 1.5  # lower precision: bound on the mean difference, in what the plain forward moves by with its inputs
STEPS = 3  # that a probe decodes after each of its prompts
LONG = 160  # positions that a probe goes to even where the configuration names no length
MOST = {"cpu": 2048, "cuda": 16384}  # positions that a probe of an engine goes to at most, for its time
THRESHOLD = re.compile("window|sliding|chunk|local|original_max_position|floor_scale")  # names of lengths in configurations
CANDIDATES = {"auto": ("compiled", "llama", "hf", "hf shifted"), "compiled": ("compiled",), "llama": ("llama",),
              "hf": ("hf", "hf shifted"), "unpacked": ("unpacked", "hf", "hf shifted")}


def first_right(candidates: Iterable[T], failure: Callable[[T], str | None]) -> tuple[T | None, dict[T, str]]:
    """The first candidate whose `failure` is None, if any, and why those before it fail. A model that cannot take what a
    candidate asks of it raises errors of any type: they are failures too."""
    wrong: dict[T, str] = {}
    for candidate in candidates:
        try:
            why = failure(candidate)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = str(error)[:300] if type(error) is ValueError else f"{type(error).__name__}: {str(error)[:300]}"
        if why is None:
            return candidate, wrong
        wrong[candidate] = why
    return None, wrong


# --- which engine samples a model -------------------------------------------------------------------------------------


def choose_engine(policy, engine: str = "auto", single: bool = False):
    """The engine for a policy's model: "compiled" (the llama engine with its step in C++), "llama" (in torch's operators),
    "hf", or "auto": the first of these that the model and the machine allow and that passes the check. "unpacked" is llama, or
    hf, without copies of the weights.

    It has reproduced the model's own forward (`disagreement`) and does so up to `.context` positions; `.snapshot` are the
    weights that it has read. An engine of the model as it is now is taken again. ValueError where no engine fits.
    """
    if engine not in CANDIDATES:
        raise ValueError(f"engine must be one of {', '.join(map(repr, CANDIDATES))}, got {engine!r}")
    verified, key, model, built = verified_of(policy), (engine, single), policy.model, {}
    if key in verified:
        return verified[key]

    def failure(kind: str) -> str | None:
        if kind in ("compiled", "llama", "unpacked") and (why := llama_obstacle(core(model))):
            return why
        if kind == "compiled" and (why := CompiledEngine.obstacle(core(model))):
            return why
        built[kind] = build(kind, model, single)
        return disagreement(built[kind], model)

    kind, wrong = first_right(CANDIDATES[engine], failure)
    if kind is None and engine in ("compiled", "llama"):
        raise ValueError(f"the {engine} engine does not fit {type(model).__name__}: {wrong[engine]}; use engine='auto'")
    if kind is None:
        raise ValueError(f"{type(core(model)).__name__} cannot be sampled with a cache of keys and values: {wrong['hf']}. Use "
                         "a decoder-only model with full, sliding-window or chunked attention")
    if "llama" in wrong:
        log.warning("hf engine for %s, since %s", type(model).__name__, wrong["llama"])
    elif "compiled" in built and kind == "llama":
        log.warning("%s is decoded in torch's operators: of the compiled engine %s", type(model).__name__, wrong["compiled"])
    chosen = built[kind]
    _limit(chosen, model)
    chosen.snapshot = Snapshot(policy)
    if chosen.verified:  # the llama engines are the same for one row
        verified |= dict.fromkeys([key] if kind.startswith("hf") else [(engine, False), (engine, True)], chosen)
    return chosen


def build(kind: str, model, single: bool):
    own = {"compiled": CompiledEngine, "llama": LlamaEngine, "unpacked": UnpackedEngine}
    if kind in own:
        return own[kind](core(model))
    return HFEngine(model, single, kind == "hf shifted")  # some models take a query's position from the number of keys


def _limit(engine, model) -> None:
    """End the engine's context where the model may act otherwise and the probe did not go."""
    steady, named = steady_context(model.config), text_config(model).max_position_embeddings
    if steady < named:
        log.warning("%s is used up to %d of its %d positions: past them its rotary positions change with the length of the "
                    "sequence", type(model).__name__, steady, named)
    probed, beyond = _engine_reach(model, engine)
    if beyond is not None:
        engine.context = min(engine.context, max(beyond, probed))
        log.warning("%s is sampled up to %d positions: its configuration names that length as one where it may change, and a "
                    "probe past it would take too long here (it went to %d)", type(model).__name__, engine.context, probed)


def choose_exact_engine(policy, engine: str = "auto", single: bool = False):
    """As `choose_engine`, with the attention of the engine in the model itself (`restore_attention` undoes it); ValueError,
    and the model as it was, where logps then differ in any bit."""
    try:
        share_attention(policy.model)
        chosen = choose_engine(policy, engine, single)
        if chosen.device.type == "cpu" and chosen.dtype == torch.bfloat16 and by_amx():
            raise ValueError("exact mode is impossible with AMX, whose bfloat16 products round by the number of rows; use "
                             "exact=False, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment before Python starts")
        update(chosen, policy, deep=True)
        if (share := inexact_share(chosen, policy.model)) > 0:
            raise ValueError(f"exact mode is impossible here: {share:.1%} of the probe's logps differ in some bit "
                             f"({chosen.name} engine, {chosen.dtype}); use exact=False, or bfloat16 on a CPU")
        return chosen
    except BaseException:
        restore_attention(policy.model)
        raise


def by_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 by AMX here: the probe is too small to see each of its differences."""
    about = Path("/proc/cpuinfo")
    has = about.exists() and "amx_bf16" in about.read_text()
    return has and os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in ("AVX2", "AVX512_CORE_BF16")


# --- how far a probe goes ---------------------------------------------------------------------------------------------


def thresholds(config) -> list[int]:
    """Lengths in a configuration (windows, chunks, scaling) past which its model may act in another way, ascending.

    Frequencies of llama3 and yarn name the length they were trained for, but are the same at every length.
    """
    lengths, parts = set(), [config.to_dict()]
    for part in parts:  # grows
        fixed = part.get("rope_type") in ("llama3", "yarn", "linear", "default")
        for key, value in part.items():
            if isinstance(value, dict):
                parts.append(value)
            elif isinstance(value, int) and THRESHOLD.search(key) and value > 0 and not fixed:
                lengths.add(int(value))
    return sorted(lengths)


def reach(config, limit: int, usual: int, most: float = math.inf) -> tuple[int, int | None]:
    """(positions that a probe goes to: `usual`, and past each threshold below `limit`; None), or with the first threshold that
    is not passed within `most` positions."""
    positions = int(min(limit, usual, most))
    for threshold in thresholds(config):
        if threshold >= limit:
            break
        wanted = min(limit, threshold + threshold // 4 + 8)  # far enough that what it does there is seen
        if wanted > most:
            return positions, threshold
        positions = max(positions, wanted)
    return positions, None


def _engine_reach(model, engine) -> tuple[int, int | None]:
    return reach(model.config, steady_context(model.config), LONG, MOST.get(engine.device.type, MOST["cpu"]))


# --- what counts as a difference --------------------------------------------------------------------------------------


def beside_rounding(model, dtype: torch.dtype, measure: Callable[[], U]) -> tuple[U, U | None]:
    """measure() of the plain forward, and in a precision lower than fp32 again with its inputs moved by a rounding."""
    own = measure()
    if torch.finfo(dtype).eps <= EXACT:
        return own, None
    with moved_inputs(model, dtype):
        return own, measure()


def difference(ours: Tensor, own: Tensor, moved: Tensor | None) -> str | None:
    """None where `ours` is the plain forward's `own`, else by how much they differ, and the bound.

    moved  the plain forward's values after `moved_inputs`, in a precision lower than fp32; None in fp32, where nothing may
           differ by more than EXACT of the largest value. In a lower precision no order of rounding is the right one: the
           mean difference is bounded by what rounding does to the plain forward (measured: honest forwards of 40 families
           stay below 1.05 of it, a forgotten window exceeds 2.3).
    """
    differences = gap(ours, own)
    if moved is None:
        name, value, bound = "at most", differences.max(), EXACT * own.nan_to_num(0.0, 0.0, 0.0).abs().max()
    else:
        name, value, bound = "on average", differences.mean(), ROUNDING * gap(moved, own).mean()
    return None if value <= bound else f"differ by {name} {float(value):.2e}, bound {float(bound):.2e}"


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|, 0 where both are the same infinity or both NaN, infinite where one is."""
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


@contextmanager
def moved_inputs(model, dtype: torch.dtype) -> Iterator[None]:
    """The embeddings of the tokens moved by one rounding of `dtype`, up or down at random."""
    generator = torch.Generator().manual_seed(2)

    def move(module, args, out):
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
        return out + out * (torch.finfo(dtype).eps * signs)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_tf32() -> Iterator[None]:
    """Products of fp32 in fp32: TF32 rounds by more than EXACT."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


# --- an engine against the plain forward ------------------------------------------------------------------------------


@torch.no_grad()
def disagreement(engine, model) -> str | None:
    """None when prompts of several lengths and 3 ragged steps give the logits of the model's own uncached forward, as
    `difference` judges. The longest goes past every threshold of the configuration below MOST (`reach`)."""
    engine.verified = True
    generator, positions = torch.Generator().manual_seed(0), _engine_reach(model, engine)[0]
    for lengths in (_probe_lengths(model), [max(1, min(100, positions // 2)), max(1, positions - STEPS)]):
        ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + STEPS), generator=generator).to(engine.device)
        with evaluating(model), without_tf32():
            ours = cached_logits(engine, ids, lengths, STEPS)
            own, moved = beside_rounding(model, engine.dtype, lambda ids=ids, n=lengths: _own_logits(model, ids, n, STEPS))
        if bool(own.isnan().any()) or not bool(own.isfinite().any()):
            engine.verified = False  # a broken policy says nothing about the engine; its rollouts report it
            return None
        if moved is not None:
            ours, own, moved = (logits.log_softmax(-1) for logits in (ours, own, moved))
        if why := difference(ours, own, moved):
            return f"its cached step is not its own forward: logits {why}, at {max(lengths)} positions"
    return None


def _probe_lengths(model) -> list[int]:
    room = min(steady_context(model.config), 64) - STEPS
    return [max(1, min(length, room)) for length in (13, 5, PAGE - 1)]  # the last one's steps cross into a second page


def _own_logits(model, ids, lengths, steps) -> Tensor:
    """The model's forward without a cache, a row at a time: logits (n, steps + 1, V) after the last positions."""
    last = {"logits_to_keep": steps + 1} if "logits_to_keep" in takes(core(model)) else {}
    whole = [model(row[None, : length + steps], use_cache=False, **last).logits[0] for row, length in zip(ids, lengths)]
    return torch.stack([logits[-steps - 1 :] for logits in whole]).float()


def cached_logits(engine, ids: Tensor, lengths: list[int], steps: int) -> Tensor:
    """Logits (n, steps + 1, V) after each of the last positions: ids (n, .), prefill to lengths, then `steps` steps."""
    ends = torch.tensor(lengths, device=engine.device)
    window = round_up(max(lengths) + steps, store_for(engine, 1).unit)
    cache = engine.allocate(len(lengths), window)
    first = engine.forward(ids[:, : max(lengths)], torch.zeros_like(ends), ends - 1, cache, window)
    prompts = [Prefilled(cache, i, length) for i, length in enumerate(lengths)]
    return torch.stack([first, *stepped(engine, ids, prompts, steps)], 1)


def stepped(engine, ids: Tensor, prompts: list[Prefilled], steps: int) -> list[Tensor]:
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
def batch_dependence(engine, rows: int = 19, steps: int = 2) -> float:
    """Share of steps whose logits differ in any bit when the row is alone, in another place, or beside longer rows.

    0 is what "a rollout does not depend on its batch" rests on. It holds for the llama engine, and for the hf engine where
    products round a row alike in all multiples of `min_rows` rows: on processors that we tried with one thread, not on GPUs,
    nor for mixtures of experts, which group rows by expert, nor on all processors where `shifted` moves a row's columns.
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

    def together(order: list[int]) -> dict[int, Tensor]:
        out = stepped(engine, ids[order], [prompts[i] for i in order], steps)
        return {row: torch.stack([logits[place] for logits in out]) for place, row in enumerate(order)}

    whole = together(list(range(rows)))
    others = [together([*range(rows)][::-1]), *(together([i]) for i in range(rows)), together([0, 2, 1])]
    pairs = [(whole[row], other[row]) for other in others for row in other]
    return float(np.mean([float((a != b).any(-1).float().mean()) for a, b in pairs]))


@torch.no_grad()
def inexact_share(engine, model) -> float:
    """Share of logps that differ in any bit between the engine's steps and the model's right-padded forward."""
    lengths, steps = _probe_lengths(model) * 2, STEPS
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + steps), generator=generator).to(engine.device)
    with evaluating(model):
        ours = cached_logits(engine, ids, lengths, steps)
        whole = model(ids, use_cache=False).logits.float()
    own = torch.stack([row[length - 1 : length + steps] for row, length in zip(whole, lengths)])
    targets = torch.stack([row[length : length + steps] for row, length in zip(ids, lengths)])[..., None]
    a, b = (t[:, :-1].gather(2, targets) - t[:, :-1].logsumexp(-1, keepdim=True) for t in (ours, own))
    return float((a != b).float().mean())
