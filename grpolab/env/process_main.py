"""The process of one session's environment: `python process_main.py DESCRIPTOR`, started by `process.Child`.

The descriptor is a socket to the server and the only one inherited beside the standard ones. On it go JSON messages behind
their length in 8 bytes; a reply is the name of a fault (or nothing), a line break and the reply's text. The process is two:
the first guards the second, so that it and all that it started die when the server closes the socket, or dies.
"""

import json
import os
import sys


def read(descriptor: int) -> bytes:
    """The next message's bytes; raises EOFError at the end."""
    return _read(descriptor, int.from_bytes(_read(descriptor, 8), "big"))


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, min(size - len(data), 2**20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def write(descriptor: int, text: str, fault: str) -> None:
    data = memoryview(f"{fault}\n{text}".encode(errors="replace"))
    data = memoryview(len(data).to_bytes(8, "big") + data)
    while data:
        data = data[os.write(descriptor, data):]


def limit_memory(size: int) -> None:
    """Allocations beyond `size` bytes of data fail: MemoryError in Python. On Linux only private memory counts: neither the
    code's own pages nor mappings that are shared, and each process that this one starts has `size` to itself."""
    import resource

    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(kind, (size, size))


def serve(descriptor: int) -> None:
    """Make the environment that the first message describes, and answer all that follow."""
    description = json.loads(read(descriptor))
    if description["memory"] is not None:
        limit_memory(description["memory"])
    sys.path[:] = description["path"]
    import threading
    from functools import partial

    from grpolab.env.worker import Worker, load_factory

    def make():
        factory = load_factory(description["factory"])
        return factory(*description["arguments"])

    answer = partial(write, descriptor)
    worker = Worker(make, description["name"], description["latency"])
    if description["check"]:
        try:
            load_factory(description["factory"])
        except BaseException as fault:  # noqa: BLE001  KeyboardInterrupt, say, which a module may raise as well
            answer(str(fault) if isinstance(fault, ValueError) else repr(fault), type(fault).__name__)
        else:
            answer("", "")
        return

    def listen() -> None:
        try:
            while True:
                kind, data = json.loads(read(descriptor))
                if kind == "cancel":
                    worker.cancel()
                elif kind == "stop":
                    worker.stop()
                else:
                    worker.post(kind, data, answer)
        except (EOFError, OSError):  # the server has hung up, and the guard kills us
            pass

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
