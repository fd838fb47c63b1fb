"""What is fed together before anything is drawn: prompts of one width, each once for all its samples."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from grpolab.decode.cache import WINDOW, round_up
from grpolab.decode.requests import Pending

PREFILL_PAIRS = 2**22  # query-key pairs in one call: rows times width times window
PREFILL_COLUMNS = 1024  # longer prompts are fed in pieces of this many tokens
BUCKET = 8  # prompts are padded to multiples of this, so that a row's width depends on its own length alone


def prefill_batches(prompts: Sequence[Pending], epoch: int) -> list[tuple[list[Pending], int, int]]:
    """(prompts, width of what is new, width of what is kept): a row's widths, and so its last bits, are its own."""
    buckets: dict[tuple[int, int], list[Pending]] = {}
    for prompt in prompts:
        kept = prompt.kept(epoch)
        buckets.setdefault((round_up(len(prompt.ids) - kept, BUCKET), round_up(kept, BUCKET)), []).append(prompt)
    batches = []
    for (width, behind), members in buckets.items():
        size = max(1, PREFILL_PAIRS // (width * (behind + width)))
        batches += [(members[i: i + size], width, behind) for i in range(0, len(members), size)]
    return batches


def prefill(engine, prompts: list[Pending], width: int, behind: int, epoch: int, unit: int) -> tuple[float, int]:
    """Feed prompts, less what their conversation has kept: up to `width` columns after up to `behind` kept ones. They get
    their cache, whose width is a multiple of `unit`, and their logits. Returns seconds, and the tokens fed."""
    started, device = time.perf_counter(), engine.device
    kept = [p.kept(epoch) for p in prompts]
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, p in enumerate(prompts):
        tokens[i, : len(p.ids) - kept[i]] = torch.tensor(p.ids[kept[i]:])
    tokens, start = tokens.to(device), torch.tensor(kept, device=device)
    last = torch.tensor([len(p.ids) - 1 for p in prompts], device=device) - start
    cache = engine.allocate(len(prompts), round_up(behind + width, unit))
    for i, p in enumerate(prompts):
        if kept[i]:
            cache.put([i], p.request.kept.cache, [0], kept[i])
    logits = None
    for c in range(0, width, PREFILL_COLUMNS):
        piece = tokens[:, c: c + PREFILL_COLUMNS]
        window = min(round_up(behind + c + piece.shape[1], WINDOW), behind + width)
        end = (last - c).clamp(0, piece.shape[1] - 1)
        part = engine.forward(piece, start + c, end, cache, window)
        logits = part if logits is None else torch.where((last >= c)[:, None], part, logits)
    synchronize(device)
    seconds, fed = time.perf_counter() - started, sum(len(p.ids) for p in prompts) - sum(kept)
    for i, p in enumerate(prompts):
        p.cache, p.row, p.logits = cache, i, logits[i]
        p.prefill_seconds = seconds * (len(p.ids) - kept[i]) / fed
    return seconds, fed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
