"""`grpolab eval`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes, Positional

from grpolab import tasks
from grpolab.arithmetic import Task, generate
from grpolab.cli import UsageError
from grpolab.cli.recipe import refuse_unread
from grpolab.cli.rollout_options import load_reward
from grpolab.evaluate import evaluate, evaluate_checks, evaluate_fixed, suite_table, summary
from grpolab.models.load import load_policy
from grpolab.rollouts import Rollout
from grpolab.train.advantages import number
from grpolab.train.rewards import is_async


@dataclass(frozen=True)
class Eval:
    """Format and exact-match rates of a model on arithmetic questions, which are drawn anew, or on rows of your own."""

    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    tasks: Path | None = None
    """JSONL rows with a prompt and an answer instead of arithmetic; a completion is right if it ended by itself and its last
    number is the answer's, or by --reward"""
    reward: str | None = None  # file.py:function(text, row, rollout) of those rows; right is a reward of at least 1
    fixed_prompts: Literal["arithmetic", "english"] | None = None  # measure these shipped prompts alone, by rule
    questions: int = 200  # arithmetic questions
    samples: int = 8  # completions per question beside the greedy one
    at: tuple[int, ...] = ()  # the k of pass@k (default: the powers of 2 up to --samples)
    max_new_tokens: int = 32  # longest completion
    seed: int = 1  # of the questions and of sampling
    task: OmitArgPrefixes[Task] = Task()

    def run(self) -> int:
        if wrong := [k for k in self.at if not 1 <= k <= self.samples]:
            raise UsageError(f"--at {wrong[0]}: pass@k needs k from 1 to --samples, which is {self.samples}")
        refuse_unread(self, [
            ("tasks reward questions samples at max_new_tokens seed ops max_operand max_factor", not self.fixed_prompts,
             "is not read with --fixed-prompts, which names shipped prompts and their length: leave it out"),
            ("reward", self.tasks, "is of the rows in --tasks; arithmetic has its checker"),
            ("questions ops max_operand max_factor", not self.tasks, "is of arithmetic, not of --tasks: leave it out")])
        if self.fixed_prompts:
            print(suite_table(passed=asyncio.run(evaluate_fixed(self.load(), self.fixed_prompts))).to_string())
            return 0
        return asyncio.run(self.arithmetic() if self.tasks is None else self.rows(self.tasks))

    async def arithmetic(self) -> int:
        _, problems = generate(0, self.questions, seed=self.seed, task=self.task)
        policy = self.load()
        table = {"greedy": await evaluate(policy, problems, **self.sampling)}
        if self.samples:
            table["sampled"] = await evaluate(policy, problems, samples=self.samples, **self.sampling)
        fixed = await evaluate_fixed(policy)
        print(summary(**table).to_string())
        if self.samples:
            self.print_pass_at(table["sampled"])
        print("\nfixed prompts, greedy\n" + suite_table(passed=fixed).to_string())
        return 0

    async def rows(self, path: Path) -> int:
        rows = tasks.read_rows(path)
        if self.reward is None:
            tasks.check_answers(rows, path)
        reward = load_reward(self.reward) if self.reward else tasks.right_number
        if is_async(reward) or not callable(reward):
            raise ValueError(f"--reward {self.reward}: eval takes a plain function (text, row, rollout); scout takes this one")
        policy = self.load()

        def right(row, text: str, rollout: Rollout) -> bool:
            if (value := number(reward(text, row, rollout), f"--reward {self.reward}")) is None:
                raise ValueError(f"--reward {self.reward} abstained on {text!r:.80}: a rate needs a verdict on each")
            return value >= 1

        cases = [(tasks.prompt_of(row), partial(right, row)) for row in rows]
        greedy = await evaluate_checks(policy, cases, **self.sampling)
        print(f"greedy   {greedy.rate} of {len(rows)} rows")
        if self.samples:
            self.print_pass_at(await evaluate_checks(policy, cases, samples=self.samples, **self.sampling))
        return 0

    @property
    def sampling(self) -> dict:
        return {"max_new_tokens": self.max_new_tokens, "seed": self.seed}

    def load(self):
        policy = load_policy(self.model)
        print(policy.origin)
        print(policy)
        return policy

    def print_pass_at(self, sampled) -> None:
        for k in self.at or (2**i for i in range(self.samples.bit_length())):
            print(f"pass@{k:<3} {sampled.pass_at(k)}")
