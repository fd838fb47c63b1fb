"""How a policy's text meets an environment: an `ActionFormat` turns what it wrote into an action and what was observed
into text, and says what an action that the environment cannot read costs.

`TEXT` is the format of grpolab's own environments: {"text": ...} both ways. `MCP` speaks to OpenEnv's environments with
tools: the question comes with their list, a turn is one call written as JSON. Others are made by `replace`:

    typed = replace(TEXT, to_action=lambda text: {"number": int(text)}, to_text=lambda seen: seen["message"])
    strict = replace(MCP, on_invalid="penalise", penalty=-0.1)
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpolab.env.protocol import InvalidAction, SessionLost, StepResult
from grpolab.tool_calls import check_json

ON_INVALID = ("tell", "penalise", "abstain")
MAX_REASON = 500  # characters of what the policy is told about an action that could not be read

# OpenEnv's server cannot serialise the error of an action that failed a validator of its own, and ends the session so.
_UNSENT_ERROR = "Unable to serialize unknown type"


def text_observation(observation: dict) -> str:
    """The string under "text"."""
    text = observation.get("text")
    if not isinstance(text, str):
        raise ValueError(f"an observation with the keys {sorted(observation)} has no string 'text': say how it reads, with "
                         "action_format=replace(TEXT, to_text=lambda observation: ...)")
    return text


def counted_calls(results: Sequence[StepResult]) -> dict[str, float]:
    """{"calls": n}: the number `calls` in the last metadata, the tool calls that the environment counted so far; else 0."""
    calls = results[-1].metadata.get("calls", 0) if results else 0
    return {"calls": calls if type(calls) in (int, float) else 0}


@dataclass(frozen=True)
class ActionFormat:
    """The hooks between a policy's text and one kind of environment.

    to_action   the text of a turn -> the action, a JSON object; raises ValueError or LookupError where the text is none
    to_text     an observation, its `metadata` inside where it has any -> the text that the policy reads
    introduce   async (slot) -> text that stands before the question, asked for after each reset; None for none
    measure     the results of an episode's steps -> numbers by name; their means over episodes stand in the row
    on_invalid  what becomes of an action that `to_action` or the environment refuses: "tell" answers with the reason in place
                of an observation; "penalise" does so too and pays `penalty`, once for each; "abstain" ends the episode
                without a reward, so that it is not trained on. It counts as a turn.
    tools       what the chat template tells the policy that it may call, in OpenAI's shape
    role        of what the policy is told: "user", or "tool" for results of calls, of which `to_text` may give a list
    """

    to_action: Callable[[str], dict] = lambda text: {"text": text}
    to_text: Callable[[dict], str] = text_observation
    introduce: Callable[[Any], Awaitable[str]] | None = None
    measure: Callable[[Sequence[StepResult]], Mapping[str, float]] = counted_calls
    on_invalid: str = "tell"
    penalty: float | None = None
    tools: Sequence[dict] = ()
    role: str = "user"

    def __post_init__(self):
        if self.on_invalid not in ON_INVALID:
            raise ValueError(f"on_invalid={self.on_invalid!r}: use one of {', '.join(ON_INVALID)}")
        if (self.on_invalid == "penalise") != (self.penalty is not None):
            raise ValueError(f"on_invalid={self.on_invalid!r} with penalty={self.penalty}: a penalty is the reward of "
                             "'penalise', which needs one, such as -0.1")

    def texts(self, result: StepResult) -> list[str]:
        """The texts of an observation, a message each: one, or with `role` "tool" one for each result."""
        texts = self.to_text(result.observation | ({"metadata": result.metadata} if result.metadata else {}))
        texts = texts if isinstance(texts, list) and texts and self.role == "tool" else [texts]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"to_text gave {texts[0]!r:.100} where the policy needs a string")
        return [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair is no text

    def action(self, text: str) -> dict:
        """The action that a turn's text stands for; raises InvalidAction where it stands for none that can be sent."""
        try:
            action = self.to_action(text)
            if not isinstance(action, dict):
                raise ValueError(f"an action is a JSON object, not {action!r:.50}")
            check_json(action)  # half of a surrogate pair, too, would end an OpenEnv session
        except (ValueError, LookupError, RecursionError) as fault:
            raise InvalidAction(str(fault) or repr(fault)) from fault
        return action

    async def act(self, slot: Any, text: str) -> StepResult:
        """Do on the slot what the text says. Raises InvalidAction where that is no action, from SessionLost where the session
        ended over it."""
        try:
            return await slot.step(self.action(text))
        except SessionLost as fault:
            if _UNSENT_ERROR not in str(fault):
                raise
            raise InvalidAction("a value that the environment does not accept") from fault


def told(why: str) -> str:
    """What the policy reads of an error."""
    return f"error: {why}" if len(why) <= MAX_REASON else f"error: {why[:MAX_REASON]} ..."


CALL_FORM = '{"name": "...", "arguments": {...}}'


def tool_call(text: str) -> dict:
    """The JSON object at the text's first brace, {"name": tool, "arguments": {...}}, as OpenEnv's action `call_tool`."""
    start = text.find("{")
    try:
        call, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except (ValueError, RecursionError):
        call = None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if start < 0 or not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise InvalidAction(f"write one tool call as {CALL_FORM}")
    return {"type": "call_tool", "tool_name": call["name"], "arguments": arguments}


def tool_text(observation: dict) -> str:
    """What a tool returned, or its error. Of an observation that no call made (a reset's): its one text, else its JSON."""
    if "tool_name" not in observation:
        fields = (observation.get("metadata") or {}) | {k: v for k, v in observation.items() if k != "metadata"}
        fields = {k: v for k, v in fields.items() if v not in (None, "", [], {})}
        texts = list(fields.values())
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else _plain(fields)
    if observation.get("error"):
        fault = observation["error"]
        return told(str(fault.get("message", fault) if isinstance(fault, dict) else fault))
    result = observation.get("result")
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return _plain(result)
    blocks = [block if isinstance(block, dict) else {"text": block} for block in result["content"]]
    text = "\n".join(str(block.get("text", f"[{block.get('type')}]")) for block in blocks)
    return told(text) if result.get("is_error") else text


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def list_tools(slot: Any) -> str:
    """The environment's tools, a line each, and the form of a call."""
    tools = (await slot.mcp("tools/list")).get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "name" in tool for tool in tools):
        raise SessionLost(f"tools/list was answered with {tools!r:.200}, which is no list of tools")
    return "\n".join(["Tools:", *map(describe_tool, tools), f"Call one of them: {CALL_FORM}"])


def describe_tool(tool: dict) -> str:
    """`add(a: integer, b?: integer): The sum.` of a tool's name, JSON schema and description; `?` may be left out."""
    schema = tool.get("inputSchema") or tool.get("input_schema") or {}
    required = schema.get("required", ())
    parts = [f"{name}{'' if name in required else '?'}: {kind.get('type', 'any') if isinstance(kind, dict) else 'any'}"
             for name, kind in schema.get("properties", {}).items()]
    about = " ".join((tool.get("description") or "").split())
    return f"{tool['name']}({', '.join(parts)})" + (f": {about}" if about else "")


def tool_calls(results: Sequence[StepResult]) -> dict[str, float]:
    """{"calls": n}: the calls that a tool answered without an error."""
    def failed(observation: dict) -> bool:
        result = observation.get("result")
        return bool(observation.get("error") or isinstance(result, dict) and result.get("is_error"))

    return {"calls": sum("tool_name" in r.observation and not failed(r.observation) for r in results)}


TEXT = ActionFormat()
MCP = ActionFormat(to_action=tool_call, to_text=tool_text, introduce=list_tools, measure=tool_calls)
