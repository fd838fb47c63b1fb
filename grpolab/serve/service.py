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
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from grpolab.access import names_loopback, shows
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import COLDEST
from grpolab.models.load import Policy
from grpolab.models.lora import exchange
from grpolab.serve.completions import CompletionResponse
from grpolab.serve.generate import GenerateRequest, GenerateResponse
from grpolab.serve.mapped import SharedLock, attach, detach
from grpolab.serve.openai_schema import (
    ChatRequest,
    CompletionRequest,
    Refused,
    Strict,
    TextRequest,
    check_request,
    sampled_as,
    unknown_model,
    validated,
)
from grpolab.serve.state import Service, ServiceOptions
from grpolab.serve.weight_sync import read_weights

DRAIN = 2  # s; how long an answer that is under way may take to leave at shutdown
IDLE = 75  # s; how long a connection stays open for the next request. Clients give theirs up after some 5 s: were it as many
# here, a request would be under way when the connection ends, and fail.
MAX_BODY = 4 * 2**20  # bytes of a request


class NewSession(Strict):
    """Options as in `Session`; what is left out is the service's."""

    id: str | None = Field(None, min_length=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    temperature: float = Field(1.0, ge=COLDEST, le=100)
    max_tokens: int | None = Field(None, ge=1)
    limit: int | None = Field(None, ge=2)
    fixed: bool = False


class NewWeights(Strict):
    mark: str | None = None  # that they must have
    mapped: bool = False  # the trainer's own, from now on (`mapped`)


class NewAdapter(Strict):
    """vLLM's fields, and the version. An adapter always takes the place of the one before, so `load_inplace` says nothing."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, pattern=r"^[^\x00]*$")
    load_inplace: bool = True
    policy_version: int | None = Field(None, ge=0, lt=2**63)


async def complete(request: Request, kind: type[CompletionRequest]) -> CompletionResponse:
    service, id = request.app.state.service, request.path_params.get("session")
    wanted = check_request(await read(request, kind), service.names)
    return CompletionResponse(service, wanted, None if id is None else service.sessions.get(id, create=True))


async def generate(request: Request) -> GenerateResponse:
    service, wanted = request.app.state.service, await read(request, GenerateRequest)
    wanted.model = wanted.model or service.name
    return GenerateResponse(service, check_request(wanted, service.names), None)


async def models(request: Request):
    cards = {card["id"]: card for card in request.app.state.service.model_cards()}
    name = request.path_params.get("model")
    if name is None:
        return JSONResponse({"object": "list", "data": list(cards.values())})
    if name not in cards:
        raise unknown_model(name, list(cards))
    return JSONResponse(cards[name])


async def health(_):
    return JSONResponse({"status": "healthy"})


async def status(request: Request):
    return JSONResponse(request.app.state.service.status())


async def open_session(request: Request):
    session = request.app.state.service.open_session(**dict(await read(request, NewSession)))
    return JSONResponse({"id": session.id, "url": session.url}, 201)


async def list_sessions(request: Request):
    sessions = request.app.state.service.sessions.all()
    return JSONResponse({"sessions": [
        {"id": s.id, "url": s.url, "turns": len(s.turns), "cancelled": s.cancelled, "open_requests": len(s.open),
         "idle_s": round(time.monotonic() - s.used, 3)} for s in sessions]})


async def session(request: Request):
    """What was sampled in a session; DELETE collects it."""
    sessions, id = request.app.state.service.sessions, request.path_params["session"]
    session = sessions.end(id) if request.method == "DELETE" else sessions.get(id)
    rollouts = [{"prompt": r.prompt, "tokens": r.tokens, "mask": r.mask, **sampled_as(r)} for r in session.rollouts()]
    return JSONResponse({"id": id, "turns": len(session.turns), "cancelled": session.cancelled, "rollouts": rollouts})


async def load_weights(request: Request):
    service, wanted = request.app.state.service, await read(request, NewWeights)
    if service.options.weights is None:
        raise Refused(404, "this service loads no weights: start it with weights=FILE, or --weights FILE")
    path, policy = Path(service.options.weights), service.policy

    def load() -> int:
        if wanted.mapped:
            policy.version, service.mark = attach(path, policy, wanted.mark), wanted.mark
        else:
            policy.version, service.mark = read_weights(path, policy.model, wanted.mark, before=lambda: detach(policy))
        service.adapter = None
        return policy.version

    return JSONResponse({"policy_version": await service.between_completions(load)})


async def load_adapter(request: Request):
    """Put a saved LoRA adapter in the place of the one before; it is also served under its name."""
    service, new = request.app.state.service, await read(request, NewAdapter)
    if service.options.adapters is None:
        raise Refused(404, "this service loads no adapters: start it with adapters=FOLDER, or --adapters FOLDER")
    home = Path(service.options.adapters).resolve()
    folder = (home / new.lora_path).resolve()
    if not folder.is_relative_to(home):
        raise Refused(403, f"{new.lora_path[:200]!r} is outside the folder of adapters", "lora_path")
    if new.lora_name == service.name:
        raise Refused(400, f"{new.lora_name!r} is the served model: call the adapter something else", "lora_name")

    def load() -> int:
        if isinstance(service.policy.lock, SharedLock):
            raise ValueError("the weights are a trainer's own, which are mapped, and an adapter would change them there: load "
                             "whole weights first (SharedFile), or start a server of its own for the adapter")
        exchange(service.policy.model, folder)
        service.policy.version = service.policy.version + 1 if new.policy_version is None else new.policy_version
        service.adapter, service.mark = new.lora_name, folder.name
        return service.policy.version

    version = await service.between_completions(load)
    return PlainTextResponse(f"Success: LoRA adapter '{new.lora_name}' added successfully, as version {version}.")


async def refuse(request: Request, refused: Refused):
    """The answer in OpenAI's error shape."""
    request.app.state.service.counts["failed" if refused.status == 500 else "refused"] += 1
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}
    return JSONResponse(refused.body, refused.status, headers.get(refused.status))


async def refuse_route(request: Request, error: HTTPException):
    there = "/v1/chat/completions, /v1/completions, /v1/models and /generate"
    message = f"{request.method} {request.url.path[:80]}: {error.detail}; there are {there}"
    return await refuse(request, Refused(error.status_code, message))


async def fail(request: Request, error: Exception):
    return await refuse(request, Refused(500, f"the service failed: {type(error).__name__}: {error}"))


def application(service: Service):
    """The ASGI application of a service."""
    routes = [
        Route("/health", health), Route("/status", status), Route("/weights", load_weights, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]), Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/sessions", open_session, methods=["POST"]), Route("/sessions", list_sessions, methods=["GET"]),
        Route("/sessions/{session}", session, methods=["GET", "DELETE"])]
    for prefix in ("/v1", "/sessions/{session}/v1"):
        routes += [
            Route(prefix + "/models", models), Route(prefix + "/models/{model:path}", models),
            Route(prefix + "/chat/completions", partial(complete, kind=ChatRequest), methods=["POST"]),
            Route(prefix + "/completions", partial(complete, kind=TextRequest), methods=["POST"])]
    app = Starlette(routes=routes, exception_handlers={Refused: refuse, HTTPException: refuse_route, Exception: fail})
    app.state.service = service

    async def guarded(scope, receive, send):
        reason = unwelcome(Request(scope), service.options.token) if scope["type"] == "http" else None
        scope["app"] = app
        await (app if reason is None else await refuse(Request(scope), reason))(scope, receive, send)

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


async def read(request: Request, kind: type[BaseModel]) -> BaseModel:
    """A request's body; Refused for one that is no such object, and with 413 for one that is too large, once all of it has
    come, so that its sender hears of it."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= MAX_BODY:
                parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "the client left before its body had arrived") from None
    if size > MAX_BODY:
        raise Refused(413, f"the body has {size} bytes, and this service takes {MAX_BODY}")
    try:
        content = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:  # ValueError also of bytes that are no UTF-8 and of endless digits
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise Refused(400, f"the body must be a JSON object, got {type(content).__name__}")
    return validated(kind, {name: value for name, value in content.items() if value is not None})


@contextlib.asynccontextmanager
async def serve_policy(policy: Policy | Sampler, **options: Any) -> AsyncIterator[Service]:
    """Serve a policy, or a Sampler of one that others use too, until the block is left. `options` are those of
    `ServiceOptions`. Browsers are refused, since a page of any site could reach a loopback address."""
    options = ServiceOptions(**options)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server((options.host, options.port), family=family, backlog=512))
        if isinstance(policy, Sampler):
            sampler = policy
        else:
            sampler = await stack.enter_async_context(await asyncio.to_thread(Sampler, policy, seed=options.seed))
        host, port = listener.getsockname()[:2]
        service = await asyncio.to_thread(Service, sampler, f"http://{f'[{host}]' if ':' in host else host}:{port}", options)
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
