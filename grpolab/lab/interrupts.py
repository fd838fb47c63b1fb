"""An interrupt of a cell said in one line, in place of a page of CancelledError."""

from __future__ import annotations

import asyncio
import linecache
import signal
import socket
import threading
import weakref
from functools import cache

INTERRUPTS = (KeyboardInterrupt, asyncio.CancelledError)
_unfinished: weakref.WeakSet = weakref.WeakSet()  # dashboards of the cell that runs


def quiet_interrupts(shell) -> None:
    """From now on an interrupt of a cell is said in one line, in place of a page of CancelledError."""
    shell.set_custom_exc(INTERRUPTS, _say)
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
    heard, said = ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    before = signal.set_wakeup_fd(said.fileno(), warn_on_full_buffer=False)
    if before != -1:  # somebody is woken already
        signal.set_wakeup_fd(before)
        for end in ends:
            end.close()
        return ()
    loop.add_reader(heard, heard.recv, 4096)
    return ends


def watch_interrupts(live) -> None:
    """Until the cell ends, an interrupt of it is told by the dashboard too."""
    shell = live._shell
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


def _say(shell, kind, error, traceback, tb_offset=None) -> None:
    for live in list(_unfinished):
        print(live.stopped())
    if not _unfinished:
        print(_stopped_at(shell, traceback))


def _stopped_at(shell, traceback) -> str:
    """The line of the cell that was interrupted, for people; the frames below it are the package's."""
    while traceback is not None and traceback.tb_frame.f_globals is not shell.user_global_ns:
        traceback = traceback.tb_next
    if traceback is None:
        return "stopped; a rerun starts this cell over"
    line = linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno).strip()
    line = line if len(line) <= 60 else line[:59] + "…"
    return f"stopped at line {traceback.tb_lineno} ({line}); a rerun starts this cell over"
