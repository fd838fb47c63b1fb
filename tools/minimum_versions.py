"""The lowest versions that pyproject.toml promises, as requirements: `make test-lowest` runs the fast tests against them.

    python tools/minimum_versions.py            # requirements, what depends on them left to pip
    python tools/minimum_versions.py --tests    # the test files that are fast and exercise every direct dependency

PyTorch stays at the version of requirements.lock: of its CPU builds older ones are not on every index, so its floor is what
the project was developed with, not what this tests.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ("test", "smollm2")  # extras
FAST = """advantages arithmetic calculator chat checker cli curriculum evaluate exercises files gate dashboard losses markers
models notebooks pool preferences train_verify protocol reward_model sampling server sync tokens""".split()


def floors() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().split())
    wanted = project["dependencies"] + sum((project["optional-dependencies"][extra] for extra in TESTED), [])
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", requirement).groups() for requirement in wanted)
    return [f"{name}=={locked['torch'] if name == 'torch' else version}" for name, version in lowest.items()]


if __name__ == "__main__":
    print(*([f"tests/test_{name}.py" for name in FAST] if "--tests" in sys.argv else floors()), sep="\n")
