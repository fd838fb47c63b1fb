"""OpenEnv's own server and client as processes. Run by the interpreter of an environment that has openenv; imports
nothing of grpolab.

    python openenv_peer.py server MAX_SESSIONS        # prints its address
    python openenv_peer.py client URL                 # plays a script against a server, prints what it saw as JSON
    python openenv_peer.py reopen URL TIMES           # opens and closes that often; prints how often it was refused
    python openenv_peer.py bench URL 8:300 64:40      # its client with 8 sessions of 300 steps each, ...; as JSON
"""

import asyncio
import json
import socket
import sys
import time


def server(max_sessions):
    import uvicorn
    from openenv.core.env_server.http_server import create_app
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

    app = create_app(Echo, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=int(max_sessions))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(f"listening at ws://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


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


async def reopen(url, times):
    from openenv.core.generic_client import GenericEnvClient

    refused = 0
    for _ in range(int(times)):
        client = GenericEnvClient(base_url=url)
        try:
            await client.connect()
            await client.reset()
        except Exception:
            refused += 1
        await client.close()
    print(json.dumps({"refused": refused}))


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
    what = {"server": server, "client": lambda *a: asyncio.run(client(*a)), "bench": lambda *a: asyncio.run(bench(*a)),
            "reopen": lambda *a: asyncio.run(reopen(*a))}
    what[sys.argv[1]](*sys.argv[2:])
