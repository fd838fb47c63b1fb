"""An interrupt of a notebook cell as one line: where it stopped, and where a rerun of the cell goes on."""

from __future__ import annotations

import asyncio
import linecache
import signal
import socket
import threading
import weakref
from functools import cache

from IPython import get_ipython

from grpolab.lab.metrics import short

INTERRUPTS = (KeyboardInterrupt, asyncio.CancelledError)
_unfinished: weakref.WeakSet = weakref.WeakSet()  # displays of the cell that runs


def quiet_interrupts(shell) -> None:
    """From now on an interrupt of a cell prints one line instead of a traceback of CancelledError."""
    shell.set_custom_exc(INTERRUPTS, _print_interrupt)
    _wake_at_signals()


@cache  # once a process, and the sockets are kept
def _wake_at_signals() -> tuple[socket.socket, ...]:
    """ipykernel tells its loop of an interrupt without waking it, so a cell that only waits would wait to its end."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return ()
    if threading.current_thread() is not threading.main_thread():
        return ()
    reader, writer = ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if previous != -1:  # another library wakes the loop
        signal.set_wakeup_fd(previous)
        for end in ends:
            end.close()
        return ()
    loop.add_reader(reader, reader.recv, 4096)
    return ends


def report_interrupts(live) -> None:
    """Until the cell ends, an interrupt of it prints `live.stopped()`; `live` has `done` and `steps`."""
    shell = get_ipython()
    if shell is None:
        return
    if live.done >= live.steps:
        _unfinished.discard(live)
        return
    if not _unfinished and shell.custom_exceptions in ((), INTERRUPTS):
        always = shell.custom_exceptions == INTERRUPTS
        quiet_interrupts(shell)

        def end_of_cell(*_):
            shell.events.unregister("post_run_cell", end_of_cell)
            if not always:
                shell.set_custom_exc((), None)
            _unfinished.clear()

        shell.events.register("post_run_cell", end_of_cell)
    _unfinished.add(live)


def in_progress(live) -> bool:
    """Whether the cell of this display still runs, and the display has more to show."""
    return live in _unfinished


def _print_interrupt(shell, kind, error, traceback, tb_offset=None) -> None:
    for live in list(_unfinished):
        print(live.stopped())
    if _unfinished:
        return
    while traceback is not None and traceback.tb_frame.f_globals is not shell.user_global_ns:  # the frames above are IPython's
        traceback = traceback.tb_next
    at = ""
    if traceback is not None:
        line = linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno).strip()
        at = f" at line {traceback.tb_lineno} ({short(line, 60)})"
    print(f"stopped{at}; a rerun starts this cell over")
