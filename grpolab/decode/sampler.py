"""The sampler: every rollout comes from here, out of one decode batch that concurrent callers share.

Token ids in; token ids, logps and finish reasons out. One worker thread owns the model: event loops keep answering
while it decodes, and what changes the weights is sent to it (`run`). The loop itself is in `scheduler.py`, the
arithmetic in `engines.py`, the draw in `sampling.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import operator
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from grpolab.decode.agreement import choose_engine, inexact_share, seconds_a_step
from grpolab.decode.attention import share_attention
from grpolab.decode.sampling import SamplingParams, fold_seed
from grpolab.decode.scheduler import Kept, Request, Scheduler, Stats, settle
from grpolab.rollouts import Group, Rollout
from grpolab.sync import rest_threads, set_own_threads

IDLE_SECONDS = 5.0  # after which the worker thread ends; the next request starts another


class Sampler:
    """Samples rollouts of a policy, from coroutines and from scripts.

        groups = await sampler.sample(prompts, group_size=8, params=SamplingParams(max_new_tokens=64, seed=0))
        groups = sampler.sample_sync(prompts, group_size=8)

    slots   rows decoded together; None takes what a fifth of the free memory holds, at most 512; 1 is tuned for one row
    engine  "auto", "llama" or "general" (`engines.choose_engine`); `sampler.engine.name` says which was taken
    exact   make the model's own forward use the sampler's attention, so that trainer logps equal the sampler's in every
            bit; ValueError where the start-up probe finds a difference
    seed    what requests without a seed of their own draw theirs from
    cuda_graphs  replay a step as one CUDA graph; off, since it has not yet been run on a GPU
    threads of torch in the worker; None takes the process's number, "auto" the quicker of one and that number, timed
            over a few steps at the start (`sampler.threads` says which); last bits may then differ between two runs
    """

    def __init__(self, policy, *, slots: int | None = None, engine: str = "auto", exact: bool = False, seed: int = 0,
                 threads: int | str | None = None, cuda_graphs: bool = False):
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}; None chooses by memory")
        if threads not in (None, "auto") and not (isinstance(threads, int) and threads >= 1):
            raise ValueError(f"threads must be at least 1, 'auto' or None, got {threads!r}")
        self.policy, self.seed, self.exact = policy, seed, exact
        self._scheduler = Scheduler(policy, partial(self._choose, engine, slots == 1), slots, cuda_graphs)
        self.threads = self._quickest_threads() if threads == "auto" else threads or torch.get_num_threads()
        self._inbox: deque = deque()
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._requests = 0
        _open_samplers.add(self)

    def _choose(self, engine: str, single: bool):
        """The engine for the policy's model as it is now; ValueError where exact mode is not to be had."""
        if self.exact:
            share_attention(self.policy.model)
        chosen = choose_engine(self.policy.model, engine, single)
        if self.exact and (share := inexact_share(chosen, self.policy.model)) > 0:
            raise ValueError(f"exact mode is not to be had here: {share:.1%} of the probe's logps differ in some bit "
                             f"({chosen.name} engine, {chosen.dtype}); use exact=False, or bfloat16 on a CPU")
        return chosen

    @property
    def engine(self):
        return self._scheduler.engine

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together: the policy's, or fewer where the engine's proof
        ends before (a warning said so)."""
        return self._scheduler.context

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> list[Group]:
        """Token id lists -> one Group of `group_size` rollouts for each; cancelling the await frees its slots."""
        return await _awaited(self.submit(prompts, group_size=group_size, params=params))

    def sample_sync(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                    params: SamplingParams | None = None) -> list[Group]:
        """`sample` for scripts; it also works inside a running loop, which it blocks."""
        return self._waited(self.submit(prompts, group_size=group_size, params=params).future)

    async def stream(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                     params: SamplingParams | None = None) -> AsyncIterator[tuple[int, int, Rollout]]:
        """(prompt index, sample index, rollout) as rows finish; leaving the iteration cancels the rest."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        tell = lambda item: loop.call_soon_threadsafe(queue.put_nowait, item)  # noqa: E731
        request = self.submit(prompts, group_size=group_size, params=params, on_rollout=lambda *item: tell(item))
        request.future.add_done_callback(lambda _: tell(None))
        try:
            while (item := await queue.get()) is not None:
                yield item
            request.future.result()
        finally:
            request.cancel()

    def conversation(self, seed: int | None = None) -> Conversation:
        """A multi-turn exchange that keeps its keys and values between turns."""
        return Conversation(self, self._fresh_seed() if seed is None else seed)

    def submit(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
               seeds: Sequence[Sequence[int]] | None = None,
               on_rollout: Callable[[int, int, Rollout], None] | None = None) -> Request:
        """Queue a request and return its handle at once (`result()`, `cancel()`).

        seeds       (B, G), to repeat rollouts by their `.seed`; None derives them from params.seed and their indices
        on_rollout  called in the worker thread with (prompt index, sample index, rollout) as each one finishes
        Raises ValueError for an empty prompt, one that fills the context, a token id outside the vocabulary, or
        group_size below 1; RuntimeError after `close`.
        """
        params = params or SamplingParams()
        if isinstance(prompts, str) or any(not hasattr(p, "__len__") or isinstance(p, str) for p in prompts):
            raise ValueError("prompts must be a list of token id lists: encode texts, wrap a single prompt in a list")
        ids = [self._checked(prompt, i) for i, prompt in enumerate(prompts)]
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self._check_stops(params)
        if seeds is None:
            base = self._fresh_seed() if params.seed is None else params.seed
            seeds = [[fold_seed(base, i, g) for g in range(group_size)] for i in range(len(ids))]
        elif [len(s) for s in seeds] != [group_size] * len(ids):
            raise ValueError(f"seeds must be {len(ids)} lists of {group_size}, got lengths {[len(s) for s in seeds]}")
        return self._queue(Request(self._scheduler, ids, [list(s) for s in seeds], params, on_rollout))

    async def run(self, fn: Callable, *args):
        """Call fn(*args) in the worker thread between two decode steps: the place to change the policy's weights."""
        return await asyncio.wrap_future(self._call(fn, args))

    def run_sync(self, fn: Callable, *args):
        """`run` for scripts."""
        return self._waited(self._call(fn, args))

    def close(self) -> _Closing:
        """End the worker thread and fail what waits; both `sampler.close()` and `await sampler.close()` do."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            worker = self._worker
        return _Closing(worker)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def _quickest_threads(self) -> int:
        common = torch.get_num_threads()
        if common == 1 or self.engine.device.type != "cpu":
            return common
        seconds = seconds_a_step(self.engine, max(self.engine.min_rows, min(self.slots, 32)), (1, common))
        return min(seconds, key=seconds.get)

    # ------------------------------------------------------------- checks

    def _checked(self, prompt: Sequence[int], index: int) -> tuple[int, ...]:
        ids = tuple(operator.index(t) for t in prompt)
        if not ids:
            raise ValueError(f"prompt {index} is empty; give it at least one token, e.g. the bos id")
        if len(ids) >= self.context:
            raise ValueError(f"prompt {index} has {len(ids)} tokens and leaves no room in the context of "
                             f"{self.context}; shorten it")
        wrong = next((t for t in ids if not 0 <= t < self.engine.vocab), None)
        if wrong is not None:
            raise ValueError(f"prompt {index} holds token id {wrong}, outside the vocabulary 0..{self.engine.vocab - 1}"
                             "; encode it with the policy's tokenizer")
        return ids

    def _check_stops(self, params: SamplingParams) -> None:
        bad = [i for i in params.stop_ids if not 0 <= i < self.engine.vocab]
        if bad:
            raise ValueError(f"stop_ids {bad} are outside the vocabulary 0..{self.engine.vocab - 1}; give token ids")
        if params.stop_strings and self.policy.tokenizer is None:
            raise ValueError("stop_strings need a policy with a tokenizer; use stop_ids")

    def _fresh_seed(self) -> int:
        with self._wake:
            self._requests += 1
            return fold_seed(self.seed, self._requests)

    # ------------------------------------------------------------- worker

    def _queue(self, item):
        """Hand a request, or a (future, fn, args), to the worker."""
        if isinstance(item, Request) and not item.left:
            settle(item.future, [])
            return item
        if threading.current_thread() is not self._worker:
            rest_threads()
        with self._wake:
            if self._closed:
                raise RuntimeError("the sampler is closed; make a new Sampler(policy)")
            self._inbox.append(item)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="grpolab-sampler", daemon=True)
                self._worker.start()
            self._wake.notify()
        return item

    def _call(self, fn: Callable, args: tuple) -> Future:
        return self._queue((Future(), fn, args))[0]

    def _waited(self, future: Future):
        if threading.current_thread() is self._worker:
            raise RuntimeError("waiting for the sampler inside its own worker thread would last for ever")
        return future.result()

    def _work(self) -> None:
        scheduler = self._scheduler
        set_own_threads(self.threads)  # a new thread would otherwise start with OpenMP's default
        while True:
            if not scheduler.busy:
                rest_threads()
            with self._wake:
                if not (scheduler.busy or self._inbox or self._closed):
                    self._wake.wait(IDLE_SECONDS)
                inbox, self._inbox = self._inbox, deque()
                if self._closed or not (scheduler.busy or inbox):
                    self._worker = None
                    break
            try:
                for item in inbox:
                    scheduler.waiting.extend(item.prompts) if isinstance(item, Request) else _answer(*item)
                with scheduler.policy.lock:
                    scheduler.step()
            except Exception as error:  # whatever the model raised: its requests fail, the worker lives on
                scheduler.fail_all(error)
        if self._closed:
            error = RuntimeError("the sampler was closed before this was done")
            scheduler.fail_all(error)
            for item in inbox:
                item.fail(error) if isinstance(item, Request) else settle(item[0], error=error)


class Conversation:
    """Turns of one exchange: what the policy wrote has mask 1, what was given to it has mask 0.

        conversation = sampler.conversation(seed=3)
        turn = await conversation.sample(prompt_ids)             # the first turn's ids are the prompt
        turn = await conversation.sample(observation_ids)        # only the new ids are prefilled
        rollout = conversation.rollout()                         # one token sequence, nothing tokenised twice
    """

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed, self.turns = sampler, seed, []
        self._kept: Kept | None = Kept()
        self._waiting = False
        self._ids: tuple[int, ...] = ()
        self._rollout: Rollout | None = None

    async def sample(self, ids: Sequence[int], params: SamplingParams | None = None) -> Rollout:
        """Append ids and let the policy answer. Returns this turn's rollout; its prompt is everything before it."""
        request = self._submit(ids, params)
        try:
            return self._take(await _awaited(request))
        finally:
            self._waiting = False

    def sample_sync(self, ids: Sequence[int], params: SamplingParams | None = None) -> Rollout:
        """`sample` for scripts."""
        request = self._submit(ids, params)
        try:
            return self._take(self.sampler._waited(request.future))
        finally:
            self._waiting = False

    def rollout(self) -> Rollout:
        """The whole exchange as one rollout: prompt, then policy turns (mask 1) and what came between (mask 0)."""
        if self._rollout is None:
            raise ValueError("the conversation has no turn yet; sample one first")
        return self._rollout

    def close(self) -> None:
        """Free its keys and values."""
        self._kept = None

    def _submit(self, ids: Sequence[int], params: SamplingParams | None) -> Request:
        if self._kept is None:
            raise RuntimeError("the conversation is closed; start another with sampler.conversation()")
        if self._waiting:
            raise RuntimeError("a turn of this conversation is still being sampled; await it first")
        params = params or SamplingParams()
        self.sampler._check_stops(params)
        prompt = self.sampler._checked((*self._ids, *ids), len(self.turns))
        request = Request(self.sampler._scheduler, [prompt], [[self.seed]], params, kept=self._kept)
        self.sampler._queue(request)
        self._waiting = True
        return request

    def _take(self, groups: list[Group]) -> Rollout:
        turn = groups[0][0]
        given, whole = turn.prompt[len(self._ids):], self._rollout
        zeros = (0.0,) * len(given)
        if whole is None:
            whole = turn
        else:
            whole = Rollout(
                prompt=whole.prompt, tokens=whole.tokens + given + turn.tokens,
                mask=whole.mask + (0,) * len(given) + turn.mask, logps=whole.logps + zeros + turn.logps,
                raw_logps=whole.raw_logps + zeros + turn.raw_logps, finish_reason=turn.finish_reason, seed=self.seed,
                policy_version=whole.policy_version, timings=turn.timings, kept_mass=_joined_mass(whole, given, turn))
        self.turns.append(turn)
        self._rollout, self._ids = whole, turn.prompt + turn.tokens
        return turn


def _joined_mass(whole: Rollout, given: tuple, turn: Rollout) -> tuple[float, ...]:
    if not (whole.kept_mass or turn.kept_mass):
        return ()
    before, after = (r.kept_mass or (1.0,) * len(r.tokens) for r in (whole, turn))
    return before + (1.0,) * len(given) + after


async def _awaited(request: Request) -> list[Group]:
    try:
        return await asyncio.wrap_future(request.future)
    except asyncio.CancelledError:
        request.cancel()
        raise


def _answer(future: Future, fn: Callable, args: tuple) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        settle(future, fn(*args))
    except BaseException as error:  # it belongs to the caller, whatever it is
        settle(future, error=error)


class _Closing:
    """What `close` returns: outside a loop the worker has been joined already, in a loop awaiting this joins it."""

    def __init__(self, worker: threading.Thread | None):
        self.worker = None if worker is threading.current_thread() else worker
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._join()

    def _join(self) -> None:
        if self.worker is not None:
            self.worker.join()

    def __await__(self):
        return asyncio.to_thread(self._join).__await__()


_open_samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A worker still inside torch when the interpreter goes would crash it."""
    for sampler in list(_open_samplers):
        sampler.close()
