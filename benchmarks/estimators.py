"""Which estimators of the policy gradient are biased, by how much, and does it matter? Exactly, on three small problems.

    OMP_NUM_THREADS=1 python benchmarks/estimators.py     # some four minutes a seed; fills results/estimators.json

The bench is `grpolab.lab.estimators`. The record has its problem with the seeds 0, 1 and 2, named beforehand. On-policy each
estimator with all groups of four; off-policy (older policies, a bf16 sampler, top-p) with all groups of two; and how the
cosine of a batch grows with its samples, from 500 sampled batches of 4, 16, 64 and 256 groups.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import records
import torch

from grpolab.lab.estimators import OFF_POLICY, ON_POLICY, bench, bf16, stale, successor, top_p

RESULTS = Path(__file__).parent / "results" / "estimators.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/estimators.py"
SEEDS, SIZE, OLD_SIZE, UPDATES, GROUPS, DRAWS = range(3), 4, 2, (1, 4, 16), (4, 16, 64, 256), 500
DRAWN = ("no baseline", "leave one out", "mean over tokens (DAPO)", "mean per sequence")


def rows(table) -> list[dict]:
    """JSON knows neither inf nor nan: None."""
    return [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            for row in table.to_dict("records")]


def one_seed(seed: int) -> dict:
    problem = successor(seed)
    samplers = {f"{k} update{'s' * (k > 1)} old": stale(problem, k) for k in UPDATES} | {"bf16": bf16(problem)}
    samplers |= {f"top-p {p}": top_p(problem, p) for p in (0.95, 0.9)}
    samplers["top-p 0.9, with its mass"] = top_p(problem, 0.9, with_mass=True)
    drawn = {name: ON_POLICY[name] for name in DRAWN}
    return {"success": problem.success.tolist(), "on_policy": rows(bench(problem, ON_POLICY | OFF_POLICY, group_size=SIZE)),
            "off_policy": rows(bench(problem, OFF_POLICY, samplers, group_size=OLD_SIZE)),
            "samples": rows(bench(problem, drawn, groups=GROUPS, group_size=SIZE, draws=DRAWS))}


def main(seeds: list[int]) -> None:
    record = {"command": COMMAND, "threads": torch.get_num_threads(), "seeds": {}}
    for seed in seeds:
        record["seeds"][str(seed)] = one_seed(seed)
        records.write(RESULTS, record)
        print(seed, record["seeds"][str(seed)]["success"], flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=list(SEEDS))
    main(parser.parse_args().seeds)
