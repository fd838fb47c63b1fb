"""Several processes that train one policy, as `torchrun` and `accelerate launch` start them. In a single process everything
here is the identity.

Every rank holds the policy, the optimiser and the data, and knows the whole batch of a step: what is drawn is a function of
(seed, step), and what one rank sampled or played is told to all (`gathered`). So each has the denominators, advantages and
minibatches that one process would have. What is divided is the work: whole groups, examples or pairs (`shard`), whose gradients
and metrics are added up once an optimiser step (`add_up`). Rank 0 alone writes, and the others start as it starts (`start`).

The ranks speak in turns, and each turn names its place. A rank that fails says so in its next turn (`abort`), one that is gone
or elsewhere is found by it; the others then end with a RankError that names the rank, at the latest after PATIENCE.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpolab.rollouts import Group, Rollout
from grpolab.runs.checkpoints import data_hash, join, split, weights_hash
from grpolab.runs.run import Run, origin
from grpolab.train import losses

T = TypeVar("T")
PATIENCE = 1800.0  # seconds that a rank waits for the others, which may still be sampling, before it gives up
FAREWELL = 60.0  # seconds that it waits at the end of a loop that failed, while rank 0 keeps a checkpoint


class RankError(RuntimeError):
    """Another rank failed, or is at another place of the program."""


class RankLost(RankError):
    """Another rank ended without a word, or was silent for PATIENCE."""


@dataclass(frozen=True)
class World:
    """This process is number `rank` of `size`; `group` is what they talk over: gloo, between processors."""

    rank: int = 0
    size: int = 1
    group: Any = None


ALONE = World()
_parted: RankError | None = None  # why the ranks of the present loop no longer talk


def world() -> World:
    """The ranks. They are those of `torch.distributed` where it was initialised, as `Accelerator()` does it, and else those
    that the launcher's variables RANK and WORLD_SIZE say: these are joined here, at the first call."""
    launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if dist.is_available() and (dist.is_initialized() or launched and os.environ["WORLD_SIZE"] != "1"):
        return _joined()
    return ALONE


@cache
def _joined() -> World:
    patience = timedelta(seconds=PATIENCE)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=patience)
        atexit.register(dist.destroy_process_group)
    if dist.get_world_size() == 1:
        return ALONE
    return World(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=patience))


def first() -> bool:
    """Whether this is the process that prints and writes."""
    return world().rank == 0


def shard(items: Sequence[T]) -> Sequence[T]:
    """This rank's share of the items: every size-th, from its own number on."""
    return items if world().size == 1 else items[world().rank :: world().size]


# --- turns ------------------------------------------------------------------------------------------------------------


def exchange(place: str, value: Any = None) -> list:
    """What each rank says at this `place` (JSON), in the order of the ranks. RankError where one failed or speaks from
    another place, RankLost where one is gone."""
    return [value] if world().size == 1 else _turn(place, value, "")


def _turn(place: str, value: Any, error: str) -> list:
    global _parted
    if _parted is not None:
        raise type(_parted)(*_parted.args)
    try:
        turns = [json.loads(data) for data in _all_bytes(json.dumps([place, value, error], default=_plain).encode())]
        failed = [f"rank {rank} failed with {error}" for rank, (_, _, error) in enumerate(turns) if error]
        if failed:
            raise RankError("; ".join(failed))
        if len({place for place, _, _ in turns}) > 1:
            places = ", ".join(f"rank {rank} at {place!r}" for rank, (place, _, _) in enumerate(turns))
            raise RankError(f"the ranks are not at the same place of the program: {places}. All run the same loops, in one "
                            "order and one at a time")
    except RankError as fault:
        _parted = fault
        raise
    return [value for _, value, _ in turns]


def _plain(x):
    """A number of numpy or torch, for JSON."""
    return x.item()


def _all_bytes(data: bytes) -> list[bytes]:
    """The bytes of every rank, filled up with spaces."""
    longest = _called(len(data))
    padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(world().size)]
    with _hearing("a rank"):
        dist.all_gather(parts, padded, world().group)
    return [part.numpy().tobytes() for part in parts]


LOST = "is lost (it ended, or said nothing for too long); start all of them again: a run goes on from its last checkpoint"


def _called(number: int) -> int:
    """The largest number of all ranks. Rank 0 hears one after another and answers, so that it can say who is missing."""
    here = world()
    if here.rank:
        answer = torch.zeros(2, dtype=torch.int64)
        with _hearing("rank 0"):
            dist.send(torch.tensor([number]), 0, here.group)
            dist.recv(answer, 0, here.group)
        largest, lost = answer.tolist()
        if lost:
            raise RankLost(f"rank {lost} {LOST}")
        return largest
    heard, lost = [torch.tensor([number])], None
    for rank in range(1, here.size):
        heard.append(torch.zeros(1, dtype=torch.int64))
        try:
            with _hearing(f"rank {rank}"):
                dist.recv(heard[-1], rank, here.group)
        except RankLost as fault:
            lost = lost or (rank, fault)
    for rank in range(1, here.size):
        with suppress(RankLost), _hearing(f"rank {rank}"):
            dist.send(torch.tensor([int(max(heard)), lost[0] if lost else 0]), rank, here.group)
    if lost:
        raise lost[1]
    return int(max(heard))


@contextmanager
def _hearing(who: str):
    """RankLost where torch.distributed fails, by a closed connection or by a timeout."""
    global _parted
    try:
        yield
    except RuntimeError as fault:
        _parted = RankLost(f"{who} {LOST}")
        raise _parted from fault


def same(what: str, value: str, remedy: str) -> None:
    """ValueError, on all ranks, unless all have the same text."""
    turns = exchange(what, value)
    other = [str(rank) for rank, text in enumerate(turns) if text != turns[0]]
    if other:
        _refuse(f"{what} differ between rank 0 and rank {', '.join(other)}: {remedy}")


def _refuse(why: str) -> None:
    """ValueError on all ranks, which need not tell each other."""
    global _parted
    _parted = RankError(why)
    raise ValueError(why)


def abort(error: BaseException) -> None:
    """Tell the others, unless they know, that this rank ends its loop; then wait until rank 0 has kept its checkpoint."""
    here = world()
    if _parted is None and isinstance(error, Exception):
        print(f"rank {here.rank}: {error!r}; it tells the other ranks as they come", file=sys.stderr, flush=True)
    try:
        if _parted is None:
            _turn("", None, f"{type(error).__name__}: {error}"[:1000])
    except RankError:
        pass
    if not isinstance(_parted, RankLost):
        with suppress(RuntimeError):  # they are gone: there is nothing to wait for
            dist.monitored_barrier(here.group, timedelta(seconds=FAREWELL))


# --- the start --------------------------------------------------------------------------------------------------------


def start(policy, optimiser, config, run: Run | None, data: Callable[[], str]) -> tuple[int, str]:
    """Where a loop begins: (steps done, where the policy comes from). `data()` is a hash of what is trained on.

    Rank 0 asks its run, and the others take over what it finds: the weights and the optimiser of a checkpoint, the rows. All
    must bring the same weights, configuration and data; ValueError where they differ."""
    global _parted
    _parted = None
    here, key = world(), data() if run is not None or world().size > 1 else ""
    if here.size == 1:
        return (run.begin(config, policy, optimiser, key), run.base) if run is not None else (0, origin(policy))
    same("the configurations", repr(config), "start every rank with the same command")
    same("the data", key, "give every rank the same rows in the same order")
    same("the weights", weights_hash(policy), "load the same policy on every rank; what is drawn at random, as the weights of "
                                              "a fresh head, needs the same seed everywhere (seed_everything)")
    version, start = policy.version, None
    if here.rank == 0:
        done, base = (run.begin(config, policy, optimiser, key), run.base) if run is not None else (0, origin(policy))
        tensors, scalars = split(optimiser.state_dict()) if done else ({}, {})
        start = {"done": done, "base": base, "moved": done > 0 or policy.version != version, "version": policy.version,
                 "rows": run.metrics if run is not None else [], "scalars": scalars,
                 "tensors": {name: [str(t.dtype).removeprefix("torch."), t.shape] for name, t in tensors.items()}}
    start = exchange("the start", start)[0]
    if start["moved"]:
        _take_over(policy, optimiser, start, tensors if here.rank == 0 else {})
    policy.version = start["version"]
    if run is not None and here.rank:
        run.metrics = start["rows"]
    return start["done"], start["base"]


@torch.no_grad()
def _take_over(policy, optimiser, start: dict, tensors: dict) -> None:
    """The parameters and the optimiser of rank 0."""
    for p in policy.model.parameters():
        if p.requires_grad:
            p.copy_(_from_first(p.detach().cpu().contiguous()))
    held = {name: tensors.get(name, torch.empty(0)) for name in start["tensors"]}
    for name, (dtype, shape) in start["tensors"].items():
        held[name] = _from_first(tensors[name] if tensors else torch.empty(shape, dtype=getattr(torch, dtype)))
    if start["done"] and world().rank:
        optimiser.load_state_dict(join(held, start["scalars"]))


def _from_first(x: torch.Tensor) -> torch.Tensor:
    """A tensor of rank 0 in the place of x, which has its shape."""
    if x.numel():
        with _hearing("rank 0"):
            dist.broadcast(x.view(-1).view(torch.uint8), 0, world().group)
    return x


# --- a step -----------------------------------------------------------------------------------------------------------


def add_up(model, metrics: dict, place: str) -> dict:
    """The gradients of all ranks added in each of them, in one go for each dtype, and their metrics, which add as those of
    micro-batches do. A rank without a share gives {}; a parameter that no rank has a gradient of keeps none."""
    if world().size == 1:
        return metrics
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = dict.fromkeys((p.dtype, p.device) for p in trained)
    alike = [[p for p in trained if (p.dtype, p.device) == kind] for kind in kinds]
    flat = [torch.cat([(torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad).flatten() for p in ps])
            for ps in alike]
    turns = exchange(place, [metrics, [p.grad is not None for ps in alike for p in ps]])
    any_has = iter([any(has) for has in zip(*(has for _, has in turns))])
    for ps, buffer in zip(alike, flat):
        total = _summed(buffer)
        for p, part in zip(ps, total.split([p.numel() for p in ps])):
            p.grad = part.view_as(p) if next(any_has) else None
    parts = [{k: torch.tensor(v, dtype=torch.float64) for k, v in of.items()} for of, _ in turns if of]
    return {k: v.item() for k, v in losses.combine(parts).items()}


def _summed(buffer: torch.Tensor) -> torch.Tensor:
    """Over the ranks: on GPUs as torch.distributed was initialised for them, else between processors."""
    total, group = (buffer, None) if buffer.device.type == "cuda" else (buffer.cpu(), world().group)
    with _hearing("a rank"):
        dist.all_reduce(total, group=group)
    return total.to(buffer.device)


def agree(policy, done: int) -> None:
    """ValueError where the ranks' weights are no longer the same."""
    if world().size > 1:
        same(f"the weights after step {done}", weights_hash(policy),
             "the ranks compute differently; use machines, GPUs and versions of one kind")


def gathered(place: str, tasks: Iterable, values: Sequence[T], plain: Callable[[T], Any], back: Callable[[Any], T]) -> list[T]:
    """What all ranks made of their shares of the `tasks`, in the order of the tasks; `plain` makes JSON of a value and
    `back` the value again. ValueError where the ranks were not asked the same."""
    if world().size == 1:
        return list(values)
    turns = exchange(place, [data_hash(tasks), [plain(v) for v in values]])
    if len({key for key, _ in turns}) > 1:
        _refuse(f"{place}: the ranks draw different tasks; what chooses them must depend on the seed, the step and what it was "
                "told alone")
    out: list = [None] * sum(len(of) for _, of in turns)
    for rank, (_, of) in enumerate(turns):
        out[rank :: len(turns)] = map(back, of)
    return out


def same_groups(groups: Sequence[Group], step: int) -> None:
    """ValueError where a source gave the ranks different groups."""
    digest = hashlib.sha256()
    for r in (r for g in groups for r in g):
        digest.update(array("q", (len(r.prompt), *r.prompt, *r.tokens)).tobytes() + repr(r.reward).encode())
    same(f"the groups of step {step}", digest.hexdigest(), "a source gives every rank all groups of the step; one that draws "
                                                           "only its own share hands them on by distributed.gathered")


# --- rollouts as JSON -------------------------------------------------------------------------------------------------


def plain_of(x: Any) -> dict:
    """The fields of a dataclass."""
    return {f.name: getattr(x, f.name) for f in fields(x)}


def plain_group(group: Group) -> list[dict]:
    return [plain_of(r) for r in group]


def group_of(rollouts: list[dict]) -> Group:
    """The inverse of `plain_group`, the same numbers in every bit."""
    return Group(tuple(map(rollout_of, rollouts)))


def rollout_of(plain: dict) -> Rollout:
    return Rollout(**{name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()})
