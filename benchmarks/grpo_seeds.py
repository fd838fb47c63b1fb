"""Does the GRPO recipe of notebook 04 learn reliably? Runs the notebook once a seed and records its measurements.

    OMP_NUM_THREADS=1 python benchmarks/grpo_seeds.py 0 1 2   # five minutes a seed; fills results/grpo_seeds.json

A seed changes what is sampled and in which order questions are asked; the questions and the SFT policy stay the same.
Seeds that the file already holds are kept, so it can be filled in several goes. The number of
threads changes the rounding and with it the path of a run: the recorded seeds used one.
"""

import json
import sys
from pathlib import Path

from grpolab.files import atomic_write
from grpolab.lab.notebooks import run_folders, run_series

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "grpo_seeds.json"
KEPT = ("exact_before", "exact_after", "gain", "sampled_before", "sampled_after", "gain_sampled", "doomed")


def main(seeds: list[str]) -> int:
    table = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = 0
    for seed in seeds or ["0", "1", "2"]:
        failed += run_series(["04"], {"seed": int(seed)})
        folders = run_folders(HERE.parent, "04_grpo", seed=seed)
        found = json.loads(next(f / "results.json" for f in folders if (f / "results.json").exists()).read_text())
        row = table[seed] = {k: found["values"][k] for k in KEPT}
        atomic_write(RESULTS, json.dumps(dict(sorted(table.items())), indent=2) + "\n")
        print(seed, row, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
