"""The decode loop behind the sampler: which rollout sits in which row, what is prefilled when, and who is done.

A rollout in progress is a row; the rows in progress are always 0..n-1: the last row moves into the gap of a finished one
(compaction), waiting rollouts are appended (refill). Where a row keeps its keys and values is the business of `slots.py`.
A prompt is prefilled once for all its samples. Each row has its own position, so rows of any length sit side by side.
No threads here: one caller a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from grpolab.decode.cache import WINDOW, Prefilled, SlotCache, places_for, round_up
from grpolab.decode.graphs import static_step
from grpolab.decode.sampling import Draw, SamplingParams, draw_mixed, uniforms
from grpolab.decode.watch import Watch
from grpolab.rollouts import Group, Rollout

PREFILL_PAIRS = 2**22  # query-key pairs in one prefill call: rows times width times window
PREFILL_COLUMNS = 1024  # longer prompts are fed in pieces of this many tokens
BUCKET = 8  # prompts are padded to multiples of this, so that a row's width depends on its own length alone
AHEAD = 32  # steps whose uniforms are computed at once
BLOCK = 8  # steps between two looks at what was drawn, on a GPU; on a CPU looking is free and it is 1


@dataclass
class Stats:
    """What a sampler did since it was made; seconds are of its worker thread."""

    prefill_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sample_seconds: float = 0.0
    refreshes: int = 0


@dataclass
class Kept:
    """The keys and values of a conversation between two turns: `length` positions under the weights of `epoch`."""

    cache: SlotCache | None = None
    length: int = 0
    epoch: int = -1


class Request:
    """The handle of a submitted request: `result(timeout)` waits for the groups, `cancel()` ends its rollouts early."""

    def __init__(self, scheduler: Scheduler, ids: list[tuple[int, ...]], seeds: list[list[int]], params: SamplingParams,
                 on_rollout: Callable[[int, int, Rollout], None] | None = None, kept: Kept | None = None):
        self.scheduler, self.params, self.seeds, self.on_rollout, self.kept = scheduler, params, seeds, on_rollout, kept
        self.prompts = [Prompt(self, i, p, deque(range(len(s)))) for i, (p, s) in enumerate(zip(ids, seeds))]
        self.rollouts: list[list[Rollout | None]] = [[None] * len(s) for s in seeds]
        self.left = sum(len(s) for s in seeds)
        self.spent = self.live = 0  # tokens booked, rows in progress
        self.future: Future = Future()
        self.stopped: str | None = None  # the finish reason that its unfinished rollouts get
        self.submitted = time.perf_counter()
        policy = scheduler.policy
        self.eos = frozenset(() if params.ignore_eos else policy.eos_ids)
        self.stops = np.zeros(scheduler.engine.vocab, dtype=bool)
        self.stops[[*self.eos, *params.stop_ids]] = True

    def result(self, timeout: float | None = None) -> list[Group]:
        """The groups, in the order of the prompts; TimeoutError after `timeout` seconds."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the unfinished rollouts at the next step, with what they have and finish_reason "cancelled"."""
        self.stop("cancelled")

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason
        self.scheduler.interrupted = True

    def book(self, tokens: int) -> bool:
        """Take tokens from the budget; a request that has too few left stops."""
        budget = self.params.max_total_tokens
        if budget is not None and self.spent + tokens > budget:
            self.stop("budget")
            return False
        self.spent += tokens
        return True

    def deliver(self, i: int, g: int, rollout: Rollout) -> None:
        self.rollouts[i][g] = rollout
        self.left -= 1
        if self.on_rollout is not None:
            try:
                self.on_rollout(i, g, rollout)
            except Exception as error:  # the callback's fault is its caller's alone
                self.fail(error)
        if self.left == 0:
            settle(self.future, [Group(tuple(row)) for row in self.rollouts])

    def fail(self, error: BaseException) -> None:
        settle(self.future, error=error)
        self.cancel()


def settle(future: Future, result=None, error: BaseException | None = None) -> None:
    """Resolve a future that its waiter may have cancelled meanwhile."""
    try:
        future.set_result(result) if error is None else future.set_exception(error)
    except InvalidStateError:
        pass


@dataclass(eq=False)
class Prompt:
    """A prompt of a request. `samples`: the sample indices that wait; `cache`, `row`, `logits`: its prefill."""

    request: Request
    index: int
    ids: tuple[int, ...]
    samples: deque[int]
    cache: SlotCache | None = None
    row: int = 0
    logits: torch.Tensor | None = None
    prefill_seconds: float = 0.0

    def limit(self, context: int) -> int:
        """How many tokens a sample may take."""
        return min(self.request.params.max_new_tokens, context - len(self.ids))

    def kept(self, epoch: int) -> int:
        """How many of its positions the conversation still holds."""
        kept = self.request.kept
        return kept.length if kept is not None and kept.epoch == epoch else 0


class Scheduler:
    """Slots, waiting prompts and the loop body `step()`. `slots` None: what a fifth of free memory holds, <= 512."""

    def __init__(self, policy, choose: Callable, slots: int | None, cuda_graphs: bool = False):
        """choose: () -> an engine for the policy's model as it is now."""
        self.policy, self.choose, self.cuda_graphs = policy, choose, cuda_graphs
        self.engine = engine = choose()
        self.device = engine.device
        self.cache_bytes = free_bytes(self.device) // 5
        fitting = self.cache_bytes // (engine.bytes_per_token() * min(policy.context, 1024))
        self.slots = slots or 1 << (max(8, min(512, fitting)).bit_length() - 1)
        self.block = BLOCK if self.device.type == "cuda" else 1
        self.static = static_step(engine) if cuda_graphs else None
        self.stats, self.rows = Stats(), Rows(self.slots + engine.min_rows)
        self.places = places_for(engine, self.slots)
        self.waiting: deque[Prompt] = deque()
        self.interrupted = False
        self.epoch, self.watch = 0, Watch(policy)

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together."""
        return min(self.policy.context, self.engine.context)

    @property
    def busy(self) -> bool:
        return bool(self.rows.n or self.waiting)

    @torch.no_grad()
    def step(self) -> None:
        """Admit what fits, then one decode step (a block of them on a GPU) for every row."""
        settled = self._refresh()
        self._drop_stopped()
        if settled:
            self._admit()
        self._spend_budgets()
        self._drop_stopped()
        if self.rows.n:
            self._decode()

    def fail_all(self, error: BaseException) -> None:
        """Forget every row and prompt; their requests get the error."""
        requests = {id(p.request): p.request for p in self.waiting}
        requests |= {id(o.request): o.request for o in self.rows.owner[: self.rows.n]}
        self.waiting.clear()
        self.rows.clear()
        self.places = places_for(self.engine, self.slots)
        for request in requests.values():
            request.fail(error)

    # ------------------------------------------------------------- weights

    def _refresh(self) -> bool:
        """Renew packed weight copies, or choose an engine anew for changed modules once no row is in progress: until then
        rows end with what they began with and none is admitted (False). See `Watch` for what is noticed."""
        idle, watch = self.rows.n == 0, self.watch
        if not (idle or self.waiting) and watch.version == self.policy.version:
            return True
        again = watch.modules_changed()
        if not again and not watch.weights_changed(deep=idle):
            return True
        if again or not self.engine.proved:
            if not idle:
                return False
            self.engine = self.choose()
            self.device = self.engine.device
            self.rows, self.places = Rows(self.slots + self.engine.min_rows), places_for(self.engine, self.slots)
            self.static = static_step(self.engine) if self.cuda_graphs else None
        else:
            self.engine.refresh()
            if self.static is not None:
                self.static.refreshed()
        watch.look()
        self.epoch += 1
        self.stats.refreshes += 1
        for prompt in self.waiting:
            prompt.cache = prompt.logits = None
        return True

    # ----------------------------------------------------------- admission

    def _spend_budgets(self) -> None:
        """Book one token for every row of a request with a budget, or stop the request if that is too much."""
        for request in {o.request for o in self.rows.owner[: self.rows.n]} if self.rows.limited else ():
            request.book(request.live)

    def _drop_stopped(self) -> None:
        if not self.interrupted:
            return
        self.interrupted = False
        for prompt in [p for p in self.waiting if p.request.stopped]:
            self.waiting.remove(prompt)
            for g in prompt.samples:
                seed = prompt.request.seeds[prompt.index][g]
                nothing = Rollout(prompt.ids, (), (), (), (), prompt.request.stopped, seed, self.policy.version)
                prompt.request.deliver(prompt.index, g, nothing)
        stopped = [i for i in range(self.rows.n) if self.rows.owner[i].request.stopped]
        if stopped:
            self._finish(stopped, [self.rows.owner[i].request.stopped for i in stopped])

    def _admit(self) -> None:
        """Fill free slots with waiting rollouts; prompts are prefilled together, at most one stays partly admitted."""
        wanted = sum(len(p.samples) for p in self.waiting)
        free = self._capacity() - self.rows.n if wanted else 0
        if free < min(max(1, self.slots // 8), max(wanted, 1)):
            return
        chosen, seats = [], free
        for prompt in self.waiting:
            if seats <= 0:
                break
            chosen.append(prompt)
            seats -= len(prompt.samples)
        for batch in prefill_batches([p for p in chosen if p.cache is None], self.epoch):
            self._prefill(*batch)
        self._enter(chosen, free)
        while self.waiting and not self.waiting[0].samples:
            self.waiting.popleft()

    def _capacity(self) -> int:
        """Rows that the memory for keys and values holds if each grows to the longest that any may become."""
        longest = max(self.rows.longest(), *(len(p.ids) + p.limit(self.context) for p in self.waiting))
        per_row = self.engine.bytes_per_token() * self.places.room(longest)
        return max(1, min(self.slots, self.cache_bytes // per_row))

    def _prefill(self, prompts: list[Prompt], width: int, behind: int) -> None:
        """Feed prompts, less what their conversation has kept: up to `width` columns after up to `behind` kept ones."""
        started = time.perf_counter()
        kept = [p.kept(self.epoch) for p in prompts]
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, p in enumerate(prompts):
            tokens[i, : len(p.ids) - kept[i]] = torch.tensor(p.ids[kept[i]:])
        tokens, start = tokens.to(self.device), torch.tensor(kept, device=self.device)
        last = torch.tensor([len(p.ids) - 1 for p in prompts], device=self.device) - start
        cache = self.engine.allocate(len(prompts), round_up(behind + width, self.places.unit))
        for i, p in enumerate(prompts):
            if kept[i]:
                cache.put([i], p.request.kept.cache, [0], kept[i])
        logits = None
        for c in range(0, width, PREFILL_COLUMNS):
            piece = tokens[:, c: c + PREFILL_COLUMNS]
            window = min(round_up(behind + c + piece.shape[1], WINDOW), behind + width)
            end = (last - c).clamp(0, piece.shape[1] - 1)
            part = self.engine.forward(piece, start + c, end, cache, window)
            logits = part if logits is None else torch.where((last >= c)[:, None], part, logits)
        synchronize(self.device)
        seconds, fed = time.perf_counter() - started, sum(len(p.ids) for p in prompts) - sum(kept)
        for i, p in enumerate(prompts):
            p.cache, p.row, p.logits = cache, i, logits[i]
            p.prefill_seconds = seconds * (len(p.ids) - kept[i]) / fed
        self.stats.prefill_seconds += seconds
        self.stats.prefill_tokens += fed

    def _enter(self, prompts: list[Prompt], free: int) -> None:
        """Give waiting samples of prefilled prompts their slots and draw their first tokens."""
        owners = []
        for prompt in prompts:
            while prompt.samples and len(owners) < free and prompt.request.book(1):
                owners.append(Owner(prompt, prompt.samples.popleft(), self))
        if not owners:
            return
        rows, first = self.rows, self.rows.n
        rows.append(owners)
        prompts = [Prefilled(o.prompt.cache, o.prompt.row, o.length) for o in owners]
        self.places.enter(first, prompts, rows.longest())
        logits = torch.stack([o.prompt.logits for o in owners])
        for owner in owners:
            if not owner.prompt.samples:
                owner.prompt.cache = owner.prompt.logits = None
        drawn = draw_mixed(logits, torch.from_numpy(rows.uniforms(first, 1)[0]).to(self.device), kinds_of(owners, self.device))
        self._record(first, [drawn])

    # -------------------------------------------------------------- decode

    def _decode(self) -> None:
        rows, n = self.rows, self.rows.n
        padded = self.engine.rows(n)
        rows.token[n:padded] = rows.position[n:padded] = 0
        steps = 1 if rows.limited else min(self.block, int((rows.limit - rows.count)[:n].min()))
        window = round_up(int(rows.position[:n].max()) + steps, self.places.unit)
        self.places.fit(rows.position[:n], padded, steps, rows.longest())
        u, kinds = torch.from_numpy(rows.next_uniforms(steps)).to(self.device), rows.kinds(self.device)
        tokens, start = (torch.from_numpy(a[:padded]).to(self.device) for a in (rows.token, rows.position))
        drawn, forward_seconds, started = [], 0.0, time.perf_counter()
        for i in range(steps):
            before = time.perf_counter()
            logits = self._forward(tokens, start, window)[:n]
            forward_seconds += time.perf_counter() - before
            drawn.append(draw_mixed(logits, u[i], kinds))
            if i + 1 < steps:
                tokens, start = F.pad(drawn[-1].tokens, (0, padded - n)), start + 1
        synchronize(self.device)
        seconds = time.perf_counter() - started
        if self.device.type == "cuda":  # the clock sees launches only, the block is counted as forward as a whole
            forward_seconds = seconds
        self.stats.steps += steps
        self.stats.row_steps += n * steps
        self.stats.decode_seconds += forward_seconds
        self.stats.sample_seconds += seconds - forward_seconds
        self._record(0, drawn)

    def _forward(self, tokens: torch.Tensor, start: torch.Tensor, window: int) -> torch.Tensor:
        if self.static is not None:
            return self.static(tokens, start, self.places.cache, window)
        return self.engine.forward(tokens[:, None], start, None, self.places.cache, window)

    def _record(self, first: int, drawn: list[Draw]) -> None:
        """Append drawn tokens, one Draw a step, to rows first.. and finish those that are done."""
        rows, alive, ended = self.rows, np.arange(first, self.rows.n), {}
        for step in drawn:
            columns = [None if t is None else t.cpu().numpy()[alive - first]
                       for t in (step.tokens, step.logps, step.raw_logps, step.kept_mass)]
            rows.extend(alive, *columns)
            self.stats.new_tokens += len(alive)
            over = rows.ended(alive, self.policy.tokenizer)
            ended |= over
            if over:
                alive = np.array([i for i in alive if i not in over], dtype=np.int64)
        if ended:
            self._finish(sorted(ended), [ended[i] for i in sorted(ended)])

    def _finish(self, done: list[int], reasons: list) -> None:
        """Deliver rows and close the gaps that they leave."""
        rows = self.rows
        for i, reason in zip(done, reasons):
            owner, request = rows.owner[i], rows.owner[i].request
            request.live -= 1
            broken = isinstance(reason, Exception)
            if not broken and request.kept is not None:
                length = int(rows.position[i])
                request.kept.cache, request.kept.length = self.places.take(i, length), length
                request.kept.epoch = self.epoch if owner.epoch == self.epoch else -1
            self.places.leave(i, broken)
            if broken:
                request.fail(reason)
            else:
                request.deliver(owner.prompt.index, owner.sample, rows.rollout(i, reason, self))
        moves = rows.compact(done)
        if moves:
            self.places.move(*zip(*moves), int(rows.position[: rows.n].max()))


class Owner:
    """Whose row it is, and what the clocks showed when it entered."""

    def __init__(self, prompt: Prompt, sample: int, scheduler: Scheduler):
        stats = scheduler.stats
        self.prompt, self.sample, self.request = prompt, sample, prompt.request
        self.length, self.limit = len(prompt.ids), prompt.limit(scheduler.context)
        self.seed, self.version = prompt.request.seeds[prompt.index][sample], scheduler.policy.version
        self.epoch, self.entered = scheduler.epoch, time.perf_counter()
        self.before = (stats.decode_seconds, stats.sample_seconds, stats.steps, stats.row_steps)
        prompt.request.live += 1


class Rows:
    """The rows in progress as a structure of arrays; entries 0..n-1 are live."""

    arrays = ("token", "position", "count", "limit", "seed", "tokens", "logps", "raw_logps", "mass")

    def __init__(self, capacity: int):
        self.n, self.owner = 0, [None] * capacity
        self.token, self.position, self.count, self.limit = (np.zeros(capacity, np.int64) for _ in range(4))
        self.seed = np.zeros(capacity, np.uint64)
        self.tokens = np.zeros((capacity, 64), np.int64)
        self.logps, self.raw_logps, self.mass = (np.ones((capacity, 64), np.float32) for _ in range(3))
        self._changed()

    def _changed(self) -> None:
        """What depends on who is in the batch: whether one request owns it all, whether one looks at every token."""
        requests = {id(o.request): o.request for o in self.owner[: self.n]}
        self.only = next(iter(requests.values())) if len(requests) == 1 else None
        self.limited = any(r.params.stop_strings or r.params.max_total_tokens for r in requests.values())
        self._kinds, self._ahead = None, np.empty((0, 0))

    def longest(self) -> int:
        """The most tokens that any row may come to have, prompt included."""
        n = self.n
        return int((self.position + 1 - self.count + self.limit)[:n].max()) if n else 0

    def append(self, owners: list[Owner]) -> None:
        """`position` is that of the newest token, which is drawn but not yet fed."""
        for owner in owners:
            i, self.n = self.n, self.n + 1
            self.owner[i], self.position[i], self.count[i] = owner, owner.length - 1, 0
            self.limit[i], self.seed[i] = owner.limit, owner.seed
        self._changed()

    def uniforms(self, first: int, steps: int) -> np.ndarray:
        """One uniform for each of the next `steps` tokens of rows first.., (steps, n - first)."""
        positions = self.position[first: self.n] + np.arange(1, steps + 1)[:, None]
        return uniforms(self.seed[first: self.n], positions)

    def next_uniforms(self, steps: int) -> np.ndarray:
        """Those of the coming `steps` steps of all rows (steps, n); computed AHEAD at a time while the rows stay."""
        if len(self._ahead) < steps:
            self._ahead = self.uniforms(0, max(steps, AHEAD))
        now, self._ahead = self._ahead[:steps], self._ahead[steps:]
        return now

    def kinds(self, device) -> list[tuple[SamplingParams, torch.Tensor]]:
        if self._kinds is None:
            self._kinds = kinds_of(self.owner[: self.n], device)
        return self._kinds

    def extend(self, rows: np.ndarray, tokens, logps, raw_logps, mass) -> None:
        count = self.count[rows]
        if count.max(initial=0) >= self.tokens.shape[1]:
            for name in ("tokens", "logps", "raw_logps", "mass"):
                setattr(self, name, np.concatenate([getattr(self, name)] * 2, axis=1))
        self.tokens[rows, count], self.logps[rows, count], self.raw_logps[rows, count] = tokens, logps, raw_logps
        self.mass[rows, count] = 1.0 if mass is None else mass
        self.token[rows] = tokens
        self.count[rows] += 1
        self.position[rows] += 1

    def ended(self, rows: np.ndarray, tokenizer) -> dict:
        """Row -> finish reason, or error, of the rows that are done after their newest token."""
        count, token = self.count[rows], self.token[rows]
        broken = ~np.isfinite(self.raw_logps[rows, count - 1])
        if self.only is not None:
            stopped = self.only.stops[np.where(broken, 0, token)] & ~broken
        else:
            stopped = np.fromiter((self.owner[i].request.stops[self.token[i]] for i in rows), bool, len(rows))
        over = broken | stopped | (count >= self.limit[rows])
        ended = {int(i): self._reason(int(i), bool(b)) for i, b in zip(rows[over], broken[over])}
        if self.limited:
            for i in rows:
                if ended.get(int(i)) in (None, "length", "context") and self._says_stop(i, tokenizer):
                    ended[int(i)] = "stop_string"
        return ended

    def _says_stop(self, i: int, tokenizer) -> bool:
        """Whether the newest token completes a stop string; the tail is long enough, as a token has a byte or more."""
        strings = self.owner[i].request.params.stop_strings
        if not strings:
            return False
        tail = max(len(s.encode()) for s in strings) + 4
        text = tokenizer.decode(self.tokens[i, max(0, self.count[i] - tail): self.count[i]].tolist())
        return any(s in text for s in strings)

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

    def rollout(self, i: int, reason: str, scheduler: Scheduler) -> Rollout:
        owner, n, stats = self.owner[i], int(self.count[i]), scheduler.stats
        decode, sample, steps, row_steps = owner.before
        steps = stats.steps - steps
        mean_rows = (stats.row_steps - row_steps) / steps if steps else 0.0
        timings = dict(
            queued_seconds=owner.entered - owner.request.submitted,
            prefill_seconds=owner.prompt.prefill_seconds,
            decode_seconds=stats.decode_seconds - decode,
            sample_seconds=stats.sample_seconds - sample,
            total_seconds=time.perf_counter() - owner.request.submitted,
            steps=steps,
            mean_rows=mean_rows,
            slot_use=mean_rows / scheduler.slots,
        )
        kept = tuple(self.mass[i, :n].tolist()) if owner.request.params.truncates else ()
        return Rollout(
            owner.prompt.ids, tuple(self.tokens[i, :n].tolist()), (1,) * n, tuple(self.logps[i, :n].tolist()),
            tuple(self.raw_logps[i, :n].tolist()), reason, owner.seed, owner.version, timings=timings, kept_mass=kept)

    def compact(self, done: list[int]) -> list[tuple[int, int]]:
        """Forget these rows; the last ones move into the gaps. Returns the moves (to, from)."""
        left, gone = self.n - len(done), set(done)
        moves = list(zip((i for i in done if i < left), (i for i in range(left, self.n) if i not in gone)))
        for to, of in moves:
            self.owner[to] = self.owner[of]
            for name in self.arrays:
                array = getattr(self, name)
                array[to] = array[of]
        self.owner[left: self.n] = [None] * len(done)
        self.n = left
        self._changed()
        return moves

    def clear(self) -> None:
        self.owner, self.n = [None] * len(self.owner), 0
        self._changed()


def kinds_of(owners: list[Owner], device) -> list[tuple[SamplingParams, torch.Tensor]]:
    """Rows grouped by how they are sampled: (params, row indices)."""
    groups: dict = {}
    for i, owner in enumerate(owners):
        p = owner.request.params
        key = "greedy" if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)
        groups.setdefault(key, (p, []))[1].append(i)
    return [(p, torch.tensor(rows, device=device)) for p, rows in groups.values()]


def prefill_batches(prompts: list[Prompt], epoch: int) -> list[tuple[list[Prompt], int, int]]:
    """(prompts, width of what is new, width of what is kept): a row's widths, and so its last bits, are its own."""
    buckets: dict[tuple[int, int], list[Prompt]] = {}
    for prompt in prompts:
        kept = prompt.kept(epoch)
        buckets.setdefault((round_up(len(prompt.ids) - kept, BUCKET), round_up(kept, BUCKET)), []).append(prompt)
    batches = []
    for (width, behind), members in buckets.items():
        size = max(1, PREFILL_PAIRS // (width * (behind + width)))
        batches += [(members[i: i + size], width, behind) for i in range(0, len(members), size)]
    return batches


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:  # what the kernel can give: its count of free pages leaves out the page cache, which it would drop
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system counts its free pages
        return 4 << 30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
