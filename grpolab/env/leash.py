"""Run a command that dies with its owner. Started as a script of its own by `ProcessBackend`; imports nothing of ours.

    python leash.py COMMAND ARGUMENT...

Standard input is the leash: the owner holds the other end of that pipe, and however the owner dies, the kernel closes
it. Then, or on SIGTERM, the command's whole process group is killed. If this process itself is killed, the kernel kills
the command (PR_SET_PDEATHSIG, Linux); elsewhere that one case is not covered.
"""

import os
import select
import signal
import subprocess
import sys


def die_with_parent() -> None:
    """In the child, before exec: ask for SIGKILL at the parent's death. Safe here, for this process has one thread."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def main(command: list[str]) -> int:
    """Run `command` until it ends or the leash is cut; returns its exit status."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the group; the owner decides
    signal.set_wakeup_fd(woken)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
    try:
        while child.poll() is None:
            ready, _, _ = select.select([0, wake], [], [])
            if 0 in ready and not os.read(0, 4096):
                break
            if wake in ready and signal.SIGTERM in os.read(wake, 4096):
                break
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
