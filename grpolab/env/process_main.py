"""The process of one session's environment: `python process_main.py DESCRIPTOR`, started by `process.Child`.

The descriptor is a socket to the server and the only one inherited beside the standard ones. On it go JSON messages, one a
line: what to make, then [kind, data] of each call, and back [text, fault] of each reply.
"""

import json
import os
import socket
import sys
import threading


def main(descriptor: int) -> None:
    """Make the environment that the first message describes, and answer all that follow."""
    os.set_inheritable(descriptor, False)
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    description = json.loads(stream.readline())
    if size := description["memory"]:  # beyond it allocations fail: MemoryError in Python
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    sys.path[:] = description["path"]
    from grpolab.env.worker import Worker, load_factory

    worker = Worker(lambda: load_factory(description["factory"])(**description["arguments"]), description["name"])

    def answer(*reply: str) -> None:
        stream.write(json.dumps(reply).encode() + b"\n")
        stream.flush()

    def listen() -> None:
        for line in stream:
            kind, data = json.loads(line)
            if kind == "cancel":
                worker.cancel()
            else:
                worker.submit(kind, data, answer)

    threading.Thread(target=listen, daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
