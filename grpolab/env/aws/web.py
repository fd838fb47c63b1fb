"""A page on which a person plays the AWS environment: the task, a command box, the account's state, the transcript.

`python -m grpolab serve aws --web` serves it on loopback. An open page is a client of the environment server like any other:
it holds one session, and where none is free it says so. Other sites' pages cannot use it: the socket asks for its own
origin, and a request under another host name is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from grpolab.env.server import EnvServer, json_response
from grpolab.files import data_path


@contextlib.asynccontextmanager
async def page(server: EnvServer, port: int = 0) -> AsyncIterator[str]:
    """Serve the page of a running environment server at a loopback port, 0 for a free one; prints and yields its address."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        bound = listener.getsockname()[1]
        hosts = [f"127.0.0.1:{bound}", f"localhost:{bound}"]

        def answer(connection: ServerConnection, request: Request) -> Response | None:
            if request.headers.get("Host") not in hosts:
                return json_response(403, {"error": "this page is served under 127.0.0.1 and localhost alone"})
            if request.path == "/":
                return _html(f"ws://{request.headers['Host']}")
            return None if request.path == "/socket" else json_response(404, {"error": "there is the page / alone"})

        async def host(connection: ServerConnection) -> None:
            with contextlib.suppress(ConnectionClosed):
                await _play(connection, server)

        async with serve_websockets(host, sock=listener, process_request=answer, compression=None,
                                    origins=[f"http://{name}" for name in hosts]):
            print(f"a page for people at http://127.0.0.1:{bound}", flush=True)
            yield f"http://127.0.0.1:{bound}"


def _html(socket: str) -> Response:
    """The page, which may load nothing, be framed by nobody and connect to its socket alone."""
    body = data_path("aws", "page.html").read_bytes()
    policy = (f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src {socket}; "
              "frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
    return Response(200, "OK", Headers({"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body)),
                                        "Connection": "close", "Content-Security-Policy": policy,
                                        "X-Content-Type-Options": "nosniff"}), body)


async def _play(page: ServerConnection, server: EnvServer) -> None:
    """One open page: a session of the server for as long as it is open, spoken to in the server's protocol."""
    token = server.options.token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with connect(server.url + "/ws", additional_headers=headers, proxy=None, compression=None) as session:
            async with asyncio.TaskGroup() as both:
                back = both.create_task(_pass_on(session, page))
                await _pass_on(page, session)
                back.cancel()
    except InvalidStatus as refusal:
        await page.send(json.dumps({"type": "error", "data": {"message": refusal.response.body.decode()}}))


async def _pass_on(source: Any, target: Any) -> None:
    """Messages, until either closes; then both are closed."""
    with contextlib.suppress(ConnectionClosed):
        async for text in source:
            await target.send(text)
    await target.close()
