"""The training loops: one short async generator a method, which yields one row of metrics a step.

A loop draws everything that it draws from (config.seed, step), so that parameters and optimiser are all there is to save;
given a Run it writes its metrics there and goes on where an interrupted run of the same configuration stopped. The heavy
work runs in a thread that holds `policy.lock`, so the event loop keeps answering while a step computes.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from grpolab import losses
from grpolab.advantages import advantages, group_health, reward_tensor
from grpolab.arithmetic import Problem
from grpolab.chat import Example, Packed, encode_chat, pack, pad, prompt_ids, user
from grpolab.checker import correct_reward
from grpolab.models import Policy
from grpolab.rollouts import Batch, Group, Layout, Rollout, collate, lay_out
from grpolab.runs import Run
from grpolab.sampler import Sampler
from grpolab.sampling import SamplingParams

T = TypeVar("T")


# --- what every loop shares -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimisation:
    """AdamW with linear warm-up, then constant or cosine to zero; `token_budget` is the most tokens (padding counted) in
    one forward pass, and changes memory and speed but not the gradient. `autocast` names a lower dtype for the matrix
    products of the update ("bfloat16"); parameters, logits and losses stay as they are."""

    steps: int = 100
    lr: float = 1e-4
    warmup: int = 5
    schedule: str = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    token_budget: int = 8192
    autocast: str | None = None
    save_every: int = 20
    seed: int = 0

    def __post_init__(self):
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule must be 'constant' or 'cosine', got {self.schedule!r}")
        if self.autocast not in (None, "bfloat16"):
            raise ValueError(f"autocast must be None or 'bfloat16' (float16 would need loss scaling), got {self.autocast!r}")
        if self.steps < 1 or self.lr <= 0 or self.token_budget < 1 or self.save_every < 1:
            raise ValueError(f"steps, lr, token_budget and save_every must be positive, got {self}")

    def lr_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., steps - 1."""
        decay = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.schedule == "cosine" else 1.0
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup)) * decay


def make_optimizer(policy: Policy, config: Optimisation) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay)


async def in_thread(policy: Policy, work: Callable[[], T]) -> T:
    """Run `work` in a thread that holds the model. A cancelled await returns at once; the thread ends its step first, and
    whoever wants the model next waits for that."""

    def locked():
        with policy.lock:
            return work()

    return await asyncio.to_thread(locked)


def draw(items: Sequence[T], n: int, step: int, seed: int) -> list[T]:
    """The `n` items of a step: walks through a fresh permutation of `items` every epoch; a function of its arguments."""
    if not items:
        raise ValueError("there is nothing to train on: the data set is empty")
    out = []
    for k in range(step * n, (step + 1) * n):
        epoch, place = divmod(k, len(items))
        if k == step * n or place == 0:
            order = random.Random(f"{seed}/{epoch}").sample(range(len(items)), len(items))
        out.append(items[order[place]])
    return out


def decoder_states(policy: Policy, ids, positions, attention) -> torch.Tensor:
    """(R, W) ids -> (R, W, D) final hidden states, before the head."""
    d = policy.device
    mask = None if attention is None else attention.to(d)
    decoder = policy.model.get_decoder()
    return decoder(ids.to(d), position_ids=positions.to(d), attention_mask=mask, use_cache=False).last_hidden_state


def head_of(policy: Policy) -> dict:
    """The output head as `target_logps` and `token_logps` take it."""
    head = policy.model.get_output_embeddings()
    return {"head": head.weight, "bias": getattr(head, "bias", None)}


def autocast(policy: Policy, config: Optimisation):
    """The context of the update's forward passes."""
    return torch.autocast(policy.device.type, torch.bfloat16, enabled=config.autocast is not None)


def masked_logps(policy: Policy, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of the tokens that the batch's mask marks, 0 elsewhere, and that mask on the policy's device: (N, T) each."""
    hidden = decoder_states(policy, batch.ids, batch.positions, batch.attention)
    ids, mask = batch.ids.to(hidden.device), batch.mask.to(hidden.device)
    return losses.token_logps(hidden, ids=ids, mask=mask, **head_of(policy)), mask


def check_head(policy: Policy) -> None:
    """Logits must be head(hidden states): models that scale or cap them afterwards are refused, not trained wrongly."""
    ids = torch.tensor([[policy.eos_ids[0], policy.pad_id]], device=policy.device)
    with torch.no_grad(), policy.lock:
        expected = policy.model(ids, use_cache=False).logits.float()
        hidden = decoder_states(policy, ids, torch.arange(2)[None], None)
        head = head_of(policy)
        ours = torch.nn.functional.linear(hidden, head["head"], head["bias"]).float()
    if not torch.allclose(ours, expected, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{policy.name!r} changes its logits after the head (a cap or a scale), which the losses here do not")


def rollout_logps(policy: Policy, layout: Layout, shape, temperature: float, with_entropy=False):
    """log p of the chosen tokens under `policy` at `temperature`: (N, T) = shape, 0 elsewhere; and their entropy, or None."""
    hidden = decoder_states(policy, layout.ids, layout.positions, layout.attention).flatten(0, 1)
    at, target = layout.predictor.to(hidden.device), layout.target.to(hidden.device)
    options = {"temperature": temperature, "with_entropy": with_entropy} | head_of(policy)
    values = losses.target_logps(hidden.index_select(0, at), targets=target, **options)
    place = (layout.row.to(hidden.device), layout.column.to(hidden.device))
    return tuple(None if v is None else v.new_zeros(shape).index_put(place, v) for v in values)


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Consecutive slices whose rows, padded to the longest, hold at most `budget` tokens (a longer row goes alone)."""
    start, longest = 0, 0
    for i, n in enumerate(lengths):
        longest = max(longest, n)
        if i > start and longest * (i + 1 - start) > budget:
            yield slice(start, i)
            start, longest = i, n
    if lengths:
        yield slice(start, len(lengths))


def apply_gradient(policy: Policy, optimizer, config: Optimisation, step: int) -> dict:
    """Clip, step, zero, and count the new version. A gradient that is not finite raises and changes nothing."""
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm).item()
    if not math.isfinite(norm):
        optimizer.zero_grad()
        raise FloatingPointError(f"the gradient norm at step {step} is {norm}: lower lr={config.lr}, or look at the batch")
    lr = config.lr_at(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    policy.version += 1
    return {"grad_norm": norm, "lr": lr}


async def _loop(policy: Policy, config: Optimisation, run: Run | None, one_step) -> AsyncIterator[dict]:
    """Steps from where the run stopped to the end; `one_step(step, optimizer)` is awaited and returns its row."""
    check_head(policy)
    optimizer = make_optimizer(policy, config)
    first = 0
    if run is not None:
        first = await in_thread(policy, lambda: run.load_checkpoint(config, policy, optimizer))
        run.metrics = run.metrics[:first]
    for step in range(first, config.steps):
        row = {"step": step} | await one_step(step, optimizer)
        if run is not None:
            run.log(row)
            if (step + 1) % config.save_every == 0 and step + 1 < config.steps:
                saved = step + 1
                await in_thread(policy, lambda: run.save_checkpoint(saved, config, policy, optimizer))  # noqa: B023
        yield row
    if run is not None:
        run.drop_checkpoint()


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
    _check_lengths(policy, max((len(e.ids) for e in examples), default=0), "example")

    def update(step, optimizer):
        began = time.perf_counter()
        batch = draw(examples, config.batch_size, step, config.seed)
        row = sft_gradient(policy, batch, config)
        row |= apply_gradient(policy, optimizer, config, step)
        seconds = time.perf_counter() - began
        return row | {"tokens_per_s": sum(len(e.ids) for e in batch) / seconds, "seconds": seconds}

    async def one_step(step, optimizer):
        return await in_thread(policy, lambda: update(step, optimizer))

    async for row in _loop(policy, config, run, one_step):
        yield row


def sft_gradient(policy: Policy, batch: Sequence[Example], config: SFTConfig) -> dict:
    """Accumulate the gradient of the batch's mean token loss, whatever the micro-batches; returns the metrics."""
    batch = sorted(batch, key=lambda e: len(e.ids))
    denominator = sum(sum(e.mask) for e in batch)
    parts = []
    for part in micro_batches([len(e.ids) for e in batch], config.token_budget):
        packed = pack(batch[part], config.pack_width, policy.pad_id) if config.pack_width else pad(batch[part], policy.pad_id)
        with autocast(policy, config):
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
    (`kl_kind`; a coefficient of 0 needs no reference). `max_grad_norm`, `lr` and the rest as in Optimisation.
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
    kl_coef: float = 0.0
    kl_kind: str = "unbiased"
    row_width: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.group_size < 1 or self.prompts_per_step < 1 or self.inner_epochs < 1:
            raise ValueError(f"group_size, prompts_per_step and inner_epochs must be at least 1, got {self}")
        if not 1 <= self.minibatches <= self.prompts_per_step:
            raise ValueError(f"minibatches={self.minibatches} must lie between 1 and prompts_per_step={self.prompts_per_step}")


Reward = Callable[[str, Problem, Rollout], float | None]


def finished_and_correct(text: str, problem: Problem, rollout: Rollout) -> float:
    """1.0 for a right boxed answer in a completion that the policy ended itself, else 0.0. A reward for the box alone
    would never ask for the end token, and the policy would forget to stop."""
    return correct_reward(text, problem.answer) if rollout.finish_reason == "eos" else 0.0


async def grpo(
    policy: Policy, reference: Policy | None, problems: Sequence[Problem], config: GRPOConfig, *,
    reward: Reward = finished_and_correct, run: Run | None = None,
) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300): sample groups, score them, push probability towards what beat its group.

    `reward(text, problem, rollout)` is a number, or None to abstain. A `reference` is needed where kl_coef > 0.
    """
    if config.kl_coef and reference is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs a reference policy to stay close to, got None")
    if reference is policy:
        raise ValueError("the reference is the policy itself, so it would move along: load it a second time")
    prompts = {p: prompt_ids(policy.tokenizer, p.question) for p in dict.fromkeys(problems)}
    _check_lengths(policy, max(map(len, prompts.values()), default=0) + config.max_new_tokens, "prompt and completion")

    async with Sampler(policy) as sampler:

        async def one_step(step, optimizer):
            began = time.perf_counter()
            asked = draw(problems, config.prompts_per_step, step, config.seed)
            params = SamplingParams(
                temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=config.seed * 1_000_003 + step
            )
            groups = await sampler.sample([prompts[p] for p in asked], group_size=config.group_size, params=params)
            groups = score(policy, asked, groups, reward)
            sampled = time.perf_counter()
            row = await in_thread(policy, lambda: grpo_update(policy, reference, groups, config, optimizer, step))
            return describe(groups) | row | _timings(groups, sampled - began, time.perf_counter() - sampled)

        async for row in _loop(policy, config, run, one_step):
            yield row


def score(policy: Policy, problems: Sequence[Problem], groups: Sequence[Group], reward: Reward) -> list[Group]:
    """Groups with a reward for each rollout."""
    return [g.with_rewards([reward(policy.decode(r.tokens), p, r) for r in g]) for p, g in zip(problems, groups)]


def grpo_update(policy: Policy, reference, groups: Sequence[Group], config: GRPOConfig, optimizer, step: int) -> dict:
    """All optimiser steps on one batch of groups. A group without a difference in reward carries no gradient, so without
    a leash it is left out of the forward pass and of the count."""
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
    if not rows:
        return {"trained_groups": 0}
    means = {k: sum(r[k] for r in rows) / len(rows) for k in rows[0] if not k.endswith("_max")}
    maxima = {k: max(r[k] for r in rows) for k in rows[0] if k.endswith("_max")}
    return means | maxima | {"trained_groups": len(kept)}


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
        with autocast(policy, config):
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
        logps, old_logps, a, mask, denominator=denominator, aggregation=config.aggregation, clip_eps=config.clip_eps
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
    """Reward, group health, and lengths by finish reason."""
    rewards = reward_tensor([g.rewards for g in groups])
    rollouts = [r for g in groups for r in g]
    ended = [len(r.tokens) for r in rollouts if r.finish_reason != "length"]
    return {
        "reward": rewards.nanmean().item(),
        **group_health(rewards),
        "completion_length": sum(len(r.tokens) for r in rollouts) / len(rollouts),
        "ended_length": sum(ended) / len(ended) if ended else float("nan"),
        "truncated": 1 - len(ended) / len(rollouts),
    }


def _timings(groups: Sequence[Group], sampling: float, update: float) -> dict:
    tokens = sum(len(r.tokens) for g in groups for r in g)
    return {
        "sampling_s": sampling, "update_s": update,
        "sampled_tokens_per_s": tokens / sampling, "updated_tokens_per_s": tokens / update,
    }


def _check_lengths(policy: Policy, longest: int, what: str) -> None:
    if longest > policy.context:
        raise ValueError(f"a {what} needs {longest} tokens; the context of {policy.name!r} is {policy.context}: shorten it")
