"""`grpolab scout`: from which tasks GRPO could learn, before anything is trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from tyro.conf import OmitArgPrefixes, Positional

from grpolab import arithmetic, tasks
from grpolab.chat import prompt_ids
from grpolab.cli import UsageError
from grpolab.cli.recipe import refuse_unread
from grpolab.cli.rollout_options import load_reward
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.evaluate import pass_at_k, share_interval, wilson
from grpolab.files import atomic_write
from grpolab.models.load import load_policy
from grpolab.rollouts import CUT
from grpolab.train.rewards import finished_and_correct, report, sample_and_score
from grpolab.train.sources import with_signal

GYM = "gym:"
ASK = "{question}\nGive the answer alone, with nothing before or after it."  # of reasoning-gym's questions


@dataclass(frozen=True)
class Scout:
    """Sample a group of completions for each question. GRPO learns from the groups whose rewards differ, so the tasks with most
    of these come first."""

    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    tasks: Positional[tuple[str, ...]]
    """JSONL files of rows with a prompt and an answer, gym:NAME of reasoning-gym (gym:all for all of them), or arithmetic"""
    reward: str | None = None  # file.py:function(text, row, rollout) of the files' rows (default: the last number is right)
    questions: int = 32  # of each task
    samples: int = 8  # completions a question
    temperature: float = 1.0  # of sampling
    max_new_tokens: int = 64  # longest completion
    seed: int = 0  # of the questions and of sampling
    save: Path | None = None  # the table as a CSV file
    task: OmitArgPrefixes[arithmetic.Task] = arithmetic.Task()

    def run(self) -> int:
        if self.samples < 2 or self.questions < 1:
            raise UsageError("--samples is at least 2, since the rewards of a group are compared with each other, and "
                             f"--questions at least 1; got {self.samples} and {self.questions}")
        if not self.tasks:
            raise UsageError("name tasks: JSONL files, gym:NAME or arithmetic")
        files = [name for name in self.tasks if name != "arithmetic" and not name.startswith(GYM)]
        refuse_unread(self, [
            ("reward", files, "is of rows in files: arithmetic and gym: have their own"),
            ("ops max_operand max_factor", "arithmetic" in self.tasks,
             "is of the task arithmetic: leave it out, or name arithmetic, too")])
        if self.save and (self.save.is_dir() or self.save.resolve() in [Path(name).resolve() for name in self.tasks]):
            raise UsageError(f"--save {self.save} is a folder, or a file of tasks, which the table would replace: name another")
        named = [task for name in dict.fromkeys(self.tasks) for task in self.named(name)]
        table = asyncio.run(self.measured(named))
        print("\n" + table.to_string(na_rep=""))
        if self.save:
            atomic_write(self.save, table.to_csv())
        return int([*table] == ["not sampled"])

    def named(self, name: str) -> list[tuple[str, Callable[[], Sequence[Any]], Callable]]:
        """(name, rows when they are called for, reward) of what an argument names."""
        if name == "arithmetic":
            return [(name, lambda: arithmetic.generate(0, self.questions, seed=self.seed, task=self.task)[1],
                     finished_and_correct)]
        if name.startswith(GYM):
            families = tasks.gym_names() if name == GYM + "all" else [name.removeprefix(GYM)]
            makers = [partial(tasks.reasoning_gym, family, size=self.questions, seed=self.seed, ask=ASK) for family in families]
            if len(makers) == 1:
                makers[0]()  # a wrong name is an error now; of all of them, one that cannot be made is left out
            return [(GYM + family, make, tasks.gym_score) for family, make in zip(families, makers)]
        rows = tasks.read_rows(name)[: self.questions]
        if self.reward is None:
            tasks.check_answers(rows, name)
        same = [other for other in self.tasks if Path(other).name == Path(name).name]
        title = Path(name).name if len(set(same)) == 1 else name
        return [(title, lambda: rows, load_reward(self.reward) if self.reward else tasks.right_number)]

    async def measured(self, named: Sequence[tuple[str, Callable, Callable]]) -> pd.DataFrame:
        """A row a task, those with most groups to learn from first; one that cannot be sampled says why."""
        policy = load_policy(self.model)
        print(f"{policy.origin}\n{policy}", flush=True)
        shares, shown = {}, {}
        async with Sampler(policy) as sampler:
            for number, (name, rows, reward) in enumerate(named, 1):
                try:
                    shares[name], shown[name] = await self.one(policy, sampler, rows(), reward)
                except ValueError as error:  # a prompt longer than the context, a family that needs a file
                    shares[name], shown[name] = -1.0, {"not sampled": str(error)[:100]}
                facts = ", ".join(f"{column} {value}" for column, value in shown[name].items())
                print(f"[{number}/{len(named)}] {name}: {facts}", flush=True)
        return pd.DataFrame.from_dict({name: shown[name] for name in sorted(shares, key=shares.get, reverse=True)}, "index")

    async def one(self, policy, sampler: Sampler, rows: Sequence[Any], reward: Callable) -> tuple[float, dict[str, str]]:
        """The share of a task's groups that differ, and the columns of its row. A completion is right where its reward is at
        least 1."""
        begun, faults = time.perf_counter(), []
        prompts = [prompt_ids(policy.tokenizer, tasks.prompt_of(row)) for row in rows]
        params = SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=self.seed)
        groups = await sample_and_score(policy, sampler, rows, prompts, self.samples, params, reward, faults)
        report(faults, len(rows) * self.samples, [])
        mixed = wilson(len(with_signal(groups)), len(groups))
        right = [sum(r is not None and r >= 1 for r in group.rewards) for group in groups]
        rollouts = [rollout for group in groups for rollout in group]
        cut = sum(rollout.finish_reason in CUT for rollout in rollouts) / len(rollouts)
        pass_at = {k: share_interval([pass_at_k(self.samples, n, k) for n in right]) for k in (1, self.samples)}
        return mixed.value, {
            "groups that differ": str(mixed), **{f"pass@{k}": str(interval) for k, interval in pass_at.items()},
            "cut": f"{cut:.0%}", "tokens": f"{sum(len(r.tokens) for r in rollouts) / len(rollouts):.1f}",
            "seconds a group": f"{(time.perf_counter() - begun) / len(groups):.2f}"}
