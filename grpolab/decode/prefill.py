"""Which prompts enter the batch, and the prefill: each prompt is fed once for all its samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from grpolab.decode.cache import WINDOW, round_up
from grpolab.decode.requests import Pending

PREFILL_PAIRS = 2**22  # query-key pairs in one call: rows times width times window
PREFILL_COLUMNS = 1024  # longer prompts are fed in pieces of this many tokens
BUCKET = 8  # prompts are padded to multiples of this, so that a row's width depends on its own length alone


def admit(waiting: Iterable[tuple[int, int]], rows: int, longest: int, slots: int, memory: int) -> list[int]:
    """How many samples of the first waiting prompts enter now, in the order of the queue.

    waiting        (positions that a sample may come to occupy, samples that wait) of each prompt, both at least 1
    rows, longest  those in progress, and the positions that the longest of them may come to occupy
    slots, memory  the most rows, and the positions of all of them together if each becomes as long as the longest

    Every prefill stalls the decode, so a part of the queue enters an eighth of the batch at a time; but where nothing runs at
    least one sample enters, even if it is too long for the memory.
    """
    counts = []
    for room, samples in waiting:
        longest = max(longest, room)
        capacity = max(1, min(slots, memory // longest))
        counts.append(max(0, min(samples, capacity - rows - sum(counts))))
        if counts[-1] < samples:
            return counts if sum(counts) >= max(1, capacity // 8) else []
    return counts


def free_bytes(device: torch.device) -> int:
    """What a cache could take: on a GPU the reserve of torch's allocator included, else what the kernel calls available, or
    4 GiB where it does not say."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 << 30


def prefill_batches(prompts: Sequence[Pending], epoch: int) -> list[tuple[list[Pending], int, int]]:
    """(prompts, width of the new tokens, width of the cached ones): a row's widths, and so its last bits, are its own."""
    buckets: dict[tuple[int, int], list[Pending]] = {}
    for prompt in prompts:
        cached = prompt.cached(epoch)
        buckets.setdefault((round_up(len(prompt.ids) - cached, BUCKET), round_up(cached, BUCKET)), []).append(prompt)
    batches = []
    for (width, behind), members in buckets.items():
        size = max(1, PREFILL_PAIRS // (width * (behind + width)))
        batches += [(members[i: i + size], width, behind) for i in range(0, len(members), size)]
    return batches


def prefill(engine, prompts: list[Pending], width: int, behind: int, epoch: int, unit: int) -> tuple[float, int]:
    """Feed prompts, except the positions that their conversation has cached: up to `width` columns after up to `behind` cached
    ones. They get their cache, whose width is a multiple of `unit`, and their logits. Returns seconds, and the tokens fed."""
    started, device = time.perf_counter(), engine.device
    cached = [p.cached(epoch) for p in prompts]
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, p in enumerate(prompts):
        tokens[i, : len(p.ids) - cached[i]] = torch.tensor(p.ids[cached[i]:])
    tokens, start = tokens.to(device), torch.tensor(cached, device=device)
    last = torch.tensor([len(p.ids) - 1 for p in prompts], device=device) - start
    cache = engine.allocate(len(prompts), round_up(behind + width, unit))
    for i, p in enumerate(prompts):
        if cached[i]:
            cache.put([i], p.request.prefix.cache, [0], cached[i])
    logits = None
    for c in range(0, width, PREFILL_COLUMNS):
        piece = tokens[:, c: c + PREFILL_COLUMNS]
        window = min(round_up(behind + c + piece.shape[1], WINDOW), behind + width)
        end = (last - c).clamp(0, piece.shape[1] - 1)
        part = engine.forward(piece, start + c, end, cache, window)
        logits = part if logits is None else torch.where((last >= c)[:, None], part, logits)
    synchronize(device)
    for i, p in enumerate(prompts):
        p.cache, p.row, p.logits = cache, i, logits[i]
    return time.perf_counter() - started, sum(len(p.ids) for p in prompts) - sum(cached)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
