"""The options of both servers: where they listen, and which token they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpolab.access import check_token, is_loopback
from grpolab.cli import UsageError


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"  # address to listen on; any but loopback needs --token-file
    port: int = 8000  # port to listen on; 0 takes a free one and prints it
    token_file: Path | None = None  # file that holds the bearer token which clients must send (an OpenAI client's api_key)

    def token(self) -> str | None:
        """The token of the file; UsageError for an address that other machines reach without one."""
        if self.token_file is not None:
            return check_token(self.token_file.read_text("utf-8", "replace").strip(), str(self.token_file))
        if not is_loopback(self.host):
            raise UsageError(f"--host {self.host} is open to other machines: add --token-file FILE, or stay on 127.0.0.1")
        return None
