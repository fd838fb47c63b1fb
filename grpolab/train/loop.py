"""What every training loop shares: the configuration of the optimiser, one step of it, and the loop over steps.

A loop draws everything that it draws from (config.seed, step), so that parameters and optimiser are all there is to save;
given a Run it writes its metrics there and goes on where an interrupted run of the same configuration stopped. The heavy
work runs in a thread that holds `policy.lock`, so the event loop keeps answering while a step computes.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpolab.lab.run import Run
from grpolab.models import Policy
from grpolab.sync import rest_threads, set_own_threads

T = TypeVar("T")


@dataclass(frozen=True)
class Optimisation:
    """An optimiser by name (`OPTIMISERS`) with linear warm-up, then constant or cosine to zero.

    These change memory and speed but not the objective: `token_budget`, the most tokens (padding counted) in one forward
    pass; `checkpoint_activations`, which keeps only the inputs of the layers and makes the rest again in the backward;
    `autocast`, a lower dtype for the matrix products of the update ("bfloat16"), with parameters, logits and losses as
    they are."""

    steps: int = 100
    lr: float = 1e-4
    warmup: int = 5
    schedule: str = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimiser: str = "adamw"
    token_budget: int = 8192
    checkpoint_activations: bool = False
    autocast: str | None = None
    save_every: int = 20
    seed: int = 0

    def __post_init__(self):
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule must be 'constant' or 'cosine', got {self.schedule!r}")
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser must be one of {tuple(OPTIMISERS)}, got {self.optimiser!r}")
        if self.autocast not in (None, "bfloat16"):
            raise ValueError(f"autocast must be None or 'bfloat16' (float16 would need loss scaling), got {self.autocast!r}")
        if self.steps < 1 or self.lr <= 0 or self.token_budget < 1 or self.save_every < 1:
            raise ValueError(f"steps, lr, token_budget and save_every must be positive, got {self}")

    def lr_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., steps - 1."""
        decay = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.schedule == "cosine" else 1.0
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup)) * decay


# --- optimisers -------------------------------------------------------------------------------------------------------

BETAS = (0.9, 0.99)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments live in the processor's memory, where the step is taken too: the device holds parameters and
    gradients alone. The parameters on the device stay the one truth; where they are on the processor nothing is copied."""

    def __init__(self, parameters, **options):
        self.live = list(parameters)
        super().__init__([host_copy(p) for p in self.live], fused=True, **options)

    @torch.no_grad()
    def step(self):
        pairs = list(zip(self.live, self.param_groups[0]["params"]))
        for live, host in pairs:
            host.copy_(live)
            host.grad = None if live.grad is None else live.grad.to("cpu")
        super().step()
        for live, host in pairs:
            live.copy_(host)

    def zero_grad(self):
        for p in (*self.live, *self.param_groups[0]["params"]):
            p.grad = None


def host_copy(p: torch.Tensor) -> torch.Tensor:
    """The parameter in the processor's memory: itself, or a copy of one on a device."""
    return p.detach().to("cpu")


def adamw(parameters, **options):
    """Fused: one pass over parameters, gradients and moments, also on a processor."""
    return torch.optim.AdamW(parameters, fused=True, betas=BETAS, **options)


def adamw_8bit(parameters, **options):
    """AdamW with block-wise 8-bit moments (arXiv 2110.02861), two bytes a parameter in place of eight."""
    try:
        return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, betas=BETAS, **options)
    except ImportError as error:
        raise ImportError("optimiser 'adamw_8bit' needs bitsandbytes: pip install 'grpolab[8bit]'") from error


def adafactor(parameters, **options):
    """Factored second moments and no first one (arXiv 1804.04235), its relative step kept at lr."""
    return torch.optim.Adafactor(parameters, **options)


OPTIMISERS = {
    "adamw": adamw,
    "adamw_8bit": adamw_8bit,
    "adafactor": adafactor,
    "adamw_cpu": partial(OffloadedAdamW, betas=BETAS),
}


def make_optimizer(policy: Policy, config: Optimisation) -> torch.optim.Optimizer:
    return OPTIMISERS[config.optimiser](policy.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


# --- one step ---------------------------------------------------------------------------------------------------------


STEPS = "grpolab-steps"  # the name of the thread


async def in_thread(policy: Policy, work: Callable[[], T]) -> T:
    """Run `work` in the thread of the steps, holding the model. A cancelled await returns at once; the thread ends its
    step first, and whoever wants the model next waits for that."""

    def locked():
        with policy.lock:
            return work()

    return await off_loop(locked)


async def off_loop(work: Callable[[], T]) -> T:
    """Run `work` in the thread of the steps, with as many torch threads as the caller has, so that the event loop keeps
    answering. One thread takes all of them, since each thread keeps freed memory of its own."""
    if threading.current_thread().name.startswith(STEPS):
        raise RuntimeError("a training step waits for another training step in its own thread: await both from one loop")
    threads = torch.get_num_threads()

    def rested():
        if torch.get_num_threads() != threads:
            set_own_threads(threads)
        try:
            return work()
        except StopIteration as error:  # a future cannot carry it
            raise RuntimeError("StopIteration left a training step or a reward: give `next` a default") from error
        finally:
            rest_threads()

    rest_threads()
    return await asyncio.get_running_loop().run_in_executor(_steps(os.getpid()), rested)


@cache
def _steps(process: int) -> ThreadPoolExecutor:
    """The thread of the steps; a forked process gets one of its own."""
    return ThreadPoolExecutor(1, STEPS)


def draw(items: Sequence[T], n: int, step: int, seed: int) -> list[T]:
    """The `n` items of a step: walks through a fresh permutation of `items` every epoch; a function of its arguments."""
    if not items:
        raise ValueError("there is nothing to train on: the data set is empty")
    out = []
    for k in range(step * n, (step + 1) * n):
        epoch, place = divmod(k, len(items))
        if k == step * n or place == 0:
            order = random.Random(f"{seed}/{epoch}").sample(range(len(items)), len(items))
        out.append(items[order[place]])
    return out


def autocast(policy: Policy, config: Optimisation):
    """The precision of the products in a forward pass."""
    return torch.autocast(policy.device.type, torch.bfloat16, enabled=config.autocast is not None)


@contextmanager
def forward_passes(policy: Policy, config: Optimisation):
    """The context of the update's forward passes: their precision, and what they keep for the backward."""
    layers = [m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if config.checkpoint_activations and not layers:
        raise ValueError(f"{policy.name!r} has no layers that can be checkpointed: set checkpoint_activations=False")
    layers = layers if config.checkpoint_activations else []
    try:
        for layer in layers:  # not the model's own switch, which works in training mode only, with its dropout
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        with autocast(policy, config):
            yield
    finally:
        for layer in layers:
            del layer.forward


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Consecutive slices whose rows, padded to the longest, hold at most `budget` tokens (a longer row goes alone)."""
    start, longest = 0, 0
    for i, n in enumerate(lengths):
        longest = max(longest, n)
        if i > start and longest * (i + 1 - start) > budget:
            yield slice(start, i)
            start, longest = i, n
    if lengths:
        yield slice(start, len(lengths))


def apply_gradient(policy: Policy, optimizer, config: Optimisation, step: int) -> dict:
    """Clip, step, zero, and count the new version. A gradient that is not finite raises and changes nothing."""
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm).item()
    if not math.isfinite(norm):
        optimizer.zero_grad()
        raise FloatingPointError(f"the gradient norm at step {step} is {norm}: lower lr={config.lr}, or look at the batch")
    lr = config.lr_at(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    policy.version += 1
    return {"grad_norm": norm, "lr": lr}


async def loop(policy: Policy, config: Optimisation, run: Run | None, one_step) -> AsyncIterator[dict]:
    """Steps from where the run stopped to the end; `one_step(step, optimizer)` is awaited and returns its row."""
    optimizer = make_optimizer(policy, config)
    first = 0
    if run is not None:
        first = await in_thread(policy, lambda: run.load_checkpoint(config, policy, optimizer))
        run.metrics = run.metrics[:first]
    for step in range(first, config.steps):
        row = {"step": step} | await one_step(step, optimizer)
        if run is not None:
            run.log(row)
            if (step + 1) % config.save_every == 0 and step + 1 < config.steps:
                saved = step + 1
                await in_thread(policy, lambda: run.save_checkpoint(saved, config, policy, optimizer))  # noqa: B023
        yield row
    if run is not None:
        run.drop_checkpoint()


async def over_batches(policy: Policy, items: Sequence, gradient, done, config: Optimisation, run: Run | None):
    """The loop of steps on `config.batch_size` items each: gradient(batch) accumulates theirs and returns its metrics,
    done(batch) names what the step did as a rate and counts it."""

    def update(step, optimizer):
        began = time.perf_counter()
        batch = draw(items, config.batch_size, step, config.seed)
        row = gradient(batch)
        row |= apply_gradient(policy, optimizer, config, step)
        seconds = time.perf_counter() - began
        return row | {name: count / seconds for name, count in done(batch).items()} | {"seconds": seconds}

    async def one_step(step, optimizer):
        return await in_thread(policy, lambda: update(step, optimizer))

    async for row in loop(policy, config, run, one_step):
        yield row
