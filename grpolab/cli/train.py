"""The training commands: `python -m grpolab sft | dpo | grpo | reward`, with every field of the configuration as a flag.

The flags are made from the dataclass, so a field that is added is a flag at once. `--dry-run` checks everything, prints the
plan of memory and hours, and trains nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import sys
import types
import typing
from pathlib import Path

from grpolab import arithmetic, tasks
from grpolab.chat import prompt_ids
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
         "completion_length")  # of a row, on its line


CONFIGS = {"sft": SFTConfig, "grpo": GRPOConfig, "dpo": DPOConfig, "reward": RewardConfig}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The arguments of one of the four commands; the options of an arithmetic Task come from `__main__`."""
    config = CONFIGS[name]
    rows = {"sft": "rows with messages, or prompt and completion (default: arithmetic, made on the spot)",
            "grpo": "rows with a prompt, and what the reward wants (default: arithmetic, made on the spot)"}
    parser.description = config.__doc__
    parser.add_argument("model", help="tiny, smollm2-135m, a Hugging Face id, or a folder")
    parser.add_argument("--data", type=Path, required=name in ("dpo", "reward"), metavar="FILE.jsonl",
                        help=rows.get(name, "rows with prompt, chosen and rejected"))
    parser.add_argument("--name", default=f"cli_{name}", help="of the run's folder under runs/ (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="of the parameters; bfloat16 ones are trained over fp32 master weights (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan of memory and hours, and train nothing")
    if name == "grpo":
        parser.add_argument("--gym", metavar="NAME", help="a task of reasoning-gym in the place of --data (extra 'gym')")
        parser.add_argument("--gym-size", type=int, default=1000, help="so many of its tasks (default %(default)s)")
        parser.add_argument("--reward", metavar="MODULE:FUNCTION",
                            help="of (text, row, rollout); default: the right number in a completion that ended, or the "
                                 "gym's own score")
    if name in ("sft", "grpo"):
        parser.add_argument("--problems", type=int, default=1000, help="arithmetic problems (default %(default)s)")
    held_out = {"sft": "rows with an answer to measure, or a completion whose loss is reported", "dpo": "rows with an answer",
                "grpo": "rows with what the reward wants", "reward": "pairs as in --data"}
    parser.add_argument("--held-out-data", type=Path, metavar="FILE.jsonl", help=held_out[name])
    parser.add_argument("--select-every", type=int, default=0, metavar="N",
                        help="every N steps, measure the policy on what is held out and keep the best one beside the last "
                             "(default: never)")
    if name in ("sft", "grpo"):
        parser.add_argument("--held-out", type=int, default=0, metavar="N",
                            help="hold out N further problems of the default task or the gym (default %(default)s)")
    if name in ("sft", "dpo"):
        parser.add_argument("--held-out-tokens", type=int, default=32, metavar="N",
                            help="most tokens of a completion that is measured (default %(default)s)")
    if name != "reward":
        parser.add_argument("--fixed-prompts", action="store_true",
                            help="with --select-every: also note the rates of the fixed prompts")
    add_flags(parser, config)
    parser.set_defaults(go=train, config=config, method=name)


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for each field of a configuration's dataclass, with its type and default."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        flag, kind, optional = "--" + field.name.replace("_", "-"), *_kind(hints[field.name])
        common = {"default": field.default, "dest": f"field_{field.name}"}
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help="(default %(default)s)", **common)
        elif typing.get_origin(kind) is tuple:
            parts = typing.get_args(kind)
            note = "or none; " if optional else ""
            parser.add_argument(flag, nargs="+", type=_reader(parts[0], optional), metavar=parts[0].__name__.upper(),
                                help=f"{len(parts)} numbers, {note}(default %(default)s)", **common)
        else:
            note = "or none; " if optional else ""
            parser.add_argument(flag, type=_reader(kind, optional), metavar=kind.__name__.upper(),
                                help=f"{note}(default %(default)s)", **common)


def config_from(args: argparse.Namespace, config: type):
    """The configuration that the flags say; ValueError where one has too few or too many numbers, or the config refuses it."""
    hints, values = typing.get_type_hints(config), {}
    for field in dataclasses.fields(config):
        value, (kind, optional) = getattr(args, f"field_{field.name}"), _kind(hints[field.name])
        if typing.get_origin(kind) is tuple and isinstance(value, list):
            wanted = len(typing.get_args(kind))
            if optional and value == [None]:
                value = None
            elif len(value) != wanted or None in value:
                raise ValueError(f"--{field.name.replace('_', '-')} takes {wanted} numbers, got {len(value)}")
            else:
                value = tuple(value)
        values[field.name] = value
    return config(**values)


def _kind(hint) -> tuple:
    """(the type, whether None is allowed) of a field's annotation."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (kind,) = (t for t in typing.get_args(hint) if t is not type(None))
        return kind, True
    return hint, False


def _reader(kind: type, optional: bool):
    def read(text: str):
        return None if optional and text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it where a value does not fit
    return read


def train(args: argparse.Namespace) -> int:
    """Run one of the commands: load, plan, train, save. Of several processes (`ranks`) the first one prints and saves."""
    with contextlib.nullcontext() if distributed.first() else contextlib.redirect_stdout(None):
        return _train(args)


def _train(args: argparse.Namespace) -> int:
    config = config_from(args, args.config)
    rows, reward = read_task(args)
    held_out = read_held_out(args, rows, reward)
    seed_everything(config.seed)
    policy = load_policy(args.model, dtype=args.dtype)
    print(policy)
    if args.method in ("dpo", "reward"):
        rows = load_preferences(args.data, policy.tokenizer)
    if args.method == "reward" and args.held_out_data:
        held_out = load_preferences(args.held_out_data, policy.tokenizer)
    select = selection(args, held_out, reward, config)
    model, reference, stream = prepare(args.method, policy, args.model, rows, config, reward, held_out)
    if args.dry_run:
        lengths = sorted(_lengths(args.method, policy, rows))
        middle = lengths[len(lengths) // 2]
        print(plan(policy, config, reference=reference, prompt_tokens=middle))
        return 0
    run = Run(args.name, Path(args.model).name if Path(args.model).is_dir() else args.model, seed=config.seed,
              select=select)
    asyncio.run(_steps(stream(run), config.steps))
    if not distributed.first():
        return 0
    print(f"{run.shown(model.save(run.folder / 'policy'))}\n{run.shown(run.folder / 'metrics.csv')}")
    if best := run.selected.best():
        print(f"{run.shown(best['folder'])}: the best by what was measured, {best['value']:.4g} after {best['steps']} steps")
    return 0


async def _steps(rows, steps: int) -> None:
    async for row in rows:
        said = "  ".join(f"{name} {row[name]:.4g}" for name in SHOWN if name in row)
        print(f"step {row['step'] + 1}/{steps}  {said}", flush=True)


def read_task(args: argparse.Namespace) -> tuple[list, object]:
    """(rows, reward) that the command names; the rows of the default task are arithmetic problems. Preferences are read with
    the policy's tokenizer, later."""
    if args.method in ("dpo", "reward"):
        return [], None
    if args.method == "grpo" and args.gym:
        if args.data:
            raise ValueError("give --data or --gym, not both: a run has one source of tasks")
        return tasks.reasoning_gym(args.gym, size=args.gym_size, seed=args.field_seed), function(args.reward) or tasks.gym_score
    if args.data:
        rows = tasks.read_rows(args.data)
        chosen = args.method == "grpo" and (function(args.reward) or tasks.right_number)
        if chosen is tasks.right_number:
            for number, row in enumerate(rows, start=1):  # before anything is trained
                tasks.wanted_number(row, f"{args.data}, row {number}")
        return rows, chosen
    task = arithmetic.Task(args.ops, args.max_operand, args.max_factor)
    problems, _ = arithmetic.generate(args.problems, 0, seed=args.field_seed, task=task)
    return problems, function(args.reward) if args.method == "grpo" else None


def read_held_out(args: argparse.Namespace, rows: list, reward) -> list:
    """The rows that the command holds out, with what their reward asks for; of preferences none, which are read later."""
    wanted = getattr(args, "held_out", 0)
    if wanted and args.held_out_data:
        raise ValueError("give --held-out or --held-out-data, not both: there is one set of held-out rows")
    if wanted and args.data:
        raise ValueError("--held-out makes further problems, and --data holds those that there are: give --held-out-data")
    if wanted < 0 or args.select_every < 0:
        raise ValueError(f"--held-out and --select-every start at 0, got {wanted} and {args.select_every}")
    if args.held_out_data and args.method != "reward":
        found = tasks.read_rows(args.held_out_data)
        if args.select_every and (args.method != "grpo" or reward is tasks.right_number):
            for number, row in enumerate(found, start=1):
                tasks.wanted_number(row, f"{args.held_out_data}, row {number}")
        return found
    if not wanted:
        return []
    if args.method == "grpo" and args.gym:
        fresh = tasks.reasoning_gym(args.gym, size=2 * wanted, seed=args.field_seed + 1)
    else:
        task = arithmetic.Task(args.ops, args.max_operand, args.max_factor)
        _, fresh = arithmetic.generate(0, wanted + len(rows), seed=args.field_seed + 1, task=task)
    asked = {tasks.prompt_of(row) for row in rows}
    found = [row for row in fresh if tasks.prompt_of(row) not in asked][:wanted]
    if len(found) < wanted:
        raise ValueError(f"--held-out {wanted}: only {len(found)} further problems were found beside the run's {len(rows)}")
    return found


def selection(args: argparse.Namespace, held_out: list, reward, config) -> Selection | None:
    """What --select-every and --fixed-prompts ask for."""
    fixed = getattr(args, "fixed_prompts", False)
    if not args.select_every:
        if fixed:
            raise ValueError("--fixed-prompts needs --select-every N, which says how often")
        return None
    if not (held_out or fixed):
        raise ValueError("--select-every measures on what is held out: say --held-out-data FILE" + (
            " or --held-out N" if hasattr(args, "held_out") else ""))
    if args.method == "reward":
        measure = held_out_accuracy(held_out)
    elif held_out:
        answers = tasks.right_number if args.data else finished_and_correct
        tokens = config.max_new_tokens if args.method == "grpo" else args.held_out_tokens
        measure = held_out_reward(held_out, reward or answers, max_new_tokens=tokens)

    async def everything(policy):
        scored = {SCORE: await measure(policy)} if held_out else {}
        return scored | (await fixed_rates(policy) if fixed else {})

    return Selection(everything, every=args.select_every, by=SCORE if held_out else None)


def function(name: str | None):
    """The object that `module:function` names, or None for None."""
    if name is None:
        return None
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"--reward is module:function, got {name!r}")
    sys.path.insert(0, "")  # a module of the working folder, as `python -m` finds one
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ValueError(f"{module} has no function {attribute!r}")
    return found


def prepare(method: str, policy, name: str, rows: list, config, reward, held_out: list):
    """(what is trained and saved, the reference or None, run -> its rows)."""
    if method == "sft":
        examples = demonstrations(policy, rows)
        shown = demonstrations(policy, [row for row in held_out if tasks.shows_completion(row)])
        return policy, None, lambda run: sft(policy, examples, config, held_out=shown, run=run)
    if method == "grpo":
        reference = load_policy(name, dtype=policy.dtype) if config.kl_coef else None
        given = {"reward": reward} if reward else {}
        return policy, reference, lambda run: grpo(policy, reference, rows, config, run=run, **given)
    if method == "dpo":
        reference = load_policy(name, dtype=policy.dtype)
        return policy, reference, lambda run: dpo(policy, reference, rows, config, run=run)
    model = RewardModel.from_policy(policy)
    return model, None, lambda run: reward_model(model, rows, config, run=run)


def _lengths(method: str, policy, rows: list) -> list[int]:
    if method in ("dpo", "reward"):
        return [len(pair.prompt) for pair in rows]
    return [len(prompt_ids(policy.tokenizer, tasks.prompt_of(row))) for row in rows[:200]]
