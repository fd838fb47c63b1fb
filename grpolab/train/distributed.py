"""Several processes that train one policy, as `torchrun` and `accelerate launch` start them. In a single process everything
here is the identity.

Every rank knows the whole batch of a step (`gathered`), so each has the denominators that one process would have; the work is
divided (`shard`), and its gradients and metrics are added up once an optimiser step (`add_up`). Before every collective the
ranks compare their place in the program (`exchange`). Rank 0 alone writes. docs/scaling.md
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpolab.rollouts import Group
from grpolab.runs.checkpoints import data_hash, join, split, weights_hash
from grpolab.runs.run import Run, origin
from grpolab.train import losses

T = TypeVar("T")
PATIENCE = 1800.0  # seconds that a rank waits for the others, which may still be sampling, before it gives up


class RankError(RuntimeError):
    """Another rank ended, sent nothing for PATIENCE, is at another place of the program, or brings other data."""


@dataclass(frozen=True)
class World:
    """This process is number `rank` of `size`; `group` is what they talk over: gloo, between processors."""

    rank: int = 0
    size: int = 1
    group: Any = None


ALONE = World()


def world() -> World:
    """The ranks. They are those of `torch.distributed` where it was initialised, as `Accelerator()` does it, and else those
    that the launcher's variables RANK and WORLD_SIZE name: these are joined here, at the first call."""
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


# --- messages ---------------------------------------------------------------------------------------------------------


def exchange(place: str, value: Any = None) -> list:
    """The values that the ranks bring to this `place`, in the order of the ranks. RankError where one is at another place or is
    gone."""
    here = world()
    if here.size == 1:
        return [value]
    messages: list = [None] * here.size
    with _noticing_loss():
        dist.monitored_barrier(here.group, timedelta(seconds=PATIENCE))  # its error says who is silent
        dist.all_gather_object(messages, (place, value), here.group)
    if len({other for other, _ in messages}) > 1:
        places = ", ".join(f"rank {rank} at {other!r}" for rank, (other, _) in enumerate(messages))
        raise RankError(f"the ranks are not at the same place of the program: {places}. All run the same loops, in one order "
                        "and one at a time")
    return [of for _, of in messages]


@contextmanager
def _noticing_loss():
    """RankError where torch.distributed fails, by a closed connection or by a timeout."""
    try:
        yield
    except RuntimeError as fault:
        raise RankError("a rank is lost: it failed (its own output says why), ended, or sent nothing for too long. Start "
                        "all of them again: a run goes on from its last checkpoint") from fault


def same(what: str, value: str, remedy: str) -> None:
    """RankError, on all ranks, unless all have the same text."""
    values = exchange(what, value)
    other = [str(rank) for rank, text in enumerate(values) if text != values[0]]
    if other:
        raise RankError(f"{what} differ between rank 0 and rank {', '.join(other)}: {remedy}")


# --- the start --------------------------------------------------------------------------------------------------------


def start(policy, optimiser, config, run: Run | None, data: Callable[[], str]) -> tuple[int, str]:
    """Where a loop begins: (steps done, where the policy comes from). `data()` is a hash of what is trained on.

    Rank 0 asks its run, and the others take over what it finds: the weights and the optimiser of a checkpoint, the rows. All
    must bring the same weights, configuration and data; RankError where they differ."""
    here, key, version = world(), data() if run is not None or world().size > 1 else "", policy.version
    if here.size > 1:
        same("the configurations", repr(config), "start every rank with the same command")
        same("the data", key, "give every rank the same rows in the same order")
        same("the weights", weights_hash(policy), "load the same policy on every rank; what is drawn at random, as the weights "
                                                  "of a fresh head, needs the same seed everywhere (seed_everything)")
    done, base = 0, origin(policy)
    if run is not None and here.rank == 0:
        done, base = run.begin(config, policy, optimiser, key), run.base
    if here.size == 1:
        return done, base
    moved = done > 0 or policy.version != version
    theirs = _from_first((done, base, moved, policy.version, policy.loss_scale, run and run.metrics))
    done, base, moved, policy.version, policy.loss_scale, rows = theirs
    if run is not None:
        run.metrics = rows
    if moved:
        with torch.no_grad():
            for p in policy.model.parameters():
                if p.requires_grad:
                    p.copy_(_from_first(p.detach().cpu()))
    if done:  # tensor by tensor: all at once would take twice the memory
        tensors, scalars = split(optimiser.state_dict())
        names, scalars = _from_first((list(tensors), scalars))
        tensors = {name: _from_first(tensors.get(name)) for name in names}
        if here.rank:
            optimiser.load_state_dict(join(tensors, scalars))
    return done, base


def _from_first(value: T) -> T:
    """Rank 0's value."""
    box = [value if first() else None]
    with _noticing_loss():
        dist.broadcast_object_list(box, 0, world().group)
    return box[0]


# --- a step -----------------------------------------------------------------------------------------------------------


def add_up(model, metrics: dict, place: str) -> dict:
    """The gradients of all ranks added in each of them, and their metrics, which add as those of micro-batches do. A rank
    without a share gives {}; a parameter that no rank has a gradient of keeps none."""
    if world().size == 1:
        return metrics
    trained = [p for p in model.parameters() if p.requires_grad]
    messages = exchange(place, [metrics, [p.grad is not None for p in trained]])
    for p, *has in zip(trained, *(has for _, has in messages)):
        if any(has):
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
            with _noticing_loss():
                dist.all_reduce(p.grad, group=None if p.is_cuda else world().group)
    return losses.combine([of for of, _ in messages if of])


def agree(policy, done: int) -> None:
    """RankError where the ranks' weights are no longer the same."""
    if world().size > 1:
        same(f"the weights after step {done}", weights_hash(policy),
             "the ranks compute differently; use machines, GPUs and versions of one kind")


def gathered(place: str, tasks: Iterable, values: Sequence[T]) -> list[T]:
    """What all ranks made of their shares of the `tasks`, in the order of the tasks. RankError where the ranks did not have the
    same tasks."""
    if world().size == 1:
        return list(values)
    same(f"{place}: the tasks", data_hash(tasks), "what chooses them must depend on the seed, the step and its results alone")
    shares = exchange(place, list(values))
    out: list = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        out[rank :: len(shares)] = share
    return out


def same_groups(groups: Sequence[Group], step: int) -> None:
    """RankError where a source gave the ranks different groups."""
    if world().size > 1:
        rows = ([r.prompt, r.tokens, repr(r.reward)] for g in groups for r in g)
        same(f"the groups of step {step}", data_hash(rows), "a source gives every rank all groups of the step; one that draws "
                                                            "only its own share hands them on by distributed.gathered")
