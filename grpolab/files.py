"""Atomic writes: a file is either the old one or the whole new one, whatever happens in between. And a lock on a folder."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder go unnoticed there
    fcntl = None

# In the repository data/ lies beside the package; an installed wheel carries it inside.
DATA = next((d for d in (Path(__file__).parent / "data", Path(__file__).parent.parent / "data") if d.is_dir()), None)


def data_path(*parts: str) -> Path:
    """A shipped file; raises FileNotFoundError naming it."""
    path = DATA.joinpath(*parts) if DATA else Path("data", *parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: it belongs to the repository, so fetch a whole copy of grpolab")
    return path


def atomic_write(path: str | Path, content: str | bytes) -> Path:
    """Write `content` beside `path`, flush it to the disk, then rename it into place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A fresh folder to fill; it takes the place of `path` when the block ends well, and vanishes when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                with open(file, "rb") as f:
                    os.fsync(f.fileno())
                os.chmod(file, 0o644)  # safetensors writes files that only their owner may read
        os.chmod(partial, 0o755)
        old = path.with_name(f".{path.name}.old.partial")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.rename(path, old)
        os.rename(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder, so that a kill leaves it whole or not at all: under another name, .<name>.gone.partial, at most."""
    gone = path.with_name(f".{path.name}.gone.partial")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def append_line(path: Path, line: str) -> None:
    append_bytes(path, line.encode(), "a row of metrics")


def append_bytes(path: Path, data: bytes, what: str) -> None:
    """Add `data` in one write; a disk that takes only a part of it is rid of that part."""
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, f"no space left for {what}", str(path))


HELD = -1
_locks: set[int] = set()  # the open folders that this process has locked


def lock_folder(folder: Path) -> int | None:
    """An open file that locks the folder, HELD where another has it, None where locks do not exist."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return HELD if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    _locks.add(handle)
    return handle


def unlock_folder(handle: int | None) -> None:
    if handle in _locks:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child between fork and exec still holds a copy of the file, and with it the lock
        _locks.discard(handle)
        os.close(handle)


def _unlock_all() -> None:
    """A forked child gives up its copies, or the parent's locks would outlive the parent."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_all)
