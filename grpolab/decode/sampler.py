"""The sampler: every rollout comes from here, out of one decode batch that concurrent callers share.

Token ids in; token ids, logps and finish reasons out. One worker thread computes, from the choice of the engine on: event loops
keep answering while it decodes, and whoever changes the weights runs in it (`run`). The decode loop itself is in
`scheduler.py`, the arithmetic in the engines, the draw in `sampling.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from grpolab.decode.conversation import Conversation
from grpolab.decode.engines.attention import restore_attention
from grpolab.decode.prompt_lookup import MOST
from grpolab.decode.requests import Prefix, Request, Stats, checked_prompt, checked_seed, settle
from grpolab.decode.sampling import SamplingParams, fold_seed, group_seeds
from grpolab.decode.scheduler import Scheduler
from grpolab.decode.verify import choose_engine, choose_exact_engine
from grpolab.rollouts import Group, Rollout
from grpolab.sync import rest_threads, set_own_threads

IDLE_SECONDS = 0.05  # without a request, after which the worker ends, and with it its OpenMP threads; the next starts another


@dataclass(eq=False)
class Job:
    """A call for the worker thread, and the future of its result."""

    fn: Callable
    args: tuple
    future: Future = field(default_factory=Future)

    def begin(self, scheduler: Scheduler) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                settle(self.future, self.fn(*self.args))
            except BaseException as error:  # it belongs to the caller, whatever it is
                settle(self.future, error=error)


class Sampler:
    """Samples rollouts of a policy, from coroutines and from scripts.

        groups = await sampler.sample(prompts, group_size=8, params=SamplingParams(max_new_tokens=64, seed=0))
        groups = sampler.sample_sync(prompts, group_size=8)

    slots   rows decoded together; None takes what a fifth of the free memory holds, at most 512
    engine  "auto", "compiled", "llama", "unpacked" or "hf" (`verify.choose_engine`); `sampler.engine` is the one in use
    exact   make the model's own forward use the sampler's attention until `close`, so that trainer logps equal the sampler's
            in every bit; ValueError where the start-up probe finds a difference. On a GPU it may find none and some bits differ
    seed    of the seeds of requests that bring none
    threads of torch in the worker; None takes the process's number
    lookup  at most so many tokens (0 to 16; 0 is off) that earlier text of a rollout lets expect are computed in one step with
            the next one (prompt lookup); what is sampled stays the same, and text that repeats takes fewer steps. It needs the
            compiled engine; while rows with a constraint are decoded it rests

    A rollout is decided by its prompt, its seed and the weights. Its bits do not depend on the other rows where
    `verify.batch_dependence` is 0: for the llama engine, and on processors that we tried for the hf engine, mixtures of
    experts and GPT-Neo excepted; elsewhere a last bit, and so rarely a token, may.

    Changed weights and modules (`snapshot.Snapshot`) are looked for where rows are admitted and where `policy.version` has
    moved. With nothing running the look is thorough. While rows run it misses edits through `.data`, which torch does not
    count, and plain numbers set on a module; a row in progress may then be sampled from two models. So change weights in
    `run`, and add one to `policy.version`.

    The engine is chosen and verified by the worker, at the first use or in `async with`; until then `engine` and `slots` wait
    for it. Where no engine fits, every caller gets the error. Policies that are unchanged share engines between samplers.
    """

    def __init__(self, policy, *, slots: int | None = None, engine: str = "auto", exact: bool = False, seed: int = 0,
                 threads: int | None = None, lookup: int = 0):
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}; None chooses by memory")
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ValueError(f"threads must be at least 1 or None, got {threads!r}")
        if not (isinstance(lookup, int) and 0 <= lookup <= MOST):
            raise ValueError(f"lookup must be from 0 (off) to {MOST} tokens, got {lookup!r}")
        if policy.bare:
            raise ValueError(f"{policy.name!r} would be sampled with its adapter, which only forward passes of a reference "
                             "switch off: load the model without it as a policy of its own")
        if lookup and exact:
            raise ValueError(f"lookup={lookup} needs the compiled engine, which exact=True does without; leave one of them out")
        self.policy, self.exact, self.lookup, self.stats = policy, exact, lookup, Stats()
        self.threads = threads or torch.get_num_threads()
        self._slots, self._engine, self._seed, self._seeds_drawn = slots, engine, seed, 0
        self._choice: Future[Scheduler] = Future()
        self._choice.set_running_or_notify_cancel()  # a cancelled await of it may not cancel it
        self._inbox: list[Request | Job] = []  # for the worker
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        _open_samplers.add(self)

    @property
    def engine(self):
        return self._scheduler.engine

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together: the policy's, or fewer where the engine could not be
        verified for more (a warning says so as it is chosen)."""
        chosen = self._choice.done() and self._choice.exception() is None
        return self._scheduler.context if chosen else self.policy.context

    @property
    def busy(self) -> bool:
        """Whether rollouts are being decoded or wait for it, as far as the worker has looked."""
        return bool(self._inbox) or self._choice.done() and self._scheduler.busy

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    @property
    def _scheduler(self) -> Scheduler:
        if not self._choice.done():
            self._start()
        return self._choice.result()

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
                     seeds: Sequence[Sequence[int]] | None = None) -> list[Group]:
        """Token id lists -> one Group of `group_size` rollouts for each; cancelling the await frees its slots. `seeds` as in
        `submit`."""
        return await self.submit(prompts, group_size=group_size, params=params, seeds=seeds).wait()

    def sample_sync(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1,
                    params: SamplingParams | None = None) -> list[Group]:
        """`sample` for scripts; it also works inside a running loop, which it blocks."""
        request = self.submit(prompts, group_size=group_size, params=params)
        try:
            return request.result()
        except BaseException:  # an interrupt: nobody waits for it any more
            request.cancel()
            raise

    async def stream(self, prompts: Sequence[Sequence[int]], *, group_size: int = 1, params: SamplingParams | None = None,
                     seeds: Sequence[Sequence[int]] | None = None) -> AsyncIterator[tuple[int, int, Rollout]]:
        """(prompt index, sample index, rollout) as rows finish; leaving the iteration cancels the rest. `seeds` as in
        `submit`."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def put(item) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it who listens
                loop.call_soon_threadsafe(queue.put_nowait, item)

        request = self.submit(prompts, group_size=group_size, params=params, seeds=seeds, on_rollout=lambda *item: put(item))
        request.future.add_done_callback(lambda _: put(None))
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
               prefix: Prefix | None = None) -> Request:
        """Queue a request and return its handle at once (`result()`, `cancel()`).

        seeds       (B, G), to repeat rollouts by their `.seed`; None derives them from params.seed and their indices
        on_rollout  called in the worker thread with (prompt index, sample index, rollout) as each one finishes; an error of
                    it fails its request
        on_tokens   called likewise with (prompt index, sample index, token ids, logps) as a rollout grows, its last tokens
                    before on_rollout has it
        prefix      `Request.prefix` of the turn that the one prompt goes on from (Prefix() of none): only the rest is fed
        Raises ValueError for an empty prompt, one that fills the context, a token id outside the vocabulary, a seed outside
        0..2**64 - 1, or group_size below 1; RuntimeError after `close`, in the worker, and for who holds `policy.lock`.
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
        vocab = len(self.policy.model.get_input_embeddings().weight)
        ids = [checked_prompt(prompt, i, vocab, self.context) for i, prompt in enumerate(prompts)]
        if bad := [i for i in params.stop_ids if not 0 <= i < vocab]:
            raise ValueError(f"stop_ids {bad} are outside the vocabulary 0..{vocab - 1}; give token ids")
        if params.constraint is not None and params.constraint.vocab != vocab:
            raise ValueError(f"the constraint is over {params.constraint.vocab} tokens and the policy has {vocab}: compile it "
                             "with Grammars of this policy")
        if params.stop_strings and self.policy.tokenizer is None:
            raise ValueError("stop_strings need a policy with a tokenizer; use stop_ids")
        eos = frozenset(() if params.ignore_eos else self.policy.eos_ids)
        seeds = [[checked_seed(s) for s in row] for row in seeds]
        request = Request(ids, seeds, params, eos, on_rollout, on_tokens, prefix)
        if request.unfinished:
            self._start(request)
        else:
            settle(request.future, [])
        return request

    async def run(self, fn: Callable, *args):
        """Call fn(*args) in the worker thread, which holds `policy.lock`, between two decode steps: the place to change the
        policy's weights."""
        return await asyncio.wrap_future(self._start(Job(fn, args)))

    def run_sync(self, fn: Callable, *args):
        """`run` for scripts."""
        return self._start(Job(fn, args)).result()

    def close(self) -> asyncio.Future | None:
        """End the worker after the step in progress and fail what waits. Outside a loop this returns when it has ended; in a
        loop at once, with a future of the end: `await sampler.close()`."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            worker = self._worker

        def finish() -> None:
            if worker not in (None, threading.current_thread()):
                worker.join()
            if self.exact:
                with self.policy.lock:
                    restore_attention(self.policy.model)

        try:
            return asyncio.get_running_loop().run_in_executor(None, finish)
        except RuntimeError:
            return finish()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    async def __aenter__(self) -> Sampler:
        self._start()
        try:
            await asyncio.wrap_future(self._choice)
        except BaseException:  # no __aexit__ will follow
            self.close()
            raise
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    # ------------------------------------------------------------- worker

    def _fresh_seed(self) -> int:
        with self._wake:
            self._seeds_drawn += 1
            return fold_seed(self._seed, self._seeds_drawn)

    def _start(self, item: Request | Job | None = None) -> Future | None:
        """Queue an item, see that a worker runs, and return the item's future; RuntimeError where waiting for that would last
        for ever."""
        if threading.current_thread() is self._worker:
            raise RuntimeError("waiting for the sampler inside its own worker thread would last for ever")
        if self.policy.lock.held():
            raise RuntimeError("this thread holds policy.lock, which the sampler needs for every step: waiting for it would "
                               "last for ever; leave the `with policy.lock` block first")
        rest_threads()
        with self._wake:
            if self._closed:
                raise RuntimeError("the sampler is closed; make a new Sampler(policy)")
            if self._choice.done():
                self._choice.result()  # raises why no engine fits
            self._inbox += [item] if item else []
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="grpolab-sampler", daemon=True)
                self._worker.start()
            self._wake.notify()
        return item and item.future

    def _choose(self):
        choose = choose_exact_engine if self.exact else choose_engine
        return choose(self.policy, self._engine, self._slots == 1)

    def _work(self) -> None:
        try:
            set_own_threads(self.threads)  # a new thread would otherwise start with OpenMP's default
            if self.policy.device.type == "cuda":
                torch.cuda.set_device(self.policy.device)  # a new thread starts with the first GPU
            if not self._choice.done():
                with self.policy.lock:
                    self._choice.set_result(Scheduler(self.policy, self._choose, self._slots, self.stats, self.lookup))
        except BaseException as error:  # every caller gets it
            if not self._choice.done():
                self._choice.set_exception(error)
            return self._end(error)
        scheduler = self._choice.result()
        while True:
            with self._wake:
                if not self._wake.wait_for(lambda: scheduler.busy or self._inbox or self._closed, IDLE_SECONDS):
                    self._worker = None
                    return
                if self._closed:
                    break
                items, self._inbox = self._inbox, []
            with self.policy.lock:
                for item in items:
                    item.begin(scheduler)
                try:
                    scheduler.step()
                except BaseException as error:  # a fault that belongs to no request fails all; the worker goes on
                    scheduler.fail_all(error)
        error = RuntimeError("the sampler was closed before this was done")
        scheduler.fail_all(error)
        self._end(error)

    def _end(self, error: BaseException) -> None:
        """What is still queued gets the error; nothing can come after it."""
        with self._wake:
            items, self._inbox = self._inbox, []
        for item in items:
            settle(item.future, error=error)
        self._worker = None


_open_samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A worker still inside torch when the interpreter goes would crash it."""
    for sampler in list(_open_samplers):
        sampler.close()
