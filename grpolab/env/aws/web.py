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

_HTML = """<!doctype html><html lang="en"><meta charset="utf-8"><title>grpolab: an AWS account</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:1.5rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
main{display:grid;grid-template-columns:2fr 1fr;gap:1.5rem}h2{font-size:1rem;margin:1rem 0 .3rem}
form{display:flex;gap:.5rem;margin:.4rem 0}input{flex:1;min-width:6rem;padding:.4rem;font:14px ui-monospace,monospace}
pre,code{font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.turn{border-left:3px solid #57ab5a;padding:.2rem .7rem;margin:.5rem 0}.failed{border-color:#c93c37}
#task{font-size:1.1rem}#note{color:#57606a}@media(max-width:45rem){main{grid-template-columns:1fr}}
</style><h1>An AWS account</h1><main><section><h2>Task</h2><p id="task">none yet</p>
<form id="choose"><input id="name" placeholder="a task's id, or empty for one drawn" aria-label="task">
<button>Start</button></form>
<form id="ask"><input id="command" placeholder="aws ..." autocomplete="off" spellcheck="false" aria-label="command">
<button>Run</button></form><p id="note" role="status">connecting</p><h2>Transcript</h2><div id="transcript"></div></section>
<aside><h2>The account</h2><pre id="account">empty</pre></aside></main><script>
const at = id => document.getElementById(id);
const socket = new WebSocket(`ws://${location.host}/socket`);
const send = message => { if (socket.readyState === 1) socket.send(JSON.stringify(message)); };
at("choose").onsubmit = e => { e.preventDefault(); send({reset: at("name").value.trim()}); };
at("ask").onsubmit = e => { e.preventDefault(); send({command: at("command").value}); at("command").value = ""; };
socket.onclose = () => { at("note").textContent += " (disconnected: reload the page for a new session)"; };
socket.onmessage = e => {
  const said = JSON.parse(e.data);
  if (said.note !== undefined) at("note").textContent = said.note;
  if (said.task) { at("task").textContent = said.task; at("transcript").replaceChildren(); }
  if (said.account) at("account").textContent = Object.entries(said.account)
    .map(([kind, names]) => kind + "\\n" + names.map(name => "  " + name).join("\\n")).join("\\n") || "empty";
  if (said.command !== undefined) {
    const turn = document.createElement("div"), line = document.createElement("code"), text = document.createElement("pre");
    turn.className = said.ok ? "turn" : "turn failed"; line.textContent = said.command; text.textContent = said.text;
    turn.append(line, text); at("transcript").append(turn);
  }
};
</script></html>"""


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
    async def tell(**said: Any) -> None:
        await connection.send(json.dumps(said))

    try:
        async with EnvSession(server.url, token=server.options.token) as session:
            await tell(note="connected: start a task")
            async for message in connection:
                try:
                    await _turn(session, json.loads(message), tell)
                except (InvalidAction, ServerError, ValueError) as fault:  # of this message: the session goes on
                    await tell(note=str(fault))
    except EnvError as fault:
        await tell(note=str(fault))


async def _turn(session: EnvSession, asked: Any, tell: Any) -> None:
    """Start an episode ({"reset": id or ""}) or run a command ({"command": line}), and tell the page what came of it. Raises
    ValueError for another message."""
    if not isinstance(asked, dict) or set(asked) not in ({"reset"}, {"command"}) or \
            not isinstance(*asked.values(), str):
        raise ValueError('a message here is {"reset": "a task\'s id"} or {"command": "aws ..."}')
    if "reset" in asked:
        result = await session.reset(**({"task": asked["reset"]} if asked["reset"] else {}))
        await tell(task=result.observation["text"], note=result.metadata["task"]["template"],
                   account=(await session.state())["account"])
    else:
        result = await session.step({"command": asked["command"]})
        state = await session.state()
        note = f"turn {state['turn']} of {state['max_turns']}, progress {state['progress']:.0%}"
        if result.done:
            note += f"; over, reward {result.reward:g}: " + ("the task is done" if state["achieved"] else "it is not done")
        await tell(command=asked["command"], text=result.observation["text"], ok=result.observation["ok"],
                   account=state["account"], note=note)
