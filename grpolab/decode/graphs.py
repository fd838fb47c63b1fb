"""A decode step from fixed buffers, so that a GPU can replay it as one CUDA graph instead of launching every kernel anew.

Not yet run on a GPU, and so off unless `Sampler(cuda_graphs=True)` asks for it; `StaticStep` without capture is tested on
the CPU to give the same rollouts.
"""

from __future__ import annotations

import logging

import torch

from grpolab.decode.cache import SlotCache, round_up

log = logging.getLogger(__name__)

STATIC_WINDOW = 128  # windows are rounded up to this, so that few graphs serve all lengths


class StaticStep:
    """`engine.forward` for one new token a row, through buffers whose addresses stay.

    Rows are rounded up to a power of two; those that fill up decode token 0 at position 0 of free slots, which the next
    owner overwrites. With `capture`, each (rows, window) becomes one CUDA graph for as long as its cache lives.
    """

    def __init__(self, engine, capture: bool):
        self.engine, self.capture = engine, capture
        self.cache: SlotCache | None = None
        self.plans: dict[tuple[int, int], tuple] = {}  # (graph or None, its logits, what else must not be freed)
        self.addresses = self._parameter_addresses()

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, start: torch.Tensor, cache: SlotCache, window: int) -> torch.Tensor:
        """tokens, start (n,): logits (n, V), valid until the next call."""
        if cache is not self.cache:
            self._begin(cache)
        n = len(tokens)
        rows = min(max(self.engine.min_rows, 1 << (n - 1).bit_length()), cache.slots)
        window = min(round_up(window, STATIC_WINDOW), cache.width)
        for buffer, values in ((self.tokens, tokens), (self.start, start)):
            buffer[:n].copy_(values)
            buffer[n:rows].zero_()
        if (rows, window) not in self.plans:
            self.plans[rows, window] = self._plan(rows, window)
        graph, logits, _ = self.plans[rows, window]
        if graph is None:
            logits = self._forward(rows, window)
        else:
            graph.replay()
        return logits[:n]

    def refreshed(self) -> None:
        """To be called after `engine.refresh()`: weights that live elsewhere now need new graphs."""
        if self.addresses != self._parameter_addresses():
            self.plans, self.addresses = {}, self._parameter_addresses()

    def _begin(self, cache: SlotCache) -> None:
        self.cache, self.plans = cache, {}
        self.tokens, self.start = (torch.zeros(cache.slots, dtype=torch.long, device=self.engine.device) for _ in range(2))

    def _forward(self, rows: int, window: int) -> torch.Tensor:
        return self.engine.forward(self.tokens[:rows, None], self.start[:rows], None, self.cache, window)

    def _plan(self, rows: int, window: int) -> tuple:
        """Warm up beside the stream, then capture; a step done twice writes the same keys and values twice."""
        if not self.capture:
            return None, None, None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward(rows, window)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward(rows, window)
        return graph, logits, (self.cache.views, getattr(self.engine, "table", None))

    def _parameter_addresses(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self.engine.model.parameters())


def static_step(engine) -> StaticStep | None:
    """On a GPU the captured step, where it passes `fault`; else None, with the reason logged: the plain step serves."""
    if engine.device.type != "cuda":
        return None
    step = StaticStep(engine, capture=True)
    why = fault(step)
    if why is not None:
        log.warning("no CUDA graphs for %s, since %s", type(engine.model).__name__, why)
        return None
    return step


@torch.no_grad()
def fault(step: StaticStep, rows: int = 4, steps: int = 3) -> str | None:
    """None when some steps at ragged positions give the very logits of the plain forward, else what went wrong."""
    engine = step.engine
    ours, plain = (engine.allocate(rows, STATIC_WINDOW) for _ in range(2))
    start = torch.arange(rows, device=engine.device) * 3
    try:
        for i in range(steps):
            tokens = (torch.arange(rows, device=engine.device) * 7 + i) % engine.vocab
            expected = engine.forward(tokens[:, None], start + i, None, plain, STATIC_WINDOW)
            if not torch.equal(step(tokens, start + i, ours, STATIC_WINDOW), expected):
                return f"its logits are not those of the plain step after {i + 1} steps"
    except RuntimeError as error:  # whatever the capture refuses
        return f"{type(error).__name__}: {error}"
    finally:
        step._begin(ours)
    return None
