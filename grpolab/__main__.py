"""The command line, `grpolab` or `python -m grpolab`: each command is a dataclass in a file of `grpolab.cli`."""

from __future__ import annotations

import difflib
import sys
import traceback
from importlib import import_module
from pathlib import Path

import tyro

from grpolab.cli import UsageError
from grpolab.env.protocol import EnvError
from grpolab.files import is_full
from grpolab.syntax import without_collection

COMMANDS = {  # name: (module in grpolab.cli, its class, what it does); a module is imported when its command is called
    "run": ("run", "Run", "execute notebooks, all of them or those named"),
    "data": ("data", "Data", "write the arithmetic data set"),
    "eval": ("eval", "Eval", "measure a model on questions"),
    "scout": ("scout", "Scout", "tell from which tasks GRPO could learn, before anything is trained"),
    "train": ("recipe", None, "train as a file says: grpolab train FILE.toml [options that win over it]"),
    "up": ("up", None, "train on an environment of Atropos: its API, the policy's server, the environment, the trainer"),
    "pairs": ("pairs", "Pairs", "make preference pairs of a model's own completions, by a reward or a judge"),
    "sft": ("train", "SFT", "imitate demonstrations"),
    "grpo": ("train", "GRPO", "learn from a reward"),
    "dpo": ("train", "DPO", "learn from preferences"),
    "reward": ("train", "Reward", "train a reward model"),
    "serve": ("serve", "Serve", "serve an environment over WebSockets"),
    "serve-policy": ("serve", "ServePolicy", "serve a model behind an OpenAI-compatible endpoint"),
    "replay": ("replay", "Replay", "generate recorded rollouts again and compare every bit"),
    "speedrun": ("board", "Speedrun", "run the board's task with a recipe and write the entry"),
    "verify": ("board", "Verify", "replay an entry of the board"),
}

TRAINING = ("sft", "grpo", "dpo", "reward")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0 when it succeeded, 1 when it failed or found a difference, 2 when the command line is
    wrong, 130 when it was interrupted. The parser leaves by SystemExit: 0 after --help, 2 after an error."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help"):
        print(usage())
        return 0 if name else 2
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        print(f"grpolab: no command {name!r}" + (f"; did you mean {close[0]!r}?" if close else "") + f"\n\n{usage()}",
              file=sys.stderr)
        return 2
    if "" not in sys.path:  # modules of the current folder, which `python -m` finds and a console script does not
        sys.path.insert(0, "")
    try:
        refuse_empty(arguments)
        if name == "train":
            from grpolab.cli.recipe import read

            if arguments[:1] == ["--config"]:
                arguments = arguments[1:]
            if not arguments or arguments[0].startswith("-"):
                raise UsageError("name a file, as in: grpolab train run.toml --steps 30, or run.yaml (--print-config of grpo, "
                                 "sft, dpo or reward writes one)")
            name, arguments = read(arguments[0], arguments[1:], TRAINING)
        elif name == "up":
            return import_module("grpolab.cli.up").main(arguments)
        elif name in TRAINING:
            from grpolab.cli.recipe import renamed

            arguments = renamed(arguments, name)
        module, cls, _ = COMMANDS[name]
        return parse(name, getattr(import_module(f"grpolab.cli.{module}"), cls), arguments).run()
    except (ValueError, TypeError, ImportError, OSError, RuntimeError, EnvError, FloatingPointError) as error:
        if not (isinstance(error, ValueError | ImportError | OSError) or raised_by_us(error)):
            traceback.print_exception(error)
        print(f"grpolab {name}: {error}{remedy(name, error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        resume = "; the same command continues from what is kept" if name in ("run", "train", "up", "pairs", *TRAINING) else ""
        print(f"grpolab {name}: interrupted{resume}", file=sys.stderr)
        return 130


def refuse_empty(arguments: list[str]) -> None:
    """UsageError for a value without a character, as a variable of the shell that is not set leaves it."""
    for before, argument in zip(["the command's name", *arguments], arguments):
        if not argument or argument.startswith("--") and argument.partition("=")[1:] == ("=", ""):
            raise UsageError(f"{argument or before} is followed by '', no value (a shell variable that is not set?): give one, "
                             "or leave the option out")


def raised_by_us(error: Exception) -> bool:
    """Whether a `raise` of this package raised it, so that its text is meant for whoever reads it; else it may be a fault."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).is_relative_to(Path(__file__).parent) and (last.line or "").startswith("raise ")


def remedy(name: str, error: Exception) -> str:
    """What to do about an error whose text does not say it."""
    if is_full(error):
        goes_on = "; the last whole checkpoint is as it was, and the same command goes on from it" * (name in TRAINING)
        return f". Nothing is left half-written{goes_on}: make room"
    if "out of memory" in str(error) or "can't allocate memory" in str(error):
        return ("\nLower --token-budget or the batch, or take --lora-rank, --dtype bfloat16 or --checkpoint-activations; "
                "--dry-run prints what takes the memory")
    return ""


def parse(name: str, command: type, arguments: list[str]):
    """A command's dataclass from its arguments; SystemExit with status 2 where they do not fit, 0 after --help."""
    with without_collection():  # tyro parses the source for the options' sentences
        return tyro.cli(command, prog=f"grpolab {name}", args=arguments)


def usage() -> str:
    commands = "\n".join(f"  {name:13} {sentence}" for name, (_, _, sentence) in COMMANDS.items())
    return ("usage: grpolab COMMAND ...\n\nA laboratory for post-training language models.\n\n"
            f"commands:\n{commands}\n\ngrpolab COMMAND --help lists a command's options.")


if __name__ == "__main__":
    sys.exit(main())
