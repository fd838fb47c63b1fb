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
from pydantic_core import to_jsonable_python

from grpolab.chat import call_form, observation_ids
from grpolab.env.action_format import ActionFormat
from grpolab.env.protocol import StepResult, declared
from grpolab.tasks import prompt_of
from grpolab.tool_calls import MAX_CALLS, ToolCall, call_of, parse_calls, tools_of

MAX_RESULT = 4000  # characters of a result that the policy is told
MAX_THREADS = 1000  # of calls that have not returned
_threads: set[threading.Thread] = set()  # theirs


class ToolFailed(Exception):
    """What a tool says went wrong, in its own words."""


class ToolsLost(Exception):
    """The tools are gone, as a server that ended. It costs the episode: the policy did nothing wrong."""


@dataclass(frozen=True)
class ToolResult:
    """A call and the text that the policy was told; `failed` where that is an error."""

    call: ToolCall
    text: str
    failed: bool = False


@dataclass(frozen=True)
class ToolRun:
    """An episode as its reward sees it: the task, the calls with their results, the text of the last turn, and the object
    whose methods were called (the list of functions, where it is that)."""

    task: Any
    calls: tuple[ToolResult, ...]
    answer: str
    tools: Any = None


def schema_of(function: Callable[..., Any]) -> dict:
    """A tool in OpenAI's shape, of a function's name, docstring and typed parameters (what `pydantic` can read from JSON).
    ValueError for a function without a name, and for a parameter without a type or that no call can name."""
    name = getattr(function, "__name__", "")
    if not callable(function) or isinstance(function, type) or not name.isidentifier():
        raise ValueError(f"{function!r:.100} is no named function, which a tool is: write one with def (a class holds several "
                         "tools, and stands alone: Tools(MyTools, reward))")
    wrong = [p.name for p in inspect.signature(function).parameters.values()
             if p.annotation is p.empty or p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if wrong:
        raise ValueError(f"the parameters {wrong} of the tool {name!r}: a call must be able to name each one, and each needs a "
                         "type, as in def tool(name: str)")
    try:
        schema = TypeAdapter(function).json_schema()
    except (PydanticUserError, NameError) as error:
        raise ValueError(f"the tool {name!r} takes what JSON cannot say: {str(error).splitlines()[0]}") from error
    for kind in schema.get("properties", {}).values():
        kind.pop("title", None)
    return {"type": "function", "function": {"name": name, "description": " ".join((inspect.getdoc(function) or "").split()),
                                             "parameters": {"properties": {}} | schema}}


def functions_of(tools: Any) -> list[Callable[..., Any]]:
    """The functions of a list, or the public methods of an object, but for `reset`."""
    if isinstance(tools, Sequence):
        return list(tools)
    names = [name for name, _ in inspect.getmembers_static(type(tools), inspect.isroutine)]
    return [getattr(tools, name) for name in names if not name.startswith("_") and name != "reset"]


class Tools:
    """Tools and the reward of an episode with them, as the environment of a pool: `GrpoPool(tools, size)`.

    tools     typed functions, plain or async; or a class, whose public methods are the tools of one episode: a new object each,
              whose `reset`, if it has one, gets the `task`, the `seed` and what entries of the task it declares; a text that it
              returns is appended to the prompt (so a class for TRL's `environment_factory` is one for this); or a
              `mcp_tools.McpServer`
    reward    plain or async function (ToolRun) -> a number
    deadline  seconds for the calls of one turn; a plain function that takes longer goes on in a thread that is left behind
    """

    def __init__(self, tools: Sequence[Callable[..., Any]] | type, reward: Callable[[ToolRun], Any], *, deadline: float = 10.0):
        if not isinstance(deadline, int | float) or not 0 < deadline < float("inf"):
            raise ValueError(f"deadline={deadline!r}: calls need a positive, finite bound in seconds")
        self.served = hasattr(tools, "session")
        if not self.served and (isinstance(tools, str) or not isinstance(tools, type | Sequence)):
            raise ValueError(f"tools={tools!r:.80}: give a list of functions, or a class (not an object of it, which all "
                             "episodes would share)")
        if not callable(reward):
            raise ValueError(f"reward={reward!r:.80}: it is a function (ToolRun) -> a number")
        self.tools, self.reward, self.deadline = tools, reward, deadline
        self.schemas = tools_of(tools.tools() if self.served else map(schema_of, functions_of(self.make())))
        if not self.schemas:
            raise ValueError(f"{tools!r:.100} holds no tool: give functions, or a class with public methods")
        self.__name__ = f"Tools({', '.join(tool['function']['name'] for tool in self.schemas)})"

    def __call__(self) -> ToolEnvironment:
        return ToolEnvironment(self)

    def make(self) -> Any:
        """The tools of one episode."""
        return self.tools() if isinstance(self.tools, type) else self.tools

    def action_format(self, tokenizer: Any, form: str | None = None) -> ActionFormat:
        """How a policy of this tokenizer writes calls and reads results: in the form of its chat template (`tool_calls`). A
        turn whose calls cannot be read is answered with the reason and counts as invalid; so is one with several calls where
        the template knows one alone. ValueError for a template that rewrites earlier turns, or knows no results."""
        form = form or call_form(tokenizer)
        observation_ids(tokenizer, ["a"], role="tool")
        try:
            observation_ids(tokenizer, ["a", "a"], role="tool")
            most = MAX_CALLS
        except ValueError:
            most = 1
        return ActionFormat(to_action=partial(_action, form=form, most=most), measure=_measure, tools=self.schemas, role="tool",
                            to_text=lambda seen: seen.get("text") or seen["results"])


def _action(text: str, form: str, most: int) -> dict:
    turn = parse_calls(text, form)
    if turn.unparsed:
        raise ValueError(f"{turn.unparsed} of the calls of this turn cannot be read; none was made")
    if len(turn.calls) > most:
        raise ValueError(f"this turn has {len(turn.calls)} calls, and a turn can have {most}; none was made")
    return {"text": turn.content, "calls": [{"name": c.name, "arguments": c.arguments} for c in turn.calls]}


def _measure(results: Sequence[StepResult]) -> dict[str, float]:
    last = results[-1].metadata if results else {}
    return {name: last.get(name, 0) for name in ("calls", "tool_errors")}


class ToolEnvironment:
    """One episode at a time: `reset` shows the task's prompt, a `step` makes the calls of a turn, or ends with the reward."""

    def __init__(self, tools: Tools):
        self._tools = tools
        self._functions: dict[str, Callable[..., Any]] = {}
        self._task: Any = None
        self._object: Any = None
        self._session: tuple[asyncio.Event, asyncio.Task] | None = None  # of a server: what ends it, and the task that has it
        self._calls: list[ToolResult] = []

    async def reset(self, task: Any = None, seed: int | None = None) -> StepResult:
        prompt = prompt_of(task) if isinstance(task, Mapping) else task
        if isinstance(prompt, list) and [message.get("role") for message in prompt] == ["user"]:
            prompt = prompt[0]["content"]
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt of a task with tools is a text or one user turn, got {str(prompt)[:120]!r}")
        self._task, self._calls, self._object = task, [], self._tools.make()
        if callable(reset := getattr(self._object, "reset", None)):
            entries = task if isinstance(task, Mapping) else {}
            async with asyncio.timeout(self._tools.deadline):
                more = await _run(partial(reset, **declared(reset, {**entries, "task": task, "seed": seed})))
            prompt += more if isinstance(more, str) else ""
        if self._tools.served:
            self._functions = await self._open_session()
        else:
            self._functions = {function.__name__: function for function in functions_of(self._object)}
        return StepResult({"text": prompt})

    def list_tools(self) -> list[dict]:
        """The tools as MCP lists them."""
        return [{"name": f["name"], "description": f["description"], "inputSchema": f["parameters"]}
                for f in (tool["function"] for tool in self._tools.schemas)]

    async def call_tool(self, name: str, arguments: dict) -> dict:
        """A call in MCP's form; the reward sees it, as it does those of a step."""
        (result,) = await self._made([ToolCall(name, arguments)])
        return {"content": [{"type": "text", "text": result.text}], "isError": result.failed}

    async def _made(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        until = asyncio.get_running_loop().time() + self._tools.deadline
        results = [await self._call(call, until) for call in calls]
        self._calls += results
        return results

    async def step(self, action: dict) -> StepResult:
        """Calls as `Tools.action_format` has them, the answer, or one of OpenEnv's actions `list_tools` and `call_tool`."""
        if action.get("type") == "list_tools":
            return StepResult({"tools": self.list_tools()})
        if action.get("type") == "call_tool":
            call = call_of({"name": action.get("tool_name"), "arguments": action.get("arguments")})
            (result,) = await self._made([call])
            error = {"error_type": "execution_error", "message": result.text.removeprefix("error: ")} if result.failed else None
            return StepResult({"tool_name": call.name, "error": error,
                               "result": {"content": [{"type": "text", "text": result.text}], "is_error": result.failed}})
        results = await self._made([call_of(call) for call in action.get("calls", [])])
        counts = {"calls": sum(not r.failed for r in self._calls), "tool_errors": sum(r.failed for r in self._calls)}
        if results:
            return StepResult({"results": [r.text for r in results]}, metadata=counts)
        if not isinstance(answer := action.get("text", ""), str):
            raise ValueError(f"an answer is a text, got {answer!r:.80}")
        run = ToolRun(self._task, tuple(self._calls), answer, self._object)
        reward = self._tools.reward(run)
        reward = await reward if inspect.isawaitable(reward) else reward
        if reward is None:
            raise ValueError(f"the reward function gave None for the answer {run.answer!r:.80}: it gives a number")
        return StepResult({"results": [""]}, reward, done=True, metadata=counts)

    async def _open_session(self) -> dict[str, Callable[..., Any]]:
        """The tools of a server in a new session, which one task opens and closes."""
        await self.close()
        over, functions = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def hold():
            try:
                async with self._tools.tools.session([tool["function"]["name"] for tool in self._tools.schemas]) as opened:
                    functions.set_result(opened)
                    await over.wait()
            except Exception as error:
                if not functions.done():  # a session that ended by itself is noticed by its next call
                    functions.set_exception(error)

        self._session = over, asyncio.create_task(hold())
        return await functions

    async def _call(self, call: ToolCall, until: float) -> ToolResult:
        """What a call returned by this time of the loop, or what was wrong with it."""
        function = self._functions.get(call.name)
        if function is None:
            return ToolResult(call, f"error: there is no tool {call.name!r:.80}; there are {', '.join(self._functions)}", True)
        try:
            async with asyncio.timeout_at(until) as limit:
                return ToolResult(call, _clean(await _run(partial(validate_call(function), **call.arguments))))
        except BaseException as error:  # whatever a tool raises, an exit or an interrupt of its own, too
            if asyncio.current_task().cancelling() or isinstance(error, GeneratorExit | ToolsLost):
                raise
            why = f"TimeoutError: longer than {self._tools.deadline:g} s" if limit.expired() else _reason(error)
            return ToolResult(call, _clean(f"error: {why}"), True)

    def state(self) -> dict:
        return {"calls": len(self._calls)}

    async def close(self) -> None:
        self._functions = {}
        if self._session is not None:
            (over, task), self._session = self._session, None
            over.set()
            await asyncio.wait([task])


def _reason(error: BaseException) -> str:
    """What the policy reads of an error."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:5])
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  of the tool's own class
        text = "(no message)"
    return text if isinstance(error, ToolFailed) else f"{type(error).__name__}: {text}"


def _clean(value: Any) -> str:
    """A result as the policy reads it: a string as it is, anything else as JSON, where it can be (dataclasses, models, dates,
    sets); no half of a surrogate pair, not too long."""
    text = value if isinstance(value, str) else json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode() or "(empty)"
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]} ... ({len(text)} characters)"


async def _run(call: Callable[[], Any]) -> Any:
    """What the call returns: awaited where it is async, else made in a daemon thread: one that hangs keeps nobody from
    exiting."""
    if inspect.iscoroutinefunction(call):
        return await call()
    loop = asyncio.get_running_loop()
    outcome = loop.create_future()
    if len(_threads) >= MAX_THREADS:
        raise RuntimeError(f"{MAX_THREADS} calls have not returned; no more are made until one does")

    def settle(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def thread() -> None:
        _threads.add(threading.current_thread())
        try:
            value, error = call(), None
        except BaseException as raised:  # noqa: BLE001  SystemExit ends only the call
            value, error = None, raised
        _threads.discard(threading.current_thread())
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=thread, name="grpolab-tool", daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value
