"""The proof before training: a loop's forward is the model's own plain forward on single sequences, in value and gradient.

Packed rows, masks, windows and positions differ between families of models, and a wrong mask trains without a word. So a loop
tries the ways of `train.logps` on sequences like its own, takes the first that is right, and refuses a model for which none is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from grpolab.decode.snapshot import verified_of
from grpolab.decode.verify import EXACT, beside_rounding, difference, first_right, gap, reach, without_tf32
from grpolab.models.load import Policy, evaluating
from grpolab.rollouts import given
from grpolab.train import forward
from grpolab.train.layout import lay_out
from grpolab.train.logps import rollout_logps
from grpolab.train.loop import Optimisation, autocast

log = logging.getLogger(__name__)

GRADIENT = 1.5  # lower precision: bound on a gradient's error, in what the plain one moves by with its inputs
SHORT = 8  # tokens of the shortest sequence, below any window
GROUP = 512  # tokens of the group of rollouts with many completions
SAMPLE = 4096  # entries of each parameter's gradient that are compared


def verify_forward(policy: Policy, config: Optimisation, longest: int, what: str = "rollouts") -> str:
    """The way in which the forward is right for sequences of up to `longest` tokens: returned, and remembered for the model.

    `what` the loop trains on: "rollouts", as which examples are taken too, or the "rewards" of a RewardModel. Logs a warning
    where the first way is wrong; ValueError where all are. Leaves no gradient, and the model as it is. It computes for a
    moment, unless the same was verified before, and takes the policy's lock, so call it in the thread of the steps.
    """
    with policy.lock:
        verified, training = verified_of(policy), policy.model.training
        key = (what, longest, config.autocast, config.checkpoint_activations, training)
        if key not in verified:
            verified[key] = _first_right(policy, config, longest, what)
        verified["way", what, training] = verified[key]
        return verified[key]


def _first_right(policy: Policy, config: Optimisation, longest: int, what: str) -> str:
    ways = ["unpadded"] * forward.readable(policy.model) + ["rows"]
    with evaluating(policy.model), without_tf32():
        if what != "rewards":
            _check_head(policy)
        task, checkpointed = TASKS[what](policy, longest), config.checkpoint_activations
        way, wrong = first_right(ways, Comparison(policy, task, policy.dtype, checkpointed).failure)
        if config.autocast and way is not None:
            with autocast(policy, config), torch.no_grad():
                if why := Comparison(policy, task, torch.bfloat16, checkpointed).failure(way):
                    way, wrong = None, wrong | {way: why}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
    if way is None:
        raise ValueError(f"{policy.name!r} cannot be trained: no forward of the trainer is the model's own ({reasons})")
    if wrong:
        log.warning("%s is trained by the forward %r, since others are not its own (%s)", policy.name, way, reasons)
    return way


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
    """Stop before the optimiser step where sampler and trainer disagree by more than `bounds` nats: `diff_abs_mean`, the mean
    over the tokens, or `diff_max`. In fp32 they are 1e-6 and 1e-4; in bf16 honest means are 0.005 to 0.04 and the
    largest below 2; another mask, window or stale weights are off by nats. NaN stops too."""
    mean, most = metrics["diff_abs_mean"], metrics["diff_max"]
    if bounds is not None and not (mean <= bounds[0] and most <= bounds[1]):
        policy.model.zero_grad()
        raise RuntimeError(
            f"step {step}: sampler and trainer disagree by {mean:.3g} nats a token on average and {most:.3g} at most, "
            f"beyond max_logp_diff={bounds}; nothing was changed. One computes another model than the other (changed modules, "
            "stale weights, another attention), or the rollouts are another sampler's: set sampler_cap and max_logp_diff"
        )


# --- what is compared -------------------------------------------------------------------------------------------------


# (plain, ours): plain() yields the values of one sequence after another by the model's own forward, ours(way=, checkpointed=)
# gives all of them in the same order, in fp32.
Task = tuple[Callable[[], Iterator[Tensor]], Callable[..., Tensor]]


def rollouts_task(policy: Policy, longest: int) -> Task:
    """Completions that share a prompt, and some a beginning, of the longest rollouts and of short ones, and some that share
    nothing: their logps. Of some there are many, so that rounding hides no gradient."""
    draw, group = _tokens(policy), _positions(policy, GROUP, least=6)
    prompt = draw(max(1, min(group // 3, longest // 2)))
    each = max(1, min(longest - len(prompt), (group - len(prompt)) // 2))
    pieces = [(prompt, draw(each)) for _ in range(max(2, (group - len(prompt)) // each))]
    pieces.append((prompt, pieces[-1][1][: each // 2] + draw(each - each // 2)))
    for n in (_positions(policy, longest), max(2, min(SHORT, longest))):
        prompt = draw((n + 1) // 2)
        pieces += [(prompt, draw(n // 2)), (prompt, draw(max(1, n // 4)))]
        pieces.append((draw((n + 1) // 2), draw(n // 2)))
    rollouts = [given(p, t, (1,) * len(t)) for p, t in pieces]
    layout = lay_out(rollouts, pad_id=policy.pad_id)
    written = torch.arange(max(len(t) for _, t in pieces)) < torch.tensor([[len(t)] for _, t in pieces])

    def ours(**how):
        logps, _ = rollout_logps(policy, layout, written.shape, 1.0, **how)
        return logps[written.to(logps.device)]

    return lambda: (_plain_logps(policy, p + t)[len(p) - 1 :] for p, t in pieces), ours


def rewards_task(policy: Policy, longest: int) -> Task:
    """Rollouts of several lengths, some of which share how they begin: the last state of each, which a head of zeros would not
    show, and its reward."""
    draw, long = _tokens(policy), _positions(policy, longest)
    prompt = draw(max(1, long // 3))
    rest = long - len(prompt)
    pieces = [(prompt, draw(rest)), (prompt, draw(rest // 2)), (prompt, ()), (draw(min(SHORT, long)), ())]
    rollouts = [given(p, t, (0,) * len(t)) for p, t in pieces]

    def plain():
        for r in rollouts:
            ids = torch.tensor([r.prompt + r.tokens], device=policy.device)
            state = policy.model.get_decoder()(ids, use_cache=False).last_hidden_state[0, -1].float()
            yield torch.cat((state, policy.model(ids, use_cache=False).logits[0].float()))

    def ours(**how):
        states, rewards = policy.read(rollouts, **how)
        return torch.cat((states.float(), rewards[:, None]), 1).flatten()

    return plain, ours


TASKS = {"rollouts": rollouts_task, "rewards": rewards_task}


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


def _positions(policy: Policy, limit: int, least: int = 2) -> int:
    """Tokens of a row or sequence, at most `limit`: as many as are cheap, and past every threshold of the model."""
    parameters = sum(p.numel() for p in policy.model.parameters())
    cheap = min(256, max(32, (4 * 10**9 if policy.device.type == "cpu" else 10**12) // parameters))
    return max(least, reach(policy.model.config, limit, cheap)[0])


# --- values and gradients ---------------------------------------------------------------------------------------------


class Comparison:
    """The plain forward's values and gradients of a task, to compare those of the trainer's ways with; in a lower `dtype` also
    what a rounding of its inputs does to them."""

    def __init__(self, policy: Policy, task: Task, dtype: torch.dtype, checkpointed: bool):
        plain, self.ours = task
        self.policy, self.checkpointed = policy, checkpointed
        self.own, self.moved = beside_rounding(policy.model, dtype, lambda: _measure(policy, plain()))

    def failure(self, way: str) -> str | None:
        """None where the way's values and gradients are the plain forward's, else what differs by how much."""
        ours = (self.ours(way=w, checkpointed=self.checkpointed) for w in [way])
        values, gradients = _measure(self.policy, ours)
        if why := difference(values, self.own[0], self.moved and self.moved[0]):
            return f"its values {why}"
        whole = _norm(self.own[1])
        floors = self.moved and [gap(m, g) for m, g in zip(self.moved[1], self.own[1])]
        for i, (g, ours) in enumerate(zip(self.own[1], gradients)):
            error, size = _norm([gap(ours, g)]), _norm([g])
            bound = GRADIENT * (_norm([floors[i]]) + _norm(floors) / 8) if floors else EXACT * (10 * size + whole)
            if not error <= bound:
                return f"a gradient differs by {error:.1e} of {size:.1e}, bound {bound:.1e}"
        return None


def _measure(policy: Policy, values: Iterator[Tensor]) -> tuple[Tensor, list[Tensor]]:
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
        for part in values:
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


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.nan_to_num(0.0, 0.0, 0.0).double().square().sum()) for g in gradients))
