"""One copy of the parameters for a trainer and a server on processors of one machine: both map a file (on /dev/shm: memory).

An optimiser step changes what the server samples with, and nothing is sent. A lock of both processes keeps a step of the
optimiser and a step of decoding apart, so that no token is sampled from half-written weights, and hands over the version: each
token is of one version, which its rollout says. Of a trainer that was killed in the middle of a step the file tells, too.

The file: version, whether a step is under way, mark, and a number of the parameters' names and forms (int64 each); then, from
byte 4096 on, the parameters in the order of the model, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import weakref
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

from grpolab.models.load import Policy, in_own_memory
from grpolab.serve.http_client import Caller
from grpolab.serve.weight_sync import MAPPED_HEADER as HEADER
from grpolab.serve.weight_sync import on_disk, refuse_others
from grpolab.sync import FairLock

ALIGNED = 64  # bytes
VERSION, UNDER_WAY, MARK, FORM = range(4)  # of the state


class SharedLock(FairLock):
    """`policy.lock` of a process that maps its weights: it also keeps out the others that map them, in order of arrival. The
    one that `writes` leaves its version in the state, and the others find it in theirs. `torn`: it ended in mid-step."""

    def __init__(self, path: Path, policy: Policy, state: torch.Tensor, writes: bool):
        super().__init__()
        self.policy, self.state, self.writes, self.torn = policy, state, writes, False
        self._file, self._entrance = files = tuple(os.open(p, os.O_RDWR | os.O_CREAT, 0o600) for p in (path, _entrance(path)))
        self.close = weakref.finalize(self, lambda: [os.close(file) for file in files])  # by itself once nobody has it any more

    def __enter__(self) -> SharedLock:
        super().__enter__()
        if self._depth == 1:
            fcntl.flock(self._entrance, fcntl.LOCK_EX)  # who comes back at once waits behind who waits
            fcntl.flock(self._file, fcntl.LOCK_EX)
            fcntl.flock(self._entrance, fcntl.LOCK_UN)
            if self.writes:
                self.state[UNDER_WAY] = 1
            else:
                self.torn, self.policy.version = bool(self.state[UNDER_WAY]), int(self.state[VERSION])
        return self

    def __exit__(self, *_) -> None:
        if self._depth == 1:
            if self.writes:
                self.state[VERSION], self.state[UNDER_WAY] = self.policy.version, 0
            fcntl.flock(self._file, fcntl.LOCK_UN)
        super().__exit__()

    def of(self, path: Path) -> bool:
        """Whether the file at `path` is the one that was mapped."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        return False


def _entrance(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _form(model: torch.nn.Module) -> int:
    """A number of the names, shapes and dtypes of the parameters."""
    form = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return int.from_bytes(sha256(repr(form).encode()).digest()[:7], "big")


def _size(model: torch.nn.Module) -> int:
    return HEADER + sum(-(-p.nbytes // ALIGNED) * ALIGNED for p in model.parameters())


def _refuse_gpu(policy: Policy) -> None:
    if policy.device.type != "cpu":
        raise ValueError(f"{policy.name!r} is on {policy.device}, and only weights of processors can be mapped: use "
                         "SharedFile, or start both without a GPU (CUDA_VISIBLE_DEVICES= in the environment)")


def _mapped(path: Path, policy: Policy, copied: bool, writes: bool) -> torch.Tensor:
    """Put the parameters into the file (`copied`), or take them from there; returns the state."""
    memory, at = torch.from_file(str(path), shared=True, size=_size(policy.model), dtype=torch.uint8), HEADER
    for p in policy.model.parameters():
        place = memory[at : at + p.nbytes].view(p.dtype).view(p.shape)
        if copied:
            place.copy_(p.detach())
        p.data = place
        at += -(-p.nbytes // ALIGNED) * ALIGNED
    return memory[:32].view(torch.int64)


def attach(path: Path, policy: Policy, mark: str) -> int:
    """Let a server's policy use the weights in the file with this mark; returns their version. ValueError, and the policy is
    as it was, for another model's or another trainer's, and for a policy on a GPU."""
    _refuse_gpu(policy)
    size = path.stat().st_size
    state = torch.from_file(str(path), shared=True, size=4, dtype=torch.int64) if size >= HEADER else None
    if state is None or (size, int(state[FORM])) != (_size(policy.model), _form(policy.model)):
        raise ValueError(f"{path} holds another model than {policy.name!r}, or no mapped weights")
    if f"{int(state[MARK]):08x}" != mark:
        raise ValueError(f"{path} holds another trainer's weights: give each a file and a server of its own")
    if getattr(policy.lock, "path", None) != (path, mark):
        lock = SharedLock(path, policy, _mapped(path, policy, copied=False, writes=False), writes=False)
        lock.path, policy.lock = (path, mark), lock
    return int(state[VERSION])


def detach(policy: Policy) -> None:
    """Let a server's policy have weights of its own again, before others are put into them: a trainer's are its own."""
    if isinstance(policy.lock, SharedLock):
        in_own_memory(policy.model)
        policy.lock = FairLock()


class Mapped:
    """A bridge for a server of ours that was started with `--weights` and this file: from the first publish on both use the
    one copy in it. ValueError for a policy on another device."""

    def __init__(self, path: str | Path):
        self.path, self.mark, self.policy = Path(path), "", None

    async def publish(self, caller: Caller, policy: Policy) -> tuple[int, str, None]:
        if self.policy is None:
            await on_disk(self._share, policy)
        answer = await caller.ask("POST", "/weights", {"mark": self.mark, "mapped": True})
        return answer["policy_version"], self.mark, None

    def _share(self, policy: Policy) -> None:
        _refuse_gpu(policy)
        refuse_others(self.path)
        with policy.lock:
            number, partial = secrets.randbits(32), self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
            try:
                with open(partial, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _size(policy.model))  # else a full disk is a SIGBUS later
                state = _mapped(partial, policy, copied=True, writes=True)
                state[:] = torch.tensor([policy.version, 0, number, _form(policy.model)])
                os.replace(partial, self.path)
            finally:
                partial.unlink(missing_ok=True)
            self.mark, self.policy, policy.lock = f"{number:08x}", policy, SharedLock(self.path, policy, state, writes=True)

    def close(self) -> None:
        """The policy gets its weights into memory of its own; a server that is left keeps the last ones."""
        if self.policy is not None:
            lock = self.policy.lock
            with lock:
                in_own_memory(self.policy.model)
                self.policy.lock = FairLock()
            if lock.of(self.path):  # not another trainer's that has taken its place
                self.path.unlink(missing_ok=True)
                _entrance(self.path).unlink(missing_ok=True)
            lock.close()
            self.policy = None
