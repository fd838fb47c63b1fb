"""What every training loop shares: the configuration of the optimiser, one step of it, and the loop over steps.

A step has two halves. `gather(step)` collects what the step needs and changes nothing, so it may be cancelled anywhere; the
update that it returns runs in the thread of the steps, which holds `policy.lock`: the one place where training changes weights.
A loop draws from (config.seed, step) alone, so parameters and optimiser are all there is to save.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from grpolab.models import lora
from grpolab.models.load import Policy
from grpolab.runs.run import Run, origin, provenance
from grpolab.sync import rest_threads, set_own_threads
from grpolab.train import distributed, losses
from grpolab.train.optimisers import MOST_SCALE, OPTIMISERS, Masters, make_optimiser

T = TypeVar("T")


@dataclass(frozen=True)
class Optimisation:
    """The optimiser (`OPTIMISERS`; the two AdamWs with `BETAS`) and its schedule. `token_budget`, `checkpoint_activations` and
    `autocast` change memory and speed but not the objective; under autocast parameters, logits and losses stay as they are."""

    steps: int = 100  # training steps
    lr: float = 1e-4  # learning rate after the warm-up
    warmup: int = 5  # steps of linear warm-up
    schedule: Literal["constant", "cosine"] = "constant"  # learning rate after the warm-up: constant, or cosine to zero
    weight_decay: float = 0.0  # decoupled weight decay
    max_grad_norm: float = 1.0  # largest norm of the gradient
    # adamw_8bit needs the extra '8bit'; adamw_cpu keeps its states in the host's memory
    optimiser: Literal["adamw", "adamw_8bit", "adafactor", "adamw_cpu"] = "adamw"
    token_budget: int = 8192  # most tokens in one forward pass, with padding where there is some
    checkpoint_activations: bool = False  # compute activations again in the backward pass: less memory, more time
    autocast: Literal["bfloat16"] | None = None  # lower dtype for the matrix products of the update
    save_every: int = 20  # steps between checkpoints
    seed: int = 0  # decides everything that is drawn

    def __post_init__(self):
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser must be one of {tuple(OPTIMISERS)}, got {self.optimiser!r}")
        if self.autocast not in (None, "bfloat16"):
            raise ValueError(f"autocast must be None or 'bfloat16', got {self.autocast!r}")
        for name, hint in get_type_hints(type(self)).items():
            if name != "optimiser" and get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name} must be one of {get_args(hint)}, got {getattr(self, name)!r}")
            if hint is int and not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        self.check_at_least(1, "steps", "token_budget", "save_every")
        self.check_at_least(0, "warmup", "weight_decay")
        self.check_positive("lr")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}; float('inf') clips nothing")

    def check_at_least(self, least: int, *names: str) -> None:
        for name in names:
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least {least}, got {getattr(self, name)}")

    def check_positive(self, *names: str) -> None:
        for name in names:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and positive, got {getattr(self, name)}")

    def lr_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., steps - 1."""
        decay = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.schedule == "cosine" else 1.0
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup)) * decay


# --- one step ---------------------------------------------------------------------------------------------------------

STEPS = "grpolab-steps"  # the name of the thread
SCALE_AGAIN = 200  # steps between attempts to double the scale of float16's losses


async def in_thread(policy: Policy, work: Callable[[], T]) -> T:
    """Run `work` in the thread of the steps, holding the model. A cancelled await returns at once; the thread ends its
    step first, and whoever wants the model next waits for that."""

    def locked():
        if policy.device.type == "cuda":
            torch.cuda.set_device(policy.device)  # a thread starts with the first GPU
        with policy.lock:
            return work()

    return await off_loop(locked)


async def off_loop(work: Callable[[], T]) -> T:
    """Run `work` in the thread of the steps, with as many torch threads as the caller has, so that the event loop keeps
    answering. One thread takes all of them, since each thread keeps freed memory of its own."""
    if threading.current_thread().name.startswith(STEPS):
        raise RuntimeError("a training step waits for another training step in its own thread: await both from one loop")
    threads = torch.get_num_threads()

    def threaded():
        if torch.get_num_threads() != threads:
            set_own_threads(threads)
        try:
            return work()
        except StopIteration as error:  # a future cannot carry it
            raise RuntimeError("StopIteration left a training step or a reward: give `next` a default") from error
        finally:
            rest_threads()

    rest_threads()
    return await asyncio.get_running_loop().run_in_executor(_steps(os.getpid()), threaded)


@cache
def _steps(process: int) -> ThreadPoolExecutor:
    """The thread of the steps; a forked process gets one of its own."""
    return ThreadPoolExecutor(1, STEPS)


def epoch_batches(items: Sequence[T], size: int, seed: int) -> Callable[[int], list[T]]:
    """step -> its `size` items: the steps walk through a fresh permutation of `items` every epoch. A function of (seed,
    step) alone."""
    if not items:
        raise ValueError("there is nothing to train on: the data set is empty")
    n = len(items)
    order = lru_cache(maxsize=2)(lambda epoch: random.Random(f"{seed}/{epoch}").sample(range(n), n))
    return lambda step: [items[order(k // n)[k % n]] for k in range(step * size, (step + 1) * size)]


def autocast(policy: Policy, config: Optimisation):
    """The precision of the products in a forward pass."""
    return torch.autocast(policy.device.type, torch.bfloat16, enabled=config.autocast is not None)


def accumulate(policy: Policy, parts: Iterable[tuple[torch.Tensor, dict]]) -> dict:
    """Add up the gradients of the micro-batches, (loss, metrics) each, times `policy.loss_scale`; returns the metrics of them
    all."""
    found = []
    for loss, metrics in parts:
        (loss * policy.loss_scale if policy.loss_scale != 1 else loss).backward()
        found.append(metrics)
    return losses.combine(found)


def apply_gradient(policy: Policy, optimiser, config: Optimisation, step: int) -> dict:
    """Clip, step, zero, and count the new version. A gradient that is not finite raises and changes nothing; in float16
    the loss may have been scaled too far, so the scale is halved and the step left out (arXiv 1710.03740, section 3.2)."""
    scale = policy.loss_scale
    if isinstance(optimiser, Masters):
        optimiser.take_gradients(scale)
    moved = [p for group in optimiser.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(moved, config.max_grad_norm).item()
    if not math.isfinite(norm):
        optimiser.zero_grad()
        if scale > 1:
            policy.loss_scale = scale / 2
            return {"grad_norm": math.nan, "lr": 0.0}
        raise FloatingPointError(f"the gradient norm at step {step} is {norm}: lower lr={config.lr}, or look at the batch")
    lr = config.lr_at(step)
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.step()
    optimiser.zero_grad()
    policy.version += 1
    if scale > 1 and (step + 1) % SCALE_AGAIN == 0:
        policy.loss_scale = min(2 * scale, MOST_SCALE)
    return {"grad_norm": norm, "lr": lr}


def check_trainable(policy: Policy) -> None:
    """Refuse a model of which nothing would be trained."""
    if not any(p.requires_grad for p in policy.model.parameters()):
        raise ValueError(f"{policy.name!r} is frozen: none of its parameters requires a gradient. Call "
                         "policy.model.requires_grad_(True), or that of the part which is to be trained")


@contextmanager
def dropout_of(policy: Policy, seed: int, step: int) -> Iterator[None]:
    """The adapter's dropout for a step; and torch's generators seeded from (seed, step) while it or a model in training mode
    takes it, so that a run that goes on drops what it would have dropped; afterwards they stand where they stood. Without
    dropout nothing is drawn from them."""
    with lora.dropping(policy.model):
        if not any(m.training for m in policy.model.modules()):
            yield
            return
        with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
            rank = distributed.world().rank  # whose rows are its own
            torch.manual_seed(random.Random(f"{seed}/{step}/dropout" + f"/{rank}" * bool(rank)).getrandbits(63))
            yield


Update = Callable[[torch.optim.Optimizer], dict]


class Training:
    """What a loop trains: `done` steps are whole, the newest checkpoint holds `saved` of them, and `version` is the policy's
    after the last one. `begin`, `step` and `keep` run in the thread of the steps."""

    def __init__(self, policy: Policy, config: Optimisation, run: Run | None, data: Callable[[], str]):
        self.policy, self.config, self.run, self.data = policy, config, run, data
        self.writer = run if distributed.first() else None
        self.done = self.saved = self.version = 0

    def begin(self) -> int:
        """Make the optimiser and go to where the run stands; the steps done."""
        policy, run = self.policy, self.run
        check_trainable(policy)
        policy.model.zero_grad()  # of somebody else's backward
        self.optimiser = make_optimiser(policy, self.config)
        self.done, self.base = distributed.start(policy, self.optimiser, self.config, run, self.data)
        if run is not None and (self.done or origin(policy) == str(run.shown(run.folder))):  # it went on, or back to the start
            policy.provenance = provenance(self.config, run, self.done, self.base)
        self.saved, self.version = self.done, policy.version
        return self.done

    def step(self, step: int, update: Update) -> dict:
        """Take a whole step: the update, its row in the run, and a checkpoint where one is due."""
        policy, config = self.policy, self.config
        if policy.version != self.version:
            raise RuntimeError(f"step {step}: somebody else changed the policy's weights since this loop's last step (version "
                               f"{self.version} then, {policy.version} now): train one policy in one loop at a time")
        try:
            with dropout_of(policy, config.seed, step):
                row = {"step": step} | update(self.optimiser)
        except BaseException:
            policy.model.zero_grad()  # half a step's gradient is nobody's
            raise
        if step + 1 == config.steps or (step + 1) % config.save_every == 0:
            distributed.agree(policy, step + 1)
        self.done, self.version = step + 1, policy.version
        policy.provenance = provenance(config, self.run, self.done, self.base)
        if policy.dtype == torch.float16:
            row["loss_scale"] = policy.loss_scale
        if self.writer is not None:
            self.writer.log(row)
            self.writer.keep_for_replay(self.done, config, policy, self.optimiser)
            if self.done < config.steps:
                if self.done % config.save_every == 0:
                    self._save()
            elif self.writer.keeps_end:
                with suppress(OSError):  # what is saved next is smaller, and an earlier checkpoint stays
                    self._save()
            elif self.writer.selected.selection is None:
                self.writer.drop_checkpoint()
        elif self.run is not None:
            self.run.metrics.append(row)
        return row

    def keep(self) -> None:
        """A checkpoint of the whole steps, where there are some that none holds."""
        last = self.config.steps + (self.writer.selected.selection is not None)  # whose last measure may be what failed
        if self.saved < self.done < last and self.policy.version == self.version:
            self._save()

    def _save(self) -> None:
        self.writer.save_checkpoint(self.done, self.config, self.policy, self.optimiser)
        self.saved = self.done


async def loop(
    policy: Policy, config: Optimisation, run: Run | None, gather: Callable[[int], Awaitable[Update]],
    data: Callable[[], str] = lambda: "",
) -> AsyncIterator[dict]:
    """Steps from where the run stopped to the end. `await gather(step)` collects what a step needs; the update that it
    returns takes the optimiser, changes the weights and returns the step's row. `data()` is a hash of what is trained on, by
    which a Run refuses to go on with something else.

    After an interrupt, a cancel, an error or a consumer that leaves, an update that has begun is finished, and a Run gets a
    checkpoint of the whole steps. Of several processes the first one writes.
    """
    if run is None and policy.version and distributed.first():
        print(f"{policy.name}: {policy.version} steps were taken on this policy before; training goes on from there",
              file=sys.stderr)
    training = Training(policy, config, run, data)
    writer = training.writer
    with writer.held() if writer else nullcontext():
        start = await in_thread(policy, training.begin)
        if writer is not None and start not in writer.selected.rows:
            await writer.measure(start, config.steps, policy, in_thread)
        for step in range(start, config.steps):
            try:
                row = await in_thread(policy, partial(training.step, step, await gather(step)))
                if writer is not None:  # the other ranks wait at the next step
                    row = row | await writer.measure(training.done, config.steps, policy, in_thread)
                yield row
            except BaseException:
                if writer is not None:
                    await in_thread(policy, training.keep)  # queued behind the step that the thread may still be in
                raise


async def over_batches(
    policy: Policy, items: Sequence[T], config: Optimisation, run: Run | None, *, check: Callable[[], Any],
    gradient: Callable[[Sequence[T], int], dict], data: Callable[[], str], counts: Callable[[Sequence[T]], tuple[int, dict]],
    before: Callable[[int], dict] = lambda step: {},
) -> AsyncIterator[dict]:
    """The loop of steps on `config.batch_size` items each; `check()` runs once before it, before(step) is measured before each.

    counts(batch) gives the denominator of the whole batch, and numbers that become rates. gradient(part, denominator)
    accumulates the gradient of this process's part and returns its share of the metrics. `data` as in `loop`."""
    await in_thread(policy, check)
    batch_of = epoch_batches(items, config.batch_size, config.seed)

    async def gather(step):
        def update(optimiser):
            seen = before(step)
            began = time.perf_counter()
            batch = batch_of(step)
            part, (denominator, numbers) = distributed.shard(batch), counts(batch)
            row = distributed.add_up(policy.model, gradient(part, denominator) if part else {}, f"step {step}")
            row |= seen | apply_gradient(policy, optimiser, config, step)
            seconds = time.perf_counter() - began
            return row | {name: number / seconds for name, number in numbers.items()} | {"seconds": seconds}

        return update

    async with aclosing(loop(policy, config, run, gather, data)) as rows:
        async for row in rows:
            yield row
