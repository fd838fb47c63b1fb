"""One request on its way: its prompts as token ids, its rows in the sampler, and what its caller gets, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace

from starlette.responses import JSONResponse

from grpolab.chat import call_form, longest_token, tokenising
from grpolab.decode.constraint import compiling
from grpolab.decode.requests import Request
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Rollout
from grpolab.serve import openai_schema
from grpolab.serve.detokenizer import StreamedText, text_of
from grpolab.serve.openai_schema import ChatRequest, CompletionRequest, Refused, TextRequest, unknown_model
from grpolab.serve.scoring import Scores, scores
from grpolab.serve.sessions import Prompt, Session
from grpolab.serve.state import Service
from grpolab.tool_calls import END_OF_CALL, ParsedTurn, certain, parse_calls


class CompletionResponse:
    """An ASGI response that samples what a request asks for."""

    def __init__(self, service: Service, request: CompletionRequest, session: Session | None):
        self.service, self.policy, self.request = service, service.policy, request
        self.recorded, self.session = session is not None, session or Session("", "", 0)
        self.constrained = service.grammars is not None and bool(request.response_format or request.call_prefix)
        self.params = self._sampling_params()
        if request.calls and not request.parallel_tool_calls and not self.constrained:  # a grammar ends it, too
            self.params = replace(self.params, stop_strings=(*self.params.stop_strings, END_OF_CALL))
        self.id = request.id_prefix + secrets.token_hex(12)
        self.prompts: list[Prompt] = []
        self.form = ""  # in which the answer's calls are written
        self.job: Request | None = None  # at the sampler
        self.answered, self.ended = 0, False  # choices that the caller got, or is about to; nobody waits for more

    async def __call__(self, scope, receive, send) -> None:
        service, request = self.service, self.request
        if service.stopping:
            raise Refused(503, "the service is shutting down")
        rows, max_rows = request.n * (1 if isinstance(request, ChatRequest) else len(request.prompt)), service.options.max_rows
        if rows > max_rows:
            raise Refused(400, f"this request asks for {rows} completions, and this service takes {max_rows} at a time", "n")
        self._room(self._least_tokens(), has="at least ")
        self.prompts = await self._tokenised()
        if self.constrained:
            await self._constrain()
        most = self._most_tokens()
        await service.admit(rows)
        self._choose_weights()
        if isinstance(request, TextRequest) and request.echo:
            answer = self._scored(scope, receive, send)
        else:
            self.params = replace(self.params, max_new_tokens=most)
            events = self._submit()
            answer = self._stream(events, send) if request.stream else self._whole(events, scope, receive, send)
        answering, leaving = asyncio.create_task(answer), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
            else:
                service.counts["cancelled"] += 1
                self.session.cancelled += rows - self.answered
        finally:
            self.ended = True
            answering.cancel()
            leaving.cancel()
            if self.job is not None:
                self.job.cancel()
            service.jobs.discard(self.job)
            self.session.open.discard(self.job)

    def _sampling_params(self) -> SamplingParams:
        """How it is sampled, with what its session says where it says nothing."""
        params, session = self.request.params, self.session
        if not self.recorded:
            return params
        if "temperature" not in self.request.model_fields_set:
            params = replace(params, temperature=session.temperature)
        if session.fixed and (params.truncates or params.greedy or params.temperature != session.temperature):
            raise Refused(400, f"this session is trained on: sample at temperature {session.temperature}, without top_k, top_p "
                               "and min_p, or leave them all out", "temperature")
        if session.fixed and self.constrained:
            raise Refused(400, "this session is trained on, and the loss could not use a rollout that is constrained: leave "
                               "response_format and tool_choice out, or serve the policy without constrained",
                          "response_format" if self.request.response_format else "tool_choice")
        return params

    def _choose_weights(self) -> None:
        """Those that the service has now; Refused where they came while the request waited, and it names others."""
        if self.request.model not in self.service.names:
            raise unknown_model(self.request.model, self.service.names)
        self.version, self.mark = self.policy.version, self.service.mark

    def _least_tokens(self) -> int:
        """That the longest prompt has at least, by its characters: to tokenise 4 MB takes seconds."""
        if isinstance(self.request, ChatRequest):
            most = sum(len(message.get("content") or "") for message in self.request.messages)
        else:
            most = max((len(prompt) for prompt in self.request.prompt if isinstance(prompt, str)), default=0)
        return -(-most // longest_token(self.policy.tokenizer))

    async def _tokenised(self) -> list[Prompt]:
        """The token ids of each prompt, and the form of an answer's calls."""
        request, tokenizer, session = self.request, self.policy.tokenizer, self.session

        def encode() -> list[Prompt]:
            if not isinstance(request, ChatRequest):
                return session.prompts_of_completions(tokenizer, request.prompt)
            self.form = call_form(tokenizer) if request.calls else ""
            if self.form not in ("hermes", "") and (
                    request.call_prefix or self.constrained or not request.parallel_tool_calls):
                raise ValueError(f"this model writes calls in the form {self.form!r}, for which tool_choice, "
                                 "parallel_tool_calls and a constrained response_format cannot be kept: leave them out")
            return [session.prompt_of_chat(tokenizer, request.messages, request.tools, request.call_prefix)]

        try:
            prompts = await asyncio.get_running_loop().run_in_executor(tokenising, encode)
        except ValueError as error:
            raise Refused(400, str(error), request.prompt_field) from None
        if not all(p.ids for p in prompts):
            raise Refused(400, "the prompt has no token; give it at least one", request.prompt_field)
        return prompts

    async def _constrain(self) -> None:
        """Sample under the grammar of what the request asks for."""
        request, compile = self.request, self.service.grammars.compile
        try:
            constraint = await asyncio.get_running_loop().run_in_executor(compiling, lambda: compile(request.grammar))
            self.params = replace(self.params, constraint=constraint)
        except ValueError as error:
            raise Refused(400, str(error), "response_format" if request.response_format else "tool_choice") from None

    def _room(self, longest: int, most: int | None = None, has: str = "") -> int:
        """Tokens that are left behind the longest prompt; Refused, with the numbers, where there is none, or not `most`. `has`
        stands before the number of the prompt's."""
        context = self.service.sampler.context
        context = min(context, self.session.limit or context)
        room = context - longest
        if room < (1 if most is None else most):
            also = "" if most is None else f" and {most} for the completion"
            remedy = "shorten it" if room < 1 else f"shorten it, or ask for at most {room}"
            raise Refused(400, f"the context is {context} tokens here, and the request has {has}{longest} in its "
                               f"prompt{also}: {remedy}", self.request.prompt_field, "context_length_exceeded")
        return room

    def _most_tokens(self) -> int:
        """Tokens that a completion may take; Refused where they do not fit."""
        most = self.request.max_tokens
        room = self._room(max(len(p.ids) for p in self.prompts), most)
        default = room if isinstance(self.request, ChatRequest) else openai_schema.COMPLETION_TOKENS
        return most or min(room, self.session.max_tokens or default)

    async def _scored(self, scope, receive, send) -> None:
        """Answer with the prompts and the log-prob at temperature 1 of each token but the first, by the trainer's forward; with
        logprobs=1 also the most probable token at each place, and with max_tokens=1 the one that follows."""
        if self.recorded:
            raise Refused(400, "a session records what is sampled: ask for a prompt's log-probs outside of it", "echo")
        self.service.counts["requests"] += 1
        sequences, policy = [p.ids for p in self.prompts], self.policy
        vocab = len(policy.model.get_input_embeddings().weight)
        if wrong := next((t for ids in sequences for t in ids if t >= vocab), None):
            raise Refused(400, f"the prompt holds token id {wrong}, outside the vocabulary 0..{vocab - 1}", "prompt")

        def score() -> list[Scores]:
            self._refuse_torn()
            self._choose_weights()  # others may have come before its turn
            return scores(policy, sequences, lambda: self.ended)

        found = await self.service.sampler.run(score)
        choices = [self._scored_choice(i, ids, of) for i, (ids, of) in enumerate(zip(sequences, found))]
        body = self._body(self.version, choices) | self._usage([], self.request.max_tokens * len(choices))
        await JSONResponse(body)(scope, receive, send)

    def _scored_choice(self, index: int, prompt: tuple[int, ...], of: Scores) -> dict:
        tokens, logps = prompt, [None, *of.logps]
        if self.request.max_tokens:
            tokens, logps = (*prompt, of.best[-1]), [*logps, of.best_logps[-1]]
        pieces = self._pieces(tokens)
        body = openai_schema.choice(self.request, index, {"text": self.policy.tokenizer.decode(tokens)}, tokens, logps, pieces,
                                    prompt=prompt) | {"finish_reason": "length"}
        if self.request.logprobs == 2:  # the most probable one last, so that it stands where both have one text
            places = zip(pieces[1:], logps[1:], self._pieces(of.best), of.best_logps)
            body["logprobs"]["top_logprobs"] = [None, *({piece: logp} | {best: most} for piece, logp, best, most in places)]
        return body

    def _submit(self) -> asyncio.Queue:
        """Hand the request to the sampler. For a stream the queue gets (prompt index, sample index, tokens, logps) as they come
        and (prompt index, sample index, rollout) of those that are finished; and None at the end."""
        service, loop, events = self.service, asyncio.get_running_loop(), asyncio.Queue()
        if self.recorded and self.params.seed is None:  # not before: a request that does not fit takes none
            self.params = replace(self.params, seed=self.session.next_seed())

        def put(*event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it who listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        # Of a session's single answer the keys and values of the turn before are used, and its own are kept.
        one = self.recorded and len(self.prompts) == self.request.n == 1
        prefix = service.sessions.caches.after(self.prompts[0].parent) if one else None
        listener = put if self.request.stream else None
        try:
            self.job = service.sampler.submit([p.ids for p in self.prompts], group_size=self.request.n, params=self.params,
                                              prefix=prefix, on_rollout=listener, on_tokens=listener)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        service.counts["requests"] += 1
        service.jobs.add(self.job)
        self.session.track(self.job)
        self.job.future.add_done_callback(lambda _: put())
        return events

    def _refuse_torn(self) -> None:
        if getattr(self.policy.lock, "torn", False):
            raise Refused(503, "the trainer ended in mid-step, so the mapped weights are half-written: publish again")

    async def _read(self, text: str, rollout: Rollout) -> tuple[ParsedTurn, str | None]:
        """The text of an answer, read for calls where its request has tools, and what is not in the format that was asked for.
        Refused for a rollout that was ended from here, or is of half-written weights."""
        session, request = self.session, self.request
        self._refuse_torn()
        if rollout.finish_reason == "cancelled" and session.closed and not self.service.stopping:
            raise Refused(410, f"the session {session.id!r} was collected while this was being sampled")
        if rollout.finish_reason == "cancelled":
            raise Refused(503, "the service is shutting down")
        if request.calls and rollout.finish_reason == "stop_string" and self._ended_by_call(text, rollout):
            text += END_OF_CALL  # a stop, which a text leaves out
        turn = parse_calls(request.call_prefix + text, self.form) if request.calls else ParsedTurn(text)
        checked = request.response_format and not turn.calls
        error = await asyncio.to_thread(request.response_format, turn.content) if checked else None
        self.service.counts["format_errors"] += error is not None
        self.service.counts["unparsed_calls"] += turn.unparsed
        return turn, error

    def _record(self, index: int, rollout: Rollout, turn: ParsedTurn) -> None:
        """Keep an answer before its caller has it, whose next request looks for it there. Nothing is awaited from here until
        the caller is sent it, so that one who leaves finds all of its answers in the record or none."""
        self.answered += 1
        if self.recorded:
            recorded = self.session.record(self.prompts[index], rollout, turn, rollout.tokens[-1] in self.policy.eos_ids)
            if recorded and self.job.prefix is not None:
                self.service.sessions.caches.keep(recorded, self.job.prefix)

    def _ended_by_call(self, text: str, rollout: Rollout) -> bool:
        """Whether the stop that ended it is the end of a call."""
        return not self.request.parallel_tool_calls and self.policy.decode(rollout.tokens)[len(text) :].startswith(END_OF_CALL)

    def _rollouts(self) -> list[Rollout]:
        """What was sampled; Refused for what the sampler raised."""
        if error := self.job.future.exception():
            raise Refused(400 if isinstance(error, ValueError) else 500, f"{type(error).__name__}: {error}") from error
        return [rollout for group in self.job.future.result() for rollout in group]

    def _body(self, version: int, choices: Sequence[dict]) -> dict:
        """An answer or a chunk. The ids of a chat's prompt stand beside its choices, as vLLM has them."""
        chat = isinstance(self.request, ChatRequest)
        body = {"id": self.id, "object": self.request.object_name + ".chunk" * (self.request.stream and chat),
                "created": int(time.time()), "model": self.service.name,
                "system_fingerprint": openai_schema.fingerprint(version, self.mark), "choices": choices}
        ids = [choice.pop("prompt_token_ids", None) for choice in choices] if chat else []
        return body | ({"prompt_token_ids": ids[0]} if ids and ids[0] else {})

    def _usage(self, rollouts: Sequence[Rollout], more: int = 0) -> dict:
        prompt, completion = sum(len(p.ids) for p in self.prompts), sum(len(r.tokens) for r in rollouts) + more
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}}

    async def _whole(self, events: asyncio.Queue, scope, receive, send) -> None:
        await events.get()
        rollouts = self._rollouts()
        read = [await self._read(text_of(self.policy, r, self.params.stop_strings), r) for r in rollouts]
        for i, (rollout, (turn, _)) in enumerate(zip(rollouts, read)):
            self._record(i // self.request.n, rollout, turn)
        await JSONResponse(self._answer(rollouts, read))(scope, receive, send)

    def _answer(self, rollouts: Sequence[Rollout], read: Sequence[tuple[ParsedTurn, str | None]]) -> dict:
        """The body of a whole answer: what was sampled, and each as it was read."""
        choices = [
            openai_schema.choice(self.request, i, self.request.content(turn), r.tokens, r.logps, self._pieces(r.tokens),
                                 rollout=r, prompt=r.prompt, turn=turn, format_error=error)
            for i, (r, (turn, error)) in enumerate(zip(rollouts, read))]
        return self._body(min(r.policy_version for r in rollouts), choices) | self._usage(rollouts)

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
        request = self.request
        texts = [StreamedText(self.policy, self.params) for _ in range(len(self.prompts) * request.n)]
        try:
            while event := await events.get():
                i, g, new, *logps = event
                index, text = i * request.n + g, texts[i * request.n + g]
                prompt = self.prompts[i].ids if text.first else ()
                if isinstance(new, Rollout):
                    turn, error = await self._read(text.end(new), new)
                    self._record(i, new, turn)
                    delta = request.delta(turn.content[text.sent :], text.first, turn.calls)
                    chunk = openai_schema.choice(request, index, delta, rollout=new, prompt=prompt, turn=turn,
                                                 format_error=error)
                else:
                    content, pieces = request.call_prefix + text.add(new), self._pieces(new)
                    end = certain(content, self.form) if request.calls else len(content)
                    delta = request.delta(content[text.sent : end], text.first)
                    chunk = openai_schema.choice(request, index, delta, new, *logps, pieces, text.offset, prompt=prompt)
                    text.sent, text.offset = max(end, text.sent), text.offset + sum(map(len, pieces))
                text.first = False
                yield self._body(self.version, [chunk])
            rollouts = self._rollouts()
            if request.stream_options.include_usage:
                yield self._body(self.version, []) | self._usage(rollouts)
        except Refused as refused:
            yield refused.body

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token's own text, where log-probs are wanted; one that is a part of a character shows as U+FFFD."""
        decode = self.policy.tokenizer.decode
        return [decode([t], skip_special_tokens=False) for t in tokens] if self.request.logprobs else []


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
