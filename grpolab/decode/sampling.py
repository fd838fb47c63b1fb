"""From logits to tokens: the sampling parameters, counter-based randomness, and the draw by inverse CDF.

Shapes: n rows, V vocabulary. Everything here is row-wise: a row's token and logps depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from operator import index

import numpy as np
import torch
from torch.nn import functional as F

from grpolab.decode.constraint import Constraint

CHUNK = 256  # width of the coarse level of the two-level inverse CDF
SHARED = 2**15  # numbers whose sum torch's threads share on a processor, where it is the only one
TOP = 256  # candidates tried before the full sort of top-p
COLDEST = 1e-30  # below this temperature, logits divided by it leave float32
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Filters apply in the order temperature, top-k, top-p, min-p; ties are all kept.

    temperature     at least 1e-30; logits are divided by it before the normaliser
    top_k           keep the k largest logits; 0 is off
    top_p           keep the smallest set whose probability reaches p; 1.0 is off
    min_p           keep tokens with at least min_p times the largest probability; 0.0 is off
    greedy          take the argmax; `logps` are then the raw ones
    max_new_tokens  tokens a rollout may take; one that fills the context before or with them finishes as "context"
    stop_ids        further token ids that end a rollout, beside the policy's eos ids
    stop_strings    texts that end a rollout at the token that completes them
    ignore_eos      run through the policy's eos ids (benchmarks)
    seed            of the request; None takes a fresh one from the sampler
    constraint      a grammar (`constraint.Grammars`), whose mask applies before the filters; it ends a rollout by an eos id
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self):
        set_to = partial(object.__setattr__, self)
        for name in ("top_k", "max_new_tokens", "seed"):
            set_to(name, None if getattr(self, name) is None else _integer(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            set_to(name, float(getattr(self, name)))
        set_to("stop_ids", tuple(_integer("stop_ids", i) for i in self.stop_ids))
        strings = (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)
        set_to("stop_strings", strings)
        if not (isfinite(self.temperature) and self.temperature >= COLDEST):
            raise ValueError(f"temperature must be at least {COLDEST}, below which logits divided by it leave float32, "
                             f"got {self.temperature}; for the argmax use greedy=True")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        for s in self.stop_strings:
            if not isinstance(s, str) or not s or s != s.encode("utf-8", "ignore").decode():
                raise ValueError(f"stop_strings holds {s!r}: it takes texts of at least one character, without half a "
                                 "surrogate pair; token ids go to stop_ids")
        for name in ("greedy", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.constraint is not None and self.ignore_eos:
            raise ValueError("a constraint ends a rollout by an eos id, and ignore_eos runs through it: leave one of them out")

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability 0; each rollout then records its `kept_mass`."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.constraint is not None)


def _integer(name: str, value) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


@dataclass(frozen=True)
class Draw:
    """One token a row: tokens (n,) int64, logps and raw_logps (n,) fp32, kept_mass (n,) or None when nothing is cut."""

    tokens: torch.Tensor
    logps: torch.Tensor
    raw_logps: torch.Tensor
    kept_mass: torch.Tensor | None = None

    def rows(self, i: np.ndarray | slice) -> Draw:
        """Those of rows i."""
        return Draw(*(None if t is None else t[i] for t in (self.tokens, self.logps, self.raw_logps, self.kept_mass)))


Kind = tuple[SamplingParams, torch.Tensor, torch.Tensor | None]  # rows that are drawn alike, (n,) indices, and (n, V) allowed


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold_seed(seed: int, *counters: int) -> int:
    """A 63-bit seed out of a seed and counters (prompt index, sample index, ...); the same in any order of work."""
    state = np.array([seed & (2**64 - 1)], dtype=np.uint64)
    for counter in counters:
        state = _mix(state + np.uint64((counter + 1) * _GOLDEN & (2**64 - 1)))
    return int(_mix(state)[0] >> np.uint64(1))


def group_seeds(seed: int, prompts: Iterable[int], group_size: int) -> list[list[int]]:
    """The seeds of the groups of a request: by the number of the prompt in it, and of the rollout in its group."""
    return [[fold_seed(seed, i, g) for g in range(group_size)] for i in prompts]


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Doubles in [0, 1), one for each (seed, position): no generator state, so no order of calls to depend on."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(_mix(seeds.astype(np.uint64)) + counters) >> np.uint64(11)) * 2.0**-53


def uniforms_on(device: torch.device, u: np.ndarray) -> torch.Tensor:
    """Uniforms as a tensor on the device; on the processor for one that has no doubles (Apple's MPS)."""
    return torch.from_numpy(u).to("cpu" if device.type == "mps" else device)


def inverse_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum of probs (n, V) exceeds u (n,) times the total: (n,) int64.

    Two levels: the cumulative sum of chunk totals, then that inside the chosen chunk, both in double. `probs` need no
    normaliser; an index with probability 0 is never returned.
    """
    if probs.device.type == "mps":  # no doubles there
        return inverse_cdf(probs.cpu(), u.cpu()).to(probs.device)
    n, vocab = probs.shape
    if vocab <= 2 * CHUNK:
        return _locate(probs.cumsum(-1, dtype=torch.float64), u)
    if vocab % CHUNK:
        probs = F.pad(probs, (0, -vocab % CHUNK))
    chunks = probs.view(n, -1, CHUNK)
    coarse = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    chunk = _locate(coarse, u)
    before = coarse.gather(1, (chunk - 1).clamp_(min=0)[:, None]).squeeze(1) * (chunk > 0)
    inside = chunks[torch.arange(n, device=probs.device), chunk].cumsum(-1, dtype=torch.float64)
    rest = (u * coarse[:, -1] - before) / inside[:, -1]
    return chunk * CHUNK + _locate(inside, rest)


def _locate(cdf: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First index with cdf > u * total; u is held below 1, so that rounding cannot pass the last positive entry."""
    target = u.clamp(0, 1 - 2**-52) * cdf[:, -1]
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(1).clamp_(max=cdf.shape[1] - 1)


def truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits (n, V), already divided by the temperature, with -inf where top-k, top-p or min-p cut."""
    floor = torch.full_like(logits[:, :1], -torch.inf)
    if 0 < params.top_k < logits.shape[1]:
        floor = logits.topk(params.top_k).values[:, -1:]
    if params.top_p < 1:
        kept = logits.masked_fill(logits < floor, -torch.inf)
        floor = torch.maximum(floor, _nucleus_floor(kept, params.top_p))
    if params.min_p > 0:
        floor = torch.maximum(floor, logits.amax(-1, keepdim=True) + np.log(params.min_p))
    return logits.masked_fill(logits < floor, -torch.inf)


def _nucleus_floor(logits: torch.Tensor, p: float) -> torch.Tensor:
    """The smallest logit of the smallest set with probability >= p (n, 1) (Holtzman et al. 2020, eq. 2)."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(TOP, logits.shape[1])).values
    mass = (best - normaliser).exp().cumsum(-1)
    if bool((mass[:, -1] < p).any()) and best.shape[1] < logits.shape[1]:
        best = logits.sort(-1, descending=True).values
        mass = (best - normaliser).exp().cumsum(-1)
    last = (mass < p).sum(-1, keepdim=True).clamp_(max=best.shape[1] - 1)
    return best.gather(1, last)


def draw_tokens(logits: torch.Tensor, u: torch.Tensor, params: SamplingParams, allowed: torch.Tensor | None = None) -> Draw:
    """One token for each row of logits (n, V) with the uniforms u (n,) double, of those that `allowed` (n, V) lets through;
    the arithmetic is fp32. One long row alone is drawn as two: torch's threads would share its sums, in another order."""
    if len(logits) == 1 and logits.numel() >= SHARED:
        both = [None if x is None else x.expand(2, *x.shape[1:]) for x in (logits, u, allowed)]
        return draw_tokens(*both[:2], params, both[2]).rows(slice(1))
    logits = logits.float()
    if params.greedy:
        tokens = _masked(logits, allowed).argmax(-1)
        logps = _logps(logits, logits.logsumexp(-1), tokens)
        return Draw(tokens, logps, logps)
    scaled = logits if params.temperature == 1 else logits / params.temperature
    kept = truncate(_masked(scaled, allowed), params) if params.truncates else scaled
    mass, normaliser = _exponentiate(kept)
    tokens = inverse_cdf(mass, u)
    logps = _logps(kept, normaliser, tokens)
    raw_logps = logps if kept is logits else _logps(logits, logits.logsumexp(-1), tokens)
    left = (normaliser - scaled.logsumexp(-1)).exp() if params.truncates else None
    return Draw(tokens, logps, raw_logps, left)


def _masked(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)


def _exponentiate(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised probabilities (n, V) and the log-normaliser (n,), with the very bits of torch.logsumexp."""
    top = logits.amax(-1, keepdim=True)
    mass = (logits - top).exp_()
    return mass, mass.sum(-1).log_().add_(top.squeeze(1))


def _logps(logits: torch.Tensor, normaliser: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As `losses.target_logps` computes them, so that equal logits give equal bits."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - normaliser


def draw_mixed(logits: torch.Tensor, u: torch.Tensor, kinds: Sequence[Kind]) -> Draw:
    """`draw_tokens` for rows (n, V) of several requests, whose kinds together cover every row."""
    if len(kinds) == 1:
        return draw_tokens(logits, u, kinds[0][0], kinds[0][2])
    n, device = logits.shape[0], logits.device
    tokens = torch.zeros(n, dtype=torch.long, device=device)
    logps, raw_logps, mass = (torch.ones(n, device=device) for _ in range(3))
    for params, rows, allowed in kinds:
        part = draw_tokens(logits[rows], u[rows.to(u.device)], params, allowed)
        tokens[rows], logps[rows], raw_logps[rows] = part.tokens, part.logps, part.raw_logps
        if part.kept_mass is not None:
            mass[rows] = part.kept_mass
    return Draw(tokens, logps, raw_logps, mass if any(params.truncates for params, _, _ in kinds) else None)
