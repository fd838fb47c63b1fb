"""A policy behind an OpenAI-compatible endpoint.

    async with serve_policy(policy) as service:          # in a notebook or a script: service.url + "/v1"
    python -m grpolab serve-policy tiny --port 8000      # a process of its own

All callers share the decode batch of one Sampler. The server runs in a thread with an event loop of its own, so that it also
answers a notebook cell that blocks. What is sampled under a session's URL is recorded (`sessions`), and `service.rollouts`
hands it out. A caller who is gone, also in mid-stream, ends its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

from grpolab.access import check_host
from grpolab.decode.sampler import Sampler
from grpolab.models.load import Policy
from grpolab.serve.state import Service

DRAIN = 2  # s; how long an answer that is under way may take to leave at shutdown


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")


@contextlib.asynccontextmanager
async def serve_policy(policy: Policy | Sampler, *, name: str | None = None, host: str = "127.0.0.1", port: int = 0,
                       token: str | None = None, seed: int = 0, max_rows: int = 4096, max_sessions: int = 4096,
                       max_session_tokens: int = 8_000_000, max_body_bytes: int = 4 * 2**20,
                       max_kept_bytes: int = 256 * 2**20, weights: str | Path | None = None,
                       adapters: str | Path | None = None) -> AsyncIterator[Service]:
    """Serve a policy, or a Sampler of one that others use too, until the block is left.

    `name` is what requests call the model (default: the policy's). `port=0` takes a free one. `token` asks every client for
    it (an OpenAI client's api_key), and is required on an address that other machines reach; browsers are refused, since a
    page of any site could reach a loopback address. `seed` makes those of requests that bring none. At most `max_rows`
    completions are in progress or wait, `max_sessions` sessions are open and keep `max_session_tokens` tokens together:
    beyond, requests get 429. A body over `max_body_bytes` gets 413. Of the newest turns of sessions `max_kept_bytes` of keys
    and values stay, which the next turn need not compute again. `weights` is the file through which a trainer in another
    process sends its updates (`RemoteSampler.publish`), `adapters` the folder from which clients may have LoRA adapters put
    in. ImportError without the extra: pip install grpolab[serve].
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port}: a port is 0 (any free one) to 65535")
    _check_numbers(max_rows=max_rows, max_sessions=max_sessions, max_session_tokens=max_session_tokens,
                   max_body_bytes=max_body_bytes)
    check_host(host, token)
    try:
        from grpolab.serve.routes import Server, application
    except ImportError as error:
        raise ImportError(f"serving a policy needs starlette and uvicorn ({error}): pip install 'grpolab[serve]'") from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, port), family=family, backlog=512))
        sampler = policy if isinstance(policy, Sampler) else await stack.enter_async_context(await _sampler(policy, seed))
        bound = listener.getsockname()
        url = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        service = Service(sampler.policy, sampler, name or sampler.policy.name, url, token=token, seed=seed, max_rows=max_rows,
                          max_sessions=max_sessions, max_session_tokens=max_session_tokens, max_body_bytes=max_body_bytes,
                          max_kept_bytes=max_kept_bytes, weights=None if weights is None else Path(weights),
                          adapters=None if adapters is None else Path(adapters).resolve())
        ready: Future[None] = Future()
        server = Server(application(service, lambda: ready.set_result(None)), DRAIN)
        thread = threading.Thread(target=_run, args=(server, listener, ready), name="grpolab-serve", daemon=True)
        thread.start()
        stack.push_async_callback(asyncio.to_thread, thread.join)
        stack.callback(server.stop)
        stack.callback(service.stop)
        await asyncio.wrap_future(ready)
        yield service


async def _sampler(policy: Policy, seed: int) -> Sampler:
    return await asyncio.to_thread(Sampler, policy, seed=seed)


def _run(server, listener: socket.socket, ready: Future) -> None:
    """The server's thread. What ends it before it serves is raised to whoever waits."""
    try:
        server.run(listener)
    except BaseException as error:
        if not ready.done():
            return ready.set_exception(error)
        raise
    if not ready.done():
        ready.set_exception(RuntimeError("the server ended before it listened"))
