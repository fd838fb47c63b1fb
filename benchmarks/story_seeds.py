"""Do the stories of notebooks 08 and 09 hold for other seeds? Runs both once a seed and records what their gates measured.

    OMP_NUM_THREADS=1 python benchmarks/story_seeds.py 0 1 2   # fills results/guess_seeds.json, longer_answers_seeds.json

A seed changes the weights that the models start from, what is sampled and in which order. Seeds that the files already
hold are kept, so they can be filled in several goes. The number of threads changes the rounding and with it the path of
a run; it stands beside each seed.
"""

import json
import os
import sys
from pathlib import Path

from grpolab.files import atomic_write
from grpolab.lab.notebooks import run_folders, run_series

HERE = Path(__file__).parent
STORIES = {"08_guess": "guess_seeds.json", "09_longer_answers": "longer_answers_seeds.json"}


def main(seeds: list[str]) -> int:
    failed = 0
    for seed in seeds or ["0", "1", "2"]:
        for name, file in STORIES.items():
            failed += run_series([name[:2]], {"seed": int(seed)})
            results = [f / "results.json" for f in run_folders(HERE.parent, name, seed=seed) if (f / "results.json").exists()]
            if results:  # none where the notebook broke before its gate
                record(HERE / "results" / file, name, seed, json.loads(results[0].read_text()))
    return failed


def record(path: Path, name: str, seed: str, found: dict) -> None:
    """Add one seed's measurements to the file."""
    table = json.loads(path.read_text()) if path.exists() else {"command": "python benchmarks/story_seeds.py", "seeds": {}}
    threads = os.environ.get("OMP_NUM_THREADS")
    table["seeds"][seed] = {"passed": found["passed"], "threads": threads and int(threads)} | found["values"]
    table["seeds"] = dict(sorted(table["seeds"].items()))
    atomic_write(path, json.dumps(table, indent=1) + "\n")
    print(name, seed, "passed" if found["passed"] else "FAILED", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
