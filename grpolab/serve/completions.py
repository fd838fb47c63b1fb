"""One request on its way: its prompts as token ids, its rows in the sampler, and what its caller gets, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace

from starlette.responses import JSONResponse

from grpolab.chat import call_form, tokenising
from grpolab.decode.requests import Prefix, Request
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Rollout
from grpolab.serve import openai_schema
from grpolab.serve.detokenizer import StreamedText, pieces_of, text_of
from grpolab.serve.openai_schema import ChatRequest, CompletionRequest, Refused
from grpolab.serve.sessions import Prompt, Session
from grpolab.serve.state import Service
from grpolab.tool_calls import ParsedTurn, certain, parse_calls

END_OF_CALL = "</tool_call>"


class CompletionResponse:
    """An ASGI response that samples what a request asks for."""

    def __init__(self, service: Service, request: CompletionRequest, session: Session | None):
        self.service, self.policy, self.request, self.session = service, service.policy, request, session
        self.params = self._sampling_params()
        self.id = request.id_prefix + secrets.token_hex(12)
        self.prompts: list[Prompt] = []
        self.form = ""  # in which the answer's calls are written
        self.job: Request | None = None  # at the sampler
        self.answered = 0  # choices that the caller got, or is about to

    async def __call__(self, scope, receive, send) -> None:
        service, session, request = self.service, self.session, self.request
        if service.stopping:
            raise Refused(503, "the service is shutting down")
        self.prompts = await self._tokenised()
        self.params = replace(self.params, max_new_tokens=self._most_tokens())
        rows = len(self.prompts) * request.n
        await service.admit(rows)
        if request.min_policy_version > self.policy.version:
            raise Refused(409, f"this service has the weights of version {self.policy.version}, and the request accepts none "
                               f"before {request.min_policy_version}: publish them first", "min_policy_version",
                          "stale_weights")
        events = self._submit()
        answer = self._stream(events, send) if request.stream else self._whole(events, scope, receive, send)
        answering, leaving = asyncio.create_task(answer), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
            else:
                service.counts["cancelled"] += 1
                if session is not None:
                    session.cancelled += rows - self.answered
        finally:
            answering.cancel()
            leaving.cancel()
            self.job.cancel()
            service.jobs.discard(self.job)
            if session is not None:
                session.open.discard(self.job)

    def _submit(self) -> asyncio.Queue:
        """Hand the request to the sampler. For a stream the queue gets (prompt index, sample index, tokens, logps) as they come
        and (prompt index, sample index, rollout) of those that are finished; and None at the end."""
        service, session, stream = self.service, self.session, self.request.stream
        loop, events = asyncio.get_running_loop(), asyncio.Queue()

        def put(event: tuple | None) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it who listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            self.job = service.sampler.submit(
                [p.ids for p in self.prompts], group_size=self.request.n, params=self.params, prefix=self._cache(),
                on_rollout=(lambda *event: put(event)) if stream else None,
                on_tokens=(lambda *event: put(event)) if stream else None)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        service.counts["requests"] += 1
        service.jobs.add(self.job)
        if session is not None:
            session.track(self.job)
        self.job.future.add_done_callback(lambda _: put(None))
        return events

    def _sampling_params(self) -> SamplingParams:
        """How it is sampled, with what its session says where it says nothing."""
        params, session = self.request.params, self.session
        if session is None:
            return params
        if "temperature" not in self.request.model_fields_set:
            params = replace(params, temperature=session.temperature)
        if session.fixed and (params.truncates or params.greedy or params.temperature != session.temperature):
            raise Refused(400, f"this session is trained on: sample at temperature {session.temperature}, without top_k, top_p "
                               "and min_p, or leave them all out", "temperature")
        return params if params.seed is not None else replace(params, seed=session.next_seed())

    async def _tokenised(self) -> list[Prompt]:
        """The token ids of each prompt."""
        request, tokenizer = self.request, self.policy.tokenizer
        record = self.session or Session("", "", 0)

        def encode() -> list[Prompt]:
            if isinstance(request, ChatRequest):
                self._read_form(tokenizer)
                return [record.prompt_of_chat(tokenizer, request.messages, request.tools, request.call_prefix)]
            return [record.prompt_of_completion(tokenizer, prompt) for prompt in request.prompt]

        try:
            prompts = await asyncio.get_running_loop().run_in_executor(tokenising, encode)
        except ValueError as error:
            raise Refused(400, str(error), request.prompt_field) from None
        if not all(p.ids for p in prompts):
            raise Refused(400, "the prompt has no token; give it at least one", request.prompt_field)
        return prompts

    def _read_form(self, tokenizer) -> None:
        """In which form the answer's calls are written; Refused where what is asked of them needs that of Hermes."""
        request = self.request
        if not request.calls:
            return
        self.form = call_form(tokenizer)
        one_at_most = not request.parallel_tool_calls
        if self.form != "hermes" and (one_at_most or request.call_prefix):
            name = "parallel_tool_calls" if one_at_most else "tool_choice"
            raise Refused(400, f"this model writes calls in the form {self.form!r}, for which {name} cannot be kept: "
                          "leave it out", name, "unsupported_parameter")
        if one_at_most:
            self.params = replace(self.params, stop_strings=(*self.params.stop_strings, END_OF_CALL))

    def _parsed(self, text: str, rollout: Rollout) -> ParsedTurn:
        """The text of an answer, read for calls where its request has tools."""
        if not self.request.calls:
            return ParsedTurn(text)
        stopped = rollout.finish_reason == "stop_string" and END_OF_CALL in self.policy.decode(rollout.tokens)[len(text) :]
        turn = parse_calls(self.request.call_prefix + text + END_OF_CALL * stopped, self.form)
        self.service.counts["unparsed_calls"] += turn.unparsed
        return turn

    def _most_tokens(self) -> int:
        """Tokens that a completion may take; Refused, with the numbers, where they do not fit."""
        session, most, context = self.session, self.request.max_tokens, self.service.sampler.context
        if session is not None and session.limit:
            context = min(context, session.limit)
        longest = max(len(p.ids) for p in self.prompts)
        room = context - longest
        if room < (most or 1):
            also = "" if most is None else f" and {most} for the completion"
            remedy = "shorten it" if room < 1 else f"shorten it, or ask for at most {room}"
            raise Refused(400, f"the context is {context} tokens here, and the request has {longest} in its prompt{also}: "
                               f"{remedy}", self.request.prompt_field, "context_length_exceeded")
        default = room if isinstance(self.request, ChatRequest) else openai_schema.COMPLETION_TOKENS
        return most or min(room, session and session.max_tokens or default)

    def _cache(self) -> Prefix | None:
        """Of a session's single answer the keys and values of the turn before; other requests leave none."""
        one = self.session is not None and len(self.prompts) == self.request.n == 1
        return self.service.sessions.caches.after(self.prompts[0].parent) if one else None

    def _record(self, index: int, rollout: Rollout, turn: ParsedTurn) -> None:
        """Put an answer into the record before its caller has it, whose next request looks for it there. Refused for a rollout
        that was ended from here."""
        session = self.session
        if rollout.finish_reason == "cancelled" and session is not None and session.closed:
            raise Refused(410, f"the session {session.id!r} was collected while this was being sampled")
        if rollout.finish_reason == "cancelled":
            raise Refused(503, "the service is shutting down")
        self.answered += 1
        kept = session and session.record(self.prompts[index], rollout, turn, rollout.tokens[-1] in self.policy.eos_ids)
        if kept and self.job.prefix is not None:
            self.service.sessions.caches.keep(kept, self.job.prefix)

    def _check_sampled(self) -> None:
        """Refused for what the sampler raised."""
        error = self.job.future.exception()
        if error is not None:
            raise Refused(400 if isinstance(error, ValueError) else 500, f"{type(error).__name__}: {error}") from error

    def _body(self, version: int, choices: Sequence[dict]) -> dict:
        """An answer or a chunk. The ids of a chat's prompt stand beside its choices, as vLLM has them."""
        body = openai_schema.envelope(self.request, self.id, self.service.name, version, self.service.mark)
        if isinstance(self.request, ChatRequest):
            ids = [choice.pop("prompt_token_ids", None) for choice in choices]
            body |= {"prompt_token_ids": ids[0]} if ids and ids[0] else {}
        return body | {"choices": choices}

    def _usage(self, rollouts: Sequence[Rollout]) -> dict:
        return openai_schema.usage_of(sum(len(p.ids) for p in self.prompts), rollouts)

    async def _whole(self, events: asyncio.Queue, scope, receive, send) -> None:
        await events.get()
        self._check_sampled()
        rollouts, choices = [rollout for group in self.job.future.result() for rollout in group], []
        for i, rollout in enumerate(rollouts):
            turn = self._parsed(text_of(self.policy, rollout, self.params.stop_strings), rollout)
            self._record(i // self.request.n, rollout, turn)
            choices.append(openai_schema.choice(
                self.request, i, self.request.content(turn), rollout.tokens, rollout.logps, self._pieces(rollout.tokens),
                rollout=rollout, prompt=rollout.prompt, turn=turn))
        body = self._body(min(r.policy_version for r in rollouts), choices) | {"usage": self._usage(rollouts)}
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, events: asyncio.Queue, send) -> None:
        """Server-sent events, as OpenAI's."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for content in self._chunks(events):
            data = f"data: {json.dumps(content, allow_nan=False)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _chunks(self, events: asyncio.Queue) -> AsyncIterator[dict]:
        """A chunk for what is new of a choice, at last the usage if it is wanted; an error where there is one."""
        n, params, rollouts, version = self.request.n, self.params, [], self.policy.version
        texts = [StreamedText(self.policy, params.stop_strings, params.stop_ids) for _ in range(len(self.prompts) * n)]
        try:
            while (event := await events.get()) is not None:
                i, g, *new = event
                index, text = i * n + g, texts[i * n + g]
                if isinstance(new[0], Rollout):
                    rollouts += new
                    text.end(new[0])
                    turn = self._parsed(text.text, new[0])
                    self._record(i, new[0], turn)
                    chunk = self._chunk(index, text, turn.content[text.sent :], rollout=new[0], turn=turn)
                else:
                    text.add(new[0])
                    whole = self.request.call_prefix + text.text if self.request.calls else text.text
                    end = certain(whole, self.form) if self.request.calls else len(whole)
                    new_text, text.sent = whole[text.sent : end], max(end, text.sent)
                    chunk = self._chunk(index, text, new_text, *new)
                yield self._body(version, [chunk])
            self._check_sampled()
            if self.request.stream_options.include_usage:
                yield self._body(version, []) | {"usage": self._usage(rollouts)}
        except Refused as refused:
            yield refused.body

    def _chunk(self, index: int, text: StreamedText, new: str, tokens: Sequence[int] = (), logps: Sequence[float] = (),
               rollout: Rollout | None = None, turn: ParsedTurn | None = None) -> dict:
        """What is `new` of a choice's text, and the tokens that it was sampled in."""
        first, text.begun = not text.begun, True
        pieces, offset = self._pieces(tokens), text.offset
        text.offset += sum(map(len, pieces))
        prompt = self.prompts[index // self.request.n].ids if first else ()
        delta = self.request.delta(new, first, turn.calls if turn else ())
        return openai_schema.choice(self.request, index, delta, tokens, logps, pieces, offset, rollout, prompt, turn)

    def _pieces(self, tokens: Sequence[int]) -> Sequence[str]:
        return pieces_of(self.policy, tokens) if self.request.logprobs else ()


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
