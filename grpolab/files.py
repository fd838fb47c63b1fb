"""Atomic writes: a file is either the old one or the whole new one, whatever happens in between."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
