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
    "words": {"decode"},  # evaluate asks the sampler
    "decode": {"words"},
    "train": {"words", "decode", "env", "lab"},
    "env": {"words"},
    "serve": {"words", "decode", "train", "env", "lab"},
    "lab": {"words", "decode", "train", "env"},
}
# A loop writes into a run: what that takes of lab needs only the words, so there is no circle.
OF_LAB_FOR_TRAIN = {"run", "states", "record", "kept", "selection"}
LONGEST = 360  # lines; a longer file says at its top why ("Longer than ...")


def room(module: str) -> str:
    """The room of a dotted module: decode, train, env, lab, or words for the flat files."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (HOME / parts[1]).is_dir() else "words"


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


def test_what_train_takes_of_lab_needs_only_the_words():
    """And asks for the rest of lab, which stands on train, inside functions alone."""
    taken = {m.split(".")[2] for path in (HOME / "train").glob("*.py") for m in imported(path) if room(m) == "lab"}
    assert taken <= OF_LAB_FOR_TRAIN
    for name in OF_LAB_FOR_TRAIN:
        tree = ast.parse((HOME / "lab" / f"{name}.py").read_text())
        modules = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.module.startswith("grpolab")]
        assert {room(m) for m in modules} <= {"words", "lab"}
        assert {m.split(".")[2] for m in modules if room(m) == "lab"} <= OF_LAB_FOR_TRAIN


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
