"""`grpolab pairs`: preference pairs of a policy's own completions, by any reward or judge."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from grpolab import tasks
from grpolab.chat import prompt_ids
from grpolab.cli import UsageError
from grpolab.cli.rollout_options import load_reward
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write, locked
from grpolab.models.load import Policy, load_policy
from grpolab.runs.checkpoints import data_hash, weights_hash
from grpolab.train.preferences import pairs_by_reward, preference_row
from grpolab.train.rewards import report, sample_and_score


@dataclass(frozen=True)
class Pairs:
    """Sample completions of each row, score them, and write a better and a worse one of a row as a preference, which
    `grpolab dpo` and `grpolab reward` read. What was done when it is interrupted is kept beside the file, and the same command
    goes on from there."""

    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    data: Path  # JSONL rows with a prompt, and with what the reward reads
    out: Path  # JSONL file to write
    reward: str | None = None
    """module:function or file.py:function, called with (text, row, rollout) (default: the last number is the row's answer)"""
    judge: str | None = None  # in its place: URL of an OpenAI endpoint, whose model rates the completions
    judge_model: str | None = None  # the name of that model
    samples: int = 8  # completions of each row
    per_row: int = 1  # most pairs of a row, with different rejected completions
    margin: float = 0.0  # the difference of the two rewards is more than this
    temperature: float = 1.0  # of sampling
    max_new_tokens: int = 64  # longest completion
    rows_at_once: int = 16  # rows that are sampled, scored and kept together
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the parameters
    seed: int = 0  # of sampling, and of which pairs are taken

    def run(self) -> int:
        if self.samples < 2 or min(self.per_row, self.rows_at_once) < 1 or not self.margin >= 0:
            raise UsageError("--samples is at least 2, --per-row and --rows-at-once at least 1, --margin at least 0; got "
                             f"{self.samples}, {self.per_row}, {self.rows_at_once} and {self.margin:g}")
        if bool(self.judge) != bool(self.judge_model) or self.judge and self.reward:
            raise UsageError("completions are scored by --reward, or by --judge URL with --judge-model NAME")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        lock = self.out.with_name(f".{self.out.name}.process")
        try:
            with locked(lock):
                try:
                    return self.write()
                finally:
                    lock.unlink()
        except BlockingIOError as error:
            raise ValueError(f"--out {self.out} is being written by process {error}: name another file") from error

    def write(self) -> int:
        if self.out.exists():
            raise UsageError(f"--out {self.out} exists, and pairs are not written over: name another file, or remove it")
        rows = tasks.read_rows(self.data)
        reward = self.rewarded(rows)
        policy = load_policy(self.model, dtype=self.dtype)
        partial = Partial(self.out, self.settings(policy, rows))
        failures = ()
        if self.judge:  # a reward needs nothing of the extra `serve`
            from grpolab.serve.http_client import RemoteError as failures
        try:
            asyncio.run(self.sample(policy, rows, reward, partial))
        except failures as error:
            raise ValueError(f"the judge: {error}") from error
        counts = partial.counts()
        if not counts["pairs"]:
            partial.path.unlink()
            raise ValueError(f"no row gave a pair ({shown(counts)}): try more --samples, another --temperature, or a reward "
                             "that tells completions apart")
        atomic_write(self.out, "".join(json.dumps(row) + "\n" for part in partial.parts for row in part["rows"]))
        partial.path.unlink()
        print(f"{self.out}: {shown(counts)}; grpolab dpo and grpolab reward read it (--data)")
        return 0

    def rewarded(self, rows: Sequence[dict]) -> Callable:
        if self.judge:
            from grpolab.serve.judge import Judge

            return Judge(self.judge, self.judge_model)
        if self.reward is None:
            tasks.check_answers(rows, self.data)
            return tasks.right_number
        return load_reward(self.reward)

    def settings(self, policy: Policy, rows: Sequence[dict]) -> dict:
        """What decides the pairs: options, and the content of the model, of the rows and of the reward's file."""
        file = Path(str(self.reward).rpartition(":")[0])
        source = file.read_text() if file.suffix == ".py" else ""
        return {k: str(v) for k, v in asdict(self).items() if k not in ("data", "out")} | {
            "model": weights_hash(policy), "rows": data_hash(rows), "reward": f"{self.reward} {data_hash([source])}"}

    async def sample(self, policy: Policy, rows: Sequence[dict], reward: Callable, partial: Partial) -> None:
        """Sample, score and keep the rows that `partial` lacks."""
        done, warned = len(partial.parts) * self.rows_at_once, []
        if done >= len(rows):
            return
        kept = f"\n{partial.path} holds the first {done} rows: going on" if done else ""
        print(f"{policy.origin}\n{policy}{kept}", flush=True)
        began, first = time.monotonic(), done
        async with Sampler(policy) as sampler:
            for start in range(done, len(rows), self.rows_at_once):
                some, faults = rows[start : start + self.rows_at_once], []
                prompts = [prompt_ids(policy.tokenizer, tasks.prompt_of(row)) for row in some]
                params = SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens,
                                        seed=self.seed * 10**6 + start)
                groups = await sample_and_score(policy, sampler, some, prompts, self.samples, params, reward, faults)
                errors = report(faults, len(some) * self.samples, warned)["reward_errors"]
                pairs, counts = pairs_by_reward(policy, some, groups, per_row=self.per_row, margin=self.margin, seed=self.seed)
                partial.keep([preference_row(pair) for pair in pairs], counts | ({"reward errors": errors} if errors else {}))
                done = start + len(some)
                left = (time.monotonic() - began) / (done - first) * (len(rows) - done)
                print(f"[{done}/{len(rows)}] {partial.counts()['pairs']} pairs  {left:.0f} s left", flush=True)


def shown(counts: Counter) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


class Partial:
    """What is done of a file of pairs: in a file beside it, a line with the settings, and a line for each part. ValueError
    where that file is of other settings. A line that was cut off is forgotten."""

    def __init__(self, out: Path, settings: dict):
        self.path, self.parts, self.settings = out.with_name(f".{out.name}.partial"), [], settings
        if not self.path.exists():
            return
        lines = [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]
        if other := [name for name, value in lines[0].items() if settings.get(name) != value]:
            raise ValueError(f"{self.path} is what an interrupted command with another {' and '.join(other)} has done: repeat "
                             "that one, name another --out, or remove the file")
        self.parts = lines[1:]
        self.write()

    def write(self) -> None:
        atomic_write(self.path, "".join(json.dumps(line) + "\n" for line in (self.settings, *self.parts)))

    def keep(self, rows: list[dict], counts: dict[str, int]) -> None:
        self.parts.append({"rows": rows, "counts": counts})
        if len(self.parts) == 1:
            return self.write()
        with open(self.path, "a") as file:
            file.write(json.dumps(self.parts[-1]) + "\n")

    def counts(self) -> Counter:
        return sum((Counter(part["counts"]) for part in self.parts), Counter())
