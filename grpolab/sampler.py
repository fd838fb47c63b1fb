"""The sampler: every rollout comes from here, out of one decode batch that concurrent callers share.

One worker thread owns the model. A rollout in progress is a row; row i uses cache slot i, and the rows in progress are
always 0..n-1: a finished row is replaced by the last one (compaction), waiting rollouts are appended (refill). A prompt is
prefilled once for all its samples. Right-padded: each row has its own position, so rows of any length sit side by side.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from .engines import WINDOW, LlamaEngine, SlotCache, round_up
from .rollouts import Group, Rollout
from .sampling import SamplingParams, draw_mixed, fold_seed, uniforms

PREFILL_TOKENS = 16384  # positions (rows times width) in one prefill call
IDLE_SECONDS = 5.0  # after which the worker thread ends; the next request starts another


class Sampler:
    """Samples rollouts of a policy, from coroutines and from scripts.

        groups = await sampler.sample(prompts, group_size=8, params=SamplingParams(max_new_tokens=64, seed=0))
        groups = sampler.sample_sync(prompts, group_size=8)

    slots   rows decoded together; None takes as many as a fifth of the free memory holds, at most 512
    seed    what requests without a seed of their own draw theirs from
    """

    def __init__(self, policy, *, slots: int | None = None, seed: int = 0):
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}; None chooses by memory")
        self.policy, self.seed = policy, seed
        self.engine = LlamaEngine(policy.model)
        self.vocab = self.engine.vocab
        per_slot = self.engine.bytes_per_token() * min(policy.context, 1024)
        self.cache_bytes = _free_bytes(policy.device) // 5
        fitting = max(8, min(512, self.cache_bytes // per_slot))
        self.slots = slots or 1 << (int(fitting).bit_length() - 1)
        self.stats = Stats()
        self._rows = _Rows(self.slots + self.engine.min_rows)
        self._cache: SlotCache | None = None
        self._waiting: deque[_Prompt] = deque()
        self._inbox: deque = deque()
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._requests = 0
        self._stamp = self._parameter_stamp()
        _open_samplers.add(self)

    # ---------------------------------------------------------------- callers

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> list[Group]:
        """Token id lists -> one Group of `group_size` rollouts for each; cancelling the await frees its slots."""
        request = self.submit(prompts, group_size=group_size, params=params)
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.cancel()
            raise

    def sample_sync(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                    params: SamplingParams | None = None) -> list[Group]:
        """`sample` for scripts; it also works inside a running loop, which it blocks."""
        return self.submit(prompts, group_size=group_size, params=params).result()

    def submit(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
               seeds: Sequence[Sequence[int]] | None = None,
               on_rollout: Callable[[int, int, Rollout], None] | None = None) -> Request:
        """Queue a request and return its handle at once (`result()`, `cancel()`).

        seeds       one for each rollout, (B, G), to repeat rollouts by their `.seed`; None derives them from params.seed
        on_rollout  called in the worker thread with (prompt index, sample index, rollout) as each one finishes
        """
        params = params or SamplingParams()
        ids = [self._checked(prompt, i) for i, prompt in enumerate(prompts)]
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        bad = [i for i in params.stop_ids if not 0 <= i < self.vocab]
        if bad:
            raise ValueError(f"stop_ids {bad} are outside the vocabulary 0..{self.vocab - 1}")
        if params.stop_strings and getattr(self.policy, "tokenizer", None) is None:
            raise ValueError("stop_strings need a policy with a tokenizer; use stop_ids")
        with self._wake:
            if self._closed:
                raise RuntimeError("the sampler is closed; make a new Sampler(policy)")
            base = params.seed if params.seed is not None else fold_seed(self.seed, self._requests)
            self._requests += 1
            if seeds is None:
                seeds = [[fold_seed(base, i, g) for g in range(group_size)] for i in range(len(ids))]
            request = Request(self, ids, [list(s) for s in seeds], params, on_rollout)
            if request.left:
                self._inbox.append(request)
                self._start()
            else:
                request.future.set_result([])
            self._wake.notify()
        return request

    async def run(self, fn: Callable, *args):
        """Call fn(*args) in the worker thread between two decode steps: the place to change the policy's weights."""
        return await asyncio.wrap_future(self._call(fn, *args))

    def run_sync(self, fn: Callable, *args):
        """`run` for scripts."""
        return self._call(fn, *args).result()

    def _call(self, fn, *args) -> Future:
        future: Future = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("the sampler is closed; make a new Sampler(policy)")
            self._inbox.append((future, fn, args))
            self._start()
            self._wake.notify()
        return future

    def close(self) -> _Closing:
        """End the worker thread and fail what waits. `sampler.close()` and `await sampler.close()` both do."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            worker = self._worker
        return _Closing(worker)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_):
        self.close()

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(self, *_):
        await self.close()

    def _checked(self, prompt: Sequence[int], index: int) -> tuple[int, ...]:
        ids = tuple(int(t) for t in prompt)
        if not ids:
            raise ValueError(f"prompt {index} is empty; give it at least one token, e.g. the bos id")
        if len(ids) >= self.policy.context:
            raise ValueError(f"prompt {index} has {len(ids)} tokens and leaves no room in the context of "
                             f"{self.policy.context}; shorten it")
        wrong = next((t for t in ids if not 0 <= t < self.vocab), None)
        if wrong is not None:
            raise ValueError(f"prompt {index} holds token id {wrong}, outside the vocabulary 0..{self.vocab - 1}")
        return ids

    # ----------------------------------------------------------------- worker

    def _start(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="grpolab-sampler", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        while True:
            with self._wake:
                busy = self._rows.n or self._waiting
                if not (busy or self._inbox or self._closed):
                    self._wake.wait(IDLE_SECONDS)
                if self._closed or not (busy or self._inbox):
                    self._worker = None
                    break
                inbox, self._inbox = self._inbox, deque()
            try:
                self._serve(inbox)
            except Exception as error:  # whatever the model raised: its requests fail, the worker lives on
                self._fail_all(error)
        if self._closed:
            self._fail_all(RuntimeError("the sampler was closed before this request was done"))

    def _serve(self, inbox) -> None:
        idle = not (self._rows.n or self._waiting)
        for item in inbox:
            if isinstance(item, Request):
                self._waiting.extend(item.prompts)
            else:
                _resolve(*item)
        with torch.no_grad():
            self._refresh(thorough=idle)
            self._drop_cancelled()
            self._admit()
            if self._rows.n:
                self._decode()

    def _refresh(self, thorough: bool) -> None:
        """Bring packed weight copies up to date; `thorough` also notices in-place changes without a version bump."""
        if not thorough and self._stamp[0] == self.policy.version:
            return
        stamp = self._parameter_stamp()
        if stamp != self._stamp:
            self.engine.refresh()
            self._stamp = stamp

    def _parameter_stamp(self) -> tuple:
        parameters = self.policy.model.parameters()
        return self.policy.version, tuple((p.data_ptr(), p._version) for p in parameters)

    def _drop_cancelled(self) -> None:
        rows = self._rows
        if any(p.request.stopped for p in self._waiting):
            for prompt in [p for p in self._waiting if p.request.stopped]:
                for g in prompt.samples:
                    prompt.request.deliver(prompt.index, g, _unstarted(prompt, g, prompt.request.stopped, self.policy))
            self._waiting = deque(p for p in self._waiting if not p.request.stopped)
        stopped = [i for i in range(rows.n) if rows.owner[i].request.stopped]
        if stopped:
            self._finish(stopped, [rows.owner[i].request.stopped for i in stopped])

    def _admit(self) -> None:
        """Fill free slots with waiting rollouts, prefilling their prompts; at most one prompt stays partly admitted."""
        rows = self._rows
        free = self._capacity() - rows.n
        wanted = sum(len(p.samples) for p in self._waiting)
        if not wanted or free < min(max(1, self.slots // 8), wanted):
            return
        chosen: list[_Prompt] = []
        for prompt in self._waiting:
            if free <= 0:
                break
            chosen.append(prompt)
            free -= len(prompt.samples)
        for batch in _prefill_batches([p for p in chosen if p.cache is None]):
            self._prefill(batch)
        self._enter(chosen, self._capacity() - rows.n)
        while self._waiting and not self._waiting[0].samples:
            self._waiting.popleft()

    def _capacity(self) -> int:
        """Rows that the memory for keys and values holds if each grows to the longest that rows or candidates may get."""
        lengths = [o.length + o.limit for o in self._rows.owner[: self._rows.n]]
        if self._waiting:
            first = self._waiting[0]
            lengths.append(len(first.ids) + first.limit(self.policy.context))
        per_row = self.engine.bytes_per_token() * round_up(max(lengths, default=1), WINDOW)
        return max(1, min(self.slots, self.cache_bytes // per_row))

    def _prefill(self, batch: list[_Prompt]) -> None:
        started = time.perf_counter()
        width = round_up(max(len(p.ids) for p in batch), WINDOW)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        for i, p in enumerate(batch):
            tokens[i, : len(p.ids)] = torch.tensor(p.ids)
        device = self.policy.device
        start = torch.zeros(len(batch), dtype=torch.long, device=device)
        last = torch.tensor([len(p.ids) - 1 for p in batch], device=device)
        cache = self.engine.allocate(len(batch), width)
        logits = self.engine.forward(tokens.to(device), start, last, cache, width)
        _synchronize(device)
        seconds = time.perf_counter() - started
        for i, p in enumerate(batch):
            p.cache, p.cache_row, p.logits = cache, i, logits[i]
            p.prefill_seconds = seconds * len(p.ids) / sum(len(q.ids) for q in batch)
        self.stats.prefill_seconds += seconds
        self.stats.prefill_tokens += sum(len(p.ids) for p in batch)

    def _enter(self, chosen: list[_Prompt], free: int) -> None:
        """Give the waiting samples of prefilled prompts their slots and draw their first tokens."""
        rows, first = self._rows, self._rows.n
        owners = []
        for prompt in chosen:
            while prompt.samples and len(owners) < free:
                owners.append(_Owner(prompt, prompt.samples.popleft(), self.policy, self.stats))
        if not owners:
            return
        self._fit(first + len(owners), max(o.length for o in owners))
        by_cache: dict[int, list[int]] = {}
        for i, owner in enumerate(owners):
            by_cache.setdefault(id(owner.prompt.cache), []).append(i)
        device = self.policy.device
        for members in by_cache.values():
            source = owners[members[0]].prompt.cache
            self._cache.put(torch.tensor([first + i for i in members], device=device), source,
                            torch.tensor([owners[i].prompt.cache_row for i in members], device=device), source.width)
        rows.append(owners)
        logits = torch.stack([o.prompt.logits for o in owners])
        for owner in owners:
            if not owner.prompt.samples:
                owner.prompt.cache = owner.prompt.logits = None
        new = slice(first, rows.n)
        u = torch.from_numpy(uniforms(rows.seed[new], rows.position[new])).to(device)
        kinds = _kinds(owners, device)
        drawn = draw_mixed(logits, u, kinds)
        self._record(first, [drawn])

    def _fit(self, rows: int, width: int) -> None:
        """Grow the cache to at least these rows and this width."""
        slots, width = rows + self.engine.min_rows, round_up(width + 1, WINDOW)
        if self._cache is None:
            self._cache = self.engine.allocate(slots, width)
        elif slots > self._cache.slots or width > self._cache.width:
            slots = slots if slots <= self._cache.slots else max(slots, min(2 * self._cache.slots, self.slots + 2))
            width = width if width <= self._cache.width else max(width, self._cache.width * 3 // 2 // WINDOW * WINDOW)
            self._cache = self._cache.resized(max(slots, self._cache.slots), max(width, self._cache.width))

    def _decode(self) -> None:
        """One step for every row: feed the pending token, draw the next one."""
        rows, device = self._rows, self.policy.device
        started = time.perf_counter()
        n = rows.n
        padded = max(n, self.engine.min_rows)
        rows.token[n:padded] = rows.position[n:padded] = 0
        window = round_up(int(rows.position[:n].max()) + 1, WINDOW)
        self._fit(padded, window - 1)
        tokens, start = (torch.from_numpy(a[:padded]).to(device) for a in (rows.token, rows.position))
        logits = self.engine.forward(tokens[:, None], start, None, self._cache, window)[:n]
        _synchronize(device)
        forwarded = time.perf_counter()
        rows.position[:n] += 1
        u = torch.from_numpy(uniforms(rows.seed[:n], rows.position[:n])).to(device)
        drawn = draw_mixed(logits, u, rows.kinds(device))
        self.stats.steps += 1
        self.stats.row_steps += n
        self.stats.decode_seconds += forwarded - started
        self._record(0, [drawn])
        self.stats.sample_seconds += time.perf_counter() - forwarded

    def _record(self, first: int, drawn: list) -> None:
        """Append drawn tokens to rows first.. and finish the rows that are done."""
        rows = self._rows
        for step in drawn:
            tokens = step.tokens.cpu().numpy()
            logps, raw_logps = step.logps.cpu().numpy(), step.raw_logps.cpu().numpy()
            mass = None if step.kept_mass is None else step.kept_mass.cpu().numpy()
            rows.extend(first, tokens, logps, raw_logps, mass)
            self.stats.new_tokens += len(tokens)
        done, reasons = rows.finished(first, self.policy)
        if done:
            self._finish(done, reasons)

    def _finish(self, done: list[int], reasons: list) -> None:
        """Deliver rows and close the gaps that they leave."""
        rows = self._rows
        for i, reason in zip(done, reasons):
            owner = rows.owner[i]
            if isinstance(reason, Exception):
                self._cache.clear(i)
                owner.request.fail(reason)
            else:
                owner.request.deliver(owner.prompt.index, owner.sample, rows.rollout(i, reason, self.stats))
        moves = rows.compact(done)
        if moves:
            device = self.policy.device
            to, source = (torch.tensor(side, device=device) for side in zip(*moves))
            self._cache.put(to, self._cache, source, round_up(int(rows.position[: rows.n].max()) + 1, WINDOW))

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            items, self._inbox = list(self._inbox), deque()
        requests = {id(p.request): p.request for p in self._waiting}
        requests |= {id(o.request): o.request for o in self._rows.owner[: self._rows.n]}
        requests |= {id(item): item for item in items if isinstance(item, Request)}
        self._waiting.clear()
        self._rows.clear()
        self._cache = None
        for request in requests.values():
            request.fail(error)
        for item in items:
            if not isinstance(item, Request) and not item[0].done():
                item[0].set_exception(error)


_open_samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A worker still inside torch when the interpreter goes would crash it."""
    for sampler in list(_open_samplers):
        sampler.close()


class _Closing:
    """What `close` returns. Outside a loop the worker is joined at once; in a loop, by awaiting this."""

    def __init__(self, worker: threading.Thread | None):
        self.worker = worker if worker is not threading.current_thread() else None
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._join()

    def _join(self):
        if self.worker is not None:
            self.worker.join()

    def __await__(self):
        return asyncio.to_thread(self._join).__await__()


@dataclass
class Stats:
    """What the sampler did since it was made; seconds are of the worker thread."""

    prefill_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sample_seconds: float = 0.0


class Request:
    """The handle of a submitted request: `result(timeout)` waits for the groups, `cancel()` ends its rollouts early."""

    def __init__(self, sampler: Sampler, ids: list[tuple[int, ...]], seeds: list[list[int]], params: SamplingParams,
                 on_rollout: Callable[[int, int, Rollout], None] | None):
        policy = sampler.policy
        self.params, self.seeds, self.on_rollout = params, seeds, on_rollout
        self.prompts = [_Prompt(self, i, p, deque(range(len(s)))) for i, (p, s) in enumerate(zip(ids, seeds))]
        self.rollouts: list[list[Rollout | None]] = [[None] * len(s) for s in seeds]
        self.left = sum(len(s) for s in seeds)
        self.future: Future = Future()
        self.stopped: str | None = None  # the finish reason that its unfinished rollouts get
        self.submitted = time.perf_counter()
        eos = () if params.ignore_eos else tuple(policy.eos_ids)
        self.stops = np.zeros(sampler.vocab, dtype=bool)
        self.stops[list(eos) + list(params.stop_ids)] = True
        self.eos = frozenset(eos)
        self._sampler = weakref.ref(sampler)

    def result(self, timeout: float | None = None) -> list[Group]:
        """The groups, in the order of the prompts; TimeoutError after `timeout` seconds."""
        sampler = self._sampler()
        if sampler is not None and sampler._worker is threading.current_thread():
            raise RuntimeError("waiting for a request inside the sampler's own thread would wait for ever")
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the unfinished rollouts at the next step, with what they have and finish_reason "cancelled"."""
        self.stopped = self.stopped or "cancelled"

    def deliver(self, i: int, g: int, rollout: Rollout) -> None:
        self.rollouts[i][g] = rollout
        self.left -= 1
        if self.on_rollout is not None:
            self.on_rollout(i, g, rollout)
        if self.left == 0 and not self.future.done():
            self.future.set_result([Group(tuple(row)) for row in self.rollouts])

    def fail(self, error: Exception) -> None:
        self.stopped = self.stopped or "cancelled"
        if not self.future.done():
            self.future.set_exception(error)


def _resolve(future: Future, fn: Callable, args: tuple) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(fn(*args))
    except BaseException as error:  # it belongs to the caller, whatever it is
        future.set_exception(error)


@dataclass(eq=False)
class _Prompt:
    """A prompt of a request; `samples` are the sample indices that wait for a slot."""

    request: Request
    index: int
    ids: tuple[int, ...]
    samples: deque[int]
    cache: SlotCache | None = None
    cache_row: int = 0
    logits: torch.Tensor | None = None
    prefill_seconds: float = 0.0

    def limit(self, context: int) -> int:
        """How many tokens a sample may take."""
        return min(self.request.params.max_new_tokens, context - len(self.ids))


class _Owner:
    """Whose row it is, and what the clocks showed when it entered."""

    def __init__(self, prompt: _Prompt, sample: int, policy, stats: Stats):
        self.prompt, self.sample, self.request = prompt, sample, prompt.request
        self.length, self.limit = len(prompt.ids), prompt.limit(policy.context)
        self.seed, self.version = prompt.request.seeds[prompt.index][sample], policy.version
        self.entered = time.perf_counter()
        self.before = (stats.decode_seconds, stats.sample_seconds, stats.steps, stats.row_steps)


class _Rows:
    """The rows in progress as a structure of arrays; entries 0..n-1 are live and entry i is cache slot i."""

    arrays = ("token", "position", "count", "limit", "seed", "tokens", "logps", "raw_logps", "mass")

    def __init__(self, capacity: int):
        self.n, self.owner = 0, [None] * capacity
        self.token = np.zeros(capacity, np.int64)  # drawn, not yet fed
        self.position = np.zeros(capacity, np.int64)  # where that token goes
        self.count = np.zeros(capacity, np.int64)  # tokens drawn so far
        self.limit = np.zeros(capacity, np.int64)
        self.seed = np.zeros(capacity, np.uint64)
        self.tokens = np.zeros((capacity, 64), np.int64)
        self.logps, self.raw_logps, self.mass = (np.ones((capacity, 64), np.float32) for _ in range(3))
        self._kinds = None

    def append(self, owners: list[_Owner]) -> None:
        for owner in owners:
            i, self.n = self.n, self.n + 1
            self.owner[i] = owner
            self.position[i], self.count[i] = owner.length, 0
            self.limit[i], self.seed[i] = owner.limit, owner.seed
        self._kinds = None

    def kinds(self, device):
        if self._kinds is None:
            self._kinds = _kinds(self.owner[: self.n], device)
        return self._kinds

    def extend(self, first: int, tokens, logps, raw_logps, mass) -> None:
        rows = np.arange(first, first + len(tokens))
        count = self.count[rows]
        if count.max() >= self.tokens.shape[1]:
            for name in ("tokens", "logps", "raw_logps", "mass"):
                setattr(self, name, np.concatenate([getattr(self, name)] * 2, axis=1))
        self.tokens[rows, count], self.logps[rows, count], self.raw_logps[rows, count] = tokens, logps, raw_logps
        self.mass[rows, count] = 1.0 if mass is None else mass
        self.token[rows] = tokens
        self.count[rows] += 1

    def finished(self, first: int, policy) -> tuple[list[int], list]:
        """Rows first.. that are done after their newest token, with a finish reason or an error each."""
        span = slice(first, self.n)
        newest = self.count[span] - 1
        broken = ~np.isfinite(self.raw_logps[np.arange(first, self.n), newest])
        over = broken | (self.count[span] >= self.limit[span])
        owners = self.owner[first: self.n]
        if all(o.request is owners[0].request for o in owners):
            over |= owners[0].request.stops[self.token[span]]
        else:
            over |= np.fromiter((o.request.stops[t] for o, t in zip(owners, self.token[span])), bool, len(owners))
        done = [int(i) + first for i in np.flatnonzero(over)]
        return done, [self._reason(i, bool(broken[i - first])) for i in done]

    def _reason(self, i: int, broken: bool):
        owner, token = self.owner[i], int(self.token[i])
        if broken:
            return FloatingPointError(
                f"the logits of prompt {owner.prompt.index}, sample {owner.sample} are not finite at position "
                f"{int(self.position[i])}; look for NaN in the policy's weights")
        if token in owner.request.eos:
            return "eos"
        if owner.request.stops[token]:
            return "stop_id"
        return "length" if self.count[i] >= owner.request.params.max_new_tokens else "context"

    def rollout(self, i: int, reason: str, stats: Stats) -> Rollout:
        owner, n = self.owner[i], int(self.count[i])
        decode, sample, steps, row_steps = owner.before
        steps = stats.steps - steps
        now = time.perf_counter()
        timings = dict(
            queued_seconds=owner.entered - owner.request.submitted,
            prefill_seconds=owner.prompt.prefill_seconds,
            decode_seconds=stats.decode_seconds - decode,
            sample_seconds=stats.sample_seconds - sample,
            seconds=now - owner.entered,
            steps=steps,
            mean_rows=(stats.row_steps - row_steps) / steps if steps else 0.0,
        )
        return Rollout(owner.prompt.ids, tuple(self.tokens[i, :n].tolist()), (1,) * n, tuple(self.logps[i, :n].tolist()),
                       tuple(self.raw_logps[i, :n].tolist()), reason, owner.seed, owner.version, timings=timings)

    def compact(self, done: list[int]) -> list[tuple[int, int]]:
        """Forget these rows; the last ones move into the gaps. Returns the moves (to, from)."""
        left = self.n - len(done)
        gone = set(done)
        gaps = [i for i in sorted(gone) if i < left]
        movers = [i for i in range(left, self.n) if i not in gone]
        moves = list(zip(gaps, movers))
        for to, source in moves:
            self.owner[to] = self.owner[source]
            for name in self.arrays:
                array = getattr(self, name)
                array[to] = array[source]
        for i in range(left, self.n):
            self.owner[i] = None
        self.n, self._kinds = left, None
        return moves

    def clear(self) -> None:
        self.owner, self.n, self._kinds = [None] * len(self.owner), 0, None


def _kinds(owners: list[_Owner], device) -> list[tuple[SamplingParams, torch.Tensor]]:
    """Rows grouped by how they are sampled."""
    groups: dict = {}
    for i, owner in enumerate(owners):
        p = owner.request.params
        key = "greedy" if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)
        groups.setdefault(key, (p, []))[1].append(i)
    return [(p, torch.tensor(rows, device=device)) for p, rows in groups.values()]


def _prefill_batches(prompts: list[_Prompt]) -> list[list[_Prompt]]:
    """Prompts of one width bucket together (a row's width, and so its last bits, then depend on itself alone)."""
    buckets: dict[int, list[_Prompt]] = {}
    for prompt in prompts:
        buckets.setdefault(round_up(len(prompt.ids), WINDOW), []).append(prompt)
    batches = []
    for width, members in buckets.items():
        size = max(1, PREFILL_TOKENS // width)
        batches += [members[i: i + size] for i in range(0, len(members), size)]
    return batches


def _unstarted(prompt: _Prompt, sample: int, reason: str, policy) -> Rollout:
    seed = prompt.request.seeds[prompt.index][sample]
    return Rollout(prompt.ids, (), (), (), (), reason, seed, policy.version)


def _free_bytes(device) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system counts its free pages
        return 4 << 30


def _synchronize(device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
