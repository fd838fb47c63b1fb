"""OpenAI's schema: what a request may ask for, and the shapes of what is answered.

A field that this service does not know or cannot honour is refused with its name; none is passed over. Beside OpenAI's it
takes those of vLLM that say how a rollout is sampled and whether its token ids come back (`return_token_ids`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Rollout
from grpolab.serve.answer_format import OPENING, answer_check, grammar
from grpolab.tool_calls import MAX_CALLS, ParsedTurn, ToolCall, tools_of

COMPLETION_TOKENS = 16  # of /v1/completions where the request says nothing, as OpenAI's
ENDED = ("eos", "stop_id", "stop_string")  # finish reasons that OpenAI calls "stop"; the others are "length"

# What clients send to say that they do not want something that is not there anyway; null says it too.
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "top_logprobs": 0,
           "min_tokens": 0, "length_penalty": 1, "use_beam_search": False, "functions": [], "function_call": "none",
           "echo": False, "best_of": 1, "store": False, "metadata": {}, "modalities": ["text"], "suffix": ""}
# What they may say of sampling where a prompt is scored.
UNSAMPLED = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "ignore_eos": (False,), "stop": ([],),
             "stop_token_ids": ([],)}


class Refused(ValueError):
    """An answer in OpenAI's error shape. `param` names the field of the request that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict:
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        name = kind.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": name, "param": self.param, "code": self.code}}


def unknown_model(name: str, names: Sequence[str]) -> Refused:
    return Refused(404, f"the model {name[:80]!r} is not served here; it is {' or '.join(map(repr, names))}", "model",
                   "model_not_found")


def one_or_several(value: Any) -> Any:
    """A single text or list of token ids as a list of one."""
    single = isinstance(value, str) or isinstance(value, list) and value and type(value[0]) is int
    return [value] if single else value


def at_each_place(logprobs: Any) -> int:
    """OpenAI's number of most probable tokens -> how many log-probs each place has: the token's own, and of these."""
    if isinstance(logprobs, bool) or logprobs not in (0, 1):
        raise ValueError("send logprobs=0, or for a prompt that is scored (echo) logprobs=1, the most probable token beside it")
    return logprobs + 1


def _joined_parts(content: Any) -> Any:
    """A list of text parts as one text."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text"
                                         and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return content


class Strict(BaseModel):
    """Its fields and no others. A bool is no number, and 2.0 no integer."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


TokenId = Annotated[int, Field(ge=0, lt=2**63)]
PromptText = Annotated[str | list[TokenId], Field(min_length=1)]


class ChatMessage(Strict):
    """What a client adds as null or empty is left out. Which role may have which field is checked with the template's."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_parts)] = None
    tool_calls: list[dict] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, message: Any) -> Any:
        return {k: v for k, v in message.items() if v not in (None, [])} if isinstance(message, dict) else message


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: NamedFunction


class StreamOptions(Strict):
    include_usage: bool = False


class CompletionRequest(Strict):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")  # `check_request` looks at the others
    object_name: ClassVar[str]  # of the answer
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    stop: Annotated[list[str], BeforeValidator(one_or_several)] = Field([], max_length=16)
    stop_token_ids: list[TokenId] = Field([], max_length=1024)
    seed: int | None = None
    temperature: float = Field(1.0, ge=0, le=100)  # 0 is the argmax
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    user: str | None = None

    @property
    def params(self) -> SamplingParams:
        """As the sampler takes them, but for `max_new_tokens`."""
        try:
            return SamplingParams(
                temperature=self.temperature or 1.0, greedy=self.temperature == 0, top_p=self.top_p, min_p=self.min_p,
                top_k=0 if self.top_k == -1 else self.top_k, seed=self.seed, ignore_eos=self.ignore_eos,
                stop_strings=tuple(self.stop), stop_ids=tuple(self.stop_token_ids))
        except ValueError as error:
            raise Refused(400, str(error)) from None


def _as_openai(call: ToolCall) -> dict:
    id = secrets.token_hex(5)[:9]  # Mistral's templates take ids of nine letters and digits alone
    return {"id": id, "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}


class ChatRequest(CompletionRequest):
    object_name = "chat.completion"
    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    messages: list[Annotated[ChatMessage, AfterValidator(lambda m: m.model_dump(exclude_none=True))]] = Field(min_length=1)
    logprobs: bool = False
    tools: Annotated[list[dict], AfterValidator(tools_of)] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # else a turn ends with its first call
    response_format: Annotated[Any, AfterValidator(answer_check)] = None

    @model_validator(mode="after")
    def with_tools(self) -> ChatRequest:
        """What is asked of calls needs tools, and a tool that is named is one of them."""
        names, chosen = [tool["function"]["name"] for tool in self.tools], self.tool_choice
        if isinstance(chosen, NamedTool) and chosen.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {chosen.function.name[:60]!r} in tools")
        if chosen == "required" and not names:
            raise ValueError("tool_choice: 'required' needs tools")
        return self

    @property
    def calls(self) -> bool:
        """Whether the answer is read for calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def call_prefix(self) -> str:
        """What an answer begins with that must call, in the form of Hermes."""
        if isinstance(self.tool_choice, NamedTool):
            return f'{OPENING}{self.tool_choice.function.name}", "arguments": '
        return OPENING if self.tool_choice == "required" else ""

    @property
    def grammar(self) -> str:
        """What an answer may be after `call_prefix`, where that or `response_format` asks for something."""
        chosen = isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name
        tools = [tool for tool in self.tools if chosen in (False, tool["function"]["name"])] if self.calls else []
        most_calls = MAX_CALLS if self.parallel_tool_calls else 1
        return grammar(self.response_format, tools, bool(self.call_prefix), bool(chosen), most_calls)

    def content(self, turn: ParsedTurn) -> dict:
        calls = [_as_openai(call) for call in turn.calls]
        return {"message": {"role": "assistant", "content": turn.content or None if calls else turn.content, "refusal": None}
                | ({"tool_calls": calls} if calls else {})}

    def delta(self, text: str, first: bool, calls: Sequence[ToolCall] = ()) -> dict:
        body = {"role": "assistant"} if first else {}
        body |= {"tool_calls": [{"index": i} | _as_openai(call) for i, call in enumerate(calls)]} if calls else {}
        return {"delta": body | ({"content": text} if text or not calls else {})}

    def logprobs_of(self, pieces: Sequence[str], logps: Sequence[float], offset: int) -> dict:
        content = [{"token": t, "logprob": x, "bytes": None if "\ufffd" in t else list(t.encode()), "top_logprobs": []}
                   for t, x in zip(pieces, logps)]
        return {"content": content, "refusal": None}


class TextRequest(CompletionRequest):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    prompt_field = "prompt"

    prompt: Annotated[list[PromptText], BeforeValidator(one_or_several)] = Field(min_length=1)
    logprobs: Annotated[int, BeforeValidator(at_each_place)] = 0
    max_tokens: int | None = Field(None, ge=0, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    echo: bool = False  # the prompts are scored; with max_tokens=1 the most probable next token follows

    calls: ClassVar[bool] = False
    call_prefix: ClassVar[str] = ""
    parallel_tool_calls: ClassVar[bool] = True
    response_format: ClassVar[None] = None

    @model_validator(mode="after")
    def sampled_or_scored(self) -> TextRequest:
        """A prompt is scored, with its greedy continuation at most, and whatever is sampled has a token."""
        follows = self.max_tokens == 1 and self.temperature == 0 and self.logprobs == 2
        scored = self.logprobs and (self.max_tokens == 0 or follows) and not self.stream and self.n == 1
        if self.echo and not scored:
            raise ValueError("echo: this service scores a prompt: send max_tokens=0 and logprobs=0 or 1 (or max_tokens=1, "
                             "logprobs=1 and temperature=0), without n and stream")
        if self.logprobs == 2 and not self.echo:
            raise ValueError("logprobs: this service gives the log-prob of the sampled token alone; send logprobs=0")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: nothing would be sampled: ask for at least 1, or for the prompt's log-probs by echo")
        for name in UNSAMPLED if self.echo else ():
            if getattr(self, name) not in UNSAMPLED[name]:
                raise ValueError(f"{name}: with echo a prompt is scored at temperature 1, and nothing is sampled; leave it out")
        return self

    def content(self, turn: ParsedTurn) -> dict:
        return {"text": turn.content}

    def delta(self, text: str, first: bool, calls: Sequence[ToolCall] = ()) -> dict:
        return {"text": text}

    def logprobs_of(self, pieces: Sequence[str], logps: Sequence[float | None], offset: int) -> dict:
        offsets = list(accumulate(map(len, pieces), initial=offset))[:-1]
        return {"tokens": list(pieces), "token_logprobs": list(logps), "top_logprobs": None, "text_offset": offsets}


def validated(model: type[BaseModel], content: dict) -> BaseModel:
    """The content as the model has it; Refused names the first field that is wrong, and its value."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        message = first["msg"].removeprefix("Value error, ")
        if not field:  # of the request as a whole, which the message says
            raise Refused(400, message, message.partition(":")[0]) from None
        value = "" if first["type"] == "missing" else f", got {json.dumps(first['input'], default=str)[:60]}"
        raise Refused(400, f"{field[:80]}: {message}{value}", field[:80]) from None


def check_request(request: CompletionRequest, models: Sequence[str]) -> CompletionRequest:
    """The request; Refused for an unsupported field, unless its value changes nothing (0.0 is 0, and false is not), and for
    another model than `models`, the names that are served."""
    for name, value in request.model_extra.items():
        neutral = NEUTRAL.get(name)
        if name not in NEUTRAL or neutral != value or isinstance(value, bool) != isinstance(neutral, bool):
            raise Refused(400, f"this service does not support {name[:80]!r} (sent: {json.dumps(value)[:60]}); leave it out. "
                               f"It takes: {', '.join(sorted(type(request).model_fields))}", name[:80],
                          "unsupported_parameter")
    if "stream_options" in request.model_fields_set and not request.stream:
        raise Refused(400, "stream_options: this answer is no stream; send stream=true, or leave them out", "stream_options")
    if request.model not in models:
        raise unknown_model(request.model, models)
    return request


def fingerprint(version: int, mark: str) -> str:
    """Which weights they are: their version, and what tells them from others of that version where a trainer sent them."""
    return f"version-{version}" + f"-{mark}" * bool(mark)


def sampled_as(rollout: Rollout) -> dict:
    """What is known of a rollout beside its tokens: this service's own field of a choice, with `return_token_ids`."""
    names = ("finish_reason", "seed", "policy_version", "logps", "raw_logps", "kept_mass", "versions")
    return {name: getattr(rollout, name) for name in names}


def choice(request: CompletionRequest, index: int, content: dict, tokens: Sequence[int] = (), logps: Sequence[float] = (),
           pieces: Sequence[str] = (), offset: int = 0, rollout: Rollout | None = None, prompt: Sequence[int] = (),
           turn: ParsedTurn | None = None, format_error: str | None = None) -> dict:
    """A choice of an answer or of a chunk: its text (`content`), its new tokens with their own texts (`pieces`, from character
    `offset` on; none where log-probs are not wanted), and once it is finished its rollout, read for calls as `turn`, and
    what of its text is not in the format that was asked for."""
    finish = rollout and ("length" if rollout.finish_reason not in ENDED else "tool_calls" if turn.calls else "stop")
    body = {"index": index, **content, "finish_reason": finish,
            "logprobs": request.logprobs_of(pieces, logps, offset) if pieces else None}
    if request.return_token_ids:
        body["token_ids"] = list(tokens)
        body |= {"prompt_token_ids": list(prompt)} if prompt else {}
        body |= {"grpolab": sampled_as(rollout) | {"unparsed_calls": turn.unparsed}} if rollout else {}
    if request.response_format and rollout:
        body["grpolab"] = body.get("grpolab", {}) | {"format_error": format_error}
    return body
