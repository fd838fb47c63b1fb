"""`grpolab data`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from grpolab.arithmetic import Task, generate, write_jsonl
from grpolab.cli import UsageError
from grpolab.tasks import read_rows


@dataclass(frozen=True)
class Data:
    """Write the arithmetic data set: train.jsonl and eval.jsonl."""

    train: int = 20_000  # unique training problems
    eval: int = 500  # held-out problems, disjoint from them
    seed: int = 1  # the same seed gives the same files, byte for byte
    out: Path = Path("data/arithmetic")  # folder to write to
    task: OmitArgPrefixes[Task] = Task()

    def run(self) -> int:
        train, held_out = generate(self.train, self.eval, seed=self.seed, task=self.task)
        files = {self.out / "train.jsonl": train, self.out / "eval.jsonl": held_out}
        for path in files:
            if path.exists() and path.stat().st_size and not all({"a", "op", "b"} <= row.keys() for row in read_rows(path)):
                raise UsageError(f"{path} holds other rows than arithmetic problems: name another folder with --out")
        for path, problems in files.items():
            write_jsonl(path, problems)
            print(f"{path}: {len(problems)} problems" + "".join(f", the first: {p.question} {p.answer}" for p in problems[:1]))
        return 0
