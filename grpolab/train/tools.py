"""Tools as functions: episodes in which a policy calls Python functions, without a server.

    def room_of(name: str) -> str:
        \"\"\"The room of a person.\"\"\"
        ...

    def reward(run: ToolRun) -> float:
        return float(run.answer == run.task["answer"])

    tools = Tools([room_of], reward)
    async with GrpoPool(tools, size=64) as pool:
        form = tools.action_format(policy.tokenizer)
        async for row in multi_turn_grpo(policy, None, rows, config, pool, action_format=form): ...

A turn that calls is answered with the results of its calls, in their order; the first turn without a call is the answer and
ends the episode. What a call does wrong (an unknown name, arguments that do not fit, an exception, a deadline) is told to the
policy as the result of that call, and counted; what the reward does wrong costs the episode, and no reward is made up.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from grpolab.chat import call_form
from grpolab.env.action_format import ActionFormat
from grpolab.env.local import name_of
from grpolab.env.protocol import StepResult, declared
from grpolab.tasks import prompt_of
from grpolab.tool_calls import ToolCall, call_of, parse_calls, tools_of

MAX_RESULT = 4000  # characters of a result that the policy is told


@dataclass(frozen=True)
class ToolResult:
    """A call and the text that the policy was told; `failed` where that is an error."""

    call: ToolCall
    text: str
    failed: bool = False


@dataclass(frozen=True)
class ToolRun:
    """An episode as its reward sees it: the task, the calls with their results, and the text of the last turn."""

    task: Any
    calls: tuple[ToolResult, ...]
    answer: str


def schema_of(function: Callable[..., Any]) -> dict:
    """A tool in OpenAI's shape, of a function's name, docstring and typed parameters (what `pydantic` can read from JSON).
    ValueError for a function that no call by name can reach: without types, or with positional-only or variable parameters."""
    name = name_of(function)
    parameters = inspect.signature(function).parameters.values()
    if wrong := [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise ValueError(f"the tool {name!r} has the parameters {wrong}, which a call cannot name: write each one out")
    if untyped := [p.name for p in parameters if p.annotation is p.empty]:
        raise ValueError(f"the tool {name!r} does not say the types of {untyped}: annotate them, as in {untyped[0]}: str")
    try:
        schema = TypeAdapter(function).json_schema()
    except PydanticUserError as error:
        raise ValueError(f"the tool {name!r} takes what JSON cannot say: {str(error).splitlines()[0]}") from error
    properties = {key: {k: v for k, v in kind.items() if k != "title"} for key, kind in schema.get("properties", {}).items()}
    return {"type": "function", "function": {"name": name, "description": " ".join((inspect.getdoc(function) or "").split()),
                                             "parameters": schema | {"properties": properties}}}


def functions_of(tools: Any) -> dict[str, Callable[..., Any]]:
    """By name: functions of a list, or the public methods of an object, but for `reset`."""
    if isinstance(tools, Sequence):
        functions = {name_of(function): function for function in tools}
        if len(functions) < len(tools):
            raise ValueError(f"two tools have one name among {[name_of(f) for f in tools]}: a call names one")
    else:
        members = inspect.getmembers(tools, inspect.ismethod)
        functions = {name: method for name, method in members if not name.startswith("_") and name != "reset"}
    if not functions:
        raise ValueError(f"{tools!r:.100} holds no tool: give functions, or a class with public methods")
    return functions


class Tools:
    """Tools and the reward of an episode with them, as the environment of a pool: `GrpoPool(tools, size)`.

    tools     typed functions, plain or async; or a class, whose public methods are the tools of one episode: a new object each,
              whose `reset`, if it has one, gets the `task`, the `seed` and what entries of the task it declares
    reward    plain or async function (ToolRun) -> a number
    deadline  seconds of one call; a plain function that takes longer goes on in a thread that is left behind
    """

    def __init__(self, tools: Sequence[Callable[..., Any]] | type, reward: Callable[[ToolRun], Any], *, deadline: float = 10.0):
        if not 0 < deadline < float("inf"):
            raise ValueError(f"deadline={deadline}: a call needs a positive, finite bound in seconds")
        self.tools, self.reward, self.deadline = tools, reward, deadline
        self.schemas = tools_of([schema_of(function) for function in functions_of(self.make()).values()])
        self.__name__ = f"Tools({', '.join(tool['function']['name'] for tool in self.schemas)})"

    def __call__(self) -> ToolEnvironment:
        return ToolEnvironment(self)

    def make(self) -> Any:
        """The tools of one episode."""
        return self.tools() if isinstance(self.tools, type) else self.tools

    def action_format(self, tokenizer: Any, form: str | None = None) -> ActionFormat:
        """How a policy of this tokenizer writes calls and reads results: in the form of its chat template (`tool_calls`). A
        turn whose call cannot be read is answered with the reason and counts as invalid."""
        form = form or call_form(tokenizer)
        return ActionFormat(to_action=partial(_action, form=form), to_text=lambda seen: seen.get("text") or seen["results"],
                            measure=_measure, tools=self.schemas, role="tool")


def _action(text: str, form: str) -> dict:
    turn = parse_calls(text, form)
    if turn.unparsed:
        raise ValueError(f"{turn.unparsed} of the calls of this turn cannot be read; none was made")
    return {"text": turn.content, "calls": [{"name": c.name, "arguments": c.arguments} for c in turn.calls]}


def _measure(results: Sequence[StepResult]) -> dict[str, float]:
    last = results[-1].metadata if results else {}
    return {name: last.get(name, 0) for name in ("calls", "tool_errors")}


class ToolEnvironment:
    """One episode at a time: `reset` asks the task's prompt, a `step` makes the calls of a turn, or ends with the reward."""

    def __init__(self, tools: Tools):
        self._tools = tools
        self._functions: dict[str, Callable[..., Any]] = {}
        self._task: Any = None
        self._calls: list[ToolResult] = []

    async def reset(self, task: Any = None, seed: int | None = None) -> StepResult:
        prompt = prompt_of(task) if isinstance(task, Mapping) else task
        if not isinstance(prompt, str):
            roles = [message.get("role") for message in prompt] if isinstance(prompt, list) else None
            if roles != ["user"]:
                raise ValueError(f"the prompt of a task with tools is a text or one user turn, got {str(prompt)[:120]!r}")
            prompt = prompt[0]["content"]
        self._task, self._calls, made = task, [], self._tools.make()
        if callable(reset := getattr(made, "reset", None)):
            entries = task if isinstance(task, Mapping) else {}
            options = declared(reset, {**entries, "task": task, "seed": seed})
            await _within(self._tools.deadline, partial(reset, **options))
        self._functions = functions_of(made)
        return StepResult({"text": prompt})

    async def step(self, action: dict) -> StepResult:
        calls = [call_of(call) for call in action.get("calls", [])]
        results = [await self._call(call) for call in calls]
        self._calls += results
        counts = {"calls": sum(not r.failed for r in self._calls), "tool_errors": sum(r.failed for r in self._calls)}
        if results:
            return StepResult({"results": [r.text for r in results]}, metadata=counts)
        run = ToolRun(self._task, tuple(self._calls), action.get("text", ""))
        reward = self._tools.reward(run)
        reward = await reward if inspect.isawaitable(reward) else reward
        return StepResult({"results": [""]}, reward, done=True, metadata=counts)

    async def _call(self, call: ToolCall) -> ToolResult:
        """What a call gave, or what was wrong with it."""
        function = self._functions.get(call.name)
        if function is None:
            return ToolResult(call, f"error: there is no tool {call.name!r:.80}; there are {', '.join(self._functions)}", True)
        try:
            value = await _within(self._tools.deadline, partial(validate_call(function), **call.arguments))
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            return ToolResult(call, _clean(text))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:5]]
            return ToolResult(call, _clean(f"error: {'; '.join(wrong)}"), True)
        except (Exception, SystemExit) as error:
            reason = f"longer than {self._tools.deadline:g} s" if isinstance(error, TimeoutError) else str(error)
            return ToolResult(call, _clean(f"error: {type(error).__name__}: {reason}"), True)

    def state(self) -> dict:
        return {"calls": len(self._calls)}

    def close(self) -> None:
        self._functions = {}


def _clean(text: str) -> str:
    """A result as the policy is told it: no half of a surrogate pair, not too long."""
    text = text.encode("utf-8", "replace").decode() or "(empty)"
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]} ... ({len(text)} characters)"


async def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns, awaited where it is async, else called in a thread of its own; TimeoutError after `seconds`."""
    function = inspect.unwrap(getattr(work, "func", work))
    async with asyncio.timeout(seconds):
        if inspect.iscoroutinefunction(function):
            return await work()
        value = await _in_thread(work)
        return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any]) -> Any:
    """The result of a plain function, called in a daemon thread: one that hangs keeps nobody from exiting."""
    loop = asyncio.get_running_loop()
    outcome = loop.create_future()

    def settle(*of: Any) -> None:
        if not outcome.done():
            outcome.set_result(of)

    def run() -> None:
        try:
            of = work(), None
        except BaseException as error:  # noqa: BLE001  SystemExit ends only the call
            of = None, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *of)

    threading.Thread(target=run, name="grpolab-tool", daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return value
