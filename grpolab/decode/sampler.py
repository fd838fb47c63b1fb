"""The sampler: every rollout comes from here, out of one decode batch that concurrent callers share.

Token ids in; token ids, logps and finish reasons out. One worker thread owns the model, from the choice of the engine on:
event loops keep answering while it decodes, and what changes the weights is sent to it (`run`). The loop itself is in
`scheduler.py`, the arithmetic in the engines, the draw in `sampling.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from grpolab.decode.conversation import Conversation
from grpolab.decode.engines.attention import set_attention, share_attention
from grpolab.decode.requests import Kept, Request, Stats, checked_prompt, checked_seed, settle
from grpolab.decode.sampling import SamplingParams, fold_seed, group_seeds
from grpolab.decode.scheduler import Scheduler
from grpolab.decode.verify import choose_engine, inexact_share, seconds_a_step
from grpolab.models.load import attention_of
from grpolab.rollouts import Group, Rollout
from grpolab.sync import rest_threads, set_own_threads

REST_SECONDS = 0.05  # without a request, after which the worker lets its OpenMP threads go
IDLE_SECONDS = 5.0  # after those it ends; the next request starts another


class Sampler:
    """Samples rollouts of a policy, from coroutines and from scripts.

        groups = await sampler.sample(prompts, group_size=8, params=SamplingParams(max_new_tokens=64, seed=0))
        groups = sampler.sample_sync(prompts, group_size=8)

    slots   rows decoded together; None takes what a fifth of the free memory holds, at most 512; 1 is tuned for one row
    engine  "auto", "llama" or "general" (`agreement.choose_engine`); `sampler.engine.name` says which was taken
    exact   make the model's own forward use the sampler's attention, so that trainer logps equal the sampler's in every
            bit; ValueError where the start-up probe finds a difference
    seed    what requests without a seed of their own draw theirs from
    cuda_graphs  replay a step as one CUDA graph; off, since it has not yet been run on a GPU
    threads of torch in the worker; None takes the process's number, "auto" the quicker of one and that number, timed
            over a few steps at the start (`sampler.threads` says which); last bits may then differ between two runs

    A rollout is decided by its prompt, its seed and the weights. Its bits do not depend on the other rows where
    `agreement.company_share` is 0: for the llama engine, and on processors that we tried for the general one, mixtures of
    experts excepted; elsewhere a last bit, and so rarely a token, may.

    Changed weights and modules (`decode.watch`) are looked for where rows are admitted and where `policy.version` has moved.
    With nothing running the look is thorough. While rows run it does not see edits through `.data`, which torch does not
    count, nor plain numbers set on a module; and what is swapped and swapped back between two looks is never seen. A row
    in progress may then be sampled from two models. So change weights in `run`, and add one to `policy.version`.

    The engine is chosen and proved by the worker, at the first use or in `async with`; until then `engine`, `slots` and
    `threads` wait for it. What it refuses is raised there, to every caller.
    """

    def __init__(self, policy, *, slots: int | None = None, engine: str = "auto", exact: bool = False, seed: int = 0,
                 threads: int | str | None = None, cuda_graphs: bool = False):
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}; None chooses by memory")
        if threads not in (None, "auto") and not (isinstance(threads, int) and threads >= 1):
            raise ValueError(f"threads must be at least 1, 'auto' or None, got {threads!r}")
        self.policy, self.seed, self.exact, self.stats = policy, seed, exact, Stats()
        self._asked = engine, slots, threads, cuda_graphs
        self._common = torch.get_num_threads()
        self._choice: Future[tuple[Scheduler, int]] = Future()  # and the number of threads
        self._choice.set_running_or_notify_cancel()  # a cancelled await of it may not cancel it
        self._inbox: deque = deque()
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._requests = 0
        _open_samplers.add(self)

    @property
    def engine(self):
        return self._scheduler.engine

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together: the policy's, or fewer where the engine's proof
        ends before (a warning says so as it is chosen)."""
        chosen = self._choice.done() and self._choice.exception() is None
        return self._choice.result()[0].context if chosen else self.policy.context

    @property
    def busy(self) -> bool:
        """Whether somebody's rollouts are being decoded or wait for it; false until the engine is chosen."""
        return bool(self._inbox) or self._choice.done() and self._scheduler.busy

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    @property
    def threads(self) -> int:
        return self._chosen()[1]

    @property
    def _scheduler(self) -> Scheduler:
        return self._chosen()[0]

    def _chosen(self) -> tuple[Scheduler, int]:
        if not self._choice.done():
            self._check_may_wait()
            self._start()
        return self._choice.result()

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
                     seeds: Sequence[Sequence[int]] | None = None) -> list[Group]:
        """Token id lists -> one Group of `group_size` rollouts for each; cancelling the await frees its slots. `seeds` as in
        `submit`."""
        self._check_may_wait()
        return await self._awaited(self.submit(prompts, group_size=group_size, params=params, seeds=seeds))

    def sample_sync(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                    params: SamplingParams | None = None) -> list[Group]:
        """`sample` for scripts; it also works inside a running loop, which it blocks."""
        self._check_may_wait()
        return self.submit(prompts, group_size=group_size, params=params).result()

    async def stream(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
                     seeds: Sequence[Sequence[int]] | None = None) -> AsyncIterator[tuple[int, int, Rollout]]:
        """(prompt index, sample index, rollout) as rows finish; leaving the iteration cancels the rest. `seeds` as in
        `submit`."""
        self._check_may_wait()
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        tell = lambda item: loop.call_soon_threadsafe(queue.put_nowait, item)  # noqa: E731
        request = self.submit(prompts, group_size=group_size, params=params, seeds=seeds, on_rollout=lambda *item: tell(item))
        request.future.add_done_callback(lambda _: tell(None))
        try:
            while (item := await queue.get()) is not None:
                yield item
            request.future.result()
        finally:
            request.cancel()

    def conversation(self, seed: int | None = None) -> Conversation:
        """A multi-turn exchange that keeps its keys and values between turns."""
        return Conversation(self, self._fresh_seed() if seed is None else checked_seed(seed))

    def submit(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
               seeds: Sequence[Sequence[int]] | None = None,
               on_rollout: Callable[[int, int, Rollout], None] | None = None,
               on_tokens: Callable[[int, int, list[int], list[float]], None] | None = None,
               kept: Kept | None = None) -> Request:
        """Queue a request and return its handle at once (`result()`, `cancel()`).

        seeds       (B, G), to repeat rollouts by their `.seed`; None derives them from params.seed and their indices
        on_rollout  called in the worker thread with (prompt index, sample index, rollout) as each one finishes; what it
                    raises is what its request fails with
        on_tokens   called likewise with (prompt index, sample index, token ids, logps) as a rollout grows, its last tokens
                    before on_rollout has it
        kept        `Request.kept` of the turn that the one prompt goes on from (Kept() of none): only what is new is fed
        Raises ValueError for an empty prompt, one that fills the context, a token id outside the vocabulary, a seed outside
        0..2**64 - 1, or group_size below 1; RuntimeError after `close`.
        """
        params = params or SamplingParams()
        if isinstance(prompts, str) or any(not hasattr(p, "__len__") or isinstance(p, str) for p in prompts):
            raise ValueError("prompts must be a list of token id lists: encode texts, wrap a single prompt in a list")
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        if seeds is None:
            base = self._fresh_seed() if params.seed is None else params.seed
            seeds = group_seeds(base, range(len(prompts)), group_size)
        elif [len(s) for s in seeds] != [group_size] * len(prompts):
            raise ValueError(f"seeds must be {len(prompts)} lists of {group_size}, got lengths {[len(s) for s in seeds]}")
        return self._queue(self._request(prompts, seeds, params, on_rollout, kept, on_tokens))

    async def run(self, fn: Callable, *args):
        """Call fn(*args) in the worker thread, which holds `policy.lock`, between two decode steps: the place to change the
        policy's weights."""
        self._check_may_wait()
        return await asyncio.wrap_future(self._queue((Future(), fn, args))[0])

    def run_sync(self, fn: Callable, *args):
        """`run` for scripts."""
        self._check_may_wait()
        return self._queue((Future(), fn, args))[0].result()

    def close(self) -> asyncio.Future | None:
        """End the worker after the step in progress and fail what waits. Outside a loop this returns when it has ended; in a
        loop at once, with a future of the end: `await sampler.close()`."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            worker = self._worker
        join = worker.join if worker not in (None, threading.current_thread()) else lambda: None
        try:
            return asyncio.get_running_loop().run_in_executor(None, join)
        except RuntimeError:
            return join()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    async def __aenter__(self) -> Sampler:
        self._check_may_wait()
        self._start()
        await asyncio.wrap_future(self._choice)
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    # ------------------------------------------------------------- requests

    def _request(self, prompts, seeds, params: SamplingParams, on_rollout, kept: Kept | None, on_tokens) -> Request:
        """A request of checked prompts, ids and seeds."""
        vocab = len(self.policy.model.get_input_embeddings().weight)
        ids = [checked_prompt(prompt, i, vocab, self.context) for i, prompt in enumerate(prompts)]
        if bad := [i for i in params.stop_ids if not 0 <= i < vocab]:
            raise ValueError(f"stop_ids {bad} are outside the vocabulary 0..{vocab - 1}; give token ids")
        if params.stop_strings and self.policy.tokenizer is None:
            raise ValueError("stop_strings need a policy with a tokenizer; use stop_ids")
        eos = frozenset(() if params.ignore_eos else self.policy.eos_ids)
        seeds = [[checked_seed(s) for s in row] for row in seeds]
        return Request(ids, seeds, params, eos, on_rollout, kept, on_tokens, self._check_may_wait)

    def _fresh_seed(self) -> int:
        with self._wake:
            self._requests += 1
            return fold_seed(self.seed, self._requests)

    def _check_may_wait(self) -> None:
        """RuntimeError where waiting for the worker would last for ever."""
        if threading.current_thread() is self._worker:
            raise RuntimeError("waiting for the sampler inside its own worker thread would last for ever")
        if self.policy.lock.held():
            raise RuntimeError("this thread holds policy.lock, which the sampler needs for every step: waiting for it would "
                               "last for ever; leave the `with policy.lock` block first")

    async def _awaited(self, request: Request) -> list[Group]:
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.cancel()
            raise

    # ------------------------------------------------------------- worker

    def _queue(self, item):
        """Hand a request, or a (future, fn, args), to the worker."""
        if isinstance(item, Request) and not item.left:
            settle(item.future, [])
            return item
        self._start(item)
        return item

    def _start(self, *items) -> None:
        """Put items into the inbox and see that there is a worker to take them."""
        rest_threads()
        with self._wake:
            if self._closed:
                raise RuntimeError("the sampler is closed; make a new Sampler(policy)")
            if self._choice.done():
                self._choice.result()  # raises what refused it
            self._inbox.extend(items)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="grpolab-sampler", daemon=True)
                self._worker.start()
            self._wake.notify()

    def _choose(self) -> tuple[Scheduler, int]:
        """The engine that fits, proved, with the rows that it will decode, and the number of threads to do it with."""
        name, slots, threads, cuda_graphs = self._asked
        with self.policy.lock:
            scheduler = Scheduler(self.policy, partial(self._engine, name, slots == 1), slots, self.stats, cuda_graphs)
            return scheduler, self._quickest_threads(scheduler) if threads == "auto" else threads or self._common

    def _engine(self, name: str, single: bool):
        """The engine for the policy's model as it is now; ValueError where exact mode is impossible."""
        if not self.exact:
            return choose_engine(self.policy.model, name, single)
        model, own = self.policy.model, attention_of(self.policy.model)
        try:
            share_attention(model)
            engine = choose_engine(model, name, single)
            if (share := inexact_share(engine, model)) > 0:
                raise ValueError(f"exact mode is impossible here: {share:.1%} of the probe's logps differ in some bit "
                                 f"({engine.name} engine, {engine.dtype}); use exact=False, or bfloat16 on a CPU")
            return engine
        except BaseException:
            set_attention(model, own)  # the trainer's goes with it
            raise

    def _quickest_threads(self, scheduler: Scheduler) -> int:
        common, engine = self._common, scheduler.engine
        if common == 1 or engine.device.type != "cpu":
            return common
        seconds = seconds_a_step(engine, max(engine.min_rows, min(scheduler.slots, 32)), (1, common))
        return min(seconds, key=seconds.get)

    def _work(self) -> None:
        set_own_threads(self._common)  # a new thread would otherwise start with OpenMP's default
        if not self._choice.done():
            try:
                self._choice.set_result(self._choose())
            except BaseException as error:  # it belongs to whoever asks
                self._choice.set_exception(error)
                return self._end(error)
        scheduler, threads = self._choice.result()
        set_own_threads(threads)
        needed = lambda: scheduler.busy or self._inbox or self._closed  # noqa: E731
        while True:
            with self._wake:
                if not self._wake.wait_for(needed, REST_SECONDS):
                    rest_threads()
                    self._wake.wait_for(needed, IDLE_SECONDS)
                if self._closed:
                    break
                if not (scheduler.busy or self._inbox):
                    self._worker = None
                    return
                inbox, self._inbox = self._inbox, deque()
            with self.policy.lock:
                for item in inbox:
                    scheduler.add(item) if isinstance(item, Request) else _answer(*item)
                try:
                    scheduler.step()
                except BaseException as error:  # a fault that is nobody's own fails all; the worker lives on
                    scheduler.fail_all(error)
        scheduler.fail_all(error := RuntimeError("the sampler was closed before this was done"))
        self._end(error)

    def _end(self, error: BaseException) -> None:
        """What is still in the inbox gets the error; nothing can come after it."""
        with self._wake:
            inbox, self._inbox = self._inbox, deque()
        for item in inbox:
            settle(item.future if isinstance(item, Request) else item[0], error=error)
        with self._wake:
            self._worker = None


def _answer(future: Future, fn: Callable, args: tuple) -> None:
    if future.set_running_or_notify_cancel():
        try:
            settle(future, fn(*args))
        except BaseException as error:  # it belongs to the caller, whatever it is
            settle(future, error=error)


_open_samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A worker still inside torch when the interpreter goes would crash it."""
    for sampler in list(_open_samplers):
        sampler.close()
