"""Who enters the batch: the promises of `admit`, over random queues."""

import random

from grpolab.decode.prefill import admit


def cases(number=4000):
    """Queues of all kinds, from an empty memory to an ample one."""
    for seed in range(number):
        rng = random.Random(seed)
        slots = rng.choice([1, 2, 5, 8, 64, 512])
        waiting = [(rng.choice([1, 32, 500, 24_000, 32_768]), rng.choice([1, 2, 8, 64])) for _ in range(rng.randint(1, 6))]
        rows = rng.choice([0, 0, 1, rng.randint(0, slots)])
        longest = rng.choice([32, 24_000]) if rows else 0
        yield waiting, rows, longest, slots, rng.choice([0, 31, 40_000, 90_000, 10**7])


def test_rows_and_memory_are_never_exceeded_and_nobody_overtakes():
    for waiting, rows, longest, slots, memory in cases():
        counts = admit(iter(waiting), rows, longest, slots, memory)
        entered = [(room, count) for (room, _), count in zip(waiting, counts) if count]
        assert all(0 <= count <= samples for count, (_, samples) in zip(counts, waiting))
        assert rows + sum(counts) <= max(slots, rows)
        if entered and rows + sum(counts) > 1:
            assert (rows + sum(counts)) * max(longest, *(room for room, _ in entered)) <= memory
        full = [count == samples for count, (_, samples) in zip(counts, waiting)]
        assert all(full[: len([c for c in counts if c]) - 1]), "a later prompt entered before an earlier one was all in"


def test_every_queue_is_served_to_its_end():
    """Rows finish in any order; each time something runs or something enters."""
    for seed, (waiting, _, _, slots, memory) in enumerate(cases(400)):
        rng, running, queue = random.Random(seed), [], [list(w) for w in waiting]
        while queue or running:
            counts = admit(queue, len(running), max(running, default=0), slots, memory)
            assert sum(counts) or running, "it would wait for ever"
            for entry, count in zip(queue, counts):
                running += [entry[0]] * count
                entry[1] -= count
            queue = [entry for entry in queue if entry[1]]
            for _ in range(rng.randint(1, 8)):
                running and running.pop(rng.randrange(len(running)))


def test_a_busy_batch_is_refilled_by_an_eighth_and_by_all_that_is_left():
    assert admit([(32, 100)], 60, 32, 64, 10**6) == [], "4 of 64 rows are not worth a prefill"
    assert admit([(32, 100)], 56, 32, 64, 10**6) == [8]
    assert admit([(32, 2), (32, 2)], 60, 32, 64, 10**6) == [2, 2], "the queue is empty afterwards"
    assert admit([(24_000, 8)], 2, 24_000, 64, 3 * 24_000) == [1], "an eighth of what the memory holds"
    assert admit([(32, 4), (32_768, 1)], 10, 32, 64, 40_000) == [4, 0], "the long one waits, alone"
    assert admit([(32_768, 1), (32, 4)], 10, 32, 64, 40_000) == [], "and is not overtaken"
