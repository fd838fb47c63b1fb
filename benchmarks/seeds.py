"""Do the claims of the notebooks hold for other seeds? Runs each once a seed and records what its gate measured.

    OMP_NUM_THREADS=1 python benchmarks/seeds.py 00 01 03 05 07 08 11 13 14   # 25 minutes a seed; fills results/seeds.json

Seed 0 is the stored run (results/notebooks/); 1 and 2, named before any of them was run, are the test. A seed changes the order
of the data, what is sampled, and in 08 the weights that the model starts from; the questions stay, but for 14's. 03 and 05
start from the policy that 01 leaves for the same seed. Of 04, baselines.py says more, and of 09 longer_answers.py.
What the record already holds is kept, so it can be filled in several goes; to measure again, take it out. The number of threads
changes the rounding and with it the path of a run; it stands beside each.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import records

from grpolab.lab.notebooks import find, run_series

RESULTS = Path(__file__).parent / "results" / "seeds.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/seeds.py 00 01 03 05 07 08 11 13 14"
SEEDS = ("1", "2")


def main(numbers: list[str]) -> int:
    """The exit status: 0 where every gate passed."""
    failed, home = 0, Path(__file__).parent.parent
    for seed in SEEDS:
        for name in (path.stem for path in find(numbers or COMMAND.split()[3:])):
            if seed not in _record()["notebooks"].get(name, {}):
                failed += run_series([name], {"seed": int(seed)})
                path = home / "runs" / name / "tiny" / f"seed-{seed}" / "results.json"
                if path.exists():  # not where it broke before its gate
                    keep(name, seed, json.loads(path.read_text()))
    return 1 if failed else 0


def _record() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"command": COMMAND, "notebooks": {}}


def keep(name: str, seed: str, found: dict) -> None:
    """Add the claims that a gate judged for one seed to the record, and its `by_seed`, by which 11 compares over seeds."""
    record, threads = _record(), os.environ.get("OMP_NUM_THREADS")
    claims = [{k: check[k] for k in ("name", "measured", "bound", "passed")} for check in found["checks"] if check["claim"]]
    of = record["notebooks"].setdefault(name, {})
    of[seed] = {"passed": found["passed"], "threads": threads and int(threads), "claims": claims,
                "provenance": records.provenance(records.measured(RESULTS.stem))}
    if values := found.get("values", {}).get("by_seed"):
        of[seed]["values"] = values
    record["command"] = COMMAND
    record["notebooks"] = {name: dict(sorted(of.items())) for name, of in sorted(record["notebooks"].items())}
    records.write(RESULTS, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="numbers or names (default: those of the recorded command)")
    sys.exit(main(parser.parse_args().notebooks))
