"""The records in results/: each, and each row of one that is made in parts, carries the commit and a hash of its code.

    python benchmarks/records.py            # lists the records whose code has changed since they were made
    python benchmarks/records.py series     # gives that of the series its own, as soon as `grpolab run --store` wrote it
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from grpolab.files import atomic_write, source_commit
from grpolab.syntax import parse_python

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = ("models", "decode", "train")
MEASURES = {  # record -> the rooms of the package whose code decides what it says
    "accelerator": TRAINING,
    "async_grpo": TRAINING, "aws": ("env",), "baselines": TRAINING, "board_search": TRAINING, "critic": (*TRAINING, "env"),
    "bridges": ("models", "decode", "serve"), "decode": ("models", "decode"), "distillation": TRAINING,
    "estimators": TRAINING,
    "grpo_seeds": TRAINING,
    "long_prompts": TRAINING, "longer_answers": TRAINING, "lora": TRAINING, "pool": ("env",), "rollouts": TRAINING,
    "prompt_lookup": ("models", "decode"),
    "seeds": (*TRAINING, "env"), "several_rewards": TRAINING,
    "series": (*TRAINING, "env", "lab"),
    "service": ("models", "decode", "serve"), "threads": ("models", "decode"), "trl": TRAINING,
    "smollm2_aws": (*TRAINING, "env"), "smollm2_aws_seeds": (*TRAINING, "env"), "smollm2_tools": (*TRAINING, "env"),
}


def measured(name: str) -> tuple[str, ...]:
    """The rooms that the record of this name is about; those on SmolLM2 are about training."""
    if name not in MEASURES and not name.startswith("smollm2_"):
        raise ValueError(f"record {name!r} is not in MEASURES of {Path(__file__).name}: say there which rooms it measures")
    return MEASURES.get(name, TRAINING)


def instructions() -> str:
    """The vector instructions of this machine, or those that torch is limited to, and whether bfloat16 is multiplied by AMX,
    which changes every ratio in it."""
    import torch

    from grpolab.decode.verify import by_amx
    limited = "limited to " if "ATEN_CPU_CAPABILITY" in os.environ else ""
    return limited + torch.backends.cpu.get_cpu_capability() + (" with AMX" if by_amx() else "")


def code_hash(room: Path) -> str:
    """Of the syntax of a room's modules without docstrings, so that prose and comments do not count, and of its C++. Pythons
    from 3.11 on agree on it."""
    whole, fields = hashlib.sha256(), {"show_empty": True} if sys.version_info >= (3, 13) else {}
    for path in sorted(room.rglob("*.py")):
        tree = parse_python(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:]
            if getattr(node, "type_params", None) == []:  # 3.11 knows none
                del node.type_params
            if isinstance(node, ast.JoinedStr):  # 3.12 ends some with an empty one
                node.values = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
        whole.update(f"{path.relative_to(room)}\n{ast.dump(tree, **fields)}\n".encode())
    for path in sorted(room.rglob("*.cpp")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def provenance(rooms: Iterable[str]) -> dict:
    """The commit, with a + where the tree differs from it, and the hash of each room."""
    return {"commit": source_commit() or None, "code": {room: code_hash(ROOT / "grpolab" / room) for room in rooms}}


def record_path(text: str) -> Path:
    """What `--out` is given, refused before anything is measured where its name is that of no record."""
    try:
        measured(Path(text).stem)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: name the file as the script's record is named, in any folder") from None
    return Path(text)


def write(path: Path, content: dict) -> Path:
    """Write a record with its provenance; its name says what it measures. Rows that an earlier run made keep theirs."""
    made = provenance(measured(path.stem))
    if "rows" in content:
        content = content | {"rows": [{"provenance": made} | row for row in content["rows"]]}
    return atomic_write(path, json.dumps(content | {"provenance": made}, indent=1) + "\n")


def parts(node: object) -> list[dict]:
    """What carries a provenance of its own within a record, at any depth."""
    below = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    whole = lambda child: isinstance(child, dict) and "provenance" in child  # noqa: E731
    return [part for child in below for part in ([child] if whole(child) else parts(child))]


def stale(results: Path = RESULTS) -> dict[str, str]:
    """Record -> why it, or some row of it, no longer speaks of the present code."""
    present = functools.cache(lambda room: code_hash(ROOT / "grpolab" / room))

    def reason(made: dict | None) -> str:
        if made is None:
            return "made before records carried a hash"
        changed = [room for room, code in made["code"].items() if present(room) != code]
        return f"{', '.join(changed)} changed since {made['commit']}" if changed else ""

    found = {}
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        own = parts(record)
        reasons = [why for part in own or [record] if (why := reason(part.get("provenance")))]
        if reasons:
            found[path.stem] = reasons[0] + (f" ({len(reasons)} of {len(own)} parts)" if own else "")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("written", nargs="?", choices=["series"], help="the record that the package has just written")
    if parser.parse_args().written:  # the package knows nothing of hashes
        write(RESULTS / "series.json", json.loads((RESULTS / "series.json").read_text()))
    print("\n".join(f"{name}: {why}" for name, why in stale().items()) or "every record is of the present code")
