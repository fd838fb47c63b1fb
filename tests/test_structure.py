"""Which room may import which, that no two files import each other, what must not load torch, how long a file may be."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import grpolab

HOME = Path(grpolab.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
# Importer -> the rooms it may import beside its own. The package's own `__init__` and `__main__` lead to all of them.
ARROWS = {
    "flat": set(),
    "models": {"flat"},
    "decode": {"flat", "models"},
    "evaluate": {"flat", "models", "decode"},
    "runs": {"flat", "models"},
    "env": {"flat"},
    "train": {"flat", "models", "decode", "evaluate", "runs", "env"},
    "serve": {"flat", "models", "decode", "evaluate", "runs", "env", "train"},
    "lab": {"flat", "models", "decode", "evaluate", "runs", "env", "train", "serve"},
    "cli": {"flat", "models", "decode", "evaluate", "runs", "env", "train", "serve", "lab"},
}
LONGEST = 360  # lines; a longer file says at its top why ("Longer than ...")


def room(module: str) -> str:
    """The room of a dotted module: its folder, `evaluate`, which stands on decode, or flat for the other files above."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and ((HOME / parts[1]).is_dir() or parts[1] == "evaluate") else "flat"


def name_of(path: Path) -> str:
    return ".".join(("grpolab", *path.relative_to(HOME).with_suffix("").parts))


def imported(path: Path) -> set[str]:
    """The grpolab modules that a file imports, wherever the statement stands, or that it names to `import_module`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "grpolab":
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] == "grpolab"}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("grpolab.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOME)))
def test_imports_go_one_way(path):
    if path.name in ("__main__.py", "__init__.py") and path.parent == HOME:
        return
    mine = room(name_of(path))
    others = {room(module) for module in imported(path)} - {mine}
    assert others <= ARROWS[mine], f"{mine} imports {sorted(others - ARROWS[mine])}"


def test_no_files_import_each_other():
    """Not through others either; graphlib names the circle."""
    modules = {name_of(path): path for path in FILES if path.name != "__init__.py"}
    graph = {}
    for name, path in modules.items():
        named = {m if m in modules else m.rpartition(".")[0] for m in imported(path)}
        graph[name] = {m for m in named if m in modules and m != name}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(modules)


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
