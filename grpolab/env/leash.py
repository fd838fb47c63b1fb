"""Processes that die with their owner. Imports nothing of ours, so that it starts in milliseconds as a script of its own:

    python leash.py COMMAND ARGUMENT...

Standard input is the leash: the owner holds the other end of that pipe, and however the owner dies, the kernel closes
it. Then, or on SIGTERM, the command's whole process group is killed. If this process itself is killed, the kernel kills
the command (PR_SET_PDEATHSIG, Linux); elsewhere that one case is not covered, nor is a grandchild that leaves the group.
"""

import contextlib
import os
import select
import signal
import sys

# What a child process inherits of our environment variables: where things are and how text is written. Everything else may
# be a secret, and a child runs what strangers wrote.
INHERITED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP PYTHONPATH PYTHONHOME PYTHONUNBUFFERED "
    "PYTHONDONTWRITEBYTECODE VIRTUAL_ENV LD_LIBRARY_PATH DYLD_LIBRARY_PATH SYSTEMROOT OMP_NUM_THREADS MKL_NUM_THREADS "
    "OPENBLAS_NUM_THREADS CUDA_VISIBLE_DEVICES".split())


def environment(extra=None) -> dict:
    """The environment variables of a child: INHERITED and LC_* of ours, and `extra` ({name: text}) over them."""
    for name, text in (extra or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"env={{{name!r}: ...}}: names and values of environment variables are text")
    kept = {name: text for name, text in os.environ.items() if name in INHERITED or name.startswith("LC_")}
    return {**kept, **(extra or {})}


def fork() -> int:
    """os.fork, whose child leads a session and a process group of its own and is killed by the kernel when this process
    ends (Linux). Only for a process with one thread."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)
    return pid


def guard(pid: int, owner: int) -> int:
    """Wait until our child `pid` ends, the other end of the descriptor `owner` is closed, or SIGTERM; then kill the child's
    group. Returns the child's exit status, as a shell gives it."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the group; the owner decides
    signal.set_wakeup_fd(woken)
    poller = select.poll()
    poller.register(owner, 0)  # asks for nothing, so that only a hang-up is told
    poller.register(wake, select.POLLIN)
    status = None
    while status is None:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = code
            break
        ready = dict(poller.poll())
        if owner in ready or (wake in ready and signal.SIGTERM in os.read(wake, 4096)):
            break
    for kill, victim in ((os.killpg, pid), (os.kill, pid)):  # the second, should it not lead its group yet
        if kill is os.killpg or status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: all of the group are zombies (macOS)
                kill(victim, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1] if status is None else status)
    return code if code >= 0 else 128 - code


def main(command: list[str]) -> int:
    """Run `command` until it ends or the leash is cut; returns its exit status."""
    pid = fork()
    if pid == 0:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        try:
            os.execvp(command[0], command)
        except OSError as fault:
            print(f"{command[0]}: {fault.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    return guard(pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
