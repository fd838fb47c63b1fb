"""One MiniStack, as a process: `python simulator.py SERVICE...` prints its address, http://127.0.0.1:PORT.

It listens on loopback only, and before MiniStack is loaded an audit hook (PEP 578) forbids what a simulated service could do on
the host: connections to any address (an SNS subscription posts to one), name look-ups, processes, and files opened for
writing. Imports nothing of ours.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile

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


class Forbidden(PermissionError):
    """The simulator may not do that on this machine."""


def audit(event: str, arguments: tuple) -> None:
    """The audit hook: raises Forbidden for what is in FORBIDDEN, and for a file opened for writing other than /dev/null."""
    if event in FORBIDDEN:
        raise Forbidden(f"the simulator may not {event} {arguments!r:.100}")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES and arguments[0] != os.devnull:
        raise Forbidden(f"the simulator may not write to {arguments[0]!r:.100}")


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

    config = Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.keep_alive_timeout = 3600  # s; a session's connection waits while its policy thinks
    config.loglevel = "ERROR"
    print(address, flush=True)  # a request waits until it answers
    asyncio.run(serve(app, config))


if __name__ == "__main__":
    main(sys.argv[1:])
