"""One request on its way: its prompts as token ids, its rows in the sampler, and what its caller gets, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from starlette.responses import JSONResponse

from grpolab.chat import LONG_TEXT, longest_token, tokenising
from grpolab.decode.requests import Kept, Request
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Rollout
from grpolab.serve import openai_schema
from grpolab.serve.detokenizer import Said, pieces_of, text_of
from grpolab.serve.openai_schema import Asked, Refused
from grpolab.serve.sessions import Prompt, Session
from grpolab.serve.state import Service

SEND = 60.0  # s; how long a caller may read nothing of its answer
GONE, TOKENS, ROLLOUT, END = "gone", "tokens", "rollout", "end"  # what happens to a request


class Gone(Exception):
    """The caller has left."""


class Answer:
    """An ASGI response that samples what was asked."""

    def __init__(self, service: Service, asked: Asked, session: Session | None):
        self.service, self.policy, self.asked, self.session = service, service.policy, asked, session
        self.prompts: list[Prompt] = []
        self.params = self._sampled()
        self.name = {"chat": "chatcmpl-", "text": "cmpl-"}[asked.kind] + secrets.token_hex(12)
        self.request: Request | None = None  # once it is sampled
        self.started = False  # the answer, so that no other can be sent
        self.answered = 0  # choices that the caller got, or is about to

    async def __call__(self, scope, receive, send) -> None:
        service, session, n = self.service, self.session, self.asked.n
        if service.stopping:
            raise Refused(503, "the service is shutting down")
        if session is not None:
            service.sessions.check_room()
        self.prompts = await self._encoded()
        self.params = replace(self.params, max_new_tokens=self._most_tokens())
        wanted = len(self.prompts) * n
        if wanted > service.max_rows:
            raise Refused(400, f"this request asks for {wanted} completions, and this service takes {service.max_rows} at a "
                               "time; send several with fewer", "n")
        await service.admitted()  # before the count: whoever waited here adds to it at once
        if service.rows + wanted > service.max_rows:
            raise Refused(429, f"{service.rows} completions are in progress, and this service takes {service.max_rows} at a "
                               f"time; this request asks for {wanted}: send it again later")
        if self.asked.least > self.policy.version:
            raise Refused(409, f"this service has the weights of version {self.policy.version}, and the request accepts none "
                               f"before {self.asked.least}: publish them first", "min_policy_version", "stale_weights")
        loop, events = asyncio.get_running_loop(), asyncio.Queue()

        def tell(*event):
            with suppress(RuntimeError):  # the loop has ended, and with it who listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            request = service.sampler.submit(
                [p.ids for p in self.prompts], group_size=n, params=self.params, on_rollout=lambda *of: tell(ROLLOUT, *of),
                on_tokens=(lambda *of: tell(TOKENS, *of)) if self.asked.stream else None, kept=self._kept())
        except (ValueError, RuntimeError) as error:
            raise refused(error) from error
        self.request = request
        request.future.add_done_callback(lambda _: tell(END))
        service.counts["requests"] += 1
        service.open.add(request)
        watch = asyncio.create_task(self._until_gone(receive, events))
        try:
            if session is not None:
                session.track(request)
            await (self._stream if self.asked.stream else self._whole)(request, events, scope, receive, self._patient(send))
        except (Gone, TimeoutError):
            service.counts["cancelled"] += 1
            if session is not None:
                session.cancelled += len(self.prompts) * n - self.answered
        finally:
            watch.cancel()
            request.cancel()
            service.open.discard(request)
            if session is not None:
                session.open.discard(request)

    # -------------------------------------------------------------- what is asked

    def _sampled(self) -> SamplingParams:
        """How it is sampled, with what its session says where it says nothing."""
        params, session = self.asked.params, self.session
        if session is None:
            return params
        if "temperature" not in self.asked.explicit:
            params = replace(params, temperature=session.temperature)
        if session.fixed and (params.truncates or params.greedy or params.temperature != session.temperature):
            raise Refused(400, f"this session is trained on: sample at temperature {session.temperature}, without top_k, top_p "
                               "and min_p, or leave them all out", "temperature")
        return params if params.seed is not None else replace(params, seed=session.next_seed())

    async def _encoded(self) -> list[Prompt]:
        """The token ids of each prompt."""
        asked, tokenizer, record = self.asked, self.policy.tokenizer, self.session or Session("", "", 0)
        field = "messages" if asked.kind == "chat" else "prompt"

        def encode() -> list[Prompt]:
            if asked.kind == "chat":
                return [record.prompt_of_chat(tokenizer, asked.messages)]
            of_text, of_ids = record.prompt_of_text, record.prompt_of_ids
            return [of_text(tokenizer, p) if isinstance(p, str) else of_ids(p) for p in asked.prompts]

        texts = [p for p in asked.prompts if isinstance(p, str)]
        pieces = [sum(len(m["content"]) for m in asked.messages), *map(len, texts)]
        context, most = self._context, longest_token(tokenizer)
        if max(pieces) > context * most:  # not worth tokenising, which takes seconds for megabytes
            raise Refused(400, f"the context is {context} tokens here, and a text of {max(pieces)} characters has more than "
                               f"{max(pieces) // most}: shorten it", field, "context_length_exceeded")
        try:
            loop, short = asyncio.get_running_loop(), sum(pieces) <= LONG_TEXT
            prompts = encode() if short else await loop.run_in_executor(tokenising, encode)
        except ValueError as error:
            raise Refused(400, str(error), field) from None
        if not all(p.ids for p in prompts):
            raise Refused(400, "the prompt has no token; give it at least one", field)
        return prompts

    @property
    def _context(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        context = self.service.sampler.context
        return min(context, self.session.limit) if self.session and self.session.limit else context

    def _most_tokens(self) -> int:
        """Tokens that a completion may take; Refused, with the numbers, where they do not fit."""
        session, wanted, context = self.session, self.asked.max_tokens, self._context
        longest = max(len(p.ids) for p in self.prompts)
        room = context - longest
        if room < (wanted or 1):
            also = "" if wanted is None else f" and {wanted} for the completion"
            remedy = "shorten it" if room < 1 else f"shorten it, or ask for at most {room}"
            raise Refused(400, f"the context is {context} tokens here, and the request has {longest} in its prompt{also}: "
                               f"{remedy}", "messages" if self.asked.kind == "chat" else "prompt", "context_length_exceeded")
        default = room if self.asked.kind == "chat" else openai_schema.COMPLETION_TOKENS
        return wanted or min(room, session and session.max_tokens or default)

    def _kept(self) -> Kept | None:
        """Of a session's single answer what the turn before left; other requests keep nothing."""
        one = self.session is not None and len(self.prompts) == self.asked.n == 1
        return self.service.sessions.kept.after(self.prompts[0].parent) if one else None

    # -------------------------------------------------------------- what is answered

    async def _until_gone(self, receive, events: asyncio.Queue) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        events.put_nowait((GONE,))

    def _patient(self, send) -> Callable:
        async def patient(message):
            async with asyncio.timeout(SEND):
                await send(message)

        return patient

    def _record(self, index: int, rollout: Rollout, text: str) -> None:
        """Before the caller has an answer it is in the record, where its next request looks for it."""
        self.answered += 1
        if self.session is not None:
            ended = rollout.tokens[-1:] != () and rollout.tokens[-1] in self.policy.eos_ids
            turn = self.session.record(self.prompts[index], rollout, text, ended)
            if turn is not None and self.request.kept is not None:
                self.service.sessions.kept.keep(turn, self.request.kept)

    def _check_whole(self, rollout: Rollout) -> None:
        """Refused for a rollout that was ended from here."""
        if rollout.finish_reason == "cancelled":
            if self.session is not None and self.session.closed:
                raise Refused(410, f"the session {self.session.id!r} was collected while this was being sampled")
            raise Refused(503, "the service is shutting down")

    def _envelope(self, version: int) -> dict:
        return openai_schema.envelope(
            self.asked.kind, self.name, self.service.name, version, self.service.mark, self.asked.stream)

    async def _whole(self, request, events, scope, receive, send) -> None:
        while (event := await events.get())[0] != END:
            if event[0] == GONE:
                raise Gone
        groups = _result(request)
        choices, rollouts = [], [r for group in groups for r in group]
        for rollout in rollouts:
            self._check_whole(rollout)
        for i, rollout in enumerate(rollouts):
            text = text_of(self.policy, rollout, self.params.stop_strings)
            self._record(i // self.asked.n, rollout, text)
            pieces = pieces_of(self.policy, rollout.tokens) if self.asked.logprobs else ()
            choices.append(openai_schema.choice(self.asked, i, rollout, text, pieces))
        body = self._envelope(min(r.policy_version for r in rollouts)) | {"choices": choices, "usage": self._usage(rollouts)}
        if self.asked.token_ids and self.asked.kind == "chat":
            body["prompt_token_ids"] = list(self.prompts[0].ids)
        await JSONResponse(body)(scope, receive, send)

    def _usage(self, rollouts: Sequence[Rollout]) -> dict:
        return openai_schema.usage_of(sum(len(p.ids) for p in self.prompts), rollouts)

    async def _stream(self, request, events, scope, receive, send) -> None:
        """Server-sent events, a chunk for what is new of a choice, as OpenAI's."""
        n, params, rollouts = self.asked.n, self.params, []
        said = [Said(self.policy, params.stop_strings, params.stop_ids) for _ in range(len(self.prompts) * n)]
        fresh = set(range(len(said)))  # choices of which nothing was sent
        sent = [0] * len(said)  # characters of the tokens of each choice so far
        version = self.policy.version
        try:
            while (event := await events.get())[0] != END:
                if event[0] == GONE:
                    raise Gone
                kind, i, g, *of = event
                index, rollout = i * n + g, of[0] if kind == ROLLOUT else None
                tokens, logps = ((), ()) if rollout is not None else of
                if rollout is not None:
                    self._check_whole(rollout)
                    new = said[index].end(rollout)
                    rollouts.append(rollout)
                    self._record(i, rollout, said[index].text)
                else:
                    new = said[index].add(tokens)
                if new or rollout is not None or index in fresh or self.asked.logprobs or self.asked.token_ids:
                    pieces = pieces_of(self.policy, tokens) if self.asked.logprobs else ()
                    chunk = openai_schema.delta(self.asked, index, new, tokens, logps, pieces, index in fresh, rollout,
                                                offset=sent[index])
                    sent[index] += sum(map(len, pieces))
                    more = {"prompt_token_ids": list(self.prompts[i].ids)} if self.asked.token_ids and index in fresh else {}
                    if self.asked.kind == "text":
                        chunk, more = chunk | more, {}
                    fresh.discard(index)
                    await self._send(send, self._envelope(version) | {"choices": [chunk]} | more)
            _result(request)
            if self.asked.usage:
                await self._send(send, self._envelope(version) | {"choices": [], "usage": self._usage(rollouts)})
        except Refused as why:
            if not self.started:
                raise
            await self._send(send, why.body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send(self, send, content: dict) -> None:
        if not self.started:
            self.started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = f"data: {json.dumps(content, allow_nan=False)}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": True})


def refused(error: BaseException) -> Refused:
    """What a caller is told of what the sampler raised."""
    if isinstance(error, ValueError):
        return Refused(400, str(error))
    closed = isinstance(error, RuntimeError) and "closed" in str(error)
    return Refused(503 if closed else 500, f"{type(error).__name__}: {error}")


def _result(request):
    try:
        return request.future.result()
    except Exception as error:
        raise refused(error) from error
