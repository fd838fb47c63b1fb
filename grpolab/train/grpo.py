"""Group-relative policy optimisation: sample groups, score them, push probability towards what beat its group."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import torch

from grpolab.chat import prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.models import lora
from grpolab.models.load import Policy
from grpolab.rollouts import CUT, Batch, Group, Rollout, collate, padded
from grpolab.runs.checkpoints import data_hash
from grpolab.runs.rollout_log import COLUMNS
from grpolab.runs.run import Run
from grpolab.tasks import prompt_of
from grpolab.train import distributed, losses
from grpolab.train.advantages import advantages, group_health, reward_tensor
from grpolab.train.grpo_config import GRPOConfig
from grpolab.train.layout import Layout, lay_out
from grpolab.train.logps import check_lengths, parts_of, rollout_logps
from grpolab.train.loop import accumulate, apply_gradient, autocast, in_thread, loop, off_loop
from grpolab.train.ppo import Critic
from grpolab.train.replay_source import importance
from grpolab.train.rewards import Reward, finished_and_correct
from grpolab.train.several_rewards import Several, check_sum
from grpolab.train.sources import Source, Tasks, as_recorded, as_step_groups, content_of, sampled, tokens_of
from grpolab.train.verify import check_drift, verify_forward


async def grpo(
    policy: Policy, reference: Policy | None, problems: Any, config: GRPOConfig, *, reward: Reward = finished_and_correct,
    watch: Mapping[str, Reward] | None = None, run: Run | None = None, success: float = 1.0, critic: Critic | None = None,
) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300): sample groups, score them, push probability towards what beat its group.

    `problems` are rows, anything with a prompt (`tasks.prompt_of`), or a curriculum (`sources.Tasks`), which is told how
    large a share of a group earned at least `success`. `reward(text, row, rollout)` is a number, or None to abstain; it may
    be async, take a step at once, or be several (`rewards`). A `reference` is needed for a KL penalty to it. The rewards in
    `watch` are not trained on: their means stand in each row under their names. With a `critic` it is PPO (`ppo`).
    """
    check_reference(policy, reference, config)
    if critic is not None:
        check_sum(reward)
    tasks, ids_of, longest = await asked(policy, problems, config, reward, watch, run, success)
    sampler = await off_loop(lambda: Sampler(policy, exact=config.exact))
    source = sampled(policy, sampler, tasks, ids_of, config, reward, watch)
    steps = grpo_from(policy, reference, source, config, longest=longest, run=run, content=tasks.content, critic=critic)
    async with sampler, aclosing(steps) as rows:
        async for row in rows:
            yield row


async def asked(
    policy: Policy, problems: Any, config: GRPOConfig, reward: Reward, watch: Mapping[str, Reward] | None, run: Run | None,
    success: float,
) -> tuple[Tasks, Callable[[Any], Sequence[int]], int]:
    """What `grpo` is asked to train on: the tasks, row -> prompt ids, and the most tokens that a prompt and its completion have
    together, which the context must hold."""
    check_names(reward, watch or ())
    tasks = Tasks(problems, config, run, success)
    if tasks.adaptive and config.refills:
        raise ValueError(f"refills={config.refills}: a curriculum says itself what is asked; leave it 0")

    prompts = {}

    def ids_of(row):
        content = content_of(row)
        if content not in prompts:
            prompts[content] = prompt_ids(policy.tokenizer, prompt_of(row))
        return prompts[content]

    def longest_of(rows):
        return max(len(ids_of(row)) for row in rows) + config.max_new_tokens if rows else policy.context

    rows = problems
    if tasks.adaptive:  # one without a table may ask anything
        rows = [row["task"] for row in problems.table()] if hasattr(problems, "table") else ()
    longest = await in_thread(policy, lambda: longest_of(rows))
    check_lengths(policy, longest, "prompt and completion")
    return tasks, ids_of, longest


async def grpo_from(
    policy: Policy, reference: Policy | None, source: Source, config: GRPOConfig, *, longest: int, run: Run | None = None,
    content: Callable[[], Iterable] = tuple, critic: Critic | None = None,
) -> AsyncIterator[dict]:
    """GRPO on the groups of any `source` (`sources`), a row a step.

    `longest` is the most tokens that prompt and completion may have together: up to there the forwards are proved.
    `content()` gives what a Run notes as the data of the run, so that it goes on with the same. Rollouts that another
    policy or sampler drew need `config.sampler_cap`, their importance correction, and a `max_logp_diff` that admits them. The
    advantages are those of the groups or, with a `critic`, of their tokens: PPO (`ppo`).
    """
    check_reference(policy, reference, config)

    def start():
        if hasattr(source, "check"):
            source.check(policy, config, run)
        if critic is not None:
            critic.check(policy, run)
        check_lengths(policy, longest, "prompt and completion")
        verify_both(policy, reference, config, longest)

    await in_thread(policy, start)

    async def gather(step):
        began = time.perf_counter()
        batch = as_step_groups(await source(step))
        sampling = time.perf_counter() - began
        seen = batch.groups if batch.seen is None else batch.seen
        tokens = tokens_of(seen) if batch.tokens is None else batch.tokens
        groups = list(batch.groups)
        if distributed.world().size > 1:
            await off_loop(lambda: distributed.same_groups(groups, step))

        def update(optimiser):
            a, returns = (batch.advantages, None) if critic is None else critic.judge(policy, groups, config)
            if run is not None and distributed.first():  # before the update, so that the record tells of a step that fails
                record = batch.record() if batch.record else as_recorded(
                    [(None, g) for g in seen], groups, config.advantage_kind, batch.advantages)
                run.record(step, policy, record if critic is None else critic.recorded(record, a), batch.engine)
            began = time.perf_counter()
            row = grpo_update(policy, reference, groups, config, optimiser, step, a, batch.off_policy)
            if critic is not None:
                row |= critic.fit(policy, groups, returns, config, optimiser, step)
            times = timings(tokens, sampling, row["trained_tokens"] * config.inner_epochs, time.perf_counter() - began)
            return describe(seen) | row | times | dict(batch.row) | batch.after_step()

        return update

    def data():
        more = () if critic is None else (critic.config,)
        return data_hash((*content(), *more), reference if config.needs_reference and not reference.bare else None)

    with nullcontext() if critic is None else critic.beside(policy):
        async with aclosing(loop(policy, config, run, gather, data)) as rows:
            async for row in rows:
                yield row


def check_reference(policy: Policy, reference: Policy | None, config: GRPOConfig) -> None:
    """Refuse a KL penalty without a reference, and a reference that would move along."""
    if config.needs_reference and reference is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs a reference policy to stay close to, got None: give one, or set "
                         "kl_to='sampler'")
    if reference is policy or reference is not None and reference.model is policy.model and not reference.bare:
        raise ValueError("the reference is the policy itself, so it would move along: load it a second time")


def check_names(reward: Reward, watch: Iterable[str]) -> None:
    """Refuse a reward or measure by the name of another column of the row or of the record, whose numbers it would replace."""
    every = GRPOConfig(kl_coef=1.0, dual_clip=3.0, sampler_cap=2.0)  # whose rows have each column
    nothing = Group((Rollout((), (), (), (), (), "lost"),))
    own = {*_unmeasured(every, True), *describe([nothing]), *timings(0, 1, 0, 1), *COLUMNS, "step", "trained_groups",
           "trained_tokens", "reward_errors", "refill_prompts", "refill_tokens", "discarded_groups", "discarded_tokens", "tier",
           "curriculum", "version", "staleness", "staleness_max", "value_loss", "explained", "loss_scale",
           "lost", "invalid", "abstained", "unheard", "tool_rate", "env_s"}
    if taken := own & {*watch, *(reward.rewards if isinstance(reward, Several) else ())}:
        raise ValueError(f"{sorted(taken)} cannot name a reward or a measure: a column of the rows or of the record is called "
                         "that already")


def verify_both(policy: Policy, reference: Policy | None, config: GRPOConfig, longest: int) -> None:
    """The forwards of the policy and of a reference that is needed, proved on sequences like those of the steps."""
    verify_forward(policy, config, longest)
    if config.needs_reference and not reference.bare:  # that is the policy's own forward
        with reference.acting():  # as its log-probs are taken
            verify_forward(reference, config, longest)


def grpo_update(
    policy: Policy, reference, groups: Sequence[Group], config: GRPOConfig, optimiser, step: int, a: torch.Tensor | None = None,
    off_policy: bool = False,
) -> dict:
    """All optimiser steps on one batch of groups, with the advantages `a` (B, G), or of each token (B, G, T), by default those
    of their rewards. The loss is a mean over all of them; a rollout without any advantage has no gradient, so without KL
    penalty it is left out of the forward passes and of what is measured in them, and a minibatch of such rollouts is no step.
    `off_policy` adds `importance` to the row, by a forward pass more where config.sampler_cap does not make it anyway."""
    if not groups:
        return _unmeasured(config, off_policy) | {"trained_groups": 0, "trained_tokens": 0}
    a = advantages(reward_tensor([g.rewards for g in groups]), config.advantage_kind) if a is None else a
    taught = (a != 0).reshape(*a.shape[:2], -1).any(2) | (config.kl_coef > 0)
    rollouts_of = {i: [r for r, t in zip(groups[i], of) if t] for i, of in enumerate(taught.tolist())}
    teaching = {i for i, rollouts in rollouts_of.items() if rollouts}
    ordered = sorted(teaching, key=lambda i: tokens_of([groups[i]]))
    shard, own, drops = distributed.shard(ordered), {}, bool(lora.dropouts(policy.model))
    if config.sampler_cap or off_policy or drops:
        with lora.dropping(policy.model, False):
            values = [trainer_logps(policy, rollouts_of[i], config) for i in shard]
        own = dict(zip(ordered, distributed.gathered(f"step {step}, log-probs", ordered, values)))
    rows = []
    for epoch in range(config.inner_epochs):
        order = random.Random(f"{config.seed}/{step}/{epoch}").sample(range(len(groups)), len(groups))
        cuts = [len(order) * i // config.minibatches for i in range(config.minibatches + 1)]
        for part in (order[a:b] for a, b in zip(cuts, cuts[1:])):  # of nearly equal lengths
            chosen = [i for i in part if i in teaching]
            if not chosen:
                continue
            whole = denominator_of([r for i in part for r in groups[i]], config)
            here = [i for i in chosen if i in shard]
            rollouts = [r for i in here for r in rollouts_of[i]]
            old = [x for i in here for x in own[i]] if config.sampler_cap else None
            metrics = grpo_gradient(
                policy, reference, rollouts, a[here][taught[here]], config, denominator=whole, old_logps=old,
                tokens=kept_tokens(r for i in chosen for r in rollouts_of[i]),
            ) if here else {}
            metrics = distributed.add_up(policy.model, metrics, f"step {step}, pass {epoch}")
            if not rows:  # the policy has not moved yet
                metrics |= disagreement(own, rollouts_of) if drops else {}
                check_drift(policy, metrics, config.max_logp_diff, step)
            rows.append(metrics | apply_gradient(policy, optimiser, config, step))
    size = {"trained_groups": len(teaching), "trained_tokens": tokens_of([groups[i] for i in teaching])}
    if not rows:
        return _unmeasured(config, off_policy) | size
    row = {k: max(r[k] for r in rows) if k.endswith("_max") else sum(r[k] for r in rows) / len(rows) for k in rows[0]}
    before = {k: rows[0][k] for k in ("diff_mean", "diff_abs_mean", "diff_max")}  # sampler against trainer, before any update
    if config.sampler_cap or off_policy:
        learned = [r for i in teaching for r in rollouts_of[i]]
        size |= importance([x for i in teaching for x in own[i]], learned, config.sampler_cap)
    return row | before | size


def disagreement(own: Mapping[int, Sequence[Sequence[float]]], rollouts_of: Mapping[int, Sequence[Rollout]]) -> dict:
    """How far the trainer's log-probs of some rollouts are from the sampler's: where the update's own have dropout."""
    pairs = [pair for i, of in own.items() for pair in zip(of, rollouts_of[i])]
    diffs = [x - y for logps, r in pairs for x, y, m in zip(logps, r.logps, r.mask) if m]
    sizes = [abs(d) for d in diffs]
    return {"diff_mean": mean(diffs), "diff_abs_mean": mean(sizes), "diff_max": max(sizes, default=0.0)}


def _unmeasured(config: GRPOConfig, off_policy: bool) -> dict:
    """The columns of an update as NaN, for a step in which no group had a signal: a row's names are always the same."""
    names = ["policy_loss", "ratio", "ratio_max", "clip_low", "clip_high", "diff_mean", "diff_abs_mean", "diff_max",
             "sampler_kl", "low_logp", "entropy", "grad_norm", "lr"]
    names += ["kl"] * config.needs_reference + ["clip_dual"] * (config.dual_clip is not None)
    names += ["sampler_weight", "sampler_capped"] * bool(config.sampler_cap)
    weights = importance((), (), None) if config.sampler_cap or off_policy else {}
    return dict.fromkeys(names, float("nan")) | weights


def kept_tokens(rollouts: Iterable[Rollout]) -> int:
    """Those that the policy chose."""
    return sum(sum(r.mask) for r in rollouts)


def denominator_of(rollouts: Sequence[Rollout], config: GRPOConfig) -> torch.Tensor:
    """What the loss of these rollouts is divided by."""
    return losses.count(padded([r.mask for r in rollouts]), config.aggregation, max_new_tokens=config.max_new_tokens)


@torch.no_grad()
def trainer_logps(policy: Policy, rollouts: Sequence[Rollout], config: GRPOConfig) -> list[list[float]]:
    """Each rollout's log-probs by the trainer's forward as the policy stands."""
    out = []
    for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
        members = rollouts[part]
        shape = (len(members), max(len(r.tokens) for r in members))
        layout = lay_out(members, share=config.share_prompts, pad_id=policy.pad_id)
        with autocast(policy, config):
            logps, _ = rollout_logps(policy, layout, shape, config.temperature)
        out += [line[: len(r.tokens)].tolist() for line, r in zip(logps, members)]
    return out


def grpo_gradient(
    policy: Policy, reference, rollouts: Sequence[Rollout], a: torch.Tensor, config: GRPOConfig, *,
    denominator=None, old_logps=None, tokens: int | None = None,
) -> dict:
    """Accumulate the gradient of the clipped objective over `rollouts` with advantages `a`, (N,) or (N, T); returns the
    metrics, means over their tokens (or parts of means over `tokens`, where these rollouts are a part).

    The `denominator` (default: of these rollouts) is counted before, so neither micro-batches nor what is left out of the
    forward pass can change the gradient. `old_logps`: the trainer's own, where the rollouts' are of another sampler.
    """
    denominator = denominator_of(rollouts, config) if denominator is None else denominator
    tokens = kept_tokens(rollouts) if tokens is None else tokens
    order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].prompt), rollouts[i].prompt, rollouts[i].tokens))
    rollouts, a = [rollouts[i] for i in order], a[order]
    old_logps = old_logps and [old_logps[i] for i in order]

    def parts():
        for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
            batch = collate(rollouts[part], a[part])
            old = padded(old_logps[part]) if old_logps else None
            layout = lay_out(rollouts[part], share=config.share_prompts, pad_id=policy.pad_id)
            with autocast(policy, config):
                loss_and_metrics = grpo_loss(policy, reference, batch, layout, denominator, tokens, config, old)
            yield loss_and_metrics

    return accumulate(policy, parts())


def grpo_loss(policy: Policy, reference, batch: Batch, layout: Layout, denominator, tokens, config: GRPOConfig, old_logps=None):
    """The clipped policy gradient and KL penalty on one micro-batch: (loss, metrics). `denominator` and `tokens` count over
    the whole batch: what the loss is divided by, and the kept tokens of the forward passes. `old_logps` (N, T) as there."""
    mask, sampled, a = (x.to(policy.device) for x in (batch.mask, batch.old_logps, batch.advantages))
    old_logps = sampled if old_logps is None else old_logps.to(policy.device)
    weights = {"sampler_logps": sampled, "sampler_cap": config.sampler_cap} if config.sampler_cap else {}
    options = {"with_entropy": True, "checkpointed": config.checkpoint_activations}
    logps, entropy = rollout_logps(policy, layout, mask.shape, config.temperature, **options)
    loss, metrics = losses.policy_loss(
        logps, old_logps, a, mask, denominator=denominator, aggregation=config.aggregation, clip_eps=config.clip_eps,
        objective=config.objective, ratio=config.ratio, dual_clip=config.dual_clip, tokens=tokens, **weights,
    )
    metrics["entropy"] = (entropy * mask).sum() / tokens
    if config.kl_coef:
        anchor, drawn = sampled, sampled
        if config.needs_reference:
            with torch.no_grad(), reference.acting():
                anchor, _ = rollout_logps(reference, layout, mask.shape, config.temperature)
            drawn = old_logps
        kl, kl_metrics = losses.kl_penalty(logps, anchor, mask, denominator=denominator, kind=config.kl_kind, old_logps=drawn,
                                           aggregation=config.aggregation, tokens=tokens)
        loss, metrics = loss + config.kl_coef * kl, metrics | (kl_metrics if config.needs_reference else {})
    return loss, metrics


def describe(groups: Sequence[Group]) -> dict:
    """Reward, group health, lengths by finish reason, and repetition, of what the policy made of the questions batch."""
    rewards = reward_tensor([g.rewards for g in groups])
    rollouts = [r for g in groups for r in g if r.finish_reason != "lost"]  # an episode that is not there has no length
    cut = [len(r.tokens) for r in rollouts if r.finish_reason in CUT]
    ended = [len(r.tokens) for r in rollouts if r.finish_reason not in CUT]
    return {
        "reward": rewards.nanmean().item(),
        **group_health(rewards),
        "completion_length": mean(cut + ended),
        "ended_length": mean(ended),
        "truncated_length": mean(cut),
        "truncated": len(cut) / len(rollouts) if rollouts else float("nan"),
        "repetition": mean([repetition([t for t, m in zip(r.tokens, r.mask) if m]) for r in rollouts]),
    }


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """The share of a completion's n-grams that it has had before (seq-rep-n, arXiv 1908.04319, eq. 10)."""
    ngrams = list(zip(*(tokens[i:] for i in range(n))))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def timings(sampled: int, sampling: float, updated: int, update: float) -> dict:
    """Seconds and tokens/s of generation (all `sampled` tokens) and of the update (the tokens trained on, once a pass)."""
    return {
        "sampling_s": sampling, "update_s": update,
        "sampled_tokens_per_s": sampled / sampling, "updated_tokens_per_s": updated / update,
    }
