"""The proof before training: a loop's forward is the model's own plain forward on single sequences, in value and gradient.

Packed rows, masks, windows and positions differ between families of models, and a wrong mask trains without a word. So a loop
tries the ways of `train.logps` on sequences like its own, takes the first that is right, and refuses a model for which none is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpolab.chat import Example, pack, pad
from grpolab.models.load import Policy, evaluating
from grpolab.rollouts import Rollout
from grpolab.train.layout import lay_out
from grpolab.train.logps import masked_logps, remember, rollout_logps, state_of
from grpolab.train.loop import Optimisation, forward_passes

log = logging.getLogger(__name__)

EXACT = 1e-4  # fp32: bound on the largest difference, as a share of the largest value (at least 1) or of a gradient's norm
ROUNDING = 8.0  # lower precision: bound in what the plain forward differs from itself by when its inputs move by a rounding
SHORT = 8  # tokens of the shortest sequence, below any window
SAMPLE = 4096  # entries of each parameter's gradient that are compared


def prove(
    policy: Policy, config: Optimisation, longest: int, what: str = "rollouts", *, width: int | None = None
) -> str:
    """The way in which the forward is right for sequences of up to `longest` tokens: returned, and remembered for the model.

    `what` the loop trains on: "rollouts", "examples", or the "rewards" of a RewardModel; `width`, of the rows that they share
    (default: the configuration's `row_width` or `pack_width`). Logs a warning where the first way
    is wrong; ValueError where all are. Leaves no gradient, and the model as it is. It computes for a moment and takes the
    policy's lock, so call it in the thread of the steps.
    """
    with policy.lock:
        readable = state_of(policy.model)[0]
        width = getattr(config, "row_width", getattr(config, "pack_width", 0)) if width is None else width
        ways = ["unpadded"] * readable + ["packed"] * (width > 0) + ["rows", "alone"]
        with evaluating(policy.model):
            if what != "rewards":
                _check_head(policy)
            task, wrong = TASKS[what](policy, width, longest), {}
            first = ways[0]
            if "packed" in ways and (why := _unfit_for_packing(policy, width)):
                ways.remove("packed")
                wrong["packed"] = why
            with forward_passes(policy, replace(config, autocast=None)):
                right = _first_right(policy, task, ways, wrong)
            if right and config.autocast:
                with forward_passes(policy, config), torch.no_grad():
                    right = _first_right(policy, task, [right], wrong, torch.bfloat16)
        reasons = "; ".join(f"{way}: {why}" for way, why in wrong.items() if why)
        if right is None:
            raise ValueError(f"{policy.name!r} cannot be trained: no forward of the trainer is the model's own ({reasons})")
        if right != first:
            log.warning("%s is trained by the forward %r, since others are not its own (%s)", policy.name, right, reasons)
        remember(policy, what, right)
        return right


@torch.no_grad()
def _unfit_for_packing(policy: Policy, width: int) -> str | None:
    """Why sequences may not share a row through the model's own layers, or None. Seen by what must not change at all, so that
    no bound for rounding can hide it: the second sequence of a row when another stands before it."""
    if "local" in (getattr(policy.model.config, "attention_layers", None) or ()):
        return "its local attention counts the columns of a row, not positions"
    draw, found = _tokens(policy), []
    n = max(2, min(width, 64) // 2)
    second = draw(n)
    for _ in range(2):
        examples = [Example(draw(n), (0,) * n), Example(second, (0,) + (1,) * (n - 1))]
        try:
            logps, mask = masked_logps(policy, pack(examples, 2 * n, policy.pad_id), way="packed")
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model refuses, the comparison with its own forward tells
            return None
        found.append(logps[mask.bool()])
    moved = float(_gap(*found).amax())
    return f"what stands before a sequence in its row moves it by {moved:.1e} nats" if moved > EXACT else None


@torch.no_grad()
def _check_head(policy: Policy) -> None:
    """Logits must be head(hidden states): models that scale, cap or ban them afterwards are refused, not trained wrongly. The
    hidden states are made large for it, since small logits pass a cap unchanged."""
    head, seen = policy.model.get_output_embeddings(), []
    if head is None:
        raise ValueError(f"{policy.name!r} names no output head (get_output_embeddings gives None): it cannot be trained")
    handles = (head.register_forward_pre_hook(lambda module, args: (args[0] * 32, *args[1:])),
               head.register_forward_hook(lambda module, args, out: seen.append(out)))
    try:
        logits = policy.model(torch.tensor([_tokens(policy)(SHORT)], device=policy.device), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if seen and not torch.allclose(logits.float(), seen[-1].float(), rtol=1e-5, atol=1e-5, equal_nan=True):
        raise ValueError(
            f"{policy.name!r} changes its logits after the head (a cap, a scale or a ban), which the losses here do not: "
            "it cannot be trained"
        )


def check_drift(policy: Policy, metrics: dict, bounds: tuple[float, float] | None, step: int) -> None:
    """Stop before the optimiser step where sampler and trainer disagree by more than `bounds` nats: `logp_diff`, the mean
    over the tokens, or `logp_diff_max`. In fp32 they are 1e-6 and 1e-4; in bf16 honest means are 0.005 to 0.04 and the
    largest below 2; another mask, window or stale weights are off by nats. NaN stops too."""
    found = (metrics["logp_diff"], metrics["logp_diff_max"])
    if bounds is not None and not all(x <= bound for x, bound in zip(found, bounds)):
        policy.model.zero_grad()
        raise RuntimeError(
            f"step {step}: sampler and trainer disagree by {found[0]:.3g} nats a token on average and {found[1]:.3g} at most, "
            f"beyond max_logp_diff={bounds}; nothing was changed. One computes another model than the other (changed modules, "
            "stale weights, another attention), or the rollouts are another sampler's: set sampler_cap and max_logp_diff"
        )


# --- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """`plain()` yields the values of one sequence after another by the model's own forward, `ours(way)` gives all of them in
    the same order, in fp32."""

    plain: Callable[[], Iterator[Tensor]]
    ours: Callable[[str], Tensor]


def rollouts_task(policy: Policy, width: int, longest: int) -> Task:
    """Completions that share a prompt in a row of `width` tokens, a long rollout and a short one: their logps."""
    row, one = _row_tokens(policy, width, longest), _long_tokens(policy, longest)
    prompt = max(1, min(row // 3, longest // 2))
    each = max(1, min(longest - prompt, (row - prompt) // 2))
    sizes = [each] * max(2, (row - prompt) // each)
    sizes += [row - prompt - sum(sizes)] if row - prompt > sum(sizes) else []
    draw = _tokens(policy)
    shared = draw(prompt)
    pieces = [(shared, draw(n)) for n in sizes]
    for n in (one, max(2, min(SHORT, longest))):  # and a long prompt of two, which without rows share it too
        first = draw((n + 1) // 2)
        pieces += [(first, draw(n // 2)), (first, draw(max(1, n // 4)))]
    rollouts = [Rollout(p, t, (1,) * len(t), (0.0,) * len(t), (0.0,) * len(t), "probe") for p, t in pieces]
    layout = lay_out(rollouts, width=width, pad_id=policy.pad_id)
    columns = max(len(r.tokens) for r in rollouts)
    written = torch.arange(columns) < torch.tensor([[len(r.tokens)] for r in rollouts])

    def ours(way):
        logps, _ = rollout_logps(policy, layout, written.shape, 1.0, way=way)
        return logps[written.to(logps.device)]

    return Task(lambda: (_plain_logps(policy, r.prompt + r.tokens)[len(r.prompt) - 1 :] for r in rollouts), ours)


def examples_task(policy: Policy, width: int, longest: int) -> Task:
    """Examples that share rows of `width` tokens, and a long and a short one: the logps of all tokens but the first."""
    row, one = _row_tokens(policy, width, longest), _long_tokens(policy, longest)
    each = max(2, min(row // 3, longest))
    draw = _tokens(policy)
    sizes = [*[each] * max(2, row // each), max(2, min(SHORT, longest)), one]
    examples = [Example(draw(n), (0,) + (1,) * (n - 1)) for n in sizes]
    names = pack([Example((i,) * len(e.ids), e.mask) for i, e in enumerate(examples)], width)
    order = names.ids[names.mask.bool()].unique_consecutive().tolist()  # in which `pack` lays them

    def ours(way):
        shared = width and way in ("unpadded", "packed")
        batch = pack(examples, width, policy.pad_id) if shared else pad([examples[i] for i in order], policy.pad_id)
        logps, mask = masked_logps(policy, batch, way=way)
        return logps[mask.bool()]

    return Task(lambda: (_plain_logps(policy, examples[i].ids) for i in order), ours)


def rewards_task(policy: Policy, width: int, longest: int) -> Task:
    """Sequences of several lengths: the last state of each, which a head of zeros would not show, and its reward."""
    draw, long = _tokens(policy), _long_tokens(policy, longest)
    sequences = [draw(n) for n in (long, max(1, long // 3), min(SHORT, long))]

    def plain():
        for s in sequences:
            ids = torch.tensor([s], device=policy.device)
            state = policy.model.get_decoder()(ids, use_cache=False).last_hidden_state[0, -1].float()
            yield torch.cat((state, policy.model(ids, use_cache=False).logits[0].float()))

    def ours(way):
        states, rewards = policy.read(sequences, way=way)
        return torch.cat((states.float(), rewards[:, None]), 1).flatten()

    return Task(plain, ours)


TASKS = {"rollouts": rollouts_task, "examples": examples_task, "rewards": rewards_task}


def _plain_logps(policy: Policy, ids) -> Tensor:
    """log p of ids[1:], by the model's own forward on this sequence alone."""
    ids = torch.tensor([ids], device=policy.device)
    logits = policy.model(ids, use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(1, ids[0, 1:, None]).squeeze(1) - logits.logsumexp(1)


def _tokens(policy: Policy) -> Callable[[int], tuple[int, ...]]:
    """Draws so many ordinary tokens: none that ends, pads or means an image."""
    special = {policy.pad_id, *policy.eos_ids, *policy.tokenizer.all_special_ids}
    size = policy.model.get_input_embeddings().weight.shape[0]
    ordinary = torch.tensor([i for i in range(size) if i not in special] or range(size))
    generator = torch.Generator().manual_seed(0)
    return lambda n: tuple(ordinary[torch.randint(len(ordinary), (n,), generator=generator)].tolist())


# --- how long the sequences are ---------------------------------------------------------------------------------------


def thresholds(config) -> list[int]:
    """The lengths in a model's configuration beyond which it may compute something else: windows, chunks, and where the
    scaling of positions begins."""
    def numbers(entry):
        for key, value in entry.items():
            if isinstance(value, dict):
                yield from numbers(value)
            elif any(word in str(key) for word in ("window", "chunk", "original_max")) and type(value) is int and value > 0:
                yield value

    return sorted(set(numbers(config.get_text_config().to_dict())))


def _past_thresholds(policy: Policy, limit: int, least: int) -> int:
    """Tokens, at most `limit`: as many as are cheap, and a few past every threshold below."""
    parameters = sum(p.numel() for p in policy.model.parameters())
    cheap = min(256, max(32, (4 * 10**9 if policy.device.type == "cpu" else 10**12) // parameters))
    return max(least, min(limit, max([cheap, *(t + 8 for t in thresholds(policy.model.config) if t < limit)])))


def _row_tokens(policy: Policy, width: int, longest: int) -> int:
    return _past_thresholds(policy, width or min(longest, 64), 6)


def _long_tokens(policy: Policy, longest: int) -> int:
    return _past_thresholds(policy, longest, 2)


# --- measuring --------------------------------------------------------------------------------------------------------


def _first_right(policy: Policy, task: Task, ways: list[str], wrong: dict[str, str | None], dtype=None) -> str | None:
    """The first way that equals the plain forward within what `dtype` (the policy's) rounds; `wrong` says why others do not."""
    dtype = dtype or policy.dtype
    coarse = torch.finfo(dtype).eps > 1e-4
    own = _measure(policy, task.plain)
    with _moved_inputs(policy.model, torch.finfo(dtype).eps):
        moved = _measure(policy, task.plain) if coarse else own
    for way in ways:
        try:
            found = _measure(policy, lambda: iter([task.ours(way)]))  # noqa: B023
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a model does not take, it refuses with an error of any type
            wrong[way] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        wrong[way] = _difference(own, found, moved, coarse)
        if wrong[way] is None:
            return way
    return None


def _measure(policy: Policy, values: Callable[[], Iterator[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """The values (K,), and the gradient of their sum under fixed random signs: SAMPLE entries of each parameter's."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    generator, out = torch.Generator().manual_seed(1), []
    samples = [torch.zeros(len(_sample(p))) for p in parameters]

    def take(sample):
        def hook(g):  # a gradient goes as soon as it is sampled: all of them at once take as much memory as the weights
            sample.add_(_sample(g).float().cpu())
            return g.new_zeros(()).expand_as(g)

        return hook

    handles = [p.register_hook(take(sample)) for p, sample in zip(parameters, samples)]
    try:
        for part in values():
            signs = torch.randint(0, 2, part.shape, generator=generator).to(part) * 2 - 1
            out.append(part.detach().float().cpu())
            if part.requires_grad:
                torch.autograd.grad((part * signs).sum(), parameters, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(out), samples


def _sample(x: Tensor) -> Tensor:
    return x.detach().flatten()[:: math.ceil(x.numel() / SAMPLE) or 1]


def _difference(own, found, moved, coarse: bool) -> str | None:
    """None, or what differs by how much, and the bound. Equal infinities and NaN on both sides are no difference."""
    errors, floors = _gap(found[0], own[0]), _gap(moved[0], own[0])
    size = own[0][own[0].isfinite()].abs()
    for name, reduce in (("at most", torch.amax), ("on average", torch.mean)):
        error, floor = float(reduce(errors)), float(reduce(floors))
        bound = ROUNDING * floor if coarse else EXACT * max(1.0, float(size.max()) if len(size) else 1.0)
        if not error <= bound:
            return f"its values differ by {name} {error:.1e}, bound {bound:.1e}"
    whole, floor = _norm(own[1]), _norm([_gap(a, b) for a, b in zip(moved[1], own[1])])
    for g, ours, m in zip(own[1], found[1], moved[1]):
        error, size = _norm([_gap(ours, g)]), _norm([g])
        bound = ROUNDING * (_norm([_gap(m, g)]) + floor / 8) if coarse else EXACT * (10 * size + whole)
        if not error <= bound:
            return f"a gradient differs by {error:.1e} of {size:.1e}, bound {bound:.1e}"
    return None


def _gap(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(torch.inf))


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.nan_to_num(0.0, 0.0, 0.0).double().square().sum()) for g in gradients))


@contextmanager
def _moved_inputs(model, eps: float):
    """The embeddings of the tokens moved by one rounding, up or down at random: what the model then differs from itself by
    is what rounding does to it."""
    generator = torch.Generator().manual_seed(2)

    def moved(module, args, out):
        signs = torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1
        return out + out * (eps * signs)

    handle = model.get_input_embeddings().register_forward_hook(moved)
    try:
        yield
    finally:
        handle.remove()
