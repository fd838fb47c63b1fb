"""Atropos' trajectory API (atroposlib 0.4.0, `run-api`): its environments as a source of groups.

    async with AtroposTrainer("http://127.0.0.1:8000", batch_size=32, max_token_len=512) as trainer:     # registers
        source = atropos_source(trainer, policy, config)         # for train.grpo_from

The old log-probs of the loss are the environment's `inference_logprobs`: without them there is nothing to compare the policy
with, and the error says what to set. The API itself checks no shape, so what it sends is checked here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import warnings
from collections.abc import Sequence

from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.serve.http_client import Caller, RemoteError
from grpolab.train.grpo import GRPOConfig
from grpolab.train.sources import Source, StepGroups

MASKED = -100  # in `masks`, where the policy did not choose the token
POLL = 0.1  # s between two looks
UNSUPPORTED = ("advantages", "overrides", "group_overrides", "images", "distill_token_ids", "distill_logprobs")


def as_group(item: dict, vocab: int, temperature: float, context: int | None = None, eos_ids: Sequence[int] = ()) -> Group:
    """ScoredData as a group with its rewards; `vocab` ids, the loss's `temperature` and `context` tokens a sequence are what it
    must fit. ValueError names what does not. A sequence that ends in one of `eos_ids` was ended by the policy, another was cut.
    `ref_logprobs` and `messages` are not read: a KL penalty is to the trainer's own reference."""
    for name in UNSUPPORTED:
        sent = item.get(name)
        if any(sent) if isinstance(sent, list) else sent:
            raise ValueError(f"an environment sent {name!r}, which this trainer does not know: switch it off there")
    params = item.get("generation_params") or {}
    if (theirs := params.get("temperature", 1.0)) != temperature:
        raise ValueError(f"an environment sampled at temperature {theirs}, and the loss is at {temperature}: set one of them")
    if not item.get("inference_logprobs"):
        raise ValueError("a group came without inference_logprobs, which the loss compares the policy with: start the "
                         "environment with --openai.server_type vllm, or another that returns log-probs, not openai")
    parts = [item.get(name) or () for name in ("tokens", "masks", "scores", "inference_logprobs")]
    if len(set(map(len, parts))) != 1:
        raise ValueError(f"half a group came: {[len(part) for part in parts]} tokens, masks, scores and log-probs")
    version = int(params.get("policy_version", 0))
    rollouts = tuple(_rollout(*sequence, version=version, vocab=vocab, eos_ids=eos_ids) for sequence in zip(*parts))
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
        self.num_steps, self.name, self._first = num_steps, name or f"grpolab-{secrets.token_hex(4)}", None

    async def __aenter__(self) -> AtroposTrainer:
        """Register. RemoteError where another trainer is registered: the API would ignore this one in silence, and both would
        share the groups."""
        ours = {"batch_size": self.batch_size, "max_token_len": self.max_token_len}
        await self.caller.ask("POST", "/register", ours | {
            "wandb_group": self.name, "wandb_project": "grpolab", "checkpoint_dir": "", "save_checkpoint_interval": 0,
            "starting_step": 0, "num_steps": self.num_steps})
        ours |= {"group": self.name}
        registered = await self.caller.ask("GET", "/info") | await self.caller.ask("GET", "/wandb_info")
        theirs = {name: registered.get(name) for name in ours}
        if theirs != ours:
            raise RemoteError(f"{self.url} goes on with another trainer, {theirs}, where this one is {ours}: restart run-api, "
                              "or take its numbers and its group as the name, if it is an earlier start of this one")
        self._first = (await self.caller.ask("GET", "/batch")).get("batch")  # environments wait for the first look
        return self

    async def __aexit__(self, *_) -> None:
        """Nothing: the API knows no leaving."""

    async def batch(self) -> list[dict]:
        """The next batch, groups as ScoredData; RemoteError after `timeout` seconds without one, with the queue's length."""
        if self._first:
            first, self._first = self._first, None
            return first
        until = asyncio.get_running_loop().time() + self.timeout
        while True:
            answer = await self.caller.ask("GET", "/batch")
            if answer.get("batch"):
                return answer["batch"]
            if answer.get("status") == "error":
                raise RemoteError(f"{self.url} knows no trainer ({answer.get('message')}): was it restarted? Register again")
            if asyncio.get_running_loop().time() > until:
                state = await self.caller.ask("GET", "/status")
                raise RemoteError(f"{self.url} gave no batch in {self.timeout} s, with {state.get('queue_size')} groups in its "
                                  f"queue: a batch is {self.batch_size} sequences in whole groups; see that environments post "
                                  "and that group sizes add up to it")
            await asyncio.sleep(POLL)


def atropos_source(trainer: AtroposTrainer, policy: Policy, config: GRPOConfig) -> Source:
    """A batch a step. Groups may differ in size: an empty rollout without reward fills up the smaller ones."""
    async def source(step: int) -> StepGroups:
        vocab = len(policy.model.get_input_embeddings().weight)
        groups, refused = [], []
        for item in await trainer.batch():  # a group that does not fit costs itself
            try:
                groups.append(as_group(item, vocab, config.temperature, trainer.max_token_len, policy.eos_ids))
            except ValueError as error:
                refused.append(error)
        if not groups:
            raise ValueError(f"no group of the batch can be trained on: {refused[0]}") from refused[0]
        if refused:
            warnings.warn(f"{len(refused)} of {len(refused) + len(groups)} groups were left out: {refused[0]}", stacklevel=2)
        size = max(map(len, groups))
        filled = [Group((*g, *[Rollout(g[0].prompt, (), (), (), (), "lost")] * (size - len(g)))) for g in groups]
        state = await trainer.caller.ask("GET", "/status")
        behind = policy.version - min(r.policy_version for g in groups for r in g)
        row = {"refused_groups": len(refused), "staleness": behind, "queued_groups": state.get("queue_size", 0)}
        return StepGroups(filled, row, engine="atropos")

    return source
