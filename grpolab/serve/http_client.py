"""Calls to a server that speaks JSON over HTTP, from coroutines, with an error that names it for whatever goes wrong."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit


class RemoteError(RuntimeError):
    """A server could not be reached, refused, or gave an answer that cannot be trained on. The text says which."""


class Caller:
    """Calls of one server. `token` is sent as a bearer token; no call takes longer than `timeout` seconds without a byte."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 300.0):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://host:port")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.url, self.token, self.timeout = url.rstrip("/"), token, timeout
        self._host, self._port, self._path = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self._threads = ThreadPoolExecutor(32, "grpolab-calls")

    async def ask(self, method: str, path: str, body: Any = None, *, text: bool = False) -> dict:
        """The JSON object that a request is answered with; RemoteError for anything else. With `text`, an answer that is no
        object is {"text": ...}. Cancelling the await closes the connection, so that the server hears of it."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout)
        loop, left = asyncio.get_running_loop(), threading.Event()
        try:
            return await loop.run_in_executor(self._threads, self._exchange, connection, left, method, path, body,
                                              text)
        except asyncio.CancelledError:
            left.set()  # before it looks whether there is a socket: the thread looks the other way round
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _exchange(self, connection: http.client.HTTPConnection, left: threading.Event, method: str, path: str,
                  body: Any, text: bool) -> dict:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        try:
            connection.connect()
            if left.is_set():
                raise ConnectionAbortedError("the caller has left")
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"{self.url}{path} gave no answer ({type(error).__name__}: {error}): is it running?") from error
        finally:
            connection.close()
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            content = raw[:200].decode("utf-8", "replace")
        if text and answer.status == 200 and not isinstance(content, dict):
            return {"text": content}
        if answer.status != 200 or not isinstance(content, dict):
            said = content.get("error", content) if isinstance(content, dict) else content
            raise RemoteError(f"{self.url}{path} refused with {answer.status}: "
                              f"{said.get('message', said) if isinstance(said, dict) else said}")
        return content
