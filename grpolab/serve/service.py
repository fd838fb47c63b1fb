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
from dataclasses import replace
from typing import Any

import uvicorn

from grpolab.decode.sampler import Sampler
from grpolab.models.load import Policy
from grpolab.serve.routes import application
from grpolab.serve.state import Service, ServiceOptions

DRAIN = 2  # s; how long an answer that is under way may take to leave at shutdown
IDLE = 75  # s; how long a connection stays open for the next request. Clients give theirs up after some 5 s: were it as many
# here, a request would be under way when the connection ends, and fail.


@contextlib.asynccontextmanager
async def serve_policy(policy: Policy | Sampler, options: ServiceOptions | None = None,
                       **changes: Any) -> AsyncIterator[Service]:
    """Serve a policy, or a Sampler of one that others use too, until the block is left. `changes` are fields of
    `ServiceOptions`. Browsers are refused, since a page of any site could reach a loopback address."""
    options = replace(options or ServiceOptions(), **changes)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server((options.host, options.port), family=family, backlog=512))
        if isinstance(policy, Sampler):
            sampler = policy
        else:
            sampler = await stack.enter_async_context(await asyncio.to_thread(Sampler, policy, seed=options.seed))
        host, port = listener.getsockname()[:2]
        service = Service(sampler, f"http://{f'[{host}]' if ':' in host else host}:{port}", options)
        server = uvicorn.Server(uvicorn.Config(
            application(service), ws="none", loop="asyncio", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, timeout_graceful_shutdown=DRAIN, timeout_keep_alive=IDLE))
        thread = threading.Thread(target=server.run, args=[[listener]], name="grpolab-serve", daemon=True)
        thread.start()
        stack.push_async_callback(asyncio.to_thread, thread.join)
        stack.callback(setattr, server, "should_exit", True)
        stack.callback(service.stop)
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended before it listened")
            await asyncio.sleep(0.005)
        yield service
