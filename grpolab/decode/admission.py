"""Who enters the batch next: a pure function of the queue, the rows in progress and the memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch


def admit(waiting: Iterable[tuple[int, int]], rows: int, longest: int, slots: int, memory: int) -> list[int]:
    """How many samples of the first waiting prompts enter now, in the order of the queue: nobody overtakes.

    waiting        (positions that a sample may come to occupy, samples that wait) of each prompt, both at least 1
    rows, longest  those in progress, and the positions that the longest of them may come to occupy
    slots, memory  the most rows, and the positions of all of them together if each becomes as long as the longest

    Every prefill stalls the decode, so what is only a part of the queue enters an eighth of the batch at a time; but where
    nothing runs at least one sample enters, even if it is too long for the memory.
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
