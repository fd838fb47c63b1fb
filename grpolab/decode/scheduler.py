"""The decode loop behind the sampler: which rollout is in which row, what is prefilled when, and which rows are done.

A rollout in progress is a row; the rows in progress are always 0..n-1: the last row moves into the gap of a finished one
(compaction), waiting rollouts are appended (refill). Each row has its own position, so rows of any length share a batch.
Where their keys and values are is decided in `cache.py`; which prompts enter, and how they are fed, in `prefill.py`. No
threads here: one caller at a time.

An error of a callback, of a tokenizer or from NaN logits fails its own request; one of the model fails the requests that were
in that prefill or step. The others go on. Longer than a file should be, since each method reads or changes the same rows.
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
from grpolab.decode.prompt_lookup import PromptLookup
from grpolab.decode.requests import Owner, Pending, Prefix, Request, Stats, no_room, settle
from grpolab.decode.sampling import Draw, Kind, draw_mixed, uniforms, uniforms_on
from grpolab.decode.snapshot import update
from grpolab.rollouts import Rollout

BLOCK = 8  # steps between two looks at what was drawn, on a GPU; on a CPU looking is free and it is 1


class Scheduler:
    """Slots, waiting prompts and the loop body `step()`. `slots` None: what a fifth of free memory holds, <= 512."""

    def __init__(self, policy, choose: Callable, slots: int | None, stats: Stats, lookup: int = 0):
        """choose: () -> an engine for the policy's model as it is now (`verify.choose_engine`); lookup: as in `Sampler`."""
        self.policy, self.choose, self.stats, self.lookup = policy, choose, stats, lookup
        self.engine = engine = self._chosen()
        self.device, self.epoch = engine.device, engine.snapshot.epoch
        self.cache_bytes = free_bytes(self.device) // 5
        fitting = self.cache_bytes // (engine.bytes_per_token() * min(policy.context, 1024))
        self.slots = slots or 1 << (max(8, min(512, fitting)).bit_length() - 1)
        self.block = BLOCK if self.device.type == "cuda" else 1
        self.requests: list[Request] = []  # that have unfinished rollouts
        self.waiting: deque[Pending] = deque()
        self._clear_rows()

    def _chosen(self):
        engine = self.choose()
        if self.lookup and not hasattr(engine, "forward_drafts"):
            raise ValueError(f"lookup={self.lookup} needs the compiled engine, and {type(self.policy.model).__name__} is "
                             f"decoded by {type(engine).__name__} here; leave lookup at 0")
        return engine

    def _clear_rows(self) -> None:
        self.rows, self.owners = Batch(self.slots + self.engine.min_rows), []
        self.store = store_for(self.engine, self.slots)
        self._rows_changed()

    def _rows_changed(self) -> None:
        """Note how the rows are drawn, and which are looked at after every token."""
        self.kinds = kinds_of(self.owners, self.device)
        self.constrained = any(o.allowed is not None for o in self.owners)
        self.with_strings = [i for i, o in enumerate(self.owners) if o.request.params.stop_strings]
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
        prompts = [Pending(request, i, ids, deque(range(len(seeds))))
                   for i, (ids, seeds) in enumerate(zip(request.prompts, request.seeds))]
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
        may_admit = self._refresh()
        self._drop_ended()
        if may_admit:
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
        """As `fail_all` for the rows alone. Their store may be half written: it is made anew."""
        for owner in self.owners:
            settle(owner.request.future, error=error)
        self._clear_rows()

    # ------------------------------------------------------------- weights

    def _refresh(self) -> bool:
        """Let the engine read changed weights, or choose another for a changed model once no row is in progress: until then
        rows end with the engine that they began with and none is admitted (False)."""
        idle, snapshot = self.rows.n == 0, self.engine.snapshot
        if not (idle or self.waiting) and snapshot.version == self.policy.version:
            return True
        changed = snapshot.model_changed(self.policy, deep=idle)
        if changed or not self.engine.verified and snapshot.weights_changed(self.policy, deep=idle):
            if not idle:
                return False
            self.engine = self._chosen()
            self.device = self.engine.device
            self._clear_rows()
            self._refuse_long(self.waiting)
        else:
            update(self.engine, self.policy, deep=idle)
        if self.epoch != self.engine.snapshot.epoch:  # this sampler or another one on the same engine read the weights anew
            self.epoch = self.engine.snapshot.epoch
            self.stats.refreshes += 1
            for prompt in self.waiting:
                prompt.cache = prompt.logits = None
        return True

    # ----------------------------------------------------------- admission

    def _drop_ended(self) -> None:
        """Requests that were cancelled, or have an error already, leave the queue and the rows."""
        ended = {r for r in self.requests if r.cancelled or r.future.done()}
        if not ended:
            return
        dropped = [p for p in self.waiting if p.request in ended]
        self.waiting = deque(p for p in self.waiting if p.request not in ended)
        for p in dropped:
            for g in p.samples:
                seed = p.request.seeds[p.index][g]
                p.request.deliver(p.index, g, Rollout(p.ids, (), (), (), (), "cancelled", seed, self.policy.version))
        self._finish({i: "cancelled" for i, o in enumerate(self.owners) if o.request in ended})
        self.requests = [r for r in self.requests if r not in ended]

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
        rows, first = self.rows, self.rows.n
        for p, g in entering:
            request = p.request
            constraint = request.params.constraint
            self.owners.append(Owner(request, p.index, g, self.policy.version, self.epoch, constraint and constraint.start(),
                                     PromptLookup(p.ids, self.lookup) if self.lookup else None))
            ends = request.eos.union(request.params.stop_ids)
            rows.append(len(p.ids), p.limit(self.context), request.seeds[p.index][g], sorted(ends))
        self._rows_changed()
        self.store.enter(first, [Prefilled(p.cache, p.row, len(p.ids)) for p, _ in entering], rows.longest())
        logits = torch.stack([p.logits for p, _ in entering])
        u = uniforms_on(self.device, rows.uniforms(first, 1)[0])
        self._record(first, [draw_mixed(logits, u, self._with_masks(kinds_of(self.owners[first:], self.device), first))])

    def _with_masks(self, kinds: list[Kind], first: int) -> list[Kind]:
        """The kinds of rows first.. with what constrained rows may draw next; one whose grammar fails may draw anything, once,
        since its request has the error."""
        return [(params, rows, torch.from_numpy(np.stack([self._allowed(first + i) for i in rows.tolist()])).to(self.device))
                if params.constraint is not None else (params, rows, None) for params, rows, _ in kinds]

    def _allowed(self, i: int) -> np.ndarray:
        try:
            return self.owners[i].allowed(int(self.rows.token[i]) if self.rows.count[i] else None)
        except Exception as error:
            settle(self.owners[i].request.future, error=error)
            return np.ones(self.engine.vocab, bool)

    # -------------------------------------------------------------- decode

    def _decode(self) -> None:
        if self.lookup and not self.constrained and any(drafts := self._drafts()):
            return self._verify(drafts)
        rows, n = self.rows, self.rows.n
        padded = self.engine.rows(n)
        rows.token[n:padded] = rows.position[n:padded] = 0
        steps = 1 if self.with_strings or self.constrained else min(self.block, int((rows.limit - rows.count)[:n].min()))
        window = round_up(int(rows.position[:n].max()) + steps, self.store.unit)
        self.store.fit(rows.position[:n], padded, steps, rows.longest())
        u, kinds = uniforms_on(self.device, rows.uniforms(0, steps)), self._with_masks(self.kinds, 0)
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

    def _drafts(self) -> list[list[int]]:
        """By row, what prompt lookup expects after its newest token."""
        rows, drafts = self.rows, []
        for i, owner in enumerate(self.owners):
            length = len(owner.request.prompts[owner.index])
            owner.lookup.extend(rows.tokens[i, len(owner.lookup.ids) - length: rows.count[i]].tolist())
            drafts.append(owner.lookup.draft(int(rows.limit[i] - rows.count[i]) - 1))
        return drafts

    def _verify(self, drafts: list[list[int]]) -> None:
        """A decode step that feeds each row its newest token and its draft. What a position draws follows from its logits and
        its uniform: a draft holds as far as it is what was drawn, and then the rollout is the one without drafts."""
        rows, n = self.rows, self.rows.n
        lengths = np.array([1 + len(draft) for draft in drafts])
        first = lengths.cumsum() - lengths
        of = np.repeat(np.arange(n), lengths)
        positions = rows.position[of] + np.arange(len(of)) - first[of]
        fed = np.array([t for i in range(n) for t in (rows.token[i], *drafts[i])])
        self.store.fit(rows.position[:n], n, int(lengths.max()), rows.longest())
        started = time.perf_counter()
        logits = self.engine.forward_drafts(torch.from_numpy(fed), torch.from_numpy(positions), of, self.store.cache,
                                            round_up(int(positions.max()) + 1, self.store.unit))
        forwarded = time.perf_counter()
        u = torch.from_numpy(uniforms(rows.seed[of], positions + 1))
        drawn = draw_mixed(logits, u, kinds_of([self.owners[i] for i in of], self.device))
        right = np.append(fed[1:] == drawn.tokens.numpy()[:-1], False)
        counts = np.array([1 + int(right[a: a + len(d)].cumprod().sum()) for a, d in zip(first.tolist(), drafts)])
        for owner, draft, count in zip(self.owners, drafts, counts.tolist()):
            owner.lookup.judge(len(draft), count - 1)
        self.stats.steps += 1
        self.stats.row_steps += n
        self.stats.drafted += len(of) - n
        self.stats.accepted += int(counts.sum()) - n
        self.stats.decode_seconds += forwarded - started
        self.stats.sample_seconds += time.perf_counter() - forwarded
        self._record(0, [drawn.rows(first + np.minimum(step, counts - 1)) for step in range(counts.max())], counts)

    def _record(self, first: int, drawn: list[Draw], counts: np.ndarray | None = None) -> None:
        """Append drawn tokens, one Draw a step, to rows first.. and finish those that are done; of row i, counts[i] of them."""
        rows, alive, done = self.rows, np.arange(first, self.rows.n), {}
        counted = rows.count[first : rows.n].copy() if self.streamed else None
        for i, step in enumerate(drawn):
            if counts is not None:
                alive = alive[counts[alive] > i]
            columns = [None if t is None else t.cpu().numpy()[alive - first]
                       for t in (step.tokens, step.logps, step.raw_logps, step.kept_mass)]
            rows.extend(alive, *columns, self.engine.snapshot.version)
            self.stats.new_tokens += len(alive)
            ended = self._ended(alive)
            done |= ended
            alive = np.array([i for i in alive if i not in ended], dtype=np.int64) if ended else alive
        for i in self.streamed:
            if i >= first and not isinstance(done.get(i), BaseException):
                owner, new = self.owners[i], slice(int(counted[i - first]), None)
                try:
                    owner.request.on_tokens(owner.index, owner.sample, *(a[new].tolist() for a in rows.drawn(i)[:2]))
                except BaseException as error:  # it fails its own request alone
                    settle(owner.request.future, error=error)
        self._finish(done)

    # ----------------------------------------------------------------- ends

    def _ended(self, alive: np.ndarray) -> dict[int, str | BaseException]:
        """Row -> finish reason, or the error of its request, of the rows that are done after their newest token."""
        broken, over = self.rows.broken(alive), self.rows.over(alive)
        ended = {int(i): self._reason(int(i)) for i in alive[over & ~broken]}
        for i in set(self.with_strings).intersection(alive.tolist()):
            if ended.get(i) in (None, "length", "context") and (reason := self._stop_string(i)):
                ended[i] = reason
        for i in map(int, alive[broken]):
            owner = self.owners[i]
            ended[i] = FloatingPointError(
                f"the logits of prompt {owner.index}, sample {owner.sample} are not finite at position "
                f"{self.rows.position[i]}; look for NaN in the policy's weights")
        return ended

    def _reason(self, i: int) -> str:
        rows, request, token = self.rows, self.owners[i].request, int(self.rows.token[i])
        if token in request.eos:
            return "eos"
        if token in request.params.stop_ids:
            return "stop_id"
        return "context" if rows.position[i] + 1 >= self.context else "length"

    def _stop_string(self, i: int) -> str | BaseException | None:
        """Whether the newest token completes a stop string; the tail is long enough, as a token has a byte or more."""
        strings = self.owners[i].request.params.stop_strings
        try:
            tail = max(len(s.encode()) for s in strings) + 4
            text = self.policy.tokenizer.decode(self.rows.drawn(i)[0][-tail:].tolist())
        except BaseException as error:  # a tokenizer of the user's own
            return error
        return "stop_string" if any(s in text for s in strings) else None

    def _finish(self, done: dict[int, str | BaseException]) -> None:
        """Take rows out, close the gaps that they leave, and deliver their rollouts, or fail their request."""
        if not done:
            return
        rows, order, finished = self.rows, sorted(done), []
        for i in order:
            owner, request = self.owners[i], self.owners[i].request
            broken = isinstance(done[i], BaseException)
            if broken:
                settle(request.future, error=done[i])
            elif not request.future.done():
                if request.prefix is not None:
                    length, epoch = int(rows.position[i]), self.epoch if owner.epoch == self.epoch else -1
                    request.prefix = Prefix(self.store.take(i, length), length, epoch)
                tokens, logps, raw_logps, mass, versions = (tuple(a.tolist()) for a in rows.drawn(i))
                finished.append((owner, Rollout(
                    request.prompts[owner.index], tokens, (1,) * len(tokens), logps, raw_logps, done[i],
                    request.seeds[owner.index][owner.sample], owner.version,
                    kept_mass=mass if request.params.truncates else (),
                    versions=versions if set(versions) - {owner.version} else ())))
            self.store.release(i, broken or self.block > 1)  # a block computes on past the end
        moves = rows.compact(order)
        if moves:
            self.store.move(*zip(*moves), int(rows.position[: rows.n].max()))
        for to, of in moves:
            self.owners[to] = self.owners[of]
        del self.owners[rows.n:]
        self._rows_changed()
        for owner, rollout in finished:
            owner.request.deliver(owner.index, owner.sample, rollout)
        self.requests = [r for r in self.requests if r.unfinished]


def kinds_of(owners: Sequence[Owner], device) -> list[Kind]:
    """Rows grouped by how they are sampled."""
    groups: dict = {}
    for i, owner in enumerate(owners):
        p = owner.request.params
        key = "greedy" if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)
        groups.setdefault((key, p.constraint is None), (p, []))[1].append(i)
    return [(p, torch.tensor(rows, device=device), None) for p, rows in groups.values()]
