"""A sampler in another process: the Sampler's `sample` over HTTP, from a service of ours or another that speaks its fields;
and a teacher there (`RemoteTeacher`).

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
from types import SimpleNamespace

from grpolab.decode.audit import audit
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.serve.http_client import Caller, RemoteError
from grpolab.serve.mapped import Mapped
from grpolab.serve.openai_schema import fingerprint
from grpolab.serve.weight_sync import AdapterSwap, Restart, SharedFile
from grpolab.train.distil import checked_scores
from grpolab.train.sources import Source, StepGroups

APART = 0.1  # nats a token, on average: bfloat16 on one side is a fifth of it
PROBE = "What is 12 + 34? \\boxed{46}. The quick brown fox; naïve café."  # how a server's tokenizer is recognised


class RemoteSampler:
    """Samples from a server, with the interface that a source of groups needs (`sample`, `stream`, `engine`).

    policy   whose prompts and updates these are; the first call compares its tokenizer with the server's
    token    of the server, if it asks for one
    model    as the server names it (default: the one that it serves)
    bridge   how `publish` brings the weights across (`weight_sync`, `mapped`)
    timeout  seconds that a request may take, sampling included
    max_staleness  by how many versions rollouts may be behind the policy; None asks for nothing. A server that says no
             versions is taken to have what was published last
    """

    def __init__(self, url: str, policy: Policy, *, token: str | None = None, model: str | None = None,
                 bridge: Mapped | SharedFile | AdapterSwap | Restart | None = None, timeout: float = 300.0,
                 max_staleness: int | None = None):
        self.caller = Caller(url, token=token, timeout=timeout)
        self.url, self.policy, self.model, self._base_model = self.caller.url, policy, model, model
        self.bridge, self.max_staleness, self.synced_s = bridge, max_staleness, 0.0
        self.engine = SimpleNamespace(name="remote")
        self._recognising, self._entrance, self._idle = asyncio.Lock(), asyncio.Lock(), asyncio.Event()
        self._calls, self._version = 0, 0  # in progress; of the last `publish`
        self._context: int | None = None
        self._ours = False  # the server is of this package, and says versions
        self._published: str | None = None  # the fingerprint of what was published last
        self._unsure = False  # a publish began and did not end well, so the server may have any weights
        self._idle.set()

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> list[Group]:
        """Token id lists -> one Group of `group_size` rollouts for each; all have the room that the longest prompt leaves in
        the context. Cancelling the await ends the request at the server. RemoteError for what cannot be trained on."""
        params = params or SamplingParams()
        if not len(prompts):
            return []
        async with self._entrance:  # `publish` waits for the calls in progress, and later calls for it
            if self._unsure:
                raise RemoteError(f"the last publish to {self.url} failed, so it may have other weights: publish again")
            self._calls += 1
            self._idle.clear()
        oldest = self.policy.version - (self.max_staleness or 0)
        try:
            await self._recognise()
            groups = await self._complete(prompts, group_size, params)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
        version, newest = min(r.policy_version for g in groups for r in g), self.policy.version
        if self.max_staleness is not None and not oldest <= version <= newest:
            raise RemoteError(f"rollouts of {self.url} are of version {version}, the policy is at {newest}, and "
                              f"max_staleness is {self.max_staleness}: publish {'more often' if version < oldest else 'first'}")
        return groups

    async def _complete(self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams) -> list[Group]:
        if params.constraint is not None:
            raise ValueError("a constraint stays in this process: ask a service that was started with --constrained")
        ids = [[int(t) for t in prompt] for prompt in prompts]
        room = max(1, self._context - max(map(len, ids)))  # the server refuses a prompt that leaves none
        body = {"model": self.model, "prompt": ids, "n": group_size, "max_tokens": min(params.max_new_tokens, room),
                "logprobs": 0, "return_token_ids": True, "temperature": 0 if params.greedy else params.temperature,
                "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p, "seed": params.seed,
                "stop": list(params.stop_strings) or None, "stop_token_ids": list(params.stop_ids) or None,
                "ignore_eos": params.ignore_eos}
        answer = await self.caller.ask("POST", "/v1/completions", {k: v for k, v in body.items() if v is not None})
        weights = answer.get("system_fingerprint")
        live = isinstance(self.bridge, Mapped)  # its weights take the trainer's steps without a publish: only the mark stays
        same = self._published in (None, weights) or live and str(weights).endswith(f"-{self.bridge.mark}")
        if self._ours and not same:
            raise RemoteError(f"{self.url} has the weights {weights}, and this sampler published {self._published}: another "
                              "trainer publishes to it, or it was started again. Publish again")
        choices = sorted(answer.get("choices") or [], key=lambda c: c["index"])
        if [c["index"] for c in choices] != list(range(len(ids) * group_size)):
            raise RemoteError(f"{self.url} gave {len(choices)} completions, not {len(ids)} groups of {group_size}")
        rollouts = [self._rollout(c, ids[i // group_size], params) for i, c in enumerate(choices)]
        return [Group(tuple(rollouts[i : i + group_size])) for i in range(0, len(rollouts), group_size)]

    async def stream(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> AsyncIterator[tuple[int, int, Rollout]]:
        """(prompt index, sample index, rollout), all of them once the last has come."""
        for i, group in enumerate(await self.sample(prompts, group_size=group_size, params=params)):
            for g, rollout in enumerate(group):
                yield i, g, rollout

    async def publish(self) -> int:
        """Bring the policy's weights to the server, once what this sampler asked for has come; returns their version.
        `synced_s` are the seconds that it took. RemoteError or ValueError where they do not arrive or the server computes
        something else; then sampling is an error until a publish succeeds."""
        if self.bridge is None:
            raise ValueError("publish needs a bridge: RemoteSampler(..., bridge=SharedFile(FILE)), and --weights FILE for the "
                             "server")
        async with self._entrance:
            await self._idle.wait()
            began, self._unsure = time.perf_counter(), True
            self._version, mark, name = await self.bridge.publish(self.caller, self.policy)
            self._published, self.model, self._context = fingerprint(self._version, mark), name or self._base_model, None
            await self._recognise()
            await self._compare()
            self._unsure = False
            self.synced_s = time.perf_counter() - began
        return self._version

    async def _compare(self) -> None:
        """RemoteError unless the server gives the log-probs of the policy: it may be of another base model."""
        params = SamplingParams(seed=0, max_new_tokens=4, ignore_eos=True)
        (group,) = await self._complete([self.policy.tokenizer.encode(PROBE)], 1, params)

        def distance() -> float:
            with self.policy.lock:
                return audit(self.policy, group).mean_error

        error = await asyncio.to_thread(distance)
        if not error <= APART:  # nor NaN
            raise RemoteError(f"{self.url} does not compute what {self.policy.name!r} does: log-probs of sampled tokens differ "
                              f"by {error:.2g} nats on average (at most {APART}). Serve the model that is trained")

    async def __aenter__(self) -> RemoteSampler:
        return self

    async def __aexit__(self, *_) -> None:
        if self.bridge is not None:
            await asyncio.to_thread(self.bridge.close)  # a server may take a while to end

    async def _recognise(self) -> None:
        """Once: the name of the model and its context. RemoteError where it is another or has another tokenizer."""
        async with self._recognising:
            if self._context is not None:
                return
            cards = (await self.caller.ask("GET", "/v1/models")).get("data") or []
            names = [card.get("id") for card in cards]
            model = self.model or (names[0] if names else None)
            if model not in names:
                raise RemoteError(f"{self.url} serves {names}, not {model!r}")
            probe = {"model": model, "prompt": PROBE, "max_tokens": 1, "return_token_ids": True}
            (choice, *_) = (await self.caller.ask("POST", "/v1/completions", probe)).get("choices") or [{}]
            theirs, ours = choice.get("prompt_token_ids"), self.policy.tokenizer.encode(PROBE)
            if theirs is None:
                raise RemoteError(f"{self.url} returns no token ids: it must know return_token_ids, as vLLM does")
            if theirs != ours:
                raise RemoteError(f"{self.url} has another vocabulary than {self.policy.name!r}: it reads a text as "
                                  f"{theirs[:8]}…, not {ours[:8]}…. Serve a model with its tokenizer")
            card = cards[names.index(model)]
            self.model, self._ours = model, "policy_version" in card
            # vLLM names it at the base alone.
            self._context = card.get("max_model_len") or cards[0].get("max_model_len") or self.policy.context

    def _rollout(self, choice: dict, prompt: list[int], params: SamplingParams) -> Rollout:
        tokens, ours = choice.get("token_ids"), choice.get("grpolab") or {}
        logps = ours.get("logps") or (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None or logps is None or len(logps) != len(tokens) or None in logps:
            raise RemoteError(f"{self.url} gave {len(logps or ())} log-probs for {len(tokens or ())} token ids, and a rollout "
                              "needs one for each: it must know logprobs=0 and return_token_ids")
        vocab = len(self.policy.model.get_input_embeddings().weight)
        if any(not 0 <= t < vocab for t in tokens):
            raise RemoteError(f"{self.url} gave token ids outside the vocabulary 0..{vocab - 1}: it serves another model")
        if (params.temperature != 1 or params.truncates) and not ours and not params.greedy:
            raise RemoteError(f"{self.url} does not say of which distribution its log-probs are: leave temperature, top_k, "
                              "top_p and min_p out, or use grpolab serve-policy")
        reason = ours.get("finish_reason") or ("eos" if choice.get("finish_reason") == "stop" else "length")
        if reason == "length" and len(prompt) + len(tokens) >= self._context:
            reason = "context"
        return Rollout(tuple(prompt), tuple(tokens), (1,) * len(tokens), tuple(logps), tuple(ours.get("raw_logps") or logps),
                       reason, ours.get("seed", 0), ours.get("policy_version", self._version),
                       kept_mass=tuple(ours.get("kept_mass") or ()), versions=tuple(ours.get("versions") or ()))


class RemoteTeacher(RemoteSampler):
    """A teacher for `distil` with vocabulary="sampled": the log-probs at temperature 1 that a server gives to the tokens of the
    student's rollouts. It scores prompts by OpenAI's `echo` without sampling, as `serve-policy` and vLLM do. Made like a
    RemoteSampler, of which `policy` is the student.

    RemoteError where the server is gone, has another tokenizer, or gives no log-probs.
    """

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Of each rollout one log-prob a token, in nats."""
        await self._recognise()
        ids = [[int(t) for t in r.prompt + r.tokens] for r in rollouts]
        body = {"model": self.model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = await self.caller.ask("POST", "/v1/completions", body)
        try:
            lines = {c["index"]: c["logprobs"]["token_logprobs"] for c in answer["choices"]}
            if len(answer["choices"]) != len(ids):
                raise ValueError(f"it scored {len(answer['choices'])} prompts of {len(ids)}")
            return checked_scores([lines[i][len(r.prompt) :] for i, r in enumerate(rollouts)], rollouts)
        except (LookupError, TypeError, ValueError) as error:
            raise RemoteError(f"{self.url} did not give each of {sum(map(len, ids))} tokens a log-prob: a teacher must score "
                              "prompts, by echo with max_tokens=0 and logprobs=0, as serve-policy and vLLM do "
                              f"({type(error).__name__}: {error})") from error


def following(sampler: RemoteSampler, source: Source, every: int = 1) -> Source:
    """A source whose remote sampler follows the policy: before a step it gets the weights if the policy has taken at least
    `every` optimiser steps since. Rows get `staleness` (versions that the step's oldest rollout is behind), `sync_s`, and how
    far the policy is from the one that sampled (`replay_source.importance`)."""
    if every < 1:
        raise ValueError(f"every must be at least 1 optimiser step, got {every}")
    published: int | None = None

    async def source_of(step: int) -> StepGroups:
        nonlocal published
        policy, seconds = sampler.policy, 0.0
        if published is None or policy.version - published >= every:
            published, seconds = await sampler.publish(), sampler.synced_s
        drawn = await source(step)
        seen = drawn.groups if drawn.seen is None else drawn.seen
        behind = policy.version - min((r.policy_version for g in seen for r in g if r.finish_reason != "lost"), default=0)
        return replace(drawn, row={"staleness": behind, "sync_s": seconds} | dict(drawn.row), off_policy=True)

    return source_of
