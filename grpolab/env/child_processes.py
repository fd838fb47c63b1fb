"""Processes that die with their owner: `start` runs a command under a guard, which is this file as a script.

    python child_processes.py COMMAND ARGUMENT...

Standard input ties the guard to its owner, who holds the other end of that pipe: however the owner dies, the kernel closes
it. Then, or on SIGTERM, the command's process group is killed, and on Linux also whatever has left that group and lost its
parent (a daemon): it becomes the guard's child (PR_SET_CHILD_SUBREAPER). If the guard itself is killed, the kernel kills the
command (PR_SET_PDEATHSIG, Linux). On macOS what leaves the group outlives it. Nothing of ours is imported: it starts in
milliseconds.
"""

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading

# What a child process inherits of our environment variables: where things are and how text is written. Everything else may
# be a secret, and a child runs what strangers wrote.
INHERITED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP PYTHONPATH PYTHONHOME PYTHONUNBUFFERED "
    "PYTHONDONTWRITEBYTECODE VIRTUAL_ENV LD_LIBRARY_PATH DYLD_LIBRARY_PATH SYSTEMROOT OMP_NUM_THREADS MKL_NUM_THREADS "
    "OPENBLAS_NUM_THREADS CUDA_VISIBLE_DEVICES".split())


def environment(extra=None) -> dict:
    """The environment variables of a child: INHERITED and LC_* of ours, and `extra` ({name: text}) over them."""
    inherited = {name: text for name, text in os.environ.items() if name in INHERITED or name.startswith("LC_")}
    return {**inherited, **(extra or {})}


def start(command, extra=None, **options) -> subprocess.Popen:
    """Start `command` under a guard, with the environment variables of `environment(extra)`; `options` are those of Popen. The
    process that is returned is the guard."""
    return subprocess.Popen([sys.executable, "-I", "-S", __file__, *command], stdin=subprocess.PIPE, start_new_session=True,
                            env=environment(extra), **options)


def start_server(command, extra=None, seconds=10.0, **options) -> tuple[subprocess.Popen, str]:
    """`start` for a server that prints its address as its first line, such as a database of an environment's own: (guard,
    address). RuntimeError where there is none within `seconds`; what it writes to stderr goes where ours does, or where
    `stderr=` says."""
    guard = start(command, extra, stdout=subprocess.PIPE, text=True, errors="replace", **options)
    printed = queue.SimpleQueue()

    def drain() -> None:  # a full pipe would block it
        printed.put(guard.stdout.readline().strip())
        for _ in guard.stdout:
            pass

    threading.Thread(target=drain, daemon=True).start()
    try:
        address = printed.get(timeout=seconds)
    except queue.Empty:
        address = None
    if not address:
        stop(guard)
        raise RuntimeError(f"{command[0]} printed no address {'first' if address == '' else f'within {seconds:g} s'}; what "
                           "it wrote to stderr is in the log")
    return guard, address


def stop(guard: subprocess.Popen) -> None:
    """Kill the command of a guard and everything in its group; returns when it is gone."""
    with contextlib.suppress(OSError):
        guard.stdin.close()
    try:
        guard.wait(5.0)
    except subprocess.TimeoutExpired:  # stuck, or stopped: the kernel kills the command with it
        guard.kill()
        guard.wait()


def guard(pid: int) -> int:
    """Wait until our child `pid` ends, the owner closes our standard input, or SIGTERM; then kill the child's group and what
    has become ours. SIGINT is handed on to the child. Returns the child's exit status, as a shell gives it."""
    def hand_on(*_):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, hand_on)  # of the owner: a terminal's does not reach us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.set_wakeup_fd(woken)
    poller = select.poll()
    poller.register(0, 0)  # asks for nothing, so that only a hang-up is reported
    poller.register(wake, select.POLLIN)
    status = None
    while (status := _reap(pid)) is None:
        ready = dict(poller.poll())
        if 0 in ready or (wake in ready and signal.SIGTERM in os.read(wake, 4096)):
            break
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: all of the group are zombies (macOS)
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # what the killed leave to us is killed too, until there is nothing
        while True:
            for child in {pid, *_children()} if status is None else _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            ended, ending = os.waitpid(-1, 0)
            status = ending if ended == pid else status
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _reap(pid: int) -> int | None:
    """Take leave of every child that has ended; the status of `pid` if it is among them."""
    status, ended = None, -1
    with contextlib.suppress(ChildProcessError):
        while ended:
            ended, code = os.waitpid(-1, os.WNOHANG)
            if ended == pid:
                status = code
    return status


def _children() -> list[int]:
    """The processes whose parent we are (Linux: elsewhere none can become ours)."""
    children, me = [], str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError):  # it has just ended
            with open(f"/proc/{name}/stat", errors="replace") as stat:
                if stat.read().rpartition(")")[2].split()[1] == me:
                    children.append(int(name))
    return children


def main(command: list[str]) -> int:
    """Run `command` in a session and a group of its own until it ends or the owner is gone; returns its exit status."""
    me, linux = os.getpid(), sys.platform == "linux"
    if linux:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what it leaves behind becomes ours

    unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # one that comes now waits until it can be handed on

    def end_with_us() -> None:  # in the child, before it becomes the command
        signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
        if linux:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != me:
                os._exit(1)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False, start_new_session=True,
                                 preexec_fn=end_with_us)
    except OSError as fault:
        print(f"{command[0]}: {fault.strerror}", file=sys.stderr, flush=True)
        return 127
    return guard(child.pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
