"""One MiniStack, as a process: `python simulator.py SERVICE...` prints its address, http://127.0.0.1:PORT, once it answers.

It listens on loopback only, and before MiniStack is loaded an audit hook (PEP 578) forbids what a simulated service could do on
the host: connections to any address (an SNS subscription posts to one), name look-ups, processes, and files opened for
writing. Imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = frozenset(("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto",
                    "socket.sendmsg", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
                    "os.forkpty", "os.kill", "os.killpg", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink",
                    "os.link", "os.truncate", "os.chmod", "os.chown", "pty.spawn", "shutil.rmtree"))
ENVIRONMENT = {
    "GATEWAY_PORT": "4566",  # in the addresses that it writes (queue URLs): the same in every process and run
    "MINISTACK_REGION": "us-east-1", "IOT_MTLS_ENABLED": "0", "SFTP_ENABLED": "0", "PERSIST_STATE": "0", "S3_PERSIST": "0",
    "SFN_WAIT_SCALE": "0", "LOG_LEVEL": "ERROR", "MINISTACK_WORKER_THREADS": "4", "DOCKER_HOST": "unix:///nowhere",
}

USAGE = "/_grpolab/usage"  # GET: as JSON, the (service, region) pairs of requests since the last wipe but one
INSPECTOR = "grpolab-inspector"  # in the User-Agent of those who only look: their requests do not count
_RESET = "/_ministack/reset"


class Forbidden(PermissionError):
    """The simulator may not do that on this machine."""


def audit(event: str, arguments: tuple) -> None:
    """The audit hook: raises Forbidden for what is in FORBIDDEN, and for a file opened for writing other than /dev/null."""
    if event in FORBIDDEN:
        raise Forbidden(f"the simulator may not {event} {arguments!r:.100}")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES and arguments[0] != os.devnull:
        raise Forbidden(f"the simulator may not write to {arguments[0]!r:.100}")


def signed_for(headers: dict[bytes, bytes]) -> tuple[str, str] | None:
    """The (service, region) that a request was signed for; None for an unsigned one, and for one that only looks."""
    scope = headers.get(b"authorization", b"").decode("latin-1").partition("Credential=")[2].split("/")
    return (scope[3], scope[2]) if len(scope) > 3 and INSPECTOR.encode() not in headers.get(b"user-agent", b"") else None


def main(services: list[str]) -> None:
    os.environ.update(ENVIRONMENT, SERVICES=",".join(services))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)  # connections wait from now on
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    sys.dont_write_bytecode = True
    tempfile.tempdir = "/nowhere"  # else its modules try to write where one could be
    sys.addaudithook(audit)

    import asyncio

    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from ministack.app import app

    used: list[set] = [set(), set()]  # before the last wipe, and since: after a wipe one looks where something was

    async def application(scope: Any, receive: Any, send: Any) -> None:
        """MiniStack, beside it USAGE, and our first line once it has started."""
        path = scope.get("path")
        if path == USAGE:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": json.dumps(sorted(used[0] | used[1])).encode()})
            return
        if path == _RESET:
            used[:] = [used[1], set()]
        elif signed := signed_for(dict(scope.get("headers", ()))):
            used[1].add(signed)

        async def sending(message: Any) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                print(address, flush=True)

        await app(scope, receive, sending if scope["type"] == "lifespan" else send)

    config = Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.keep_alive_timeout = 3600  # s; a session's connection waits while its policy thinks
    config.loglevel = "ERROR"
    asyncio.run(serve(application, config))


if __name__ == "__main__":
    main(sys.argv[1:])
