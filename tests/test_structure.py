"""The house: which room may import which, what an environment server must not load, how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import grpolab

HOME = Path(grpolab.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
# Importer -> the rooms it may import beside its own. `__main__` is the door to all of them.
ARROWS = {
    "flat": {"decode", "models"},  # evaluate asks the sampler
    "models": {"flat"},
    "decode": {"flat", "models"},
    "runs": {"flat", "models", "lab"},
    "train": {"flat", "models", "decode", "runs", "env", "lab"},
    "env": {"flat"},
    "serve": {"flat", "models", "decode", "runs", "train", "env"},
    "lab": {"flat", "models", "decode", "runs", "train", "env"},
    "cli": {"flat", "models", "decode", "runs", "train", "env", "serve", "lab"},
}
LONGEST = 360  # lines; a longer file says at its top why ("Longer than ...")


def room(module: str) -> str:
    """The room of a dotted module: decode, train, env, lab, or flat for the files above them."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (HOME / parts[1]).is_dir() else "flat"


def imported(path: Path) -> set[str]:
    """The grpolab modules that a file names in an import statement, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "grpolab":
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] == "grpolab"}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_imports_go_one_way(path):
    if path.name in ("__main__.py", "__init__.py") and path.parent == HOME:
        return
    mine = room(".".join(("grpolab", *path.relative_to(HOME).parts)).removesuffix(".py"))
    others = {room(module) for module in imported(path)} - {mine}
    assert others <= ARROWS[mine], f"{mine} imports {sorted(others - ARROWS[mine])}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_a_long_file_says_why(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST or "Longer than" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.parametrize("module", ["grpolab", "grpolab.env.server", "grpolab.env.pool", "grpolab.lab.gate"])
def test_it_is_light(module):
    """Environments run where no torch is; the gate closes notebooks that have no model."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_the_public_face():
    from grpolab import GrpoPool, MultiTurnEnvPool, Sampler, SamplingParams, gate, load_policy, losses  # noqa: F401
    from grpolab.train import (  # noqa: F401
        DPOConfig,
        GRPOConfig,
        RewardConfig,
        RewardModel,
        SFTConfig,
        dpo,
        grpo,
        multi_turn_grpo,
        reward_model,
        sft,
    )

    assert callable(sft) and callable(grpo) and callable(dpo) and callable(reward_model)  # the methods, not their modules
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        grpolab.Trainer  # noqa: B018
