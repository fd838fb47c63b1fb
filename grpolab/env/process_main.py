"""The process of one session's environment: `python process_main.py DESCRIPTOR`, started by `process.Child`.

The descriptor is a socket to the server and the only one inherited beside the standard ones. On it go JSON messages, one a
line: what to make, then [kind, data] of each call, and back [text, fault] of each reply. The process is two: the first
guards the second, so that it and all that it started die when the server closes the socket, or dies.
"""

import contextlib
import json
import os
import socket
import sys


def limit_memory(size: int) -> None:
    """Allocations beyond `size` bytes of data fail: MemoryError in Python. On Linux only private memory counts: neither the
    code's own pages nor mappings that are shared, and each process that this one starts has `size` to itself."""
    import resource

    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(kind, (size, size))


def serve(descriptor: int) -> None:
    """Make the environment that the first message describes, and answer all that follow."""
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    description = json.loads(stream.readline())
    if description["memory"] is not None:
        limit_memory(description["memory"])
    sys.path[:] = description["path"]
    import threading

    from grpolab.env.worker import Worker, load_factory

    def answer(text: str, fault: str) -> None:
        stream.write(json.dumps([text, fault]).encode() + b"\n")
        stream.flush()

    worker = Worker(lambda: load_factory(description["factory"])(*description["arguments"]), description["name"])

    def listen() -> None:
        with contextlib.suppress(OSError):  # the server has hung up, and the guard kills us
            for line in stream:
                kind, data = json.loads(line)
                if kind in ("cancel", "stop"):
                    getattr(worker, kind)()
                else:
                    worker.post(kind, data, answer)

    threading.Thread(target=listen, daemon=True).start()
    worker.run()


def main(descriptor: int) -> int:
    # Imported here, for `multiprocessing` imports this file once more, where its folder is on no path.
    from child_processes import fork, guard

    os.set_inheritable(descriptor, False)
    pid = fork()
    if pid:
        return guard(pid, descriptor)
    serve(descriptor)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
