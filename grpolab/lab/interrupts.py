"""An interrupt of a notebook cell as one line: where it stopped, and where a rerun of the cell goes on.

Apart from the dashboard, since a cell without one is interrupted, too: `plots.use_style` asks for it.
"""

from __future__ import annotations

import asyncio
import linecache
import signal
import socket
import weakref
from contextlib import suppress
from functools import cache
from traceback import walk_tb

from grpolab.lab.metrics import short

INTERRUPTS = (KeyboardInterrupt, asyncio.CancelledError)
_displays: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # dashboard -> number of the cell that updated it last


def quiet_interrupts(shell, live=None) -> None:
    """From now on an interrupt prints one line instead of a traceback of CancelledError: that of `live.stopped()` where it
    ends the cell of a display that has more to show."""
    if shell.custom_exceptions != INTERRUPTS:
        shell.set_custom_exc(INTERRUPTS, _print_interrupt)
        _wake_at_signals()
    if live is not None:
        _displays[live] = shell.execution_count


@cache  # once a process, and the sockets live as long
def _wake_at_signals() -> tuple[socket.socket, ...]:
    """ipykernel tells its loop of an interrupt without waking it, so a cell that only waits would wait to its end."""
    reader, writer = ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    with suppress(RuntimeError, ValueError):  # no loop runs here, or not in the main thread
        asyncio.get_running_loop().add_reader(reader, reader.recv, 4096)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    return ends


def _print_interrupt(shell, kind, error, traceback, tb_offset=None) -> None:
    in_cell = [live for live, cell in _displays.items() if cell == shell.execution_count and live.done < live.steps]
    for live in in_cell:
        print(live.stopped())
    if in_cell:
        return
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback) if frame.f_globals is shell.user_global_ns]
    at = f" at line {lines[0][1]} ({short(linecache.getline(*lines[0]).strip(), 60)})" if lines else ""
    print(f"stopped{at}; a rerun starts this cell over")
