"""HTTP around a service: routes, the token, bodies and their limits, and the server that uvicorn runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpolab.access import names_loopback, shows
from grpolab.serve.completions import Answer
from grpolab.serve.openai_schema import Refused, read_json, read_request, sampled_as
from grpolab.serve.sessions import Session
from grpolab.serve.state import Service

HEAD = 30.0  # s; how long a client may take to send the head of a request
IDLE = 75  # s; how long a connection stays open for the next request. Clients give theirs up after some 5 s: were it as many
# here, a request would be under way when the connection ends, and fail.
BODY = 30.0  # s; how long a body may take
SWALLOWED = 256 * 2**20  # bytes of a body over the limit that are read and thrown away, so that its sender hears why
CONNECTIONS = 4096
ADAPTER = {"lora_name", "lora_path", "load_inplace", "policy_version"}  # an adapter always takes the place of the one before


def application(service: Service, started: Callable[[], None]) -> Callable[..., Awaitable[None]]:
    """The ASGI application of a service; `started()` is called once it runs."""
    at = service.sessions

    @contextlib.asynccontextmanager
    async def lifespan(_):
        started()
        yield

    def sampling(kind: str):
        async def endpoint(request: Request):
            asked = read_request(kind, await read_body(request, service.max_body_bytes), service.names)
            id = request.path_params.get("session")
            return Answer(service, asked, None if id is None else at.get(id, create=True))

        return endpoint

    async def models(_):
        return JSONResponse({"object": "list", "data": service.model_cards()})

    async def model(request: Request):
        name = request.path_params["model"]
        card = next((card for card in service.model_cards() if card["id"] == name), None)
        if card is None:
            names = " or ".join(map(repr, service.names))
            raise Refused(404, f"the model {name[:80]!r} is not served here; it is {names}", "model", "model_not_found")
        return JSONResponse(card)

    async def health(_):
        return JSONResponse({"status": "healthy"})

    async def status(_):
        return JSONResponse(service.status())

    async def open_session(request: Request):
        content = await read_body(request, service.max_body_bytes)
        if set(content) - {"id"} or not isinstance(content.get("id", ""), str):
            raise Refused(400, "a new session takes an id, a text, and nothing else; {} makes one up", "id")
        session = at.open(content.get("id"))
        return JSONResponse({"id": session.id, "url": session.url}, 201)

    async def look(request: Request):
        return JSONResponse(told(at.get(request.path_params["session"])))

    async def collect(request: Request):
        return JSONResponse(told(at.end(request.path_params["session"])))

    async def weights(request: Request):
        content = await read_body(request, service.max_body_bytes)
        wanted = content.get("checksum")
        if set(content) - {"checksum"} or not (wanted is None or type(wanted) is int):
            raise Refused(400, "new weights may be asked for with the checksum that they must have, an integer; got "
                               f"{str(content)[:200]}", "checksum")
        return JSONResponse({"policy_version": await service.load_weights(wanted)})

    async def adapter(request: Request):
        content = await read_body(request, service.max_body_bytes)
        name, path, version = (content.get(key) for key in ("lora_name", "lora_path", "policy_version"))
        texts = all(isinstance(text, str) and 0 < len(text) < 4096 for text in (name, path))
        if not texts or not (version is None or type(version) is int) or set(content) - ADAPTER:
            raise Refused(400, "an adapter is put in with lora_name and lora_path, two texts, and may say its policy_version, "
                               f"an integer; got {str(content)[:200]}", "lora_name")
        version = await service.load_adapter(name, path, version)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully, as version {version}.")

    async def refuse(_, refused: Refused):
        service.counts["refused"] += 1
        return refusal(refused)

    async def refuse_route(request: Request, error: HTTPException):
        service.counts["refused"] += 1
        path = request.url.path[:80]
        said = {404: f"{path} is not served here; there are /v1/chat/completions, /v1/completions, /v1/models, /health, "
                     "/status and /sessions", 405: f"{request.method} is not a method of {path}"}
        return refusal(Refused(error.status_code, said.get(error.status_code, str(error.detail))))

    async def fail(_, error: Exception):
        service.counts["failed"] += 1
        return refusal(Refused(500, f"the service failed: {type(error).__name__}: {error}"))

    paths = ("", "/sessions/{session}")
    app = Starlette(
        lifespan=lifespan, exception_handlers={Refused: refuse, HTTPException: refuse_route, Exception: fail},
        routes=[
            Route("/health", health), Route("/status", status),
            Route("/weights", weights, methods=["POST"]), Route("/v1/load_lora_adapter", adapter, methods=["POST"]),
            Route("/sessions", open_session, methods=["POST"]),
            Route("/sessions/{session}", look), Route("/sessions/{session}", collect, methods=["DELETE"]),
            *(Route(f"{path}/v1/models", models) for path in paths),
            *(Route(f"{path}/v1/models/{{model:path}}", model) for path in paths),
            *(Route(f"{path}/v1/chat/completions", sampling("chat"), methods=["POST"]) for path in paths),
            *(Route(f"{path}/v1/completions", sampling("text"), methods=["POST"]) for path in paths),
        ],
    )

    async def guarded(scope, receive, send):
        if scope["type"] == "http" and (why := unwelcome(scope, service.token)):
            service.counts["refused"] += 1
            return await refusal(why)(scope, receive, send)
        await app(scope, receive, send)

    return guarded


def unwelcome(scope: dict, token: str | None) -> Refused | None:
    """Why a request is not let in: a browser's, one that names another host (where no token is asked for), or without the
    token. /health is open to all but these."""
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    if any(name == "origin" for name, _ in headers):
        return Refused(403, "requests of web pages (with an Origin) are refused: a page of any site could reach this address")
    if token is None and not names_loopback([value for name, value in headers if name == "host"]):
        return Refused(403, "the Host header names another server: without a token this one answers only to 127.0.0.1, ::1 and "
                            "localhost")
    if token is None or scope["path"] == "/health" or shows(token, [v for name, v in headers if name == "authorization"]):
        return None
    return Refused(401, "this service asks for its token: give it to the client as api_key", code="invalid_api_key")


def refusal(refused: Refused) -> JSONResponse:
    """The answer in OpenAI's error shape; after those that end an exchange in the middle the connection is closed."""
    more = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer", "Connection": "close"}}
    close = {"Connection": "close"} if refused.status in (403, 408, 413, 415) else {}
    return JSONResponse(refused.body, refused.status, more.get(refused.status, close))


async def read_body(request: Request, limit: int) -> dict:
    """The JSON object of a body of at most `limit` bytes; Refused with 413 for a larger one, 408 for one that is too slow,
    415 for a compressed one."""
    parts, size = [], 0
    if (how := request.headers.get("content-encoding", "identity")) != "identity":
        raise Refused(415, f"the body is encoded as {how[:40]!r}, and this service takes plain JSON alone")
    try:
        async with asyncio.timeout(BODY):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > SWALLOWED:
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY:.0f} s") from None
    except ClientDisconnect:
        raise Refused(400, "the client left before its body had arrived") from None
    if size > limit:
        raise Refused(413, f"the body has {'over ' if size > SWALLOWED else ''}{size} bytes, and this service takes {limit}")
    return read_json(b"".join(parts))


def told(session: Session) -> dict:
    """What was sampled in a session, as JSON."""
    rollouts = [{"prompt": list(r.prompt), "tokens": list(r.tokens), "mask": list(r.mask), **sampled_as(r)}
                for r in session.rollouts()]
    return {"id": session.id, "turns": len(session.turns), "cancelled": session.cancelled, "rollouts": rollouts}


class PatientProtocol(H11Protocol):
    """uvicorn's, which ends a connection on which the head of a request takes too long, the first or a later one; uvicorn
    itself ends one on which nothing comes after an answer."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._waiting = asyncio.get_running_loop().call_later(HEAD, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # a whole head is there
            self._rest()
        elif self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(HEAD, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _rest(self) -> None:
        if self._waiting is not None:
            self._waiting = self._waiting.cancel()


class Server:
    """uvicorn with an application, on a socket that listens already; `run` blocks until `stop`."""

    def __init__(self, app: Callable[..., Awaitable[None]], drain: int):
        self._server = uvicorn.Server(uvicorn.Config(
            app, http=PatientProtocol, ws="none", loop="asyncio", lifespan="on", log_config=None, log_level="error",
            access_log=False, server_header=False, timeout_graceful_shutdown=drain, timeout_keep_alive=IDLE,
            limit_concurrency=CONNECTIONS))

    def run(self, listener: socket.socket) -> None:
        self._server.run([listener])

    def stop(self) -> None:
        self._server.should_exit = True
