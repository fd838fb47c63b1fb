"""How a training shows on a terminal: a bar that keeps its last state, or a line a step where stderr is no terminal."""

from __future__ import annotations

import shutil
import sys
import time

from tqdm import tqdm

from grpolab.lab.metrics import readable
from grpolab.train import distributed

BAR = ("loss", "reward", "accuracy", "kl", "sampler_kl", "eval_score", "tokens_per_s", "sampled_tokens_per_s")
LINE = ("loss", "held_out_loss", "eval_score", "reward", "mixed", "tier", "accuracy", "margin", "kl", "sampler_kl", "entropy",
        "grad_norm", "completion_length", "tokens_per_s", "sampled_tokens_per_s")  # columns of a row, in this order


class Progress:
    """Shows each step of a training: done and all steps, its numbers, the time left. On a terminal these are a bar on stderr,
    above which `say` writes, and lines go to a stdout that is none. Of several processes the first one shows."""

    def __init__(self, title: str, steps: int):
        self.title, self.steps, self._began = title, steps, time.monotonic()
        self._before: int | None = None  # steps of an earlier process
        self._bar: tqdm | None = None
        first = distributed.first()
        self.on_terminal = first and sys.stderr.isatty()
        self.prints_lines = first and not (self.on_terminal and sys.stdout.isatty())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, row: dict) -> None:
        """Take the row of a step that is done."""
        done = row["step"] + 1
        if self._before is None:
            self._before = row["step"]
            if self.on_terminal:
                columns, lines = shutil.get_terminal_size()  # tqdm draws nothing where a terminal says that it has none
                self._bar = tqdm(total=self.steps, initial=self._before, desc=self.title, unit="step", ncols=columns,
                                 nrows=lines)
                self._bar.start_t = self._bar.last_print_t = time.time() - (time.monotonic() - self._began)
        if self._bar is not None:
            left_out = ("sampler_kl",) if "kl" in row else ()
            self._bar.set_postfix_str(shown(row, [name for name in BAR if name not in left_out]), refresh=False)
            self._bar.update(done - self._bar.n)
        if self.prints_lines:
            left = (time.monotonic() - self._began) / (done - self._before) * (self.steps - done)
            print(f"step {done}/{self.steps}  {shown(row, LINE)}  {left:.0f} s left", flush=True)

    def say(self, text: str) -> None:
        """Write a text above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)


def shown(row: dict, names) -> str:
    return "  ".join(f"{name} {readable(row[name])}" for name in names if name in row)
