"""`python -m grpolab serve`: an environment server as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from grpolab.access import check_token
from grpolab.env.backends import BackendError, BackendPool, read_backend
from grpolab.env.process import Isolation
from grpolab.env.server import serve_forever
from grpolab.env.worker import load_factory

AWS_OPTIONS = ("max_turns", "tier", "hints", "chaos", "drift", "shaping", "gamma", "chaos_seed", "drift_seed",
               "observation_characters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m grpolab serve`."""
    parser.add_argument("environment", help="calculator, guess, aws, or package.module:Class of your own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token-file")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and prints it")
    parser.add_argument("--max-sessions", type=int, default=8)
    parser.add_argument("--isolate", choices=("process", "thread"), default="process" if os.name == "posix" else "thread",
                        help="where a session's environment lives: a thread, or a process of its own that can be killed, with "
                        "all that it started (except, on macOS, what has left its process group)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]",
                        help="a variable that those processes and the backends get beside PATH and the like")
    parser.add_argument("--cwd", type=Path, help="the folder of those processes")
    parser.add_argument("--memory-mib", type=int, help="the most private memory that one of those processes may allocate; "
                        "shared mappings (/dev/shm) are not counted, and each process that it starts has as much again")
    parser.add_argument("--backend", metavar="COMMAND", help="what each session leases: a command that prints its address as "
                        "its first line, or package.module:function that makes a Backend from its number")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds added to every reset and step")
    parser.add_argument("--reset-timeout", type=float, default=60.0, help="seconds that a reset may take")
    parser.add_argument("--step-timeout", type=float, default=60.0, help="seconds that a step may take")
    parser.add_argument("--close-timeout", type=float, default=5.0, help="seconds that closing an environment may take")
    parser.add_argument("--ping-interval", type=float, default=5.0, help="seconds between heartbeats; 0 turns them off")
    parser.add_argument("--ping-timeout", type=float, default=10.0, help="seconds without answer before it is gone")
    parser.add_argument("--token-file", type=Path, help="file that holds the bearer token which clients must send")
    parser.add_argument("--trace", type=Path, help="JSONL file to append every call to")
    aws = parser.add_argument_group("of the aws environment (AwsEnv)")
    aws.add_argument("--web", action="store_true", help="also a page for people, on loopback; it takes one of the sessions")
    aws.add_argument("--web-port", type=int, default=0, help="of that page; 0 takes a free one and prints it")
    aws.add_argument("--max-turns", type=int, help="commands in an episode (8)")
    aws.add_argument("--tier", help="of the tasks that are drawn where a client names none")
    aws.add_argument("--hints", action="store_true", default=None, help="the action `aws hint` tells one, and costs reward")
    aws.add_argument("--chaos", type=float, help="chance after each turn that something is destroyed which the agent has made")
    aws.add_argument("--no-drift", dest="drift", action="store_false", default=None, help="drift tasks begin unspoilt")
    aws.add_argument("--shaping", type=float, help="weight of the potential difference that is paid each turn (0)")
    aws.add_argument("--gamma", type=float, help="discount of that potential (1)")
    aws.add_argument("--chaos-seed", type=int, help="of chaos alone; without it, the episode's")
    aws.add_argument("--drift-seed", type=int, help="of drift alone; without it, the episode's")
    aws.add_argument("--observation-characters", type=int, help="of an output, at most (800)")


def main(args: argparse.Namespace) -> int:
    """`python -m grpolab serve`: run a server process from parsed arguments. Returns 0 when a signal ended
    it, 2 where they make no sense, 130 when it was interrupted before it served."""
    try:
        variables = dict(_variable(given) for given in args.env)
        if args.isolate == "thread" and (args.cwd or args.memory_mib is not None):
            raise ValueError("--cwd and --memory-mib are of --isolate process: a thread has neither to itself")
        isolate = "thread" if args.isolate == "thread" else Isolation(variables, args.cwd, args.memory_mib)
        token = args.token_file and check_token(args.token_file.read_text("utf-8", "replace").strip(), str(args.token_file))
        # A thread's module is imported here and now, while signals still end this process: on the loop they would wait for it.
        environment = args.environment if args.isolate == "process" else load_factory(args.environment)
        backends = _accounts(args)
        if args.backend is not None:
            if backends is not None:
                raise ValueError("--backend: the aws environment brings its own")
            backends = BackendPool(read_backend(args.backend, env=variables), max(args.max_sessions, 1))
        beside = None
        if args.web:
            if args.environment != "aws":
                raise ValueError("--web is of `serve aws`")
            from grpolab.env.aws.web import page

            beside = partial(page, port=args.web_port)
        asyncio.run(serve_forever(
            environment, beside=beside, max_sessions=args.max_sessions, host=args.host, port=args.port, isolate=isolate,
            backends=backends, token=token, reset_timeout=args.reset_timeout, step_timeout=args.step_timeout,
            close_timeout=args.close_timeout, ping_interval=args.ping_interval or None,
            ping_timeout=args.ping_timeout, latency=args.latency, trace=args.trace))
    except (ValueError, OSError, BackendError, ImportError) as error:
        print(f"grpolab serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("grpolab serve: interrupted", file=sys.stderr)
        return 130
    return 0


def _accounts(args: argparse.Namespace) -> BackendPool | None:
    """The leased accounts of the aws environment, which hand its options on; None for another environment."""
    options = {name: value for name in AWS_OPTIONS if (value := getattr(args, name)) is not None}
    if args.environment != "aws":
        if options:
            raise ValueError(f"--{'no-drift' if 'drift' in options else min(options).replace('_', '-')} is of `serve aws`")
        return None
    from grpolab.env.aws.backend import accounts
    from grpolab.env.aws.environment import AwsEnv

    AwsEnv("http://127.0.0.1:1", **options)  # says what is wrong with them before anything starts
    return accounts(max(args.max_sessions, 1), options=options)


def _variable(given: str) -> tuple[str, str]:
    """(name, value) of `NAME=VALUE`, or of `NAME` with the value that it has here."""
    name, equals, value = given.partition("=")
    if not name or not (equals or name in os.environ):
        raise ValueError(f"--env {given}: {'it has no name' if not name else f'{name} is not set here'}; write NAME=VALUE")
    return name, value if equals else os.environ[name]
