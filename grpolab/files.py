"""Atomic writes: a file is either the old one or the whole new one, whatever happens in between. And a lock that ends with
its process."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder go unnoticed there
    fcntl = None

# Files of a saved model that another saving may lack: the weights' shards, an adapter's, a run's model card.
MODEL_FILES = (
    "model*.safetensors", "adapter_model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_config.json", "provenance.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json",
    "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "*.jinja", "additional_chat_templates",
    "README.md", "curve.png", ".DS_Store", ".ipynb_checkpoints")
DPI = 100  # at which a figure has its nominal size in pixels

# In the repository data/ lies beside the package; an installed wheel carries it inside.
DATA = next((d for d in (Path(__file__).parent / "data", Path(__file__).parent.parent / "data") if d.is_dir()), None)


def data_path(*parts: str) -> Path:
    """A shipped file; raises FileNotFoundError naming it."""
    path = DATA.joinpath(*parts) if DATA else Path("data", *parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: it belongs to the repository, so fetch a whole copy of grpolab")
    return path


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room: of the disk, of a quota, or of what a process may write."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing name the path. safetensors raises a type of its own, of which an OSError is made."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except SafetensorError as error:
        number = re.search(r"(?:os error|code:) (\d+)", str(error))  # the latter as safetensors 0.4 says it
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def append(path: Path, text: str) -> None:
    """Add text to a file: all of it, or an OSError, and the file is as it was."""
    with naming(path), open(path, "r+b", buffering=0) as file:
        with suppress(OSError):  # where the file system knows locks; no other process then adds in between
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        try:
            left = memoryview(text.encode())
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)
            raise


def atomic_write(path: str | Path, content: str | bytes) -> Path:
    """Write `content` beside `path`, flush it to the disk, then rename it into place."""
    given, path = Path(path), Path(path).resolve()  # a symbolic link stays
    mode = path.stat().st_mode & 0o777 if path.is_file() else 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, mode)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return given


@contextmanager
def atomic_folder(path: str | Path, ours: Iterable[str] | None = None) -> Iterator[Path]:
    """A fresh folder to fill; it takes the place of `path` when the block ends well, and vanishes when it does not. With
    `ours`, patterns of file names, it is one of a saved model, and ValueError says what else the folder at `path` holds."""
    path = Path(path).resolve()  # a symbolic link stays, and what it points to is replaced
    if path.exists() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, "a file is there, and a folder would be written", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        with naming(path):
            yield partial
        if ours is not None:
            _refuse_others(path, partial, ours)
        for file in partial.rglob("*"):
            if file.is_file():
                with open(file, "rb") as f:
                    os.fsync(f.fileno())
                os.chmod(file, 0o644)  # safetensors writes files that only their owner may read
        os.chmod(partial, 0o755)
        old = _renamed(path)
        try:
            os.rename(partial, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.rename(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _refuse_others(path: Path, partial: Path, ours: Iterable[str]) -> None:
    """ValueError where `path` holds what has no counterpart in `partial` and no name of ours, or is no saved model."""
    parts = sorted(path.iterdir()) if path.is_dir() else []
    weights = any(path.glob("*model*.safetensors")) and any(path.glob("*config.json"))
    others = [part.name for part in parts
              if not weights or not (partial / part.name).exists() and not any(part.match(name) for name in ours)]
    if others:
        raise ValueError(f"{path} holds {', '.join(others[:3])}{', ...' * (len(others) > 3)}, and saving replaces the whole "
                         "folder: name a new or an empty one, or one that holds a saved model alone")


def remove_folder(path: Path) -> None:
    """Remove a folder, so that a kill leaves it whole or not at all: under another name, .<name>.removed.partial, at most."""
    shutil.rmtree(_renamed(path, "removed"), ignore_errors=True)


def restore_folder(gone: Path) -> None:
    """Give a folder of which a kill left only the other name, before the new one was in its place, its name again."""
    path = gone.with_name(gone.name[1:].removesuffix(".gone.partial"))
    if gone.name.endswith(".gone.partial") and not path.exists():
        os.rename(gone, path)


def _renamed(path: Path, why: str = "gone") -> Path:
    """The other name of a folder that is to be removed, or whose place another takes."""
    gone = path.with_name(f".{path.name}.{why}.partial")
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        os.rename(path, gone)
    return gone


_locked: set[Path] = set()  # by this process


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which is made and holds the process's id; BlockingIOError, with that id, while another loop of
    this process or another process has it. Where the file system knows no locks, it is of this process alone."""
    if path.resolve() in _locked:
        raise BlockingIOError(os.getpid())
    with open(path, "a+") as file:
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                file.seek(0)
                raise BlockingIOError(file.read()) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        _locked.add(path.resolve())
        try:
            yield
        finally:
            _locked.discard(path.resolve())


def source_commit() -> str:
    """The commit of the source tree that this package is imported from, with a + where the tree differs from it; "" where it is
    installed from a wheel."""
    source = Path(__file__).parents[1]
    try:
        done = subprocess.run(["git", "-C", str(source), "describe", "--always", "--dirty=+", "--exclude=*"],
                              capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if (source / ".git").exists() else ""


def png(figure, scale: float = 2.0) -> bytes:
    """A matplotlib figure as PNG at `scale` times its size, in 64 colours."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=scale * DPI, bbox_inches="tight", facecolor="white")
    return fewer_colours(drawn.getvalue())


def fewer_colours(image: bytes) -> bytes:
    """A PNG in 64 colours; as it was where that is smaller."""
    from PIL import Image  # matplotlib brings it; a run without figures does not load it

    small = BytesIO()
    Image.open(BytesIO(image)).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return min(image, small.getvalue(), key=len)
