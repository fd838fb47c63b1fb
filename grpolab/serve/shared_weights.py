"""Weights from a trainer to a sampler in another process: one safetensors file that both map (on /dev/shm it is memory).

A version counter makes a torn read impossible to miss: it is odd while the trainer writes, a reader copies between two looks
at it, and the copy counts only if both looks gave the same even number and the checksum that the trainer left agrees. The
reader copies into memory of its own first, so that a model never holds half of an update.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

STATE = "grpolab.state"  # int64: counter, policy version, checksum
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
READ = 30.0  # s; how long a reader tries to find the file at rest


class Torn(RuntimeError):
    """The file was never found at rest, or what it holds at rest is not what was asked for."""


def parameters(model) -> dict[str, torch.Tensor]:
    """What travels: every parameter once, tied ones under one name."""
    return {name: p.detach() for name, p in model.named_parameters()}


class SharedWeights:
    """The parameters of a model in a mapped safetensors file; `write` in the trainer, `read` wherever it is sampled from."""

    def __init__(self, path: str | Path):
        """Map a file. ValueError for one that is no weights file of ours, OSError where there is none."""
        self.path = Path(path)
        self._file = open(self.path, "r+b")  # noqa: SIM115  (closed by `close`)
        try:
            self._map = mmap.mmap(self._file.fileno(), 0)
            self.tensors = _tensors(self._map, self.path)
        except (ValueError, OSError):
            self._file.close()
            raise
        self._state = self.tensors.pop(STATE)

    @classmethod
    def create(cls, path: str | Path, model) -> SharedWeights:
        """A file for a model, in the place of any that was there, readable by its owner alone."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        own = {name: p.to("cpu", copy=True).contiguous() for name, p in parameters(model).items()}
        try:
            save_file(own | {STATE: torch.zeros(3, dtype=torch.int64)}, partial)
            os.chmod(partial, 0o600)
            os.replace(partial, path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, SafetensorError):  # how it says that the disk is full
                raise OSError(f"{path} could not be written ({error}): it takes {sum(p.nbytes for p in own.values())} bytes"
                              ) from error
            raise
        return cls(path)

    @property
    def version(self) -> int:
        """The policy version of the last write."""
        return int(self._state[1])

    @property
    def place(self) -> str:
        """"ours" while this file is the one at the path, "gone" where there is none or it was cut short, "replaced" where
        there is another."""
        own = os.fstat(self._file.fileno())
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return "gone"
        if (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino):
            return "replaced"
        return "ours" if own.st_size == len(self._map) else "gone"

    def fits(self, model) -> None:
        """ValueError with the first tensors that the file and the model do not have in common."""
        mine = {name: (tuple(t.shape), t.dtype) for name, t in self.tensors.items()}
        its = {name: (tuple(p.shape), p.dtype) for name, p in parameters(model).items()}
        wrong = sorted(name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(f"{self.path} holds another model: {len(wrong)} tensors differ, the first {name!r}: "
                             f"{mine.get(name, 'missing')} there, {its.get(name, 'missing')} in the model")

    def write(self, model, version: int) -> int:
        """Put the model's parameters into the file; returns their checksum. BlockingIOError while another process writes."""
        self.fits(model)
        self._check_length()
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            self._state[0] = int(self._state[0]) | 1  # of a writer that died in the middle it is odd already
            for name, p in parameters(model).items():
                self.tensors[name].copy_(p)
            found = checksum(self.tensors, version)
            self._state[1], self._state[2] = version, found
            self._state[0] += 1
            return found
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def read(self, model, seconds: float = READ, expected: int | None = None) -> tuple[int, int]:
        """Put the file's parameters into the model, all of one write, and return their version and checksum. Torn, and the
        model is as it was, where the file is not found at rest in `seconds`, or at rest without the `expected` checksum."""
        self.fits(model)
        until, why = time.monotonic() + seconds, "nothing was written into it"
        while True:
            self._check_length()
            before = int(self._state[0])
            if before % 2 == 0 and before:
                version, wanted = int(self._state[1]), int(self._state[2])
                copies = {name: t.clone() for name, t in self.tensors.items()}
                if int(self._state[0]) != before:
                    why = "it was written while it was read, again and again"
                elif checksum(copies, version) != wanted:
                    why = "its checksum is wrong"
                elif expected not in (None, wanted):
                    raise Torn(f"{self.path} holds other weights (of version {version}) than those that were published: is "
                               "there another trainer? Give each a file and a server of its own")
                else:
                    with torch.no_grad():
                        for name, p in model.named_parameters():
                            p.copy_(copies[name])
                    return version, wanted
            elif before:
                why = "a write into it has begun and not ended; publish again"
            if time.monotonic() > until:
                raise Torn(f"{self.path} gave no whole weights in {seconds} s: {why}")
            time.sleep(0.001)

    def _check_length(self) -> None:
        """ValueError where the file was cut short: to touch what is gone would kill this process (SIGBUS)."""
        if os.fstat(self._file.fileno()).st_size < len(self._map):
            raise ValueError(f"{self.path} was cut short by another program; let a trainer publish into it again")

    def close(self) -> None:
        self.tensors, self._state = {}, None
        self._file.close()  # the mapping goes with the last tensor


def checksum(tensors: Mapping[str, torch.Tensor], version: int) -> int:
    """CRC-32 of the version and of all bytes, in the order of the names."""
    crc = zlib.crc32(struct.pack("<q", version))
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def mark_of(checksum: int) -> str:
    """What tells these weights from others of their version, as a service's fingerprint has it."""
    return f"{checksum:08x}"


def _tensors(data: mmap.mmap, path: Path) -> dict[str, torch.Tensor]:
    """Views of a mapped safetensors file: eight bytes of length, a header in JSON, then the numbers."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            (begin, end), kind = entry["data_offsets"], DTYPES[entry["dtype"]]
            size = (end - begin) // kind.itemsize
            view = torch.frombuffer(data, dtype=kind, count=size, offset=8 + length + begin)
            tensors[name] = view.reshape(entry["shape"])
        if tensors[STATE].shape != (3,) or tensors[STATE].dtype != torch.int64:
            raise ValueError("its counter has another shape or type")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError,
            RecursionError) as error:
        raise ValueError(f"{path} is no file of shared weights ({type(error).__name__}: {error}); let a trainer publish into "
                         "it first") from None
    return tensors
