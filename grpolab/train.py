"""The training methods: one short async generator each, which yields one row of metrics a step (the loop: optimise.py)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from grpolab import losses
from grpolab.advantages import advantages, group_health, informative, reward_tensor
from grpolab.arithmetic import Problem
from grpolab.chat import Example, encode_chat, pack, pad, prompt_ids, user
from grpolab.checker import correct_reward
from grpolab.forward import check_head, check_lengths, masked_logps, rollout_logps
from grpolab.models import Policy
from grpolab.optimise import Optimisation, apply_gradient, draw, forward_passes, in_thread, loop, micro_batches, off_loop
from grpolab.preferences import Pair
from grpolab.reference import ReferenceLogps, pair_logps, reference_values
from grpolab.reward import RewardModel
from grpolab.rollouts import Batch, Group, Layout, Rollout, collate, lay_out
from grpolab.runs import Run
from grpolab.sampler import Sampler
from grpolab.sampling import SamplingParams, fold_seed

# --- supervised fine-tuning -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SFTConfig(Optimisation):
    """`batch_size` examples a step; `pack_width` packs them into rows of so many tokens (0: one example a row)."""

    batch_size: int = 64
    pack_width: int = 0


def demonstrations(policy: Policy, problems: Sequence[Problem]) -> list[Example]:
    """Each problem's question and target as one tokenised conversation."""
    return [
        encode_chat(policy.tokenizer, user(p.question) + [{"role": "assistant", "content": p.target}]) for p in problems
    ]


async def sft(policy: Policy, examples: Sequence[Example], config: SFTConfig, *, run: Run | None = None) -> AsyncIterator[dict]:
    """Supervised fine-tuning: maximise the log-likelihood of the assistant's tokens, end tokens included."""
    check_head(policy)
    check_lengths(policy, max((len(e.ids) for e in examples), default=0), "example")

    def gradient(batch):
        return sft_gradient(policy, batch, config)

    def tokens(batch):
        return {"tokens_per_s": sum(len(e.ids) for e in batch)}

    async for row in over_batches(policy, examples, gradient, tokens, config, run):
        yield row


async def over_batches(policy: Policy, items: Sequence, gradient, done, config: Optimisation, run: Run | None):
    """The loop of steps on `config.batch_size` items each: gradient(batch) accumulates theirs and returns its metrics,
    done(batch) names what the step did as a rate and counts it."""

    def update(step, optimizer):
        began = time.perf_counter()
        batch = draw(items, config.batch_size, step, config.seed)
        row = gradient(batch)
        row |= apply_gradient(policy, optimizer, config, step)
        seconds = time.perf_counter() - began
        return row | {name: count / seconds for name, count in done(batch).items()} | {"seconds": seconds}

    async def one_step(step, optimizer):
        return await in_thread(policy, lambda: update(step, optimizer))

    async for row in loop(policy, config, run, one_step):
        yield row


def sft_gradient(policy: Policy, batch: Sequence[Example], config: SFTConfig) -> dict:
    """Accumulate the gradient of the batch's mean token loss, whatever the micro-batches; returns the metrics."""
    batch = sorted(batch, key=lambda e: len(e.ids))
    denominator = sum(sum(e.mask) for e in batch)
    parts = []
    for part in micro_batches([len(e.ids) for e in batch], config.token_budget):
        packed = pack(batch[part], config.pack_width, policy.pad_id) if config.pack_width else pad(batch[part], policy.pad_id)
        with forward_passes(policy, config):
            logps, mask = masked_logps(policy, packed)
        loss, metrics = losses.sft_loss(logps, mask, denominator=denominator)
        loss.backward()
        parts.append(metrics)
    return {"loss": losses.combine(parts)["sft_loss"].item(), "tokens": denominator}


# --- group-relative policy optimisation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GRPOConfig(Optimisation):
    """One step: `prompts_per_step` questions, `group_size` rollouts each, `inner_epochs` passes over them in
    `minibatches` optimiser steps a pass.

    The advantage is centred in the group (`advantage_kind`), the loss a sum over all kept tokens divided by their count
    (`aggregation`), the ratio clipped by `clip_eps` = (low, high), and the leash `kl_coef` times the KL to the reference
    (`kl_kind`; a coefficient of 0 needs no reference). `objective`, `ratio` and `dual_clip` as in `losses.policy_loss`;
    `max_grad_norm`, `lr` and the rest as in Optimisation.

    `refills` is dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): up to so many times a step, groups without a difference
    in reward are replaced by groups of further questions. What that costs stands in the row.
    """

    prompts_per_step: int = 64
    group_size: int = 8
    inner_epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 32
    advantage_kind: str = "centred"
    aggregation: str = "token"
    clip_eps: tuple[float, float] = (0.2, 0.2)
    objective: str = "ppo"
    ratio: str = "token"
    dual_clip: float | None = None
    refills: int = 0
    kl_coef: float = 0.0
    kl_kind: str = "unbiased"
    row_width: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.group_size < 1 or self.prompts_per_step < 1 or self.inner_epochs < 1:
            raise ValueError(f"group_size, prompts_per_step and inner_epochs must be at least 1, got {self}")
        if self.refills < 0:
            raise ValueError(f"refills must be 0 (off) or more rounds of sampling, got {self.refills}")
        if not 1 <= self.minibatches <= self.prompts_per_step:
            raise ValueError(f"minibatches={self.minibatches} must lie between 1 and prompts_per_step={self.prompts_per_step}")


Reward = Callable[[str, Problem, Rollout], float | None]  # or an object that also has `batch`, see `score`


def finished_and_correct(text: str, problem: Problem, rollout: Rollout) -> float:
    """1.0 for a right boxed answer in a completion that the policy ended itself, else 0.0. A reward for the box alone
    would never ask for the end token, and the policy would forget to stop."""
    return correct_reward(text, problem.answer) if rollout.finish_reason == "eos" else 0.0


async def grpo(
    policy: Policy, reference: Policy | None, problems: Sequence[Problem], config: GRPOConfig, *,
    reward: Reward = finished_and_correct, watch: Mapping[str, Reward] | None = None, run: Run | None = None,
) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300): sample groups, score them, push probability towards what beat its group.

    `reward(text, problem, rollout)` is a number, or None to abstain. A `reference` is needed where kl_coef > 0. The
    rewards in `watch` are not trained on: their means stand in each row under their names.
    """
    check_reference(policy, reference, config)
    prompts = {p: prompt_ids(policy.tokenizer, p.question) for p in dict.fromkeys(problems)}
    check_head(policy)
    check_lengths(policy, max(map(len, prompts.values()), default=0) + config.max_new_tokens, "prompt and completion")

    async with Sampler(policy) as sampler:

        async def ask(asked, seed):
            params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=seed)
            groups = await sampler.sample([prompts[p] for p in asked], group_size=config.group_size, params=params)
            return await scored(lambda: score(policy, asked, groups, reward), [reward])

        async def one_step(step, optimizer):
            began = time.perf_counter()
            asked = draw(problems, config.prompts_per_step, step, config.seed)
            drawn = await ask(asked, config.seed * 1_000_003 + step)
            groups, cost = await refill(ask, asked, drawn, list(prompts), config, step) if config.refills else (drawn, {})
            sampled = time.perf_counter()
            row = await in_thread(policy, lambda: grpo_update(policy, reference, groups, config, optimizer, step))
            row |= await scored(lambda: watched(policy, asked, drawn, reward, watch or {}), (watch or {}).values())
            times = timings(tokens_of(drawn) + cost.get("refill_tokens", 0), sampled - began,
                            row["trained_tokens"] * config.inner_epochs, time.perf_counter() - sampled)  # fmt: skip
            return describe(drawn) | cost | row | times

        async for row in loop(policy, config, run, one_step):
            yield row


def check_reference(policy: Policy, reference: Policy | None, config: GRPOConfig) -> None:
    """Refuse a leash without a reference, and a reference that would move along."""
    if config.kl_coef and reference is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs a reference policy to stay close to, got None")
    if reference is policy:
        raise ValueError("the reference is the policy itself, so it would move along: load it a second time")


async def refill(ask, asked: Sequence[Problem], drawn: Sequence[Group], problems: Sequence[Problem], config, step: int):
    """Dynamic sampling: (groups to train on, what it cost).

    Each round asks as many questions, none of them twice in a step, as groups with a difference in reward are missing:
    a function of (seed, step) and of the rewards, so that a resumed run asks the same. Where rounds or questions run out,
    the step trains on fewer groups. `ask(problems, seed)` samples and scores.
    """
    left = [p for p in random.Random(f"{config.seed}/{step}/refill").sample(problems, len(problems)) if p not in set(asked)]
    sampled, kept = list(drawn), with_signal(drawn)
    for extra in range(config.refills):
        more, left = left[: config.prompts_per_step - len(kept)], left[config.prompts_per_step - len(kept) :]
        if not more:
            break
        fresh = await ask(more, fold_seed(config.seed, step, extra))
        sampled, kept = sampled + fresh, kept + with_signal(fresh)
    return kept, {
        "refill_prompts": len(sampled) - len(drawn),
        "refill_tokens": tokens_of(sampled) - tokens_of(drawn),
        "discarded_groups": len(sampled) - len(kept),
        "discarded_tokens": tokens_of(sampled) - tokens_of(kept),
    }


def with_signal(groups: Sequence[Group]) -> list[Group]:
    """The groups whose rewards differ."""
    return [g for g, keep in zip(groups, informative(reward_tensor([g.rewards for g in groups])).tolist()) if keep]


def tokens_of(groups: Sequence[Group]) -> int:
    return sum(len(r.tokens) for g in groups for r in g)


async def scored(work, rewards):
    """work(), off the event loop where a reward takes whole batches: a learned one, which computes for long."""
    return await off_loop(work) if any(hasattr(r, "batch") for r in rewards) else work()


def score(policy: Policy, problems: Sequence[Problem], groups: Sequence[Group], reward: Reward) -> list[Group]:
    """Groups with a reward for each rollout. A reward with a method `batch(texts, problems, rollouts)` gives all of a
    step in one call, as a learned one should."""
    if not hasattr(reward, "batch"):
        return [g.with_rewards([reward(policy.decode(r.tokens), p, r) for r in g]) for p, g in zip(problems, groups)]
    rollouts = [r for g in groups for r in g]
    asked = [p for p, g in zip(problems, groups) for _ in g]
    rewards = list(reward.batch([policy.decode(r.tokens) for r in rollouts], asked, rollouts))
    if len(rewards) != len(rollouts):
        raise ValueError(f"{reward!r} gave {len(rewards)} rewards for {len(rollouts)} rollouts: give each its own, or None")
    left = iter(rewards)
    return [g.with_rewards([next(left) for _ in g]) for g in groups]


def watched(
    policy: Policy, problems: Sequence[Problem], groups: Sequence[Group], trained: Reward, watch: Mapping[str, Reward]
) -> dict:
    """The mean of each watched reward over all rollouts; the groups hold those of the `trained` one already."""
    found = {name: groups if r is trained else score(policy, problems, groups, r) for name, r in watch.items()}
    return {name: reward_tensor([g.rewards for g in of]).nanmean().item() for name, of in found.items()}


def grpo_update(policy: Policy, reference, groups: Sequence[Group], config: GRPOConfig, optimizer, step: int) -> dict:
    """All optimiser steps on one batch of groups. A group without a difference in reward carries no gradient, so without
    a leash it is left out of the forward pass and of the count."""
    if not groups:
        return {"trained_groups": 0, "trained_tokens": 0}
    a = advantages(reward_tensor([g.rewards for g in groups]), config.advantage_kind)
    kept = [i for i in range(len(groups)) if config.kl_coef or bool(a[i].any())]
    rows = []
    for epoch in range(config.inner_epochs):
        order = random.Random(f"{config.seed}/{step}/{epoch}").sample(kept, len(kept))
        size = math.ceil(len(order) / config.minibatches) or 1
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            rollouts = [r for i in chosen for r in groups[i]]
            metrics = grpo_gradient(policy, reference, rollouts, a[chosen].flatten(), config)
            rows.append(metrics | apply_gradient(policy, optimizer, config, step))
    size = {"trained_groups": len(kept), "trained_tokens": tokens_of([groups[i] for i in kept])}
    if not rows:
        return size
    row = {k: max(r[k] for r in rows) if k.endswith("_max") else sum(r[k] for r in rows) / len(rows) for k in rows[0]}
    before = {k: rows[0][k] for k in ("logp_diff", "logp_diff_max")}  # sampler against trainer: the policy has not moved yet
    return row | before | size


def grpo_gradient(policy: Policy, reference, rollouts: Sequence[Rollout], a: torch.Tensor, config: GRPOConfig) -> dict:
    """Accumulate the gradient of the clipped objective over `rollouts` with advantages `a` (N,); returns the metrics.

    The denominator is counted over all of them first, so the micro-batches cannot change the gradient.
    """
    denominator = losses.count(collate(rollouts, a).mask, config.aggregation, max_new_tokens=config.max_new_tokens)
    tokens = sum(sum(r.mask) for r in rollouts)
    order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].prompt), rollouts[i].prompt))
    rollouts, a = [rollouts[i] for i in order], a[order]
    lengths = [len(r.prompt) + len(r.tokens) for r in rollouts]
    parts = []
    for part in micro_batches(lengths, config.token_budget):
        batch = collate(rollouts[part], a[part])
        layout = lay_out(rollouts[part], width=config.row_width, pad_id=policy.pad_id)
        with forward_passes(policy, config):
            loss, metrics = grpo_loss(policy, reference, batch, layout, denominator, tokens, config)
        loss.backward()
        parts.append(metrics)
    return {k: v.item() for k, v in losses.combine(parts).items()}


def grpo_loss(policy: Policy, reference, batch: Batch, layout: Layout, denominator, tokens, config: GRPOConfig):
    """The clipped policy gradient with its leash on one micro-batch: (loss, metrics). `denominator` and `tokens` count over
    the whole batch: what the loss is divided by, and the kept tokens."""
    mask, old_logps, a = (x.to(policy.device) for x in (batch.mask, batch.old_logps, batch.advantages))
    logps, entropy = rollout_logps(policy, layout, mask.shape, config.temperature, with_entropy=True)
    loss, metrics = losses.policy_loss(
        logps, old_logps, a, mask, denominator=denominator, aggregation=config.aggregation, clip_eps=config.clip_eps,
        objective=config.objective, ratio=config.ratio, dual_clip=config.dual_clip,
    )
    metrics["entropy"] = (entropy * mask).sum() / tokens
    if config.kl_coef:
        with torch.no_grad():
            ref_logps, _ = rollout_logps(reference, layout, mask.shape, config.temperature)
        kl, kl_metrics = losses.kl_penalty(
            logps, ref_logps, mask, denominator=denominator, kind=config.kl_kind, old_logps=old_logps,
            aggregation=config.aggregation,
        )
        loss, metrics = loss + config.kl_coef * kl, metrics | kl_metrics
    return loss, metrics


def describe(groups: Sequence[Group]) -> dict:
    """Reward, group health, and lengths by finish reason, of what the policy made of the questions drawn."""
    rewards = reward_tensor([g.rewards for g in groups])
    rollouts = [r for g in groups for r in g]
    cut = [len(r.tokens) for r in rollouts if r.finish_reason == "length"]
    ended = [len(r.tokens) for r in rollouts if r.finish_reason != "length"]
    return {
        "reward": rewards.nanmean().item(),
        **group_health(rewards),
        "completion_length": mean(cut + ended),
        "ended_length": mean(ended),
        "truncated_length": mean(cut),
        "truncated": len(cut) / len(rollouts),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def timings(sampled: int, sampling: float, updated: int, update: float) -> dict:
    """Seconds and tokens/s of generation (all `sampled` tokens) and of the update (the tokens trained on, once a pass)."""
    return {
        "sampling_s": sampling, "update_s": update,
        "sampled_tokens_per_s": sampled / sampling, "updated_tokens_per_s": updated / update,
    }


# --- direct preference optimisation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DPOConfig(Optimisation):
    """`batch_size` pairs a step; `beta`, `kind` and `label_smoothing` as in `losses.dpo_loss`, `length_normalised` divides
    each completion's log-prob by its kept tokens. `row_width` > 0 lets chosen and rejected share their prompt."""

    batch_size: int = 32
    beta: float = 0.1
    kind: str = "sigmoid"
    label_smoothing: float = 0.0
    length_normalised: bool = False
    row_width: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size < 1 or not self.beta > 0:
            raise ValueError(f"batch_size must be at least 1 and beta positive, got {self}")
        if self.kind not in losses.DPO_KINDS:
            raise ValueError(f"kind must be one of {losses.DPO_KINDS}, got {self.kind!r}")


async def dpo(
    policy: Policy, reference: Policy | ReferenceLogps, pairs: Sequence[Pair], config: DPOConfig, *, run: Run | None = None
) -> AsyncIterator[dict]:
    """Direct preference optimisation (arXiv 2305.18290): raise the chosen completions against the rejected ones, both
    measured from the reference.

    `reference` is a resident model, or its log-probs from `cache_logps`, which need none; the steps are the same in
    every bit on a CPU.
    """
    if reference is policy:
        raise ValueError("the reference is the policy itself, so it would move along: cache_logps(policy, pairs) keeps it")
    check_pairs(policy, pairs)
    check_head(policy)
    reference_at = reference_values(reference, pairs, config)

    def gradient(places):
        return dpo_gradient(policy, [pairs[i] for i in places], reference_at(places), config)

    async for row in over_batches(policy, range(len(pairs)), gradient, pairs_per_s, config, run):
        yield row


def pairs_per_s(batch: Sequence) -> dict:
    """What a step on pairs did, for `over_batches`."""
    return {"pairs_per_s": len(batch)}


def dpo_gradient(policy: Policy, pairs: Sequence[Pair], ref_logps: torch.Tensor, config: DPOConfig) -> dict:
    """Accumulate the gradient of the batch's mean pair loss, whatever the micro-batches; returns the metrics.
    ref_logps: (P, 2), chosen and rejected."""
    parts = []
    for places in pair_batches(pairs, config):
        part = [pairs[i] for i in places]
        with forward_passes(policy, config):
            logps = pair_logps(policy, part, config.row_width)
        loss, metrics = losses.dpo_loss(
            *logps.T, *ref_logps[places].to(logps.device).T, beta=config.beta, denominator=len(pairs), kind=config.kind,
            label_smoothing=config.label_smoothing, lengths=pair_lengths(part, logps) if config.length_normalised else None,
        )
        loss.backward()
        parts.append(metrics)
    metrics = {k: v.item() for k, v in losses.combine(parts).items()}
    return {"loss": metrics.pop("dpo_loss")} | metrics


def implicit_rewards(
    policy: Policy, reference: Policy | ReferenceLogps, pairs: Sequence[Pair], config: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """DPO's reward beta (log pi - log pi_ref) of each pair's chosen and rejected completion, and log pi: (P, 2) each."""
    check_pairs(policy, pairs)
    ref_logps, logps = reference_values(reference, pairs, config)(range(len(pairs))), torch.zeros(len(pairs), 2)
    with torch.no_grad(), policy.lock, forward_passes(policy, config):
        for places in pair_batches(pairs, config):
            logps[places] = pair_logps(policy, [pairs[i] for i in places], config.row_width).cpu()
    scale = pair_lengths(pairs, logps).T if config.length_normalised else 1.0
    return config.beta * (logps - ref_logps) / scale, logps


def pair_batches(pairs: Sequence[Pair], config: Optimisation) -> Iterator[list[int]]:
    """The places of the pairs of each micro-batch, pairs of similar length together; a pair counts as two rows."""
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i].longest, pairs[i].prompt))
    for part in micro_batches([2 * pairs[i].longest for i in order], config.token_budget):
        yield order[part]


def pair_lengths(pairs: Sequence[Pair], like: torch.Tensor) -> torch.Tensor:
    """Kept tokens of chosen and rejected: (2, P)."""
    return like.new_tensor([[sum(s.mask) for s in (p.chosen, p.rejected)] for p in pairs]).T


def check_pairs(policy: Policy, pairs: Sequence[Pair]) -> None:
    """Refuse pairs that do not fit the policy's context or vocabulary."""
    check_lengths(policy, max((p.longest for p in pairs), default=0), "pair")
    top, size = max((max(p.prompt + p.chosen.ids + p.rejected.ids) for p in pairs), default=0), policy.model.config.vocab_size
    if top >= size:
        raise ValueError(f"the pairs hold token id {top}, beyond the vocabulary of {size}: they are of another tokenizer")


# --- reward model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardConfig(Optimisation):
    """`batch_size` pairs a step. `margin` is asked for between chosen and rejected, times a pair's own `meta["margin"]`
    where it has one; `centering` pulls the two rewards' sum to zero (`losses.bradley_terry_loss`)."""

    batch_size: int = 32
    margin: float = 0.0
    centering: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size < 1 or self.centering < 0:
            raise ValueError(f"batch_size must be at least 1 and centering at least 0, got {self}")


async def reward_model(
    model: RewardModel, pairs: Sequence[Pair], config: RewardConfig, *, run: Run | None = None
) -> AsyncIterator[dict]:
    """Train a reward model to score chosen above rejected (Bradley–Terry; InstructGPT, arXiv 2203.02155, eq. 1)."""
    check_pairs(model, pairs)

    def gradient(places):
        return reward_gradient(model, [pairs[i] for i in places], config)

    async for row in over_batches(model, range(len(pairs)), gradient, pairs_per_s, config, run):
        yield row


def reward_gradient(model: RewardModel, pairs: Sequence[Pair], config: RewardConfig) -> dict:
    """Accumulate the gradient of the batch's mean Bradley–Terry loss, whatever the micro-batches; returns the metrics."""
    parts = []
    for places in pair_batches(pairs, config):
        part = [pairs[i] for i in places]
        with forward_passes(model, config):
            rewards = model.forward([r.prompt + r.tokens for p in part for r in p.sides]).view(-1, 2)
        margin = rewards.new_tensor([config.margin * p.meta.get("margin", 1.0) for p in part])
        loss, metrics = losses.bradley_terry_loss(
            *rewards.T, denominator=len(pairs), margin=margin, centering=config.centering
        )
        loss.backward()
        parts.append(metrics)
    metrics = {k: v.item() for k, v in losses.combine(parts).items()}
    return {"loss": metrics.pop("bradley_terry_loss")} | metrics
