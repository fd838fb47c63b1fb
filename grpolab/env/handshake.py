"""What a client's HTTP request asks of the server before there is a session: its token, its patience, its company."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Response

from grpolab.access import shows


def is_told(token: str, headers: Headers) -> bool:
    """Whether a request shows the token, in its only Authorization header."""
    return shows(token, headers.get_all("Authorization"))


def asked_wait(headers: Headers) -> float:
    """The seconds of `Prefer: wait=SECONDS` (RFC 7240, section 4.3), 0 without."""
    found = re.search(r"(?:^|[,;\s])wait=([0-9]{1,6}(?:\.[0-9]{1,6})?)(?![0-9.])", ", ".join(headers.get_all("Prefer")))
    return float(found[1]) if found else 0.0


def asked_group(headers: Headers, connection: ServerConnection) -> tuple[Any, int]:
    """(key, size) of the sessions that get their slots together: those of X-Session-Group, or this one alone."""
    told = headers.get_all("X-Session-Group")
    if not told:
        return connection, 1
    found = re.fullmatch(r"([!-~]{1,64}) ([1-9][0-9]{0,5})", told[0])
    if found is None or len(told) > 1:
        raise ValueError(f"X-Session-Group: {told[0][:80]!r}: write a name of at most 64 characters, a space, and how many "
                         "sessions it has")
    return found[1], int(found[2])


def json_response(status: int, body: dict, *headers: tuple[str, str]) -> Response:
    """An answer in place of a WebSocket handshake, after which the connection is closed."""
    text = json.dumps(body).encode()
    fields = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(text))), ("Connection", "close"),
                      *headers])
    return Response(status, HTTPStatus(status).phrase, fields, text)
