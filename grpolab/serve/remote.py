"""A sampler in another process: the Sampler's `sample` over HTTP, from a service of ours or another that speaks its fields.

    sampler = RemoteSampler("http://127.0.0.1:8000", policy, bridge=SharedFile("/dev/shm/policy.safetensors"))
    groups = await sampler.sample(prompts, group_size=8, params=SamplingParams(seed=0))
    await sampler.publish()              # after an update: the server was started with --weights and that file

Token ids go in, token ids and log-probs come out; nothing is tokenised on the way. A rollout carries the version of the
weights that made it. The numerics of another process need not be the trainer's: `GRPOConfig.sampler_cap` corrects for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from grpolab.decode.audit import audit
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.serve.http_client import Caller, RemoteError
from grpolab.serve.openai_schema import MOST_CHOICES, fingerprint
from grpolab.serve.weight_sync import Bridge
from grpolab.train.sources import Drawn, Source

APART = 0.1  # nats a token, on average: bfloat16 on one side is a fifth of it
PROBE = "What is 12 + 34? \\boxed{46}. The quick brown fox; naïve café."  # how a server's tokenizer is recognised


class RemoteSampler:
    """Samples from a server, with the interface that a source of groups needs (`sample`, `stream`, `engine`).

    policy   whose prompts and updates these are; the first call compares its tokenizer with the server's
    token    of the server, if it asks for one
    model    as the server names it (default: the one that it serves)
    bridge   how `publish` brings the weights across (`bridges`): SharedFile, AdapterSwap or Restart
    timeout  seconds that a request may take, sampling included
    max_staleness  by how many versions rollouts may be behind the policy; None asks for nothing. A server of ours refuses
             to sample from older weights, of another's rollouts the version is the one that was published last
    """

    def __init__(self, url: str, policy: Policy, *, token: str | None = None, model: str | None = None,
                 bridge: Bridge | None = None, timeout: float = 300.0, max_staleness: int | None = None):
        self.caller = Caller(url.rstrip("/").removesuffix("/v1"), token=token, timeout=timeout)
        self.url, self.policy, self.model, self._named = self.caller.url, policy, model, model
        self.bridge, self.max_staleness, self.synced_s = bridge, max_staleness, 0.0
        self.engine = SimpleNamespace(name="remote")
        self._known, self._gate, self._rest = asyncio.Lock(), asyncio.Lock(), asyncio.Event()
        self._asked, self._version = 0, 0  # calls in progress; the version of the last `publish`
        self._context: int | None = None
        self._ours = False  # the server is of this package, and says versions
        self._sent: str | None = None  # the fingerprint of what was published last
        self._rest.set()

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> list[Group]:
        """Token id lists -> one Group of `group_size` rollouts for each. Cancelling the await ends the request at the server.
        All of a call have the room that its longest prompt leaves in the context. RemoteError where the answer is not whole:
        every rollout with its ids, and a log-prob for each."""
        params = params or SamplingParams()
        if not 1 <= group_size <= MOST_CHOICES:
            raise ValueError(f"group_size must be from 1 to {MOST_CHOICES} here, got {group_size}")
        if not len(prompts):
            return []
        async with self._gate:  # `publish` waits for what is asked, and what is asked then for it
            self._asked += 1
            self._rest.clear()
        try:
            return await self._sample(prompts, group_size, params)
        finally:
            self._asked -= 1
            if not self._asked:
                self._rest.set()

    async def _sample(self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams) -> list[Group]:
        await self._know()
        stale = self.max_staleness
        least = max(0, self.policy.version - stale) if self._ours and stale is not None else None
        groups = await self._drawn(prompts, group_size, params, least)
        behind = self.policy.version - min(r.policy_version for g in groups for r in g)
        if stale is not None and behind < 0:
            raise RemoteError(f"rollouts of {self.url} are of version {self.policy.version - behind}, and the policy has only "
                              f"{self.policy.version}: the server has weights that are not this policy's. Publish first")
        if stale is not None and behind > stale:
            raise RemoteError(f"rollouts of {self.url} are {behind} versions behind the policy's {self.policy.version}, and "
                              f"max_staleness is {stale}: publish more often")
        return groups

    async def _drawn(self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams,
                     least: int | None = None) -> list[Group]:
        """Groups of the server, of policy version `least` or later."""
        ids = [[int(t) for t in prompt] for prompt in prompts]
        room = self._context - max(map(len, ids)) if self._context else params.max_new_tokens
        if room < 1:
            raise ValueError(f"a prompt has {max(map(len, ids))} tokens and leaves no room in the context of {self._context}")
        most = min(params.max_new_tokens, room)
        body = {"model": self.model, "prompt": ids, "n": group_size, "max_tokens": most, "logprobs": 0,
                "return_token_ids": True, "temperature": 0 if params.greedy else params.temperature, "top_p": params.top_p,
                "top_k": params.top_k, "min_p": params.min_p, "seed": params.seed, "stop": list(params.stop_strings) or None,
                "stop_token_ids": list(params.stop_ids) or None, "ignore_eos": params.ignore_eos,
                "min_policy_version": least}
        answer = await self.caller.ask("POST", "/v1/completions", {k: v for k, v in body.items() if v is not None})
        has = answer.get("system_fingerprint")
        if self._ours and self._sent not in (None, has):
            raise RemoteError(f"{self.url} has the weights {has}, and this sampler published {self._sent}: another trainer "
                              "publishes to it, or it was started again. Publish again, and give each trainer a server of its "
                              "own")
        return self._groups(answer, ids, group_size, params)

    async def stream(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> AsyncIterator[tuple[int, int, Rollout]]:
        """(prompt index, sample index, rollout), all of them once the last has come."""
        for i, group in enumerate(await self.sample(prompts, group_size=group_size, params=params)):
            for g, rollout in enumerate(group):
                yield i, g, rollout

    async def publish(self, policy: Policy | None = None) -> int:
        """Bring the policy's weights to the server, once what this sampler asked for has come; returns the version that the
        server has then. `synced_s` are the seconds that it took. RemoteError or ValueError, and the server has the weights of
        before, where they do not arrive."""
        policy = policy or self.policy
        if self.bridge is None:
            raise ValueError("publish needs a bridge: RemoteSampler(..., bridge=SharedFile(FILE)), and for the server "
                             "serve-policy --weights FILE")
        async with self._gate:
            await self._rest.wait()
            began, before = time.perf_counter(), (self.model, self._context, self._sent)
            try:
                self._sent = None
                sent = await self.bridge.publish(self.caller, policy, partial(self._prove, policy))
            except BaseException:
                self.model, self._context, self._sent = before
                raise
            self._version, self.synced_s = sent.version, time.perf_counter() - began
            self._sent = fingerprint(sent.version, sent.mark)
        return sent.version

    async def _prove(self, policy: Policy, name: str | None) -> None:
        """RemoteError unless the server, under this name, knows our tokenizer and gives the log-probs of the policy: it may be
        of another base model, or have taken in what does not fit."""
        self.model, self._context = name or self._named, None
        await self._know()
        text = self.policy.tokenizer.encode(PROBE)
        (group,) = await self._drawn([text], 1, SamplingParams(seed=0, max_new_tokens=4, ignore_eos=True))

        def off() -> float:
            with policy.lock:
                return audit(policy, group).mean_error

        error = await asyncio.get_running_loop().run_in_executor(None, off)
        if not error <= APART:  # nor NaN
            raise RemoteError(f"{self.url} does not compute what {policy.name!r} does: log-probs of sampled tokens differ by "
                              f"{error:.2g} nats on average, and {APART} would pass. Serve the model that the policy, or its "
                              "adapter, stands on")

    def close(self) -> None:
        self.caller.close()
        if self.bridge is not None:
            self.bridge.close()

    async def __aenter__(self) -> RemoteSampler:
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)  # a server may take a while to end

    async def _know(self) -> None:
        """Once: the name of the model, its context, and whether its tokenizer is ours."""
        async with self._known:
            if self._context is not None:
                return
            cards = (await self.caller.ask("GET", "/v1/models")).get("data") or []
            names = [card.get("id") for card in cards]
            self.model = self.model or (names[0] if names else None)
            if self.model not in names:
                raise RemoteError(f"{self.url} serves {names}, not {self.model!r}")
            asked = {"model": self.model, "prompt": PROBE, "max_tokens": 1, "return_token_ids": True}
            (choice, *_) = (await self.caller.ask("POST", "/v1/completions", asked)).get("choices") or [{}]
            theirs, ours = choice.get("prompt_token_ids"), self.policy.tokenizer.encode(PROBE)
            if theirs is None:
                raise RemoteError(f"{self.url} returns no token ids: it must know return_token_ids, as grpolab serve-policy "
                                  "and vLLM do")
            if theirs != ours:
                raise RemoteError(f"{self.url} has another vocabulary than {self.policy.name!r}: it reads a text as "
                                  f"{theirs[:8]}…, we as {ours[:8]}…; serve the model that is trained")
            self._ours = "policy_version" in cards[names.index(self.model)]
            known = (card.get("max_model_len") for card in (cards[names.index(self.model)], cards[0]))  # vLLM: its base's alone
            self._context = next((n for n in known if n), self.policy.context)

    def _groups(self, answer: dict, prompts: list[list[int]], size: int, params: SamplingParams) -> list[Group]:
        choices = sorted(answer.get("choices") or [], key=lambda c: c["index"])
        if [c["index"] for c in choices] != list(range(len(prompts) * size)):
            raise RemoteError(f"{self.url} gave {len(choices)} completions, and {len(prompts)} groups of {size} were asked for")
        rollouts = [self._rollout(c, prompts[i // size], params) for i, c in enumerate(choices)]
        return [Group(tuple(rollouts[i * size : (i + 1) * size])) for i in range(len(prompts))]

    def _rollout(self, choice: dict, prompt: list[int], params: SamplingParams) -> Rollout:
        tokens, told = choice.get("token_ids"), choice.get("grpolab") or {}
        logps = told.get("logps") or (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None or logps is None or len(logps) != len(tokens) or any(x is None for x in logps):
            raise RemoteError(f"{self.url} gave {0 if logps is None else len(logps)} log-probs for "
                              f"{'no' if tokens is None else len(tokens)} token ids, and a rollout needs one for each: the "
                              "server must know logprobs=0 and return_token_ids")
        vocab = len(self.policy.model.get_input_embeddings().weight)
        if any(not 0 <= t < vocab for t in tokens):
            raise RemoteError(f"{self.url} gave token ids outside the vocabulary 0..{vocab - 1}: it serves another model")
        if (params.temperature != 1 or params.truncates) and not told and not params.greedy:
            raise RemoteError(f"{self.url} does not say of which distribution its log-probs are, and {params} asks for another "
                              "temperature than 1, or for top_k, top_p or min_p: leave them out, or use grpolab serve-policy")
        reason = told.get("finish_reason") or {"stop": "eos"}.get(choice.get("finish_reason"), "length")
        full = len(prompt) + len(tokens) >= self._context
        reason = "context" if full and reason == "length" else reason
        return Rollout(tuple(prompt), tuple(tokens), (1,) * len(tokens), tuple(logps), tuple(told.get("raw_logps") or logps),
                       reason, told.get("seed", 0), told.get("policy_version", self._version),
                       kept_mass=tuple(told.get("kept_mass") or ()))

    def __repr__(self):
        return f"RemoteSampler({self.url!r}, {self.policy.name!r})"


def following(sampler: RemoteSampler, source: Source, every: int = 1) -> Source:
    """A source whose remote sampler follows the policy: before a step it gets the weights if the policy has taken at least
    `every` optimiser steps since. Rows get `staleness` (versions that the step's oldest rollout is behind), `sync_s`, and how
    far the policy is from the one that sampled (`train.offline.importance`)."""
    if every < 1:
        raise ValueError(f"every must be at least 1 optimiser step, got {every}")
    sent: list[int] = []

    async def source_of(step: int) -> Drawn:
        policy, synced = sampler.policy, 0.0
        if not sent or policy.version - sent[-1] >= every:
            sent[:] = [await sampler.publish()]
            synced = sampler.synced_s
        drawn = await source(step)
        seen = drawn.groups if drawn.seen is None else drawn.seen
        behind = policy.version - min((r.policy_version for g in seen for r in g if r.finish_reason != "lost"), default=0)
        return replace(drawn, row=dict(drawn.row) | {"staleness": behind, "sync_s": synced}, off_policy=True)

    return source_of
