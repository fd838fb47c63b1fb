"""A page on which a person plays the AWS environment: the task, a command box, the account's state, the transcript.

`python -m grpolab serve aws --web` serves it on loopback. An open page is a client of the environment server like any other:
it holds one session, and where none is free it says so. Other sites' pages cannot use it: the socket asks for its own
origin, and a request under another host name is refused.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from grpolab.env.client import EnvSession
from grpolab.env.protocol import EnvError, InvalidAction, ServerError
from grpolab.env.server import EnvServer
from grpolab.files import data_path

_HTML = data_path("aws", "page.html").read_text(encoding="utf-8")


@contextlib.asynccontextmanager
async def page(server: EnvServer, port: int = 0) -> AsyncIterator[str]:
    """Serve the page of a running environment server at a loopback port, 0 for a free one; prints and yields its address."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        bound = listener.getsockname()[1]
        hosts = [f"127.0.0.1:{bound}", f"localhost:{bound}"]

        def answer(connection: ServerConnection, request: Request) -> Response | None:
            if request.headers.get("Host") not in hosts:
                return _response(403, "Forbidden", "this page is served under 127.0.0.1 and localhost alone")
            if request.path == "/":
                return _response(200, "OK", _HTML, f"ws://{request.headers['Host']}")
            return None if request.path == "/socket" else _response(404, "Not Found", "there is the page / alone")

        async def host(connection: ServerConnection) -> None:
            with contextlib.suppress(ConnectionClosed):
                await _play(connection, server)

        async with serve_websockets(host, sock=listener, process_request=answer, compression=None,
                                    origins=[f"http://{name}" for name in hosts]):
            print(f"a page for people at http://127.0.0.1:{bound}", flush=True)
            yield f"http://127.0.0.1:{bound}"


def _response(status: int, reason: str, text: str, connects: str = "") -> Response:
    """A page that may load nothing, be framed by nobody and connect to `connects` alone; or without that, a line of text."""
    policy = (f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src {connects}; "
              "frame-ancestors 'none'; base-uri 'none'; form-action 'none'").replace("connect-src ;", "")
    kind = "text/html" if connects else "text/plain"
    body = text.encode()
    headers = Headers([("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))), ("Connection", "close"),
                       ("Content-Security-Policy", policy), ("X-Content-Type-Options", "nosniff")])
    return Response(status, reason, headers, body)


async def _play(connection: ServerConnection, server: EnvServer) -> None:
    """One open page: a session of the server for as long as it is open."""
    async def send(**message: Any) -> None:
        await connection.send(json.dumps(message))

    try:
        async with EnvSession(server.url, token=server.options.token) as session:
            await send(note="connected: start a task")
            async for text in connection:
                try:
                    await _turn(session, json.loads(text), send)
                except (InvalidAction, ServerError, ValueError) as error:  # of this message: the session goes on
                    await send(note=str(error))
    except EnvError as error:
        await send(note=str(error))


async def _turn(session: EnvSession, request: Any, send: Any) -> None:
    """Start an episode ({"reset": id or ""}) or run a command ({"command": line}), and send the page the result. Raises
    ValueError for another message."""
    if not isinstance(request, dict) or set(request) not in ({"reset"}, {"command"}) or \
            not isinstance(*request.values(), str):
        raise ValueError('a message here is {"reset": "a task\'s id"} or {"command": "aws ..."}')
    if "reset" in request:
        result = await session.reset(**({"task": request["reset"]} if request["reset"] else {}))
        await send(task=result.observation["text"], note=result.metadata["task"]["template"],
                   account=(await session.state())["account"])
    else:
        result = await session.step({"command": request["command"]})
        state = await session.state()
        note = f"turn {state['turn']} of {state['max_turns']}, progress {state['progress']:.0%}"
        if result.done:
            note += f"; over, reward {result.reward:g}: " + ("the task is done" if state["achieved"] else "it is not done")
        await send(command=request["command"], text=result.observation["text"], ok=result.observation["ok"],
                   account=state["account"], note=note)
