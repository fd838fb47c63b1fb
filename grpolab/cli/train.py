"""`grpolab sft | grpo | dpo | reward`: every field of the configuration is an option, so a field that is added is one at once.

`--dry-run` checks everything, prints the plan of memory and hours, and trains nothing. Arguments and rows are checked before
the model is loaded. A run's folder keeps the options as a file that `grpolab train` reads (`recipe`).
Longer than most: what the four commands share is one class.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, ClassVar, Literal

from tyro.conf import OmitArgPrefixes, Positional

from grpolab import arithmetic, tasks
from grpolab.chat import prompt_ids
from grpolab.cli import UsageError, publish, recipe
from grpolab.cli.progress import Progress
from grpolab.cli.rollout_options import RolloutOptions, load_reward, rollouts_of, served
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.evaluate import fixed_rates
from grpolab.files import atomic_write, remove_folder
from grpolab.models.load import Policy, load_policy
from grpolab.models.lora import ATTENTION, LoRA
from grpolab.runs.run import Run, seed_everything
from grpolab.runs.selection import SCORE, Selection
from grpolab.signals import at_signals
from grpolab.train import distributed
from grpolab.train.dpo import DPOConfig, dpo
from grpolab.train.grpo import GRPOConfig, grpo
from grpolab.train.loop import off_loop
from grpolab.train.plan import plan
from grpolab.train.preferences import Pair, load_preferences
from grpolab.train.reward_model import RewardConfig, RewardModel, held_out_accuracy, reward_model
from grpolab.train.rewards import finished_and_correct, held_out_reward
from grpolab.train.sft import SFTConfig, demonstrations, sft

Suite = Literal["arithmetic", "english"]  # fixed prompts
# Options beside configuration and data with others of which it is another training.
DECISIVE = ("reward", "env", "tools", "agent", "max_turns", "max_total_tokens", "action_format", "curriculum")


@dataclass(frozen=True)
class Plan:
    """A training that is ready to start: what is saved, its reference, the tokens of its prompts, its rows of metrics, what is
    measured of it on held-out rows, and a sample to look at: (run, step) -> text."""

    model: Any
    reference: Any
    prompt_lengths: Sequence[int]
    steps: Callable[[Run], AsyncIterator[dict]]
    measure: Callable | None = None
    sample: Callable[[Run, int], Awaitable[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the four commands share."""

    method: ClassVar[str]
    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    name: str | None = None  # of the run's folder under runs/ (default: cli_ and the method)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the parameters; those of 16 bits have fp32 master weights
    dry_run: bool = False  # print the plan of memory and hours, and train nothing
    held_out_data: Path | None = None  # JSONL rows to measure on: as in --data, or with an answer
    select_every: int = 0  # every N steps, measure on what is held out, and keep the best policy beside the last (0: never)
    replay_every: int = 0  # every N steps of grpo, keep the weights that replay, browse, bisect and fork need (0: never)
    export_every: int = 0  # every N steps, save the policy as policy-<steps> in the run's folder (0: only at the end)
    keep_last: int = 3  # of those folders
    show_every: int = 20  # every N steps, print a sample: a completion, of GRPO the rollout with the highest reward (0: never)
    out: Path | None = None  # the folder in which runs lie (default: runs)
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # trackers that are told each step's numbers
    push_to_hub: str | None = None  # owner/model on the Hugging Face hub, private where it is new, to upload the policy to
    lora_rank: int = 0  # rank of an adapter that is trained in the place of the weights (0: none)
    lora_alpha: float = 16.0  # its scale is alpha / rank
    lora_dropout: float = 0.0  # share of its inputs that an update leaves out
    lora_target: tuple[str, ...] = ATTENTION  # names of the projections that it stands beside
    resume: bool = False  # an error where no interrupted run left a checkpoint; where one did, the command goes on anyway
    gradient_accumulation_steps: int = 1  # batches that make a step: multiplies --batch-size, or --prompts-per-step
    print_config: bool = False  # print the options as a file for `grpolab train`, and do nothing else

    held_out: ClassVar[int] = 0  # options of some methods alone
    fixed_prompts: ClassVar[str | None] = None

    def run(self) -> int:
        """Load, plan, train, save. Of several processes the first one prints and saves."""
        if self.gradient_accumulation_steps != 1:
            return self.accumulated().run()
        with contextlib.nullcontext() if distributed.first() else contextlib.redirect_stdout(None):
            self.check()
            if self.print_config:
                print(self.as_recipe(), end="")
                return 0
            rows, held_out = self.read()
            seed_everything(self.config.seed)
            policy = load_policy(self.model, dtype=self.dtype, adapter=self.adapter)
            print(policy.origin)
            print(policy)
            ready = self.prepare(policy, rows, held_out)
            if self.dry_run:
                middle = median_low(ready.prompt_lengths)
                print(plan(policy, self.config, reference=ready.reference, prompt_tokens=middle))
            else:
                self.train(ready)
        return 0

    def accumulated(self) -> Training:
        """The same training with its whole batch in one number. A step's gradient is that of the batch, in however many forward
        passes --token-budget makes of it, so this is all that accumulation means here."""
        if self.gradient_accumulation_steps < 1:
            raise UsageError(f"--gradient-accumulation-steps {self.gradient_accumulation_steps}: at least 1")
        name = "prompts_per_step" if self.method == "grpo" else "batch_size"
        whole = getattr(self.config, name) * self.gradient_accumulation_steps
        print(f"# --gradient-accumulation-steps {self.gradient_accumulation_steps}: --{name.replace('_', '-')} {whole} a step")
        return replace(self, config=replace(self.config, **{name: whole}), gradient_accumulation_steps=1)

    @property
    def adapter(self) -> LoRA | None:
        if not self.lora_rank:
            return None
        return LoRA(self.lora_rank, self.lora_alpha, self.lora_target, self.config.seed, self.lora_dropout)

    def as_recipe(self) -> str:
        options = recipe.entries(self)
        return recipe.written(self.method, {k: v for k, v in options.items() if k not in ("print_config", "dry_run", "resume")})

    def reference(self, policy: Policy) -> Policy:
        """The policy as it starts: without its adapter, or loaded again."""
        return policy.without_adapter() if self.lora_rank else load_policy(self.model, dtype=policy.dtype)

    def check(self) -> None:
        if min(self.select_every, self.replay_every, self.held_out, self.export_every, self.show_every, self.lora_rank) < 0:
            raise UsageError("--select-every, --replay-every, --export-every, --show-every, --held-out and --lora-rank start "
                             "at 0, which is never or none")
        changed = recipe.entries(self)
        if name := next((name for name in ("keep_last", "problems", "sync_every") if changed.get(name, 1) < 1), None):
            raise UsageError(f"--{name.replace('_', '-')} {changed[name]}: at least 1")
        recipe.refuse_unread(self, self.conditions())
        if self.select_every and not (self.held_out_data or self.held_out or self.fixed_prompts):
            raise UsageError("--select-every measures on what is held out: add --held-out-data FILE, or --held-out N where "
                             "the command has it")
        if self.push_to_hub and not self.print_config:
            publish.check_hub(self.push_to_hub)

    def conditions(self) -> list[tuple[str, Any, str]]:
        """Which options are read only beside others: rules of `recipe.refuse_unread`."""
        return [
            ("lora_alpha lora_dropout lora_target", self.lora_rank, "is an adapter's: add --lora-rank N"),
            ("replay_every", self.method == "grpo", "is of grpo, whose steps can be looked at again: leave it out"),
            ("keep_last", self.export_every, "is of --export-every N: add it"),
            ("fixed_prompts", self.select_every, "needs --select-every N, which says how often"),
            ("held_out held_out_data", self.select_every or self.method == "sft",
             "is measured every --select-every N steps: add it, or leave --held-out and --held-out-data")]

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Rows to train on and rows to measure on, as far as they are read without the policy's tokenizer."""
        raise NotImplementedError

    def prepare(self, policy, rows: Sequence[Any], held_out: Sequence[Any]) -> Plan:
        raise NotImplementedError

    def train(self, ready: Plan) -> None:
        async def values(policy):
            scores = {SCORE: await ready.measure(policy)} if ready.measure else {}
            return scores | (await fixed_rates(policy, self.fixed_prompts) if self.fixed_prompts else {})

        select = Selection(values, every=self.select_every, by=SCORE if ready.measure else None) if self.select_every else None
        shown = Path(self.model).name if Path(self.model).is_dir() else self.model
        run = Run(self.name or f"cli_{self.method}", shown, root=self.out, seed=self.config.seed, select=select,
                  replay_every=self.replay_every)
        run.options = {key: value for key, value in recipe.entries(self).items() if key in DECISIVE}
        if self.resume and not run.checkpointed():
            raise UsageError(f"--resume: {run.shown(run.folder)} holds no checkpoint of an interrupted run; without --resume "
                             "the command begins one")
        if self.resume and (other := run.differs(self.config, ready.model)):
            raise UsageError(f"--resume: {run.shown(run.folder)} holds {other}: take its options and model again, or leave "
                             "--resume out, and it is moved aside")
        start = Path(self.model).expanduser()
        if start.is_dir() and start.resolve().is_relative_to(run.folder.resolve()):
            raise UsageError(f"{self.model} lies in {run.shown(run.folder)}, where this run would write: give another --name")
        run.keeps_end = True  # the steps are kept until the policy is saved
        with contextlib.ExitStack() as stack:
            if distributed.first():
                run.sinks += [stack.enter_context(tracker(name, run.folder)) for name in self.report_to]
            try:
                asyncio.run(until_interrupted(self.steps(ready, run)))
            except BaseException as error:
                if run.metrics and distributed.first():
                    print(run.made(), file=sys.stderr)
                if isinstance(error, asyncio.CancelledError):
                    raise KeyboardInterrupt from None
                raise
        if distributed.first():
            atomic_write(run.folder / recipe.NAME, self.as_recipe())
            saved = ready.model.save(run.folder / "policy")
            publish.write_model_card(run, ready.model, saved, self.as_recipe())
            print(f"{run.shown(saved)}, with a model card\n{run.shown(run.folder / recipe.NAME)}: grpolab train reads it")
            if best := run.selected.best():
                print(f"{run.shown(best['folder'])}: the best by what was measured, {best['value']:.4g} after "
                      f"{best['steps']} steps")
            if self.push_to_hub:
                print(f"uploaded to {publish.push(saved, self.push_to_hub)}")
            run.drop_checkpoint()
            print(run.made())

    async def steps(self, ready: Plan, run: Run) -> None:
        """Train, show each step and the samples of --show-every, and save what --export-every asks for."""
        with Progress(self.method, self.config.steps) as progress:
            async for row in ready.steps(run):
                done = row["step"] + 1
                progress.update(row)
                if hint := self.hint(row):
                    progress.say(hint)
                if not distributed.first():
                    continue
                if ready.sample and self.show_every and done % self.show_every == 0:
                    progress.say(await ready.sample(run, row["step"]))
                if self.export_every and done % self.export_every == 0:
                    ready.model.save(run.folder / f"policy-{done:06d}")
                    saved = sorted(run.folder.glob("policy-" + "[0-9]" * 6))
                    for folder in [f for f in saved if int(f.name[-6:]) <= done][: -self.keep_last]:
                        remove_folder(folder)

    def hint(self, row: dict) -> str:
        """What a method says of a step beside its numbers; "" for nothing."""
        return ""


async def until_interrupted(work: Coroutine) -> None:
    """Do the work. The first Ctrl-C cancels it, which ends with the step in progress, a second one ends the process at once:
    what lies on the disk is whole, since files are renamed into place."""
    task = asyncio.ensure_future(work)

    def interrupt() -> None:
        if task.cancelling():
            print("interrupted twice: ended in the midst of a step", file=sys.stderr, flush=True)
            os._exit(130)
        else:
            print("interrupted: the step in progress ends first; again for at once", file=sys.stderr, flush=True)
            task.cancel()

    with at_signals(interrupt, signal.SIGINT):
        await task


@contextlib.contextmanager
def tracker(name: str, folder: Path) -> Iterator[Any]:
    """A sink of a run (`Run(sinks=...)`), ended with the block: TensorBoard's files in the run's folder; a run of wandb or
    trackio, in the project that WANDB_PROJECT or TRACKIO_PROJECT names, else grpolab."""
    try:
        module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ModuleNotFoundError as error:
        raise ImportError(f"--report-to {name} needs {error.name}: pip install {name}") from error
    if name == "tensorboard":
        with module.SummaryWriter(str(folder / name)) as writer:
            yield writer
        return
    project = os.environ.get(f"{name.upper()}_PROJECT", "grpolab")
    try:
        yield module.init(project=project, name="-".join(folder.parts[-2:]))
    finally:
        module.finish()


@dataclass(frozen=True, kw_only=True)
class TaskTraining(Training):
    """Options of the methods that train on tasks: arithmetic problems, unless --data names others."""

    data: Path | None = None  # JSONL rows to train on (default: arithmetic problems, generated from the seed)
    problems: int = 1000  # arithmetic problems to train on; by default fewer where the task has not so many
    held_out: int = 0  # hold out N further arithmetic problems
    fixed_prompts: Suite | None = None  # with --select-every: also measure the rates of these fixed prompts
    task: OmitArgPrefixes[arithmetic.Task] = field(default_factory=arithmetic.Task)

    @cached_property
    def rewarded(self) -> Callable:
        """The reward of the rows that are measured."""
        return tasks.right_number if self.data else finished_and_correct

    @property
    def draws_problems(self) -> bool:
        """Whether it trains on arithmetic problems."""
        return not self.data

    def conditions(self) -> list[tuple[str, Any, str]]:
        return [*super().conditions(),
                ("held_out", not self.held_out_data, "and --held-out-data: not both, there is one set of held-out rows"),
                ("held_out", self.draws_problems, "makes arithmetic problems, and others are asked here: give --held-out-data"),
                ("problems ops max_operand max_factor", self.draws_problems,
                 "is of arithmetic problems, and others are asked here: leave it out")]

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        seed, count = self.config.seed, self.problems
        if count == type(self).problems:  # the default: as many as a small task has, leaving some to hold out
            count = min(count, sum(self.task.space(op) for op in self.task.ops) // 2)
        rows = self.read_file(self.data) if self.data else arithmetic.generate(count, 0, seed=seed, task=self.task)[0]
        if self.held_out:
            _, further = arithmetic.generate(0, self.held_out + count, seed=seed + 1, task=self.task)
            known = set(rows)
            return rows, [problem for problem in further if problem not in known][: self.held_out]
        held_out = self.read_file(self.held_out_data) if self.held_out_data else []
        if held_out and not (self.select_every or any(map(tasks.shows_completion, held_out))):
            raise UsageError(f"--held-out-data {self.held_out_data}: its rows show no completion whose loss could be measured: "
                             "add --select-every N, which measures answers")
        if self.select_every and self.rewarded is tasks.right_number:
            tasks.check_answers(held_out, self.held_out_data)
        return rows, held_out

    def read_file(self, path: Path) -> list[Any]:
        return tasks.read_rows(path)

    def measure(self, held_out: Sequence[Any], max_new_tokens: int) -> Callable | None:
        return held_out_reward(held_out, self.rewarded, max_new_tokens=max_new_tokens) if held_out else None

    def prompts(self, policy, rows: Sequence) -> list[list[int]]:
        """The token ids of some rows' prompts."""
        return [prompt_ids(policy.tokenizer, tasks.prompt_of(row)) for row in rows[:200]]


@dataclass(frozen=True, kw_only=True)
class SFT(TaskTraining):
    """Imitate demonstrations: rows with messages, or with a prompt and a completion."""

    method = "sft"
    held_out_tokens: int = 32  # longest completion that is measured
    config: OmitArgPrefixes[SFTConfig] = field(default_factory=SFTConfig)

    def prepare(self, policy, rows, held_out) -> Plan:
        examples = demonstrations(policy, rows)
        shown = demonstrations(policy, [row for row in held_out if tasks.shows_completion(row)])
        prompts = self.prompts(policy, rows)
        return Plan(policy, None, [*map(len, prompts)],
                    lambda run: sft(policy, examples, self.config, held_out=shown, run=run),
                    self.measure(held_out, self.held_out_tokens), completed(policy, prompts, self.held_out_tokens))


@dataclass(frozen=True, kw_only=True)
class GRPO(TaskTraining):
    """Learn from a reward: the right number in a completion that ended, or a function of yours."""

    method = "grpo"
    reward: str | None = None  # module:function or file.py:function, called with (text, row, rollout)
    rollouts: OmitArgPrefixes[RolloutOptions] = field(default_factory=RolloutOptions)
    config: OmitArgPrefixes[GRPOConfig] = field(default_factory=GRPOConfig)

    @cached_property
    def rewarded(self) -> Callable | None:
        """None where the reward comes with the rollouts."""
        if self.reward:
            return load_reward(self.reward)
        return None if self.rollouts.kind else super().rewarded

    @property
    def draws_problems(self) -> bool:
        return not self.data and self.rollouts.env in (None, "calculator") and not self.rollouts.atropos_url

    def check(self) -> None:
        super().check()
        self.rollouts.check(self.reward, self.lora_rank)
        if self.rollouts.tools and not self.data:
            raise UsageError("--tools needs --data FILE, rows with a prompt")

    def conditions(self) -> list[tuple[str, Any, str]]:
        return [*self.rollouts.conditions(), *super().conditions()]

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        if not (self.data or self.draws_problems):  # questions are drawn over there
            return [None], self.read_file(self.held_out_data) if self.held_out_data else []
        rows, held_out = super().read()
        if self.rewarded is tasks.right_number:
            tasks.check_answers(rows, self.data)
        return rows, held_out

    def read_file(self, path: Path) -> list[Any]:
        return tasks.read_json(path) if self.rollouts.kind in ("env", "agent") else tasks.read_rows(path)

    def prepare(self, policy, rows, held_out) -> Plan:
        config, options = self.config, self.rollouts
        reference = self.reference(policy) if config.needs_reference else None
        asked = options.tasks(rows, config.seed)
        if options.kind is None:
            def steps(run: Run) -> AsyncIterator[dict]:
                if options.server_url:
                    return served(options, policy, reference, asked, config, self.rewarded, run)
                return grpo(policy, reference, asked, config, reward=self.rewarded, run=run)

            measure = self.measure(held_out, config.max_new_tokens)
            return Plan(policy, reference, [*map(len, self.prompts(policy, rows))], steps, measure, best_rollout)
        steps, measured = rollouts_of(options, policy, reference, asked, config, self.rewarded)
        return Plan(policy, reference, [max(1, options.max_total_tokens - config.max_new_tokens)], steps,
                    measured(held_out) if held_out and measured else None, best_rollout)

    def hint(self, row: dict) -> str:
        if row["step"] or not row.get("reward") == 0 == row.get("mixed"):
            return ""
        return (f"No rollout earned a reward, so this step taught nothing. A base model does not know the answer's format: "
                f"imitate demonstrations first (grpolab sft {self.model}), then start from their result (grpolab grpo "
                f"runs/cli_sft/{Path(self.model).name}/policy).")


@dataclass(frozen=True, kw_only=True)
class DPO(Training):
    """Learn from preferences: rows with prompt, chosen and rejected."""

    method = "dpo"
    data: Path  # JSONL rows with prompt, chosen and rejected
    held_out_tokens: int = 32  # longest completion that is measured
    fixed_prompts: Suite | None = None  # with --select-every: also measure the rates of these fixed prompts
    config: OmitArgPrefixes[DPOConfig] = field(default_factory=DPOConfig)

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        held_out = tasks.read_rows(self.held_out_data) if self.held_out_data else []
        if self.select_every:
            tasks.check_answers(held_out, self.held_out_data)
        return (), held_out

    def prepare(self, policy, rows, held_out) -> Plan:
        pairs = load_preferences(self.data, policy.tokenizer)
        reference = self.reference(policy)
        measure = held_out_reward(held_out, tasks.right_number, max_new_tokens=self.held_out_tokens) if held_out else None
        prompts = [pair.prompt for pair in pairs]
        return Plan(policy, reference, [*map(len, prompts)], lambda run: dpo(policy, reference, pairs, self.config, run=run),
                    measure, completed(policy, prompts, self.held_out_tokens))


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
        model = RewardModel.from_policy(policy, self.adapter)
        return Plan(model, None, [len(pair.prompt) for pair in pairs],
                    lambda run: reward_model(model, pairs, self.config, run=run),
                    held_out_accuracy(held_out) if held_out else None, scored(model, held_out or pairs))


# --- samples to look at -----------------------------------------------------------------------------------------------


def completed(policy: Policy, prompts: Sequence[Sequence[int]], most: int) -> Callable[[Run, int], Awaitable[str]]:
    """A greedy completion of at most `most` tokens of one prompt after another."""
    async def sample(run: Run, step: int) -> str:
        prompt = list(prompts[step % len(prompts)])
        async with await off_loop(lambda: Sampler(policy, engine="hf")) as sampler:  # it copies no weights
            ((rollout,),) = await sampler.sample([prompt], params=SamplingParams(greedy=True, max_new_tokens=most))
        return sample_text(policy.decode(prompt), policy.decode(rollout.tokens), rollout.finish_reason)

    return sample


def scored(model: RewardModel, pairs: Sequence[Pair]) -> Callable[[Run, int], Awaitable[str]]:
    """The scores of one pair after another."""
    async def sample(run: Run, step: int) -> str:
        sides = pairs[step % len(pairs)].sides
        scores = await off_loop(lambda: model.score([r.prompt + r.tokens for r in sides]))
        prompt, *texts = map(model.tokenizer.decode, (sides[0].prompt, *[r.tokens for r in sides]))
        notes = [f"score {score:.4g}" for score in scores]
        return f"{sample_text(prompt, texts[0], notes[0])}\n{answer_text(texts[1], notes[1])}"

    return sample


async def best_rollout(run: Run, step: int) -> str:
    """The rollout of the step with the highest reward."""
    rollouts = run.rollouts(step, ["prompt", "completion", "reward"]).dropna(subset="reward")
    if not len(rollouts):
        return "  no rollout of this step has a reward"
    best = rollouts.loc[rollouts["reward"].idxmax()]
    return sample_text(best["prompt"], best["completion"], f"reward {best['reward']:.4g}")


def sample_text(prompt: str, completion: str, note: str) -> str:
    return f"  {json.dumps(prompt[-400:], ensure_ascii=False)}\n{answer_text(completion, note)}"


def answer_text(completion: str, note: str) -> str:
    return f"  → {json.dumps(completion[-400:], ensure_ascii=False)}  {note}"
