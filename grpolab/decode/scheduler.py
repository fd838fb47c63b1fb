"""The decode loop behind the sampler: which rollout sits in which row, what is prefilled when, and who is done.

A rollout in progress is a row; the rows in progress are always 0..n-1: the last row moves into the gap of a finished one
(compaction), waiting rollouts are appended (refill). Where a row keeps its keys and values is the business of `cache.py`,
who enters and how a prompt is fed, once for all its samples, that of `prefill.py`. Each row has its own
position, so rows of any length sit side by side. No threads here: one caller a time.

A fault fails whom it belongs to: of a callback, a tokenizer or NaN logits its request, of the model in a prefill or a step
the requests that were in it. The others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from grpolab.decode.batch import Batch
from grpolab.decode.cache import Prefilled, round_up, store_for
from grpolab.decode.prefill import admit, free_bytes, prefill, prefill_batches, synchronize
from grpolab.decode.requests import Kept, Owner, Pending, Request, Stats, deliver, ending, no_room, pending, settle, tell
from grpolab.decode.sampling import Draw, SamplingParams, draw_mixed, uniforms_on
from grpolab.decode.snapshot import Snapshot
from grpolab.rollouts import Rollout

BLOCK = 8  # steps between two looks at what was drawn, on a GPU; on a CPU looking is free and it is 1


class Scheduler:
    """Slots, waiting prompts and the loop body `step()`. `slots` None: what a fifth of free memory holds, <= 512."""

    def __init__(self, policy, choose: Callable, slots: int | None, stats: Stats):
        """choose: () -> an engine for the policy's model as it is now."""
        self.policy, self.choose = policy, choose
        self.engine = engine = choose()
        self.device = engine.device
        self.cache_bytes = free_bytes(self.device) // 5
        fitting = self.cache_bytes // (engine.bytes_per_token() * min(policy.context, 1024))
        self.slots = slots or 1 << (max(8, min(512, fitting)).bit_length() - 1)
        self.block = BLOCK if self.device.type == "cuda" else 1
        self.stats = stats
        self.requests: list[Request] = []  # that have unfinished rollouts
        self.waiting: deque[Pending] = deque()
        self.epoch, self.snapshot = 0, Snapshot(policy)
        self._clear_rows()

    def _clear_rows(self) -> None:
        self.rows, self.owners = Batch(self.slots + self.engine.min_rows), []
        self.store = store_for(self.engine, self.slots)
        self._changed()

    def _changed(self) -> None:
        """What depends on who is in the batch: how its rows are drawn, and whom to look at after every token."""
        self.kinds = kinds_of(self.owners, self.device)
        self.listening = [i for i, o in enumerate(self.owners) if o.request.params.stop_strings]
        self.streamed = [i for i, o in enumerate(self.owners) if o.request.on_tokens is not None]

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together."""
        return min(self.policy.context, self.engine.context)

    @property
    def busy(self) -> bool:
        return bool(self.rows.n or self.waiting)

    def add(self, request: Request) -> None:
        """Put a request with at least one rollout into the queue."""
        prompts = pending(request)
        self.requests.append(request)
        self.waiting.extend(prompts)
        self._refuse_long(prompts)

    def _refuse_long(self, prompts: Iterable[Pending]) -> None:
        """Fail the requests of prompts that the engine has no room for; it was not known when they were submitted."""
        for p in prompts:
            if p.limit(self.context) < 1:
                settle(p.request.future, error=no_room(p.index, len(p.ids), self.context))

    @torch.no_grad()
    def step(self) -> None:
        """Admit what fits, then one decode step (a block of them on a GPU) for every row."""
        settled = self._refresh()
        self._drop_stopped()
        if settled:
            self._admit()
        if self.rows.n:
            try:
                self._decode()
            except BaseException as error:  # whatever the model raised belongs to those in the batch
                self._fail_rows(error)
        if not self.busy:
            self.requests = []

    def fail_all(self, error: BaseException) -> None:
        """Forget every row and prompt; their requests get the error."""
        for request in self.requests:
            settle(request.future, error=error)
        self.requests, self.waiting = [], deque()
        self._clear_rows()

    def _fail_rows(self, error: BaseException) -> None:
        """As `fail_all` for the rows alone. What they share may be half written: it is made anew."""
        for owner in self.owners:
            settle(owner.request.future, error=error)
        self._clear_rows()

    # ------------------------------------------------------------- weights

    def _refresh(self) -> bool:
        """Renew packed weight copies, or choose an engine anew for changed modules once no row is in progress: until then
        rows end with what they began with and none is admitted (False). See `Snapshot` for what is noticed."""
        idle, snapshot = self.rows.n == 0, self.snapshot
        if not (idle or self.waiting) and snapshot.version == self.policy.version:
            return True
        again = snapshot.structure_changed(deep=idle)
        if not again and not snapshot.weights_changed(deep=idle):
            return True
        if again or not self.engine.verified:
            if not idle:
                return False
            self.engine = self.choose()
            self.device = self.engine.device
            self._clear_rows()
            self._refuse_long(self.waiting)
        else:
            self.engine.refresh()
        snapshot.renew()
        self.epoch += 1
        self.stats.refreshes += 1
        for prompt in self.waiting:
            prompt.cache = prompt.logits = None
        return True

    # ----------------------------------------------------------- admission

    def _drop_stopped(self) -> None:
        """Requests that end before their time leave the queue and the rows: stopped, failed, or nobody waits for them."""
        reasons = {r: why for r in self.requests if (why := ending(r))}
        if not reasons:
            return
        dropped = [p for p in self.waiting if p.request in reasons]
        self.waiting = deque(p for p in self.waiting if p.request not in reasons)
        for p in dropped:
            for g in p.samples:
                nothing = Rollout(p.ids, (), (), (), (), reasons[p.request], p.request.seeds[p.index][g], self.policy.version)
                deliver(p.request, p.index, g, nothing)
        self._finish({i: reasons[o.request] for i, o in enumerate(self.owners) if o.request in reasons})
        self.requests = [r for r in self.requests if r not in reasons]

    def _admit(self) -> None:
        """Fill free rows with waiting rollouts; prompts are prefilled together, at most one stays partly admitted."""
        if not self.waiting or self.rows.n >= self.slots:
            return
        room, context = self.store.room, self.context
        wanted = ((room(len(p.ids) + p.limit(context)), len(p.samples)) for p in self.waiting)
        memory = self.cache_bytes // self.engine.bytes_per_token()
        counts = admit(wanted, self.rows.n, room(self.rows.longest()), self.slots, memory)
        chosen = [(p, count) for p, count in zip(self.waiting, counts) if count]
        for batch, *widths in prefill_batches([p for p, _ in chosen if p.cache is None], self.epoch):
            try:
                seconds, fed = prefill(self.engine, batch, *widths, self.epoch, self.store.unit)
                self.stats.prefill_seconds += seconds
                self.stats.prefill_tokens += fed
            except BaseException as error:
                for p in batch:
                    settle(p.request.future, error=error)
        entering = []
        for p, count in chosen:
            if p.cache is not None:  # else its prefill failed
                entering += [(p, p.samples.popleft()) for _ in range(count)]
        if entering:
            try:
                self._enter(entering)
            except BaseException as error:
                self._fail_rows(error)
                for p, _ in entering:
                    settle(p.request.future, error=error)
        for p, _ in chosen:
            if not p.samples:
                p.cache = p.logits = None
        self.waiting = deque(p for p in self.waiting if p.samples)

    def _enter(self, entering: Sequence[tuple[Pending, int]]) -> None:
        """Give samples of prefilled prompts their rows and draw their first tokens."""
        rows, stats, first, now = self.rows, self.stats.snapshot(), self.rows.n, time.perf_counter()
        for p, g in entering:
            request = p.request
            self.owners.append(Owner(request, p.index, g, self.policy.version, self.epoch, p.prefill_seconds, now, stats))
            ends = request.eos.union(request.params.stop_ids)
            rows.append(len(p.ids), p.limit(self.context), request.seeds[p.index][g], sorted(ends))
        self._changed()
        self.store.enter(first, [Prefilled(p.cache, p.row, len(p.ids)) for p, _ in entering], rows.longest())
        logits = torch.stack([p.logits for p, _ in entering])
        u = uniforms_on(self.device, rows.uniforms(first, 1)[0])
        self._record(first, [draw_mixed(logits, u, kinds_of(self.owners[first:], self.device))])

    # -------------------------------------------------------------- decode

    def _decode(self) -> None:
        rows, n = self.rows, self.rows.n
        padded = self.engine.rows(n)
        rows.token[n:padded] = rows.position[n:padded] = 0
        steps = 1 if self.listening else min(self.block, int((rows.limit - rows.count)[:n].min()))
        window = round_up(int(rows.position[:n].max()) + steps, self.store.unit)
        self.store.fit(rows.position[:n], padded, steps, rows.longest())
        u, kinds = uniforms_on(self.device, rows.next_uniforms(steps)), self.kinds
        tokens, start = (torch.from_numpy(a[:padded]).to(self.device) for a in (rows.token, rows.position))
        drawn, forward_seconds, started = [], 0.0, time.perf_counter()
        for i in range(steps):
            before = time.perf_counter()
            logits = self.engine.forward(tokens[:, None], start, None, self.store.cache, window)[:n]
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

    def _record(self, first: int, drawn: list[Draw]) -> None:
        """Append drawn tokens, one Draw a step, to rows first.. and finish those that are done."""
        rows, alive, done = self.rows, np.arange(first, self.rows.n), {}
        counted = rows.count[first : rows.n].copy() if self.streamed else None
        for step in drawn:
            columns = [None if t is None else t.cpu().numpy()[alive - first]
                       for t in (step.tokens, step.logps, step.raw_logps, step.kept_mass)]
            rows.extend(alive, *columns)
            self.stats.new_tokens += len(alive)
            ended = self._ended(alive)
            done |= ended
            alive = np.array([i for i in alive if i not in ended], dtype=np.int64) if ended else alive
        for i in self.streamed:
            if i >= first and not isinstance(done.get(i), BaseException):
                owner, new = self.owners[i], slice(int(counted[i - first]), None)
                tell(owner.request, owner.index, owner.sample, *(a[new].tolist() for a in rows.taken(i)[:2]))
        self._finish(done)

    # ----------------------------------------------------------------- ends

    def _ended(self, alive: np.ndarray) -> dict[int, str | BaseException]:
        """Row -> finish reason, or what its request fails with, of the rows that are done after their newest token."""
        broken, over = self.rows.broken(alive), self.rows.over(alive)
        ended = {int(i): self._reason(int(i)) for i in alive[over & ~broken]}
        for i in set(self.listening).intersection(alive.tolist()):
            if ended.get(i) in (None, "length", "context") and (said := self._says_stop(i)):
                ended[i] = said
        return ended | {int(i): self._broken(int(i)) for i in alive[broken]}

    def _reason(self, i: int) -> str:
        rows, request, token = self.rows, self.owners[i].request, int(self.rows.token[i])
        if token in request.eos:
            return "eos"
        if token in request.params.stop_ids:
            return "stop_id"
        return "context" if rows.position[i] + 1 >= self.context else "length"

    def _says_stop(self, i: int) -> str | BaseException | None:
        """Whether the newest token completes a stop string; the tail is long enough, as a token has a byte or more."""
        strings = self.owners[i].request.params.stop_strings
        try:
            tail = max(len(s.encode()) for s in strings) + 4
            text = self.policy.tokenizer.decode(self.rows.taken(i)[0][-tail:].tolist())
        except BaseException as error:  # a tokenizer of the user's own
            return error
        return "stop_string" if any(s in text for s in strings) else None

    def _broken(self, i: int) -> FloatingPointError:
        owner, position = self.owners[i], int(self.rows.position[i])
        return FloatingPointError(f"the logits of prompt {owner.index}, sample {owner.sample} are not finite at position "
                                  f"{position}; look for NaN in the policy's weights")

    def _finish(self, done: dict[int, str | BaseException]) -> None:
        """Take rows out, close the gaps that they leave, and deliver what they have, or fail their request."""
        if not done:
            return
        rows, order, finished = self.rows, sorted(done), []
        for i in order:
            owner, request = self.owners[i], self.owners[i].request
            broken = isinstance(done[i], BaseException)
            if broken:
                settle(request.future, error=done[i])
            elif not request.future.done():
                if request.kept is not None:
                    length, epoch = int(rows.position[i]), self.epoch if owner.epoch == self.epoch else -1
                    request.kept = Kept(self.store.take(i, length), length, epoch)
                finished.append((owner, self._rollout(i, done[i])))
            self.store.release(i, broken)
        moves = rows.compact(order)
        if moves:
            self.store.move(*zip(*moves), int(rows.position[: rows.n].max()))
        for to, of in moves:
            self.owners[to] = self.owners[of]
        del self.owners[rows.n:]
        self._changed()
        for owner, rollout in finished:
            deliver(owner.request, owner.index, owner.sample, rollout)
        self.requests = [r for r in self.requests if r.left]

    def _rollout(self, i: int, reason: str) -> Rollout:
        owner = self.owners[i]
        request, spent = owner.request, self.stats - owner.stats
        tokens, logps, raw_logps, mass = (tuple(a.tolist()) for a in self.rows.taken(i))
        mean_rows = spent.row_steps / spent.steps if spent.steps else 0.0
        timings = dict(
            queued_seconds=owner.entered - request.submitted,
            prefill_seconds=owner.prefill_seconds,
            decode_seconds=spent.decode_seconds,
            sample_seconds=spent.sample_seconds,
            total_seconds=time.perf_counter() - request.submitted,
            steps=spent.steps,
            mean_rows=mean_rows,
            slot_use=mean_rows / self.slots,
        )
        return Rollout(
            request.prompts[owner.index], tokens, (1,) * len(tokens), logps, raw_logps, reason,
            request.seeds[owner.index][owner.sample], owner.version, timings=timings,
            kept_mass=mass if request.params.truncates else ())


def kinds_of(owners: Sequence[Owner], device) -> list[tuple[SamplingParams, torch.Tensor]]:
    """Rows grouped by how they are sampled: (params, row indices)."""
    groups: dict = {}
    for i, owner in enumerate(owners):
        p = owner.request.params
        key = "greedy" if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)
        groups.setdefault(key, (p, []))[1].append(i)
    return [(p, torch.tensor(rows, device=device)) for p, rows in groups.values()]
