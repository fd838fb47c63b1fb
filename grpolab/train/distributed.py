"""Several processes that train one policy, as `torchrun` and `accelerate launch` start them. In a single process everything
here is the identity.

Every rank holds the policy, the optimiser and the data, and knows the whole batch of a step: what is drawn is a function of
(seed, step), and what one rank sampled or played is sent to all (`gathered`). So each has the denominators, advantages and
minibatches that one process would have. What is divided is the work: whole groups, examples or pairs (`shard`), whose gradients
and metrics are added up once an optimiser step (`add_up`). Rank 0 alone writes, and the others start as it starts (`start`).

Before every collective the ranks exchange a message that names the place in the program (`exchange`). A rank that fails sends
its error in the next one (`abort`); a rank that is gone is missed there. The others then end with a RankError, at the latest
after PATIENCE.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
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
FAREWELL = 60.0  # seconds that it waits at the end of a loop that failed, while rank 0 saves a checkpoint


class RankError(RuntimeError):
    """Another rank failed, is at another place of the program, or brings other data. All ranks raise it."""


class RankLost(RankError):
    """Another rank ended, or sent nothing for PATIENCE."""


@dataclass(frozen=True)
class World:
    """This process is number `rank` of `size`; `group` is what they talk over: gloo, between processors."""

    rank: int = 0
    size: int = 1
    group: Any = None


ALONE = World()
_failure: RankError | None = None  # of the present loop


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


def exchange(place: str, value: Any = None, *, error: str = "") -> list:
    """The values (JSON) that the ranks bring to this `place`, in the order of the ranks. RankError where one failed, is at
    another place or is gone."""
    if world().size == 1:
        return [value]
    messages = [json.loads(data) for data in _all_bytes(json.dumps([place, value, error], default=lambda x: x.item()).encode())]
    failed = [f"rank {rank} failed with {error}" for rank, (_, _, error) in enumerate(messages) if error]
    places = [f"rank {rank} at {place!r}" for rank, (place, _, _) in enumerate(messages)]
    if failed or len({place for place, _, _ in messages}) > 1:
        raise _noted(RankError("; ".join(failed) or f"the ranks are not at the same place of the program: {', '.join(places)}. "
                               "All run the same loops, in one order and one at a time"))
    return [value for _, value, _ in messages]


def _noted(failure: RankError) -> RankError:
    global _failure
    _failure = failure
    return failure


def _all_bytes(data: bytes) -> list[bytes]:
    """The bytes of every rank, filled up with spaces."""
    here = world()
    with _noticing_loss():
        dist.monitored_barrier(here.group, timedelta(seconds=PATIENCE))  # its error says who is silent
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(here.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), here.group)
        padded = torch.frombuffer(bytearray(data.ljust(int(max(lengths)))), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(here.size)]
        dist.all_gather(parts, padded, here.group)
    return [part.numpy().tobytes() for part in parts]


@contextmanager
def _noticing_loss():
    """RankLost where torch.distributed fails, by a closed connection or by a timeout."""
    try:
        yield
    except RuntimeError as fault:
        raise _noted(RankLost("a rank is lost: it ended, or sent nothing for too long. Start all of them again: a run goes on "
                              "from its last checkpoint")) from fault


def same(what: str, value: str, remedy: str) -> None:
    """RankError, on all ranks, unless all have the same text."""
    values = exchange(what, value)
    other = [str(rank) for rank, text in enumerate(values) if text != values[0]]
    if other:
        raise _noted(RankError(f"{what} differ between rank 0 and rank {', '.join(other)}: {remedy}"))


def abort(error: BaseException) -> None:
    """Tell the others, unless they know, that this rank ends its loop; then wait until rank 0 has saved its checkpoint."""
    here = world()
    if _failure is None:
        if isinstance(error, Exception):
            print(f"rank {here.rank}: {error!r}; it tells the other ranks as they come", file=sys.stderr, flush=True)
        with suppress(RankError):
            exchange("", error=f"{type(error).__name__}: {error}"[:1000])
    if not isinstance(_failure, RankLost):
        with suppress(RuntimeError):  # they are gone: there is nothing to wait for
            dist.monitored_barrier(here.group, timedelta(seconds=FAREWELL))


# --- the start --------------------------------------------------------------------------------------------------------


def start(policy, optimiser, config, run: Run | None, data: Callable[[], str]) -> tuple[int, str]:
    """Where a loop begins: (steps done, where the policy comes from). `data()` is a hash of what is trained on.

    Rank 0 asks its run, and the others take over what it finds: the weights and the optimiser of a checkpoint, the rows. All
    must bring the same weights, configuration and data; RankError where they differ."""
    global _failure
    _failure = None
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
    tensors, scalars = split(optimiser.state_dict()) if done else ({}, {})
    found = exchange("the start", {
        "done": done, "base": base, "moved": done > 0 or policy.version != version, "version": policy.version,
        "rows": run.metrics if run is not None else [], "scalars": scalars,
        "tensors": {name: [str(t.dtype).removeprefix("torch."), t.shape] for name, t in tensors.items()},
    })[0]
    if found["moved"]:
        with torch.no_grad():
            for p in policy.model.parameters():
                if p.requires_grad:
                    p.copy_(_from_first(p.detach().cpu().contiguous()))
        for name, (dtype, shape) in found["tensors"].items():
            tensors[name] = _from_first(tensors.get(name, torch.empty(shape, dtype=getattr(torch, dtype))))
        if found["done"] and here.rank:
            optimiser.load_state_dict(join(tensors, found["scalars"]))
    policy.version = found["version"]
    if run is not None and here.rank:
        run.metrics = found["rows"]
    return found["done"], found["base"]


def _from_first(x: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor in the place of x, which has its shape."""
    if x.numel():
        with _noticing_loss():
            dist.broadcast(x.view(-1).view(torch.uint8), 0, world().group)
    return x


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


def gathered(place: str, tasks: Iterable, values: Sequence[T], plain: Callable[[T], Any], back: Callable[[Any], T]) -> list[T]:
    """What all ranks made of their shares of the `tasks`, in the order of the tasks; `plain` makes JSON of a value and
    `back` the value again. RankError where the ranks did not have the same tasks."""
    if world().size == 1:
        return list(values)
    same(f"{place}: the tasks", data_hash(tasks), "what chooses them must depend on the seed, the step and its results alone")
    shares = exchange(place, [plain(v) for v in values])
    out: list = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        out[rank :: len(shares)] = map(back, share)
    return out


def same_groups(groups: Sequence[Group], step: int) -> None:
    """RankError where a source gave the ranks different groups."""
    if world().size > 1:
        rows = ([r.prompt, r.tokens, repr(r.reward)] for g in groups for r in g)
        same(f"the groups of step {step}", data_hash(rows), "a source gives every rank all groups of the step; one that draws "
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
