"""HTTP around a service: its routes, who is let in, and the bodies of requests."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from grpolab.access import names_loopback, shows
from grpolab.decode.sampling import COLDEST
from grpolab.serve.completions import CompletionResponse
from grpolab.serve.openai_schema import (
    ChatRequest,
    CompletionRequest,
    Refused,
    Strict,
    TextRequest,
    read_json,
    read_request,
    sampled_as,
    validated,
)
from grpolab.serve.sessions import Session
from grpolab.serve.state import Service


class NewSession(Strict):
    """Options as in `Session`; what is left out is the service's."""

    id: str | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    temperature: float = Field(1.0, ge=COLDEST, le=100)
    max_tokens: int | None = Field(None, ge=1)
    limit: int | None = Field(None, ge=2)
    fixed: bool = False


class NewWeights(Strict):
    checksum: int | None = None  # that they must have


class NewAdapter(Strict):
    """vLLM's fields, and the version. An adapter always takes the place of the one before, so `load_inplace` says nothing."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = True
    policy_version: int | None = None


async def complete(request: Request, kind: type[CompletionRequest]) -> CompletionResponse:
    service = request.app.state.service
    wanted = read_request(kind, await read_body(request), service.names)
    id = request.path_params.get("session")
    return CompletionResponse(service, wanted, None if id is None else service.sessions.get(id, create=True))


async def models(request: Request):
    return JSONResponse({"object": "list", "data": request.app.state.service.model_cards()})


async def model(request: Request):
    cards = {card["id"]: card for card in request.app.state.service.model_cards()}
    name = request.path_params["model"]
    if name not in cards:
        raise Refused(404, f"the model {name[:80]!r} is not served here; it is {' or '.join(map(repr, cards))}", "model",
                      "model_not_found")
    return JSONResponse(cards[name])


async def health(_):
    return JSONResponse({"status": "healthy"})


async def status(request: Request):
    return JSONResponse(request.app.state.service.status())


async def open_session(request: Request):
    session = request.app.state.service.sessions.open(**dict(validated(NewSession, await read_body(request))))
    return JSONResponse({"id": session.id, "url": session.url}, 201)


async def list_sessions(request: Request):
    return JSONResponse({"sessions": [
        {"id": s.id, "url": s.url, "answers": len(s.turns), "cancelled": s.cancelled, "open_requests": len(s.open),
         "idle_s": round(time.monotonic() - s.used, 3)} for s in request.app.state.service.sessions.all()]})


async def look(request: Request):
    return JSONResponse(recorded(request.app.state.service.sessions.get(request.path_params["session"])))


async def collect(request: Request):
    return JSONResponse(recorded(request.app.state.service.sessions.end(request.path_params["session"])))


async def load_weights(request: Request):
    wanted = validated(NewWeights, await read_body(request))
    return JSONResponse({"policy_version": await request.app.state.service.load_weights(wanted.checksum)})


async def load_adapter(request: Request):
    new = validated(NewAdapter, await read_body(request))
    version = await request.app.state.service.load_adapter(new.lora_name, new.lora_path, new.policy_version)
    return PlainTextResponse(f"Success: LoRA adapter '{new.lora_name}' added successfully, as version {version}.")


async def refuse(request: Request, refused: Refused):
    """The answer in OpenAI's error shape."""
    request.app.state.service.counts["refused"] += 1
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(refused.body, refused.status, headers.get(refused.status))


async def refuse_route(request: Request, error: HTTPException):
    path = request.url.path[:80]
    message = f"{request.method} {path}: {error.detail}; there are /v1/chat/completions, /v1/completions and /v1/models"
    return await refuse(request, Refused(error.status_code, message))


async def fail(request: Request, error: Exception):
    request.app.state.service.counts["failed"] += 1
    refused = Refused(500, f"the service failed: {type(error).__name__}: {error}")
    return JSONResponse(refused.body, refused.status)


def application(service: Service) -> Callable[..., Awaitable[None]]:
    """The ASGI application of a service."""
    of_sessions = [(prefix + path, endpoint, method) for prefix in ("", "/sessions/{session}") for path, endpoint, method in (
        ("/v1/models", models, "GET"), ("/v1/models/{model:path}", model, "GET"),
        ("/v1/chat/completions", partial(complete, kind=ChatRequest), "POST"),
        ("/v1/completions", partial(complete, kind=TextRequest), "POST"))]
    routes = [
        ("/health", health, "GET"), ("/status", status, "GET"), ("/weights", load_weights, "POST"),
        ("/v1/load_lora_adapter", load_adapter, "POST"), ("/sessions", open_session, "POST"),
        ("/sessions", list_sessions, "GET"),
        ("/sessions/{session}", look, "GET"), ("/sessions/{session}", collect, "DELETE"), *of_sessions]
    app = Starlette(routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in routes],
                    exception_handlers={Refused: refuse, HTTPException: refuse_route, Exception: fail})
    app.state.service = service

    async def guarded(scope, receive, send):
        reason = unwelcome(Request(scope), service.options.token) if scope["type"] == "http" else None
        if reason is None:
            return await app(scope, receive, send)
        scope["app"] = app
        await (await refuse(Request(scope), reason))(scope, receive, send)

    return guarded


def unwelcome(request: Request, token: str | None) -> Refused | None:
    """Why a request is not let in: a browser's, one that names another host (where no token is asked for), or without the
    token. /health is open to all but these."""
    if "origin" in request.headers:
        return Refused(403, "requests of web pages (with an Origin) are refused: a page of any site could reach this address")
    if token is None and not names_loopback(request.headers.getlist("host")):
        return Refused(403, "the Host header names another server: without a token this one answers only to 127.0.0.1, ::1 and "
                            "localhost")
    if token is None or request.scope["path"] == "/health" or shows(token, request.headers.getlist("authorization")):
        return None
    return Refused(401, "this service asks for its token: give it to the client as api_key", code="invalid_api_key")


async def read_body(request: Request) -> dict:
    """The JSON object of a body; Refused with 413 for one that is too large, once all of it has come, so that its sender hears
    of it."""
    parts, size, limit = [], 0, request.app.state.service.options.max_body_bytes
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "the client left before its body had arrived") from None
    if size > limit:
        raise Refused(413, f"the body has {size} bytes, and this service takes {limit}")
    return read_json(b"".join(parts))


def recorded(session: Session) -> dict:
    """What was sampled in a session, as JSON."""
    rollouts = [{"prompt": list(r.prompt), "tokens": list(r.tokens), "mask": list(r.mask), **sampled_as(r)}
                for r in session.rollouts()]
    return {"id": session.id, "turns": len(session.turns), "cancelled": session.cancelled, "rollouts": rollouts}
