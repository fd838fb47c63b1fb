"""`grpolab sft | grpo | dpo | reward`: every field of the configuration is an option, so a field that is added is one at once.

`--dry-run` checks everything, prints the plan of memory and hours, and trains nothing. Arguments and rows are checked before
the model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, ClassVar, Literal

from tyro.conf import OmitArgPrefixes, Positional

from grpolab import arithmetic, tasks
from grpolab.chat import prompt_ids
from grpolab.cli import UsageError
from grpolab.evaluate import fixed_rates
from grpolab.models.load import load_policy
from grpolab.runs.run import Run, seed_everything
from grpolab.runs.selection import SCORE, Selection
from grpolab.train import distributed
from grpolab.train.dpo import DPOConfig, dpo
from grpolab.train.grpo import GRPOConfig, grpo
from grpolab.train.plan import plan
from grpolab.train.preferences import load_preferences
from grpolab.train.reward_model import RewardConfig, RewardModel, held_out_accuracy, reward_model
from grpolab.train.rewards import finished_and_correct, held_out_reward
from grpolab.train.sft import SFTConfig, demonstrations, sft

SHOWN = ("loss", "held_out_loss", "eval_score", "reward", "mixed", "accuracy", "kl", "entropy", "grad_norm",
         "completion_length")  # columns that are printed for each step


@dataclass(frozen=True)
class Plan:
    """A training that is ready to start: what is saved, its reference, the tokens of its prompts, its rows of metrics, and
    what is measured of it on held-out rows."""

    model: Any
    reference: Any
    prompt_lengths: Sequence[int]
    steps: Callable[[Run], AsyncIterator[dict]]
    measure: Callable | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the four commands share."""

    method: ClassVar[str]
    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    name: str | None = None  # of the run's folder under runs/ (default: cli_ and the method)
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 ones are trained over fp32 master weights
    dry_run: bool = False  # print the plan of memory and hours, and train nothing
    held_out_data: Path | None = None  # JSONL rows to measure on: as in --data, or with an answer
    select_every: int = 0  # every N steps, measure on what is held out, and keep the best policy beside the last (0: never)
    replay_every: int = 0  # every N steps, keep the weights from which `grpolab replay` generates rollouts again (0: never)

    held_out: ClassVar[int] = 0  # options of some methods alone
    fixed_prompts: ClassVar[bool] = False

    def run(self) -> int:
        """Load, plan, train, save. Of several processes the first one prints and saves."""
        with contextlib.nullcontext() if distributed.first() else contextlib.redirect_stdout(None):
            self.check()
            rows, held_out = self.read()
            seed_everything(self.config.seed)
            policy = load_policy(self.model, dtype=self.dtype)
            print(policy.origin)
            print(policy)
            ready = self.prepare(policy, rows, held_out)
            if self.dry_run:
                middle = median_low(ready.prompt_lengths)
                print(plan(policy, self.config, reference=ready.reference, prompt_tokens=middle))
            else:
                self.train(ready)
        return 0

    def check(self) -> None:
        if min(self.select_every, self.replay_every, self.held_out) < 0:
            raise UsageError("--select-every, --replay-every and --held-out start at 0")
        if self.fixed_prompts and not self.select_every:
            raise UsageError("--fixed-prompts needs --select-every N, which says how often")
        if self.select_every and not (self.held_out_data or self.held_out or self.fixed_prompts):
            raise UsageError("--select-every measures on what is held out: add --held-out-data FILE, or --held-out N where "
                             "the command has it")

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Rows to train on and rows to measure on, as far as they are read without the policy's tokenizer."""
        raise NotImplementedError

    def prepare(self, policy, rows: Sequence[Any], held_out: Sequence[Any]) -> Plan:
        raise NotImplementedError

    def train(self, ready: Plan) -> None:
        async def values(policy):
            scores = {SCORE: await ready.measure(policy)} if ready.measure else {}
            return scores | (await fixed_rates(policy) if self.fixed_prompts else {})

        select = Selection(values, every=self.select_every, by=SCORE if ready.measure else None) if self.select_every else None
        shown = Path(self.model).name if Path(self.model).is_dir() else self.model
        run = Run(self.name or f"cli_{self.method}", shown, seed=self.config.seed, select=select,
                  replay_every=self.replay_every)
        asyncio.run(self.print_steps(ready.steps(run)))
        if distributed.first():
            print(f"{run.shown(ready.model.save(run.folder / 'policy'))}\n{run.shown(run.folder / 'metrics.csv')}")
            if best := run.selected.best():
                print(f"{run.shown(best['folder'])}: the best by what was measured, {best['value']:.4g} after "
                      f"{best['steps']} steps")

    async def print_steps(self, rows: AsyncIterator[dict]) -> None:
        async for row in rows:
            values = "  ".join(f"{name} {row[name]:.4g}" for name in SHOWN if name in row)
            print(f"step {row['step'] + 1}/{self.config.steps}  {values}", flush=True)
            if self.method == "grpo" and row["step"] == 0 and row.get("reward") == 0 and not row.get("trained_groups"):
                print(f"No rollout earned a reward, so this step taught nothing. A base model does not know the answer's "
                      f"format: imitate demonstrations first (grpolab sft {self.model}), then start from their result "
                      f"(grpolab grpo runs/cli_sft/{Path(self.model).name}/policy).", flush=True)


@dataclass(frozen=True, kw_only=True)
class TaskTraining(Training):
    """Options of the methods that train on tasks: arithmetic problems, unless --data names others."""

    data: Path | None = None  # JSONL rows to train on (default: arithmetic problems, generated from the seed)
    problems: int = 1000  # arithmetic problems to train on; by default fewer where the task has not so many
    held_out: int = 0  # hold out N further arithmetic problems
    fixed_prompts: bool = False  # with --select-every: also measure the rates of the fixed prompts
    task: OmitArgPrefixes[arithmetic.Task] = field(default_factory=arithmetic.Task)

    @cached_property
    def rewarded(self) -> Callable:
        """The reward of the rows that are measured."""
        return tasks.right_number if self.data else finished_and_correct

    def check(self) -> None:
        super().check()
        if self.held_out and self.held_out_data:
            raise UsageError("give --held-out or --held-out-data, not both: there is one set of held-out rows")
        if self.held_out and self.data:
            raise UsageError("--held-out makes further problems, and --data names all that there are: give --held-out-data")

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        seed, count = self.config.seed, self.problems
        if count == type(self).problems:  # the default: as many as a small task has, leaving some to hold out
            count = min(count, sum(self.task.space(op) for op in self.task.ops) // 2)
        rows = tasks.read_rows(self.data) if self.data else arithmetic.generate(count, 0, seed=seed, task=self.task)[0]
        if self.held_out:
            _, further = arithmetic.generate(0, self.held_out + count, seed=seed + 1, task=self.task)
            return rows, [problem for problem in further if problem not in set(rows)][: self.held_out]
        held_out = tasks.read_rows(self.held_out_data) if self.held_out_data else []
        if self.select_every and self.rewarded is tasks.right_number:
            tasks.check_answers(held_out, self.held_out_data)
        return rows, held_out

    def measure(self, held_out: Sequence[Any], max_new_tokens: int) -> Callable | None:
        return held_out_reward(held_out, self.rewarded, max_new_tokens=max_new_tokens) if held_out else None

    def prompt_lengths(self, policy, rows: Sequence) -> list[int]:
        return [len(prompt_ids(policy.tokenizer, tasks.prompt_of(row))) for row in rows[:200]]


@dataclass(frozen=True, kw_only=True)
class SFT(TaskTraining):
    """Imitate demonstrations: rows with messages, or with a prompt and a completion."""

    method = "sft"
    held_out_tokens: int = 32  # longest completion that is measured
    config: OmitArgPrefixes[SFTConfig] = field(default_factory=SFTConfig)

    def prepare(self, policy, rows, held_out) -> Plan:
        examples = demonstrations(policy, rows)
        shown = demonstrations(policy, [row for row in held_out if tasks.shows_completion(row)])
        return Plan(policy, None, self.prompt_lengths(policy, rows),
                    lambda run: sft(policy, examples, self.config, held_out=shown, run=run),
                    self.measure(held_out, self.held_out_tokens))


@dataclass(frozen=True, kw_only=True)
class GRPO(TaskTraining):
    """Learn from a reward: the right number in a completion that ended, or a function of yours."""

    method = "grpo"
    reward: str | None = None  # module:function or file.py:function, called with (text, row, rollout)
    config: OmitArgPrefixes[GRPOConfig] = field(default_factory=GRPOConfig)

    @cached_property
    def rewarded(self) -> Callable:
        return load_function(self.reward) if self.reward else tasks.right_number if self.data else finished_and_correct

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        rows, held_out = super().read()
        if self.rewarded is tasks.right_number:
            tasks.check_answers(rows, self.data)
        return rows, held_out

    def prepare(self, policy, rows, held_out) -> Plan:
        reference = load_policy(self.model, dtype=policy.dtype) if self.config.kl_coef else None
        return Plan(policy, reference, self.prompt_lengths(policy, rows),
                    lambda run: grpo(policy, reference, rows, self.config, reward=self.rewarded, run=run),
                    self.measure(held_out, self.config.max_new_tokens))


@dataclass(frozen=True, kw_only=True)
class DPO(Training):
    """Learn from preferences: rows with prompt, chosen and rejected."""

    method = "dpo"
    data: Path  # JSONL rows with prompt, chosen and rejected
    held_out_tokens: int = 32  # longest completion that is measured
    fixed_prompts: bool = False  # with --select-every: also measure the rates of the fixed prompts
    config: OmitArgPrefixes[DPOConfig] = field(default_factory=DPOConfig)

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        held_out = tasks.read_rows(self.held_out_data) if self.held_out_data else []
        if self.select_every:
            tasks.check_answers(held_out, self.held_out_data)
        return (), held_out

    def prepare(self, policy, rows, held_out) -> Plan:
        pairs = load_preferences(self.data, policy.tokenizer)
        reference = load_policy(self.model, dtype=policy.dtype)
        measure = held_out_reward(held_out, tasks.right_number, max_new_tokens=self.held_out_tokens) if held_out else None
        return Plan(policy, reference, [len(pair.prompt) for pair in pairs],
                    lambda run: dpo(policy, reference, pairs, self.config, run=run), measure)


@dataclass(frozen=True, kw_only=True)
class Reward(Training):
    """Train a reward model from preferences: rows with prompt, chosen and rejected."""

    method = "reward"
    data: Path  # JSONL rows with prompt, chosen and rejected
    config: OmitArgPrefixes[RewardConfig] = field(default_factory=RewardConfig)

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return (), ()  # preferences are read with the policy's tokenizer

    def prepare(self, policy, rows, held_out) -> Plan:
        pairs = load_preferences(self.data, policy.tokenizer)
        held_out = load_preferences(self.held_out_data, policy.tokenizer) if self.held_out_data else []
        model = RewardModel.from_policy(policy)
        return Plan(model, None, [len(pair.prompt) for pair in pairs],
                    lambda run: reward_model(model, pairs, self.config, run=run),
                    held_out_accuracy(held_out) if held_out else None)


def load_function(name: str) -> Callable:
    """The function that `module:function` or `path/to/file.py:function` names."""
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise ValueError(f"--reward is module:function or file.py:function, got {name!r}")
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"--reward {name}: there is no file {module}")
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    function = getattr(loaded, attribute, None)
    if not callable(function) and not hasattr(function, "batch"):  # an object with `batch`, as Several, is a reward too
        raise ValueError(f"{module} has no function {attribute!r}")
    return function
