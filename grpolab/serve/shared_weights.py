"""Weights from a trainer to a sampler in another process: one safetensors file that both map (on /dev/shm it is memory).

A version counter makes a torn read impossible to miss: it is odd while the trainer writes, a reader copies between two looks
at it, and the copy counts only if both looks gave the same even number and the checksum that the trainer left agrees. The
reader copies into memory of its own first, so that a model never holds half of an update.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

STATE = "grpolab.state"  # int64: counter, policy version, checksum
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
READ = 30.0  # s; how long a reader tries to find the file at rest


class Torn(RuntimeError):
    """The file was never found at rest, or what it holds at rest is not what was asked for."""


class SharedWeights:
    """The parameters of a model in a mapped safetensors file, tied ones once; `write` in the trainer, `read` wherever it is
    sampled from."""

    def __init__(self, path: str | Path):
        """Map a file. ValueError for one that is no weights file of ours, OSError where there is none."""
        self.path = Path(path)
        with open(self.path, "r+b") as file:
            status = os.fstat(file.fileno())
            self._inode = status.st_dev, status.st_ino
            try:
                self.tensors = _mapped(mmap.mmap(file.fileno(), 0))  # the mapping goes with the last tensor
                self._state = self.tensors.pop(STATE).view(torch.int64).reshape(3)
            except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
                raise ValueError(f"{path} is no file of shared weights ({type(error).__name__}: {error}); let a trainer "
                                 "publish into it first") from None

    @classmethod
    def create(cls, path: str | Path, model) -> SharedWeights:
        """A file for a model, in the place of any that was there, readable by its owner alone."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        parameters = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in model.named_parameters()}
        try:
            save_file(parameters | {STATE: torch.zeros(3, dtype=torch.int64)}, partial)
            os.chmod(partial, 0o600)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return cls(path)

    @property
    def version(self) -> int:
        """The policy version of the last write."""
        return int(self._state[1])

    @property
    def replaced(self) -> bool | None:
        """Whether another file is at the path now; None where there is none."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return (status.st_dev, status.st_ino) != self._inode

    def check(self, model) -> None:
        """ValueError with the first tensor that the file and the model do not have in common."""
        ours = {name: (tuple(t.shape), t.dtype) for name, t in self.tensors.items()}
        its = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        wrong = sorted(name for name in ours.keys() | its.keys() if ours.get(name) != its.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(f"{self.path} holds another model: {len(wrong)} tensors differ, the first {name!r}: "
                             f"{ours.get(name, 'missing')} there, {its.get(name, 'missing')} in the model")

    @torch.no_grad()
    def write(self, model, version: int) -> int:
        """Put the model's parameters into the file; returns their checksum."""
        self.check(model)
        self._state[0] = int(self._state[0]) | 1  # of a writer that died in the middle it is odd already
        for name, p in model.named_parameters():
            self.tensors[name].copy_(p)
        self._state[1], self._state[2] = version, checksum(self.tensors, version)
        self._state[0] += 1
        return int(self._state[2])

    @torch.no_grad()
    def read(self, model, seconds: float = READ, expected: int | None = None) -> tuple[int, int]:
        """Put the file's parameters into the model, all of one write, and return their version and checksum. Torn, and the
        model is as it was, where the file is not found at rest in `seconds`, or at rest without the `expected` checksum."""
        self.check(model)
        until = time.monotonic() + seconds
        while True:
            before, version, written = self._state.tolist()
            copies = {name: t.clone() for name, t in self.tensors.items()}
            if not before:
                reason = "nothing was written into it"
            elif before % 2:
                reason = "a write into it has begun and not ended; publish again"
            elif int(self._state[0]) != before:
                reason = "it was written while it was read, again and again"
            elif checksum(copies, version) != written:
                reason = "its checksum is wrong"
            elif expected not in (None, written):
                raise Torn(f"{self.path} holds other weights (of version {version}) than those that were published: is there "
                           "another trainer? Give each a file and a server of its own")
            else:
                for name, p in model.named_parameters():
                    p.copy_(copies[name])
                return version, written
            if time.monotonic() > until:
                raise Torn(f"{self.path} gave no whole weights in {seconds} s: {reason}")
            time.sleep(0.001)


def checksum(tensors: Mapping[str, torch.Tensor], version: int) -> int:
    """CRC-32 of the version and of all bytes, in the order of the names."""
    crc = zlib.crc32(struct.pack("<q", version))
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def mark_of(checksum: int) -> str:
    """What tells these weights from others of their version, as a service's fingerprint has it."""
    return f"{checksum:08x}"


def _mapped(data: mmap.mmap) -> dict[str, torch.Tensor]:
    """Views of a mapped safetensors file: eight bytes of length, a header in JSON, then the numbers."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            (begin, end), dtype = entry["data_offsets"], DTYPES[entry["dtype"]]
            view = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=8 + length + begin)
            tensors[name] = view.reshape(entry["shape"])
    return tensors
