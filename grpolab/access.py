"""Who may talk to a server of ours: addresses that reach this machine alone, and bearer tokens."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether an address of ours reaches this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(hosts: Sequence[str]) -> bool:
    """Whether the Host headers of a request are one, and it names this machine. A page of another site whose name was made to
    lead here (DNS rebinding) has that name in it."""
    try:
        return len(hosts) == 1 and is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")
    except ValueError:  # no address: "[", for one
        return False


def check_token(token: str, where: str = "token") -> str:
    """`token`, if it can stand in an HTTP header; the error does not show it."""
    if not token or not all("!" <= letter <= "~" for letter in token):
        what = "is empty: then anybody is let in" if not token else "holds spaces, line breaks or letters beyond ASCII"
        raise ValueError(f"the bearer token of {where} {what}; write one line of printable ASCII without spaces")
    return token


def check_host(host: str, token: str | None) -> None:
    """ValueError for an address that other machines reach, without a token."""
    if token is not None:
        check_token(token)
    elif not is_loopback(host):
        raise ValueError(f"host={host!r} is reachable from other machines: pass a token (token=... in Python, --token-file "
                         "on the command line), or stay on 127.0.0.1")


def shows(token: str, authorization: Sequence[str]) -> bool:
    """Whether the Authorization headers of a request are one, and it shows the token; compared in constant time."""
    sent = authorization[0].encode("utf-8", "replace") if len(authorization) == 1 else b""
    return hmac.compare_digest(sent, f"Bearer {token}".encode())
