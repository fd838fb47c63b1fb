"""Calls to a server that speaks JSON over HTTP or HTTPS, with an error that names it for whatever goes wrong."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx2

from grpolab.access import check_token


class RemoteError(RuntimeError):
    """A server could not be reached, refused, or gave an answer that cannot be trained on. The text says which."""


class NoAnswer(RemoteError):
    """The server is not there, or left without a word: it may come back."""


class Caller:
    """Calls of one server, each over a connection of its own, so that nothing has to be closed. `token` is sent as a bearer
    token; no call waits longer than `timeout` seconds for the next byte."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 300.0):
        try:
            parts = urlsplit(url)
            right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0  # a port that is none raises
        except ValueError:
            right = False
        if not right:
            raise ValueError(f"{url!r} is no address of a server: write http://host:port")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._headers = {"Authorization": f"Bearer {check_token(token)}"} if token else {}
        self._tls = httpx2.create_ssl_context() if parts.scheme == "https" else False  # 0.1 s, which plain HTTP need not pay

    async def ask(self, method: str, path: str, body: Any = None) -> dict:
        """The JSON object that a request is answered with, {"text": ...} for an answer that is none; RemoteError for a refusal.
        Cancelling the await closes the connection, so that the server hears of it."""
        at = self.url + path
        try:
            async with httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=self.timeout) as client:
                answer = await client.request(method, at, json=body, headers=self._headers)
        except httpx2.HTTPError as error:
            unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            remedy = ("is it running?" if unreached else
                      f"it took the request and did not answer within {self.timeout:g} s: ask for less at a time, or give it "
                      "a longer timeout" if isinstance(error, httpx2.TimeoutException) else "the connection ended")
            raise NoAnswer(f"{at} gave no answer ({type(error).__name__}: {error}): {remedy}") from error
        try:
            content = answer.json()
        except (ValueError, RecursionError):
            content = answer.text[:200]
        if answer.is_success:
            return content if isinstance(content, dict) else {"text": content}
        reason = content.get("error", content) if isinstance(content, dict) else content
        reason = reason.get("message", reason) if isinstance(reason, dict) else reason
        raise RemoteError(f"{at} refused with {answer.status_code}: {reason}")
