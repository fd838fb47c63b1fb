"""python -m grpolab run | data | eval | sft | dpo | grpo | reward | serve | serve-policy | replay"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
from pathlib import Path

from grpolab import arithmetic
from grpolab.cli import env
from grpolab.cli import serve as endpoint

TRAINING = {"sft": "imitate demonstrations", "grpo": "learn from a reward", "dpo": "learn from preferences",
            "reward": "train a reward model"}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="grpolab", description="A laboratory for post-training language models.")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="execute notebooks, all of them or those named")
    run.add_argument("notebooks", nargs="*", metavar="NN", help="numbers or names, e.g. 01 04_grpo (default: the whole series)")
    run.add_argument("-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                     help="set a notebook's parameter, e.g. -p model smollm2-135m")
    run.add_argument("--store", action="store_true", help="put the executed notebooks in the place of their sources")
    run.add_argument("--jobs", type=int, default=1, metavar="N",
                     help="notebooks at once, each with its share of the processors (default %(default)s)")
    run.set_defaults(go=_run)

    data = commands.add_parser("data", help="write the arithmetic data set: train.jsonl and eval.jsonl")
    data.add_argument("--train", type=int, default=20_000, help="unique training problems (default %(default)s)")
    data.add_argument("--eval", type=int, default=500, help="held-out problems, disjoint from them (default %(default)s)")
    data.add_argument("--seed", type=int, default=1)
    data.add_argument("--out", type=Path, default=Path("data/arithmetic"), help="folder (default %(default)s)")
    _task_options(data)
    data.set_defaults(go=_data)

    evaluation = commands.add_parser("eval", help="format and exact-match rates of a model on held-out questions")
    evaluation.add_argument("model", help="tiny, smollm2-135m, a Hugging Face id, or a folder")
    evaluation.add_argument("--prompts-file", type=Path, metavar="FILE.jsonl",
                            help="rows with a prompt and an answer in the place of arithmetic; right is the answer's number as "
                                 "the last of a completion that ended")
    evaluation.add_argument("--questions", type=int, default=200)
    evaluation.add_argument("--samples", type=int, default=8, help="completions a question beside the greedy one")
    evaluation.add_argument("--max-new-tokens", type=int, default=32)
    evaluation.add_argument("--seed", type=int, default=1)
    _task_options(evaluation)
    evaluation.set_defaults(go=_eval)

    for name, help in TRAINING.items():
        training = commands.add_parser(name, help=help)
        if argv[:1] == [name]:  # its flags are the fields of a configuration, and torch is imported for them
            from grpolab.cli import train as trainer

            trainer.add_arguments(training, name)
            if name in ("sft", "grpo"):
                _task_options(training)

    serving = commands.add_parser("serve", help="serve an environment over WebSockets: calculator, guess, or your own")
    env.add_arguments(serving)
    serving.set_defaults(go=env.main)

    policy = commands.add_parser("serve-policy", help="serve a model behind an OpenAI-compatible endpoint")
    endpoint.add_arguments(policy)
    policy.set_defaults(go=endpoint.main)

    replaying = commands.add_parser("replay", help="generate recorded rollouts again and compare them in every bit")
    replaying.add_argument("run", type=Path, help="a run's folder, or the file of a bundle")
    replaying.add_argument("steps", nargs="*", type=int, metavar="STEP", help="steps (a bundle holds one)")
    replaying.add_argument("--group", type=int, help="of the step (default: all)")
    replaying.add_argument("--rollout", type=int, help="of the group (default: all)")
    replaying.add_argument("--reference", help="the reference of a run with a leash, where it is not the run's own start")
    replaying.add_argument("--bundle", type=Path, help="write the step to this file, to replay it elsewhere")
    replaying.set_defaults(go=_replay)

    args = parser.parse_args(argv)
    try:
        return args.go(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"grpolab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("grpolab: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


def _task_options(parser: argparse.ArgumentParser) -> None:
    default = arithmetic.Task()
    parser.add_argument("--ops", default=default.ops, help="operators, some of +-* (default %(default)s)")
    parser.add_argument("--max-operand", type=int, default=default.max_operand, help="of + and - (default %(default)s)")
    parser.add_argument("--max-factor", type=int, default=default.max_factor, help="of * (default %(default)s)")


def _task(args) -> arithmetic.Task:
    return arithmetic.Task(args.ops, args.max_operand, args.max_factor)


def _run(args) -> int:
    from grpolab.lab.notebooks import run_beside, run_series

    parameters = {name: _literal(value) for name, value in args.parameters}
    if args.jobs != 1:
        return run_beside(args.notebooks, parameters, args.jobs, store=args.store)
    return run_series(args.notebooks, parameters, store=args.store)


def _literal(text: str):
    """A Python literal where the text is one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _data(args) -> int:
    train, held_out = arithmetic.generate(args.train, args.eval, seed=args.seed, task=_task(args))
    for name, problems in (("train", train), ("eval", held_out)):
        path = arithmetic.write_jsonl(args.out / f"{name}.jsonl", problems)
        print(f"{path}: {len(problems)} problems, the first: {problems[0].question} {problems[0].answer}" if problems else path)
    return 0


def _eval_rows(args) -> int:
    """Rates of a model on the rows of a file."""
    from grpolab import tasks
    from grpolab.evaluate import evaluate_checks
    from grpolab.models.load import load_policy

    rows = tasks.read_rows(args.prompts_file, needs=["answer"])
    for number, row in enumerate(rows, start=1):
        tasks.wanted_number(row, f"{args.prompts_file}, row {number}")
    policy = load_policy(args.model)
    print(policy)
    cases = [(tasks.prompt_of(row), lambda text, rollout, row=row: tasks.right_number(text, row, rollout) == 1) for row in rows]

    async def everything():
        common = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
        greedy = await evaluate_checks(policy, cases, **common)
        return greedy, args.samples and await evaluate_checks(policy, cases, samples=args.samples, **common)

    greedy, sampled = asyncio.run(everything())
    print(f"greedy   {greedy.rate} of {len(rows)} rows")
    if args.samples:
        print("\n".join(f"pass@{k:<3} {sampled.pass_at(k)}" for k in _powers(args.samples)))
    return 0


def _powers(samples: int) -> list[int]:
    return [2**i for i in range(samples.bit_length()) if 2**i <= samples]


def _eval(args) -> int:
    if args.prompts_file:
        return _eval_rows(args)
    from grpolab.evaluate import evaluate, evaluate_fixed, suite_table, summary
    from grpolab.models.load import load_policy

    _, problems = arithmetic.generate(0, args.questions, seed=args.seed, task=_task(args))
    policy = load_policy(args.model)
    print(policy)

    async def everything():
        common = {"max_new_tokens": args.max_new_tokens, "seed": args.seed}
        table = {"greedy": await evaluate(policy, problems, **common)}
        if args.samples:
            table["sampled"] = await evaluate(policy, problems, samples=args.samples, **common)
        return table, await evaluate_fixed(policy)

    table, fixed = asyncio.run(everything())
    print(summary(**table).to_string())
    if args.samples:
        print("\n" + "\n".join(f"pass@{k:<3} {table['sampled'].pass_at(k)}" for k in _powers(args.samples)))
    print("\nfixed prompts, greedy\n" + suite_table(passed=fixed).to_string())
    return 0


def _replay(args) -> int:
    """0 where every bit agrees, 1 where one does not."""
    from grpolab.lab.replay import bundle, replay, replay_bundle
    from grpolab.models.load import load_policy
    from grpolab.runs.run import Run

    if args.run.is_file():
        found = [replay_bundle(args.run, args.group, args.rollout)]
    else:
        if not (args.run / "run.json").is_file():
            raise ValueError(f"{args.run} is neither a run's folder (with run.json) nor the file of a bundle")
        if not args.steps or args.bundle and len(args.steps) > 1:
            raise ValueError(f"name {'one step' if args.bundle else 'the steps'} of {args.run}, e.g. replay {args.run} 12")
        run, reference = Run(root=args.run), args.reference and load_policy(args.reference)
        if args.bundle:
            print(bundle(run, args.steps[0], args.bundle, reference=reference))
            return 0
        found = [replay(run, step, args.group, args.rollout, reference=reference) for step in args.steps]
    print("\n".join(map(str, found)))
    return 0 if all(r.equal for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
