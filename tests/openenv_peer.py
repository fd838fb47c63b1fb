"""OpenEnv's own server and client as processes. Run by the interpreter of an environment that has openenv; imports
nothing of grpolab.

    python openenv_peer.py server MAX_SESSIONS        # prints its address
    python openenv_peer.py typed MAX_SESSIONS         # the same of an environment with typed actions
    python openenv_peer.py tools MAX_SESSIONS         # and of one with MCP tools
    python openenv_peer.py client URL                 # plays a script against a server, prints what it saw as JSON
    python openenv_peer.py bench URL 8:300 64:40      # its client with 8 sessions of 300 steps each, ...; as JSON
"""

import asyncio
import json
import random
import socket
import sys
import time


def listen(environment, action, observation, max_sessions):
    import uvicorn
    from openenv.core.env_server.http_server import create_app

    app = create_app(environment, action, observation, env_name="peer", max_concurrent_envs=int(max_sessions))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(f"listening at ws://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def server(max_sessions):
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class EchoAction(Action):
        text: str = ""
        sleep: float = 0.0
        boom: str = ""

    class EchoObservation(Observation):
        echo: str = ""
        turn: int = 0
        env: str = ""
        seed: int | None = None

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State(episode_id=None, step_count=0)
            self.seed = None

        def seen(self, text, reward=None):
            return EchoObservation(echo=text, turn=self._state.step_count, env=hex(id(self)), seed=self.seed,
                                   reward=reward, done=False, metadata={"kept": True})

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.seed, self._state = seed, State(episode_id=episode_id, step_count=0)
            return self.seen("")

        def step(self, action, timeout_s=None, **kwargs):
            self._state.step_count += 1
            if action.sleep:  # a sleep of 0 s is none: it can cost 70 us, which a benchmark would count as OpenEnv's
                time.sleep(action.sleep)
            if action.boom:
                raise RuntimeError(action.boom)
            return self.seen(action.text, float(len(action.text)))

        @property
        def state(self):
            return self._state

    listen(Echo, EchoAction, EchoObservation, max_sessions)


def drawn(seed):
    """The two numbers of a question, from the seed alone."""
    rng = random.Random(seed)
    return rng.randrange(3), rng.randrange(3)


def typed(max_sessions):
    """A sum, asked and answered in fields of their own; the answer is a number up to 9, which a validator checks."""
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import field_validator

    class Answer(Action):
        number: int

        @field_validator("number")
        @classmethod
        def small(cls, number):
            if number > 9:
                raise ValueError("a number up to 9")
            return number

    class Said(Observation):
        message: str = ""

    class Sums(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.numbers = drawn(seed)
            return Said(message="What is {} + {}?".format(*self.numbers))

        def step(self, action, timeout_s=None, **kwargs):
            right = action.number == sum(self.numbers)
            return Said(message="correct" if right else "wrong", reward=float(right), done=True)

        @property
        def state(self):
            return State()

    listen(Sums, Answer, Said, max_sessions)


def tools(max_sessions):
    """The same sums by MCP tools; each step counts, so that asking for the tools must be none."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Sums(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            mcp = FastMCP("sums")

            @mcp.tool()
            def add(a: int, b: int) -> int:
                """The sum."""
                return a + b

            @mcp.tool()
            def answer(n: int) -> str:
                """The end."""
                return "noted"

            super().__init__(mcp)
            self.steps = 0

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.numbers, self.steps = drawn(seed), 0
            return Observation(done=False, metadata={"question": "What is {} + {}?".format(*self.numbers)})

        async def step_async(self, action, timeout_s=None, **kwargs):
            self.steps += 1
            seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
            if isinstance(action, CallToolAction) and action.tool_name == "answer" and seen.error is None:
                seen.done, seen.reward = True, float(action.arguments["n"] == sum(self.numbers))
            return seen

        def _step_impl(self, action, timeout_s=None, **kwargs):
            raise ValueError("there are tools")

        @property
        def state(self):
            return State(step_count=self.steps)

    listen(Sums, CallToolAction, CallToolObservation, max_sessions)


async def client(url):
    from openenv.core.generic_client import GenericEnvClient

    said = {}
    async with GenericEnvClient(base_url=url) as env:
        said["before"] = await env.state()
        first = await env.reset(seed=7, episode_id="ep1", task={"id": 3})
        said["reset"] = [first.observation, first.reward, first.done]
        result = await env.step({"text": "hello"})
        said["step"] = [result.observation, result.reward, result.done]
        said["after"] = await env.state()
        for name, action in (("invalid", {"zzz": 1}), ("raised", {"raise": "boom: x"})):
            try:
                await env.step(action)
            except RuntimeError as fault:
                said[name] = str(fault)
        said["again"] = (await env.step({"text": "still here"})).observation
        others = []
        try:
            for _ in range(8):
                others.append(GenericEnvClient(base_url=url))
                await others[-1].connect()
        except Exception as fault:
            said["refused"] = f"{type(fault).__name__}: {fault}"
        for other in others:
            await other.close()
    print(json.dumps(said))


async def caller(url):
    """Its client at an environment with tools."""
    from openenv.core.generic_client import GenericEnvClient

    said = {}
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(task={"prompt": "Where is Ann?"})
        said["tools"] = (await env.step({"type": "list_tools"})).observation["tools"]
        for name, tool in (("called", "room"), ("unknown", "nothing")):
            action = {"type": "call_tool", "tool_name": tool, "arguments": {"name": "Ann"}}
            said[name] = (await env.step(action)).observation
        last = await env.step({"text": "12"})
        said["last"] = [last.done, last.reward]
    print(json.dumps(said))


async def bench(url, *sizes):
    print(json.dumps([await measure(url, *map(int, size.split(":"))) for size in sizes]))


async def measure(url, sessions, steps):
    from openenv.core.generic_client import GenericEnvClient

    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    await asyncio.gather(*(c.connect() for c in clients))
    await asyncio.gather(*(c.reset() for c in clients))
    latencies = []

    async def play(c):
        for _ in range(steps):
            start = time.perf_counter()
            await c.step({"text": "x"})
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(c.step({"text": "x"}) for c in clients))
    start = time.perf_counter()
    await asyncio.gather(*(play(c) for c in clients))
    wall = time.perf_counter() - start
    await asyncio.gather(*(c.close() for c in clients))
    latencies.sort()
    return {"steps_per_s": len(latencies) / wall, "median_s": latencies[len(latencies) // 2]}


if __name__ == "__main__":
    what = {"server": server, "typed": typed, "tools": tools, "client": lambda *a: asyncio.run(client(*a)),
            "caller": lambda *a: asyncio.run(caller(*a)),
            "bench": lambda *a: asyncio.run(bench(*a))}
    what[sys.argv[1]](*sys.argv[2:])
