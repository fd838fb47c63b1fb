"""Atropos' trajectory API (atroposlib 0.4.0, `run-api`): its environments as a source of groups.

    trainer = AtroposTrainer("http://127.0.0.1:8000", batch_size=32, max_token_len=512)
    source = atropos_source(trainer, policy, config)         # for train.grpo_from; the first step registers

The old log-probs of the loss are the environment's `inference_logprobs`: without them there is nothing to compare the policy
with, and the error says what to set. The API itself checks no shape, so what it sends is checked here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.serve.http_client import Caller, NoAnswer, RemoteError
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.grpo import GRPOConfig
from grpolab.train.sources import Source, StepGroups, as_recorded

MASKED = -100  # in `masks`, where the policy did not choose the token
POLL = 0.1  # s between two looks
UNSUPPORTED = ("images", "distill_token_ids", "distill_logprobs")
OVERRIDES = {"temperature", "set_advantage_to_zero"}  # of a sequence
GROUP_OVERRIDES = {"temperature", "group_size"}  # the latter is between an environment and the API


def as_group(item: dict, vocab: int, temperature: float, context: int | None = None, eos_ids: Sequence[int] = (),
             version: int = 0) -> Group:
    """ScoredData as a group with its rewards; `vocab` ids and `context` tokens a sequence are what it must fit. ValueError
    names what does not. A sequence that ends in one of `eos_ids` was ended by the policy, another was cut. Its temperature is
    that of its `overrides`, else of the group's `generation_params`, else of `group_overrides`, else 1; where it is not the
    loss's, `temperature`, the rollout has it. `version` is that of the weights where `generation_params` have no
    `policy_version`. `ref_logprobs` and `messages` are not read: a KL penalty is to the trainer's own reference."""
    for name in UNSUPPORTED:
        sent = item.get(name)
        if any(sent) if isinstance(sent, list) else sent:
            raise ValueError(f"an environment sent {name!r}, which this trainer does not know: switch it off there")
    params, of_group = item.get("generation_params") or {}, item.get("group_overrides") or {}
    overrides = item.get("overrides") or [{}] * len(item.get("tokens") or ())
    unknown = {name for o in overrides for name in o or ()} - OVERRIDES | of_group.keys() - GROUP_OVERRIDES
    if unknown:
        raise ValueError(f"an environment sent the overrides {sorted(unknown)}, and this trainer knows of a sequence "
                         f"{sorted(OVERRIDES)} and of a group {sorted(GROUP_OVERRIDES)}")
    if not item.get("inference_logprobs"):
        raise ValueError("a group came without inference_logprobs, which the loss compares the policy with: start the "
                         "environment with --openai.server_type vllm, or another that returns log-probs, not openai")
    parts = [item.get(name) or () for name in ("tokens", "masks", "scores", "inference_logprobs")]
    if len({*map(len, parts), len(overrides)}) != 1:
        raise ValueError(f"half a group came: {[len(part) for part in parts]} tokens, masks, scores and log-probs, and "
                         f"{len(overrides)} overrides")
    at = [{**of_group, **params, **(o or {})}.get("temperature", 1.0) for o in overrides]
    if wrong := [t for t in at if not (isinstance(t, int | float) and 0 < t < math.inf)]:
        raise ValueError(f"an environment sampled at temperature {wrong[0]!r}: nothing can be learned from the argmax")
    version = int(params.get("policy_version", version))
    rollouts = tuple(
        replace(_rollout(*sequence, version=version, vocab=vocab, eos_ids=eos_ids), temperature=None if t == temperature else t)
        for *sequence, t in zip(*parts, at))
    longest = max(len(r.prompt) + len(r.tokens) for r in rollouts)
    if context is not None and longest > context:
        raise ValueError(f"a sequence of {longest} tokens came, and this trainer registered for at most {context}: lower the "
                         "environment's --env.max_token_length")
    return Group(rollouts)


def _rollout(ids: Sequence[int], masks: Sequence[int], score: float, logps: Sequence[float], *, version: int, vocab: int,
             eos_ids: Sequence[int]) -> Rollout:
    begin = next((i for i, m in enumerate(masks) if m != MASKED), 0)
    mask = tuple(int(m != MASKED) for m in masks[begin:])
    own = tuple(float(x) if m else 0.0 for x, m in zip(logps[begin:], mask))
    faults = {
        f"{len(ids)} tokens, {len(masks)} masks and {len(logps)} log-probs": not len(ids) == len(masks) == len(logps),
        f"token ids outside the vocabulary 0..{vocab - 1}: the environment samples from another model":
            not all(0 <= t < vocab for t in ids),
        f"the score {score}": not math.isfinite(score),
        "no prompt, or no token to train on": begin == 0,
        f"a mask that is neither its token nor {MASKED}": any(m not in (MASKED, t) for m, t in zip(masks, ids)),
        "log-probs above 0 at trained tokens: its inference_logprobs are shifted or missing":
            not all(x <= 0 and math.isfinite(x) for x in own),
    }
    if fault := next((text for text, holds in faults.items() if holds), None):
        raise ValueError(f"a sequence came with {fault}")
    reason = "eos" if ids[-1] in eos_ids else "length"
    return Rollout(tuple(ids[:begin]), tuple(ids[begin:]), mask, own, own, reason, policy_version=version, reward=float(score))


class AtroposTrainer:
    """The trainer's end. `batch_size` counts sequences; `timeout` are the seconds that a batch may take to come. The API serves
    one trainer and knows it by its `name` (default: a new one): give one to register again after an interruption."""

    def __init__(self, url: str, *, batch_size: int, max_token_len: int, num_steps: int = 1000, timeout: float = 600.0,
                 name: str | None = None):
        self.caller = Caller(url, timeout=60.0)
        self.url, self.batch_size, self.max_token_len, self.timeout = self.caller.url, batch_size, max_token_len, timeout
        self.num_steps, self.name = num_steps, name or f"grpolab-{secrets.token_hex(4)}"
        self._registered = self._again = False

    async def batch(self) -> list[dict]:
        """The next batch, groups as ScoredData; the first call registers. RemoteError after `timeout` seconds without one, with
        the queue's length. An API that is away is waited for as long, and one that was started again is registered with anew,
        as a warning says."""
        until = asyncio.get_running_loop().time() + self.timeout
        while True:
            answer, away = {}, None
            try:
                answer = await (self.caller.ask("GET", "/batch") if self._registered else self._register())
            except NoAnswer as error:
                if not (self._registered or self._again):  # it was never there
                    raise
                away = error
            if answer.get("status") == "error":
                warnings.warn(f"{self.url} was started again, so this trainer registers anew; what it had in its queue is "
                              "lost, and environments register once: start them again, too", stacklevel=2)
                self._registered, self._again = False, True
            if answer.get("batch"):
                return answer["batch"]
            if asyncio.get_running_loop().time() > until:
                if away:
                    raise RemoteError(f"{self.url} was away for {self.timeout} s: {away}") from away
                raise RemoteError(f"{self.url} gave no batch in {self.timeout} s, with {await self.queued()} groups in its "
                                  f"queue: a batch is {self.batch_size} sequences in whole groups; see that environments post "
                                  "and that group sizes add up to it" + "; they register once, so start them again too"
                                  * self._again)
            await asyncio.sleep(POLL)

    async def _register(self) -> dict:
        """Register, and look for a batch, for which environments wait. RemoteError where another trainer is registered: the API
        would ignore this one in silence, and both would share the groups."""
        ours, theirs = await self._registration()
        if theirs["batch_size"] == -1:  # groups came before any trainer, which an API takes for the end of its set-up
            await self.caller.ask("GET", "/reset_data")
            ours, theirs = await self._registration()
        if theirs != ours:
            raise RemoteError(f"{self.url} goes on with another trainer, {theirs}, where this one is {ours}: restart run-api, "
                              "or take its numbers and its group as the name, if it is an earlier start of this one")
        self._registered = True
        return await self.caller.ask("GET", "/batch")

    async def _registration(self) -> tuple[dict, dict]:
        """Register; what this trainer is, and what the API holds of its trainer."""
        ours = {"batch_size": self.batch_size, "max_token_len": self.max_token_len}
        await self.caller.ask("POST", "/register", ours | {
            "wandb_group": self.name, "wandb_project": "grpolab", "checkpoint_dir": "", "save_checkpoint_interval": 0,
            "starting_step": 0, "num_steps": self.num_steps})
        ours |= {"group": self.name}
        held = await self.caller.ask("GET", "/info") | await self.caller.ask("GET", "/wandb_info")
        return ours, {name: held.get(name) for name in ours}

    async def queued(self) -> int:
        """Groups in the API's queue; 0 while it is away."""
        try:
            return (await self.caller.ask("GET", "/status")).get("queue_size", 0)
        except NoAnswer:
            return 0


def advantages_of(items: Sequence[dict], groups: Sequence[Group], config: GRPOConfig) -> torch.Tensor | None:
    """What environments say of advantages: those that they sent for each token (`advantages`), 0 for a sequence with
    `set_advantage_to_zero`, and the others as the rewards give them: (B, G), or (B, G, T) where some are of tokens. None
    where no environment says anything."""
    sent = [item.get("advantages") for item in items]
    zero = [[bool((o or {}).get("set_advantage_to_zero")) for o in item.get("overrides") or ()] for item in items]
    if not any(sent) and not any(map(any, zero)):
        return None
    a = advantages(reward_tensor([g.rewards for g in groups]), config.advantage_kind)
    if any(sent):
        a = a[:, :, None].repeat(1, 1, max(len(r.tokens) for g in groups for r in g))
    for b, (rows, zeros) in enumerate(zip(sent, zero)):
        if rows and len(rows) != len(items[b]["tokens"]):
            raise ValueError(f"an environment sent the advantages of {len(rows)} sequences for {len(items[b]['tokens'])}")
        for g, row in enumerate(rows or ()):
            n = len(groups[b][g].tokens)
            if len(row) != len(items[b]["tokens"][g]) or not all(map(math.isfinite, row)):
                raise ValueError(f"an environment sent {len(row)} advantages for {len(items[b]['tokens'][g])} tokens, or some "
                                 "that are no numbers")
            a[b, g, :n] = torch.tensor(row[len(row) - n :])
        for g, none in enumerate(zeros):
            if none:
                a[b, g] = 0.0
    return a


def _mean(advantages: torch.Tensor, mask: Sequence[int]) -> float:
    """The mean over the tokens that the policy chose; 0 where there are none."""
    own = advantages[: len(mask)][torch.tensor(mask, dtype=torch.bool)]
    return float(own.mean()) if len(own) else 0.0


def atropos_source(trainer: AtroposTrainer, policy: Policy, config: GRPOConfig) -> Source:
    """A batch a step. Groups may differ in size: an empty rollout without reward fills up the smaller ones."""
    async def source(step: int) -> StepGroups:
        vocab = len(policy.model.get_input_embeddings().weight)
        items, groups, refused = [], [], []
        for item in await trainer.batch():  # a group that does not fit costs itself
            try:
                group = as_group(item, vocab, config.temperature, trainer.max_token_len, policy.eos_ids, policy.version)
                advantages_of([item], [group], config)
            except (ValueError, TypeError) as error:  # TypeError: a field of another type
                refused.append(error)
            else:
                groups.append(group)
                items.append(item)
        if not groups:
            raise ValueError(f"no group of the batch can be trained on: {refused[0]}") from refused[0]
        if refused:
            warnings.warn(f"{len(refused)} of {len(refused) + len(groups)} groups were left out: {refused[0]}", stacklevel=2)
        size = max(map(len, groups))
        filled = [Group((*g, *[Rollout(g[0].prompt, (), (), (), (), "lost")] * (size - len(g)))) for g in groups]
        a = advantages_of(items, filled, config)
        versioned = [g for g, item in zip(groups, items) if "policy_version" in (item.get("generation_params") or {})]
        behind = policy.version - min(r.policy_version for g in versioned for r in g) if versioned else math.nan
        row = {"refused_groups": len(refused), "staleness": behind, "queued_groups": await trainer.queued()}
        shown = a if a is None or a.dim() == 2 else torch.tensor(
            [[_mean(row, r.mask) for row, r in zip(rows, g)] for rows, g in zip(a, filled)])
        return StepGroups(filled, row, advantages=a, engine="atropos", record=lambda: as_recorded(
            [(None, g) for g in filled], filled, config.advantage_kind, shown))

    return source
