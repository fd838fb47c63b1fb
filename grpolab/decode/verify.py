"""The proofs of the sampler: which engine computes a model's own forward, and whether the model is still the one proved.

Longer than 350 lines, since the choice, its probes and the snapshot of a model are one argument.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn import functional as F

from grpolab.decode.cache import PAGE, Prefilled, round_up, store_for
from grpolab.decode.engines import attention
from grpolab.decode.engines.attention import restore_attention, share_attention
from grpolab.decode.engines.hf import HFEngine, takes
from grpolab.decode.engines.llama import LlamaEngine
from grpolab.models.load import attention_of, core, evaluating, llama_obstacle, steady_context, text_config

log = logging.getLogger(__name__)

BOUND = 1e-4  # fp32: of the largest logit
STEPS = 3  # that a probe decodes after each of its prompts
LONG = 160  # positions that a probe goes to even where the configuration names no length
FLOPS = {"cpu": 2e12, "cuda": 4e14}  # that one forward of the probe may take: some ten seconds on a laptop
SCORES = 2**30  # bytes that the attention of one forward of the probe may take
PLAIN = (bool, int, float)  # values set on a module that its forward may read
THRESHOLD = re.compile("window|sliding|chunk|local|original_max_position|floor_scale")  # names of lengths in configurations


def choose_engine(model, engine: str = "auto", single: bool = False):
    """The engine for a model: "llama", "hf", or "auto" (llama where the model allows it and the check passes).

    Whatever is chosen has reproduced the model's own forward (`disagreement`) and does so up to `.context` positions. The
    outcome is remembered for as long as the model's modules and configuration stay, so that it is proved once.
    ValueError where nothing does.
    """
    if engine not in ("auto", "llama", "hf"):
        raise ValueError(f"engine must be 'auto', 'llama' or 'hf', got {engine!r}")
    structure, proofs = _proofs.get(model, (None, {}))
    if structure is None or structure.changed(deep=True):
        proofs = {}
    key = engine, single, str(model.config)
    if key in proofs:
        build, context = proofs[key]
        chosen = build()
        chosen.context, chosen.proved = context, True
        return chosen
    chosen, build = _prove(model, engine, single)
    if chosen.proved:
        _proofs[model] = Structure(model), proofs | {key: (build, chosen.context)}
    return chosen


_proofs: WeakKeyDictionary = WeakKeyDictionary()  # model -> its Structure and (how to build the engine, context) by request


def _prove(model, name: str, single: bool):
    """An engine that was compared with the model, and a function that builds another like it."""
    reference = weakref.ref(model)  # the builder is kept beside the model and may not keep it alive
    if name != "hf":
        why = llama_obstacle(core(model))
        if why is None:
            build = lambda: LlamaEngine(core(reference()), single)  # noqa: E731
            why = disagreement(engine := build(), model)
            if why is None:
                return _limited(engine, model), build
        if name == "llama":
            raise ValueError(f"the llama engine does not fit {type(model).__name__}: {why}; use engine='auto'")
        log.warning("hf engine for %s, since %s", type(model).__name__, why)
    reasons = []
    for shifted in (False, True):  # some models take a query's position from the number of keys
        build = lambda shifted=shifted: HFEngine(reference(), single, shifted)  # noqa: E731
        engine = build()
        try:
            why = disagreement(engine, model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that cannot take such masks fails in a way of its own
            why = f"{type(error).__name__}: {error}"
        if why is None:
            return _limited(engine, model), build
        reasons.append(why)
    raise ValueError(engine.refusal(f"its cached step is not its own forward ({reasons[0]})"))


def choose_exact_engine(model, engine: str = "auto", single: bool = False):
    """As `choose_engine`, with the attention of the engine in the model itself (`restore_attention` undoes it); ValueError,
    and the model as it was, where logps then differ in any bit."""
    try:
        share_attention(model)
        chosen = choose_engine(model, engine, single)
        if (share := inexact_share(chosen, model)) > 0:
            raise ValueError(f"exact mode is impossible here: {share:.1%} of the probe's logps differ in some bit "
                             f"({chosen.name} engine, {chosen.dtype}); use exact=False, or bfloat16 on a CPU")
        return chosen
    except BaseException:
        restore_attention(model)
        raise


def _limited(engine, model):
    """The engine, its `context` within the lengths past which the model may act otherwise and the probe did not go."""
    steady, named = steady_context(model.config), text_config(model).max_position_embeddings
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
    config, weights = text_config(model), sum(p.numel() for p in model.parameters())
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
    fp32: within BOUND, without TF32. Lower precision: mean |difference of logps| within twice what the model differs
    from itself by, with its own cache or its other attention, since there is no one right order of rounding. A banned
    token's -inf agrees with -inf alone.
    """
    engine.proved = True
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 rounds by more than the bound
    try:
        return next(filter(None, (_disagreement(engine, model, *probe) for probe in _probes(model, engine))), None)
    finally:
        torch.set_float32_matmul_precision(precision)


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
    worst, bound = float(_distance(ours, own).max()), BOUND * float(own[own.isfinite()].abs().max())
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
def batch_dependence(engine, rows: int = 7, steps: int = 2) -> float:
    """Share of steps whose logits differ in any bit when the row is alone, in another place, or beside longer rows.

    0 is what "a rollout does not depend on its batch" rests on. It holds for the llama engine, and for the hf engine where
    products round a row alike in all multiples of `min_rows` rows: on processors that we tried with one thread, not on GPUs,
    nor for mixtures of experts, which group rows by expert.
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


# --- is it still the model that was proved and read? --------------------------------------------------------------------


class Structure:
    """What a model is made of, as it is now; it does not keep the model itself alive.

    `changed`  whether a module, buffer, hook, replaced forward or attention implementation is another one,
               or parameters have another dtype or device: an engine must be chosen anew
               `deep` also compares the plain numbers and switches that are set on modules (a scale, an adapter's)
    """

    def __init__(self, model):
        self.config = model.config
        self.spaces = [vars(m) for m in model.modules()]
        names = ("_modules", "_buffers", "_parameters", "_forward_hooks", "_forward_pre_hooks")
        children, buffers, parameters, *hooks = ([space[name] for space in self.spaces] for name in names)
        self.tables, self.owned = [d for d in (*children, *buffers) if d], [d for d in parameters if d]
        self.hooks = [*hooks[0], *hooks[1]]
        self.parts, self.form, self.constants = self._parts(), self._form(), self._constants()

    def changed(self, deep: bool) -> bool:
        parts = self._parts()
        if len(parts) != len(self.parts) or not all(map(is_, parts, self.parts)) or self._form() != self.form:
            return True
        return deep and self._constants() != self.constants

    def parameters(self) -> list:
        return [p for p in chain.from_iterable(map(dict.values, self.owned)) if p is not None]

    def _parts(self) -> list:
        return list(chain.from_iterable(map(dict.values, self.tables)))

    def _form(self) -> tuple:
        """Hooks by their number, which is never given twice; forwards that somebody set on a single module."""
        replaced, parameters = [id(space["forward"]) for space in self.spaces if "forward" in space], self.parameters()
        return (tuple(chain.from_iterable(self.hooks)), replaced, attention_of(self),
                [p.dtype for p in parameters], [p.device for p in parameters])

    def _constants(self) -> list:
        return [(name, x) for space in self.spaces for name, x in space.items() if type(x) in PLAIN and name != "training"]


class Snapshot:
    """A policy's model as it was when its weights were last read (`renew`).

    `structure_changed`  another model object, or what `Structure` sees
    `weights_changed`    the policy's version, or a parameter replaced, moved or edited in place (torch counts those edits).
                         `deep` also sums the bits of all weights, which sees edits through `.data`, that torch does not
                         count; it reads every weight once, as a decode step does, so it is for when nothing runs.
    """

    def __init__(self, policy):
        self.policy = policy
        self.renew()

    def renew(self) -> None:
        self.model, self.version, self.structure = self.policy.model, self.policy.version, Structure(self.policy.model)
        self.stamp, self.sums = self._stamp(), checksum(self.model)

    def structure_changed(self, deep: bool) -> bool:
        return self.policy.model is not self.model or self.structure.changed(deep)

    def weights_changed(self, deep: bool) -> bool:
        return self._stamp() != self.stamp or (deep and checksum(self.model) != self.sums)

    def _stamp(self) -> tuple:
        parameters = self.structure.parameters()
        return (self.policy.version, list(map(id, parameters)), [p._version for p in parameters],
                [p.data_ptr() for p in parameters])


@torch.no_grad()
def checksum(model) -> list[int]:
    """A number for each parameter and buffer: the sum of its bits as integers, a row of them times the row's number.

    It changes with every change of a single entry and of the order of rows; not with the order inside a row.
    """
    sums = [_bits(t.detach()) for t in chain(model.parameters(), model.buffers()) if t.numel()]
    return torch.stack([s.cpu() for s in sums]).tolist() if sums else []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.contiguous().reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    wide = rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0
    sums = rows.view(torch.int64 if wide else torch.uint8).sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
