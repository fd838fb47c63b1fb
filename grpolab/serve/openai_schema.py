"""The OpenAI wire: what a request asks for, checked field by field, and the shapes of what is answered.

A field that this service does not know or cannot honour is refused with its name; none is passed over. Beside OpenAI's it
takes those of vLLM that say how a rollout is sampled and whether its token ids come back (`return_token_ids`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpolab.chat import Message
from grpolab.decode.sampling import COLDEST, SamplingParams
from grpolab.rollouts import Rollout

MOST_CHOICES = 128  # n of a request
MOST_PROMPTS = 1024  # of one completions request
COMPLETION_TOKENS = 16  # of /v1/completions where the request says nothing, as OpenAI's
FINISHES = {"eos": "stop", "stop_id": "stop", "stop_string": "stop"}  # the others are "length"

COMMON = ("model n stop seed temperature top_p max_tokens stream stream_options logprobs user top_k min_p ignore_eos "
          "stop_token_ids return_token_ids min_policy_version").split()
FIELDS = {"chat": (*COMMON, "messages", "max_completion_tokens"), "text": (*COMMON, "prompt")}
# What clients send to say that they do not want something that is not there anyway; null says it too.
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "top_logprobs": 0,
           "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "functions": [], "function_call": "none",
           "echo": False, "best_of": 1, "store": False, "metadata": {}, "modalities": ["text"], "suffix": ""}


class Refused(Exception):
    """An answer in OpenAI's error shape. `param` names the field of the request that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict:
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        name = kind.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": name, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A request, checked. `messages` of a chat, or `prompts` (texts or token ids) of completions; `max_tokens` None leaves it
    to the service; `params` as the sampler takes them, but for `max_new_tokens`."""

    kind: str
    n: int
    params: SamplingParams
    max_tokens: int | None
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    least: int = 0  # policy version that the request accepts
    explicit: frozenset[str] = frozenset()  # fields that the request set


def read_json(body: bytes) -> dict:
    """The object of a request's body; Refused for anything else."""
    def constant(name):
        raise ValueError(f"{name} is no JSON number")

    try:
        content = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # ValueError also of bytes that are no UTF-8 and of endless digits
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(content).__name__}")
    return content


def read_request(kind: str, content: dict, models: Sequence[str]) -> Asked:
    """What a body asks for. `kind` is "chat" or "text"; `models` are the names that are served. Refused names what is wrong."""
    given = {name: value for name, value in content.items() if value is not None}
    known = FIELDS[kind]
    for name, value in given.items():
        if name not in known and not _neutral(name, value):
            raise Refused(400, f"this service does not support {name[:80]!r} (sent: {_shown(value)}); leave it out. It takes: "
                               + ", ".join(sorted(known)), name[:80], "unsupported_parameter")
    named = _take(given, "model", str, None)
    if named not in models:
        said = "the request names no model" if named is None else f"the model {named[:80]!r} is not served here"
        raise Refused(404 if named else 400, f"{said}; it is {' or '.join(map(repr, models))}", "model", "model_not_found")
    stream = _take(given, "stream", bool, False)
    options = _take(given, "stream_options", dict, {})
    if options and (not stream or set(options) - {"include_usage"} or not isinstance(options.get("include_usage"), bool)):
        raise Refused(400, "stream_options takes include_usage (true or false), with stream=true", "stream_options")
    common = {"n": _take(given, "n", int, 1), "stream": stream, "usage": options.get("include_usage", False),
              "token_ids": _take(given, "return_token_ids", bool, False), "params": _params(given),
              "least": _take(given, "min_policy_version", int, 0), "explicit": frozenset(given)}
    if not 1 <= common["n"] <= MOST_CHOICES:
        raise Refused(400, f"n must be from 1 to {MOST_CHOICES}, got {common['n']}", "n")
    if kind == "chat":
        return Asked("chat", max_tokens=_max_tokens(given), messages=_messages(given.get("messages")),
                     logprobs=_take(given, "logprobs", bool, False), **common)
    if _take(given, "logprobs", int, 0) != 0:
        raise Refused(400, f"logprobs={given['logprobs']}: this service gives the log-prob of the sampled token alone; send "
                           "logprobs=0", "logprobs")
    return Asked("text", max_tokens=_max_tokens(given), prompts=_prompts(given.get("prompt")), logprobs="logprobs" in given,
                 **common)


def _neutral(name: str, value: Any) -> bool:
    """Whether an unsupported field is sent with the value that changes nothing; 0.0 is 0, and false is not."""
    return name in NEUTRAL and NEUTRAL[name] == value and isinstance(value, bool) == isinstance(NEUTRAL[name], bool)


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def _take(given: dict, name: str, kind: type, default: Any) -> Any:
    """A field of the type that it must have. A bool is no number, an integral float no integer."""
    value = given.get(name, default)
    if value is default and name not in given:
        return default
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if kind is float:
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if right and not (abs(value) < 1e300 and math.isfinite(value)):
            raise Refused(400, f"{name} must be a finite number", name)
    if not right:
        words = {str: "a text", int: "an integer", bool: "true or false", float: "a number", dict: "an object"}
        raise Refused(400, f"{name} must be {words[kind]}, got {_shown(value)}", name)
    return value


def _max_tokens(given: dict) -> int | None:
    named = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    values = {_take(given, name, int, None) for name in named}
    if len(values) > 1:
        raise Refused(400, "max_tokens and max_completion_tokens say different things; send one of them", "max_tokens")
    most = values.pop() if values else None
    if most is not None and most < 1:
        raise Refused(400, f"{named[0]} must be at least 1, got {str(most)[:40]}", named[0])
    return most


def _params(given: dict) -> SamplingParams:
    """How it is sampled; temperature 0 is the argmax."""
    temperature = _take(given, "temperature", float, 1.0)
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or len(stop) > 16 or not all(isinstance(s, str) for s in stop):
        raise Refused(400, f"stop must be a text or a list of at most 16 texts, got {_shown(stop)}", "stop")
    ids = given.get("stop_token_ids", [])
    if not isinstance(ids, list) or len(ids) > 1024 or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise Refused(400, f"stop_token_ids must be a list of token ids, got {_shown(ids)}", "stop_token_ids")
    top_k = _take(given, "top_k", int, 0)
    wanted = {"stop": {"stop_strings": tuple(stop)}, "stop_token_ids": {"stop_ids": tuple(ids)},
              "temperature": {} if temperature == 0 else {"temperature": temperature},
              "top_k": {"top_k": 0 if top_k == -1 else top_k}, "top_p": {"top_p": _take(given, "top_p", float, 1.0)},
              "min_p": {"min_p": _take(given, "min_p", float, 0.0)}, "seed": {"seed": _take(given, "seed", int, None)}}
    if temperature != 0 and not COLDEST <= temperature <= 100:
        raise Refused(400, f"temperature must be 0 (the argmax) or from {COLDEST} to 100, got {temperature}", "temperature")
    for name, part in wanted.items():  # so that the error knows which field it is about
        try:
            SamplingParams(**part)
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error), name) from None
    merged = {key: value for part in wanted.values() for key, value in part.items()}
    return SamplingParams(**merged, greedy=temperature == 0, ignore_eos=_take(given, "ignore_eos", bool, False))


def _messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"messages must be a list of at least one message, got {_shown(messages)}", "messages")
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages))


def _message(message: Any, where: str) -> Message:
    """A role and a text; what a client adds as null is left out, and a list of text parts is joined."""
    if not isinstance(message, dict):
        raise Refused(400, f"{where} must be an object with role and content, got {_shown(message)}", where)
    said = {k: v for k, v in message.items() if v is not None and v != []}
    role, content = said.pop("role", None), said.pop("content", message.get("content"))
    if role not in ("system", "user", "assistant"):
        raise Refused(400, f"{where}: this service knows the roles system, user and assistant, got {_shown(role)}", where)
    if said:
        raise Refused(400, f"{where}: this service does not support {sorted(said)[0][:80]!r} in a message", where)
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" and set(p) == {"type", "text"}
                                         and isinstance(p["text"], str) for p in content):
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise Refused(400, f"{where}: its content must be a text or text parts, got {_shown(content)}", where)
    return {"role": role, "content": content}


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or token id lists, one or several."""
    one = isinstance(prompt, str) or isinstance(prompt, list) and prompt and type(prompt[0]) is int
    prompts = [prompt] if one else prompt
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MOST_PROMPTS:
        raise Refused(400, f"prompt must be a text, a list of token ids, or 1 to {MOST_PROMPTS} of them, got {_shown(prompt)}",
                      "prompt")
    for i, p in enumerate(prompts):
        if not (isinstance(p, str) or isinstance(p, list) and all(type(t) is int and 0 <= t < 2**63 for t in p)):
            raise Refused(400, f"prompt {i} is neither a text nor a list of token ids: {_shown(p)}", "prompt")
        if not p:
            raise Refused(400, f"prompt {i} is empty; give it at least one token", "prompt")
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)


# ------------------------------------------------------------------ answers


def fingerprint(version: int, mark: str) -> str:
    """Which weights they are: their version, and what tells them from others of that version where a trainer sent them."""
    return f"version-{version}" + f"-{mark}" * bool(mark)


def envelope(kind: str, name: str, model: str, version: int, mark: str = "", stream: bool = False) -> dict:
    """What every answer and every chunk of a stream begins with."""
    what = {"chat": "chat.completion", "text": "text_completion"}[kind]
    return {"id": name, "object": what + ".chunk" * (stream and kind == "chat"), "created": int(time.time()), "model": model,
            "system_fingerprint": fingerprint(version, mark)}


def usage_of(prompt_tokens: int, rollouts: Sequence[Rollout]) -> dict:
    completion = sum(len(r.tokens) for r in rollouts)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion, "total_tokens": prompt_tokens + completion}


def finish(rollout: Rollout) -> str:
    return FINISHES.get(rollout.finish_reason, "length")


def logprobs_of(kind: str, pieces: Sequence[str], logps: Sequence[float], offset: int = 0) -> dict:
    """Log-probs of sampled tokens, whose texts are `pieces`; `offset` is where the first of them begins."""
    if kind == "text":
        offsets = [offset + sum(map(len, pieces[:i])) for i in range(len(pieces))]
        return {"tokens": list(pieces), "token_logprobs": list(logps), "top_logprobs": None, "text_offset": offsets}
    content = [{"token": t, "logprob": x, "bytes": None if "\ufffd" in t else list(t.encode()), "top_logprobs": []}
               for t, x in zip(pieces, logps)]
    return {"content": content, "refusal": None}


def sampled_as(rollout: Rollout) -> dict:
    """What is known of a rollout beside its tokens: this service's own field of a choice, with `return_token_ids`."""
    return {"finish_reason": rollout.finish_reason, "seed": rollout.seed, "policy_version": rollout.policy_version,
            "logps": list(rollout.logps), "raw_logps": list(rollout.raw_logps), "kept_mass": list(rollout.kept_mass)}


def choice(asked: Asked, index: int, rollout: Rollout, text: str, pieces: Sequence[str]) -> dict:
    """One completion of an answer that is not streamed."""
    body = {"message": {"role": "assistant", "content": text, "refusal": None}} if asked.kind == "chat" else {"text": text}
    ids = {"token_ids": list(rollout.tokens), "grpolab": sampled_as(rollout)} if asked.token_ids else {}
    if asked.token_ids and asked.kind == "text":
        ids["prompt_token_ids"] = list(rollout.prompt)
    return {"index": index, **body, "finish_reason": finish(rollout), **ids,
            "logprobs": logprobs_of(asked.kind, pieces, rollout.logps) if asked.logprobs else None}


def delta(asked: Asked, index: int, text: str, tokens: Sequence[int], logps: Sequence[float], pieces: Sequence[str],
          first: bool, rollout: Rollout | None = None, offset: int = 0) -> dict:
    """One choice of a chunk: what is new since the last, its tokens from character `offset` on; with the finished rollout, its
    end."""
    body = {"delta": ({"role": "assistant"} if first else {}) | {"content": text}} if asked.kind == "chat" else {"text": text}
    ids = {"token_ids": list(tokens)} if asked.token_ids else {}
    if asked.token_ids and rollout is not None:
        ids["grpolab"] = sampled_as(rollout)
    return {"index": index, **body, "finish_reason": None if rollout is None else finish(rollout), **ids,
            "logprobs": logprobs_of(asked.kind, pieces, logps, offset) if asked.logprobs and tokens else None}
