"""`grpolab serve`: an environment server as a process of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from grpolab.cli import UsageError
from grpolab.cli.address import Address
from grpolab.env.backends import BackendError, BackendPool, ProcessBackend
from grpolab.env.process import Isolation
from grpolab.env.server import serve_forever
from grpolab.env.worker import load_factory


@dataclass(frozen=True)
class AwsOptions:
    """Only of `serve aws`."""

    web: bool = False  # also serve a page for people, on loopback; it takes one of the sessions
    web_port: int = 0  # port of that page; 0 takes a free one and prints it
    max_turns: int = 8  # commands in an episode
    tier: str | None = None  # tier of the tasks that are drawn where a client names none
    hints: bool = False  # let the action `aws hint` give a hint, at a cost in reward
    chaos: float = 0.0  # probability after each turn that something the agent made is destroyed
    drift: bool = True  # begin drift tasks with a changed account
    shaping: float = 0.0  # weight of the potential difference that is paid each turn
    gamma: float = 1.0  # discount of that potential
    chaos_seed: int | None = None  # seed of chaos alone (default: the episode's)
    drift_seed: int | None = None  # seed of drift alone (default: the episode's)
    observation_characters: int = 800  # longest observation

    def changed(self) -> dict:
        """The options that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class Limits:
    """Times in seconds."""

    reset_timeout: float = 60.0  # longest reset
    step_timeout: float = 60.0  # longest step
    close_timeout: float = 5.0  # longest closing of an environment
    ping_interval: float | None = 5.0  # between heartbeats; 0 turns them off
    ping_timeout: float = 10.0  # without an answer before a client counts as gone


@dataclass(frozen=True)
class Serve:
    """Serve an environment over WebSockets until SIGTERM or SIGINT."""

    environment: Positional[str]  # calculator, guess, aws, or package.module:Class of your own
    address: OmitArgPrefixes[Address] = Address()
    max_sessions: int = 8  # sessions open at a time
    isolate: Literal["process", "thread"] = "process" if os.name == "posix" else "thread"
    """Where a session's environment runs: in a thread, or in a process of its own that can be killed, with all that it started
    (except, on macOS, what has left its process group)."""
    env: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME[=VALUE]")] = ()
    """A variable that those processes and the backends get beside PATH and the like."""
    cwd: Path | None = None  # working folder of those processes
    memory_mib: int | None = None
    """The most private memory that one of those processes may allocate; shared mappings (/dev/shm) are not counted, and each
    process that it starts has as much again."""
    backend: str | None = None  # what each session leases: a command that prints its address as its first line
    limits: OmitArgPrefixes[Limits] = Limits()
    aws: OmitArgPrefixes[AwsOptions] = AwsOptions()

    def run(self) -> int:
        if self.isolate == "thread" and (self.cwd or self.memory_mib is not None):
            raise UsageError("--cwd and --memory-mib need --isolate process: a thread has neither to itself")
        if self.environment != "aws" and (changed := self.aws.changed()):
            name = min(changed)
            raise UsageError(f"--{'no-' * (name == 'drift')}{name.replace('_', '-')} is only of `serve aws`")
        if self.environment == "aws" and self.backend is not None:
            raise UsageError("--backend: the aws environment brings its own")
        variables = dict(map(variable, self.env))
        isolation = "thread" if self.isolate == "thread" else Isolation(variables, self.cwd, self.memory_mib)
        token = self.address.token()
        # A thread's module is imported here, while signals still end this process: on the loop they would wait for it.
        environment = self.environment if self.isolate == "process" else load_factory(self.environment)
        options = asdict(self.limits) | {"ping_interval": self.limits.ping_interval or None}
        page = None
        if self.aws.web:
            from grpolab.env.aws.web import page

            page = partial(page, port=self.aws.web_port)
        try:
            asyncio.run(serve_forever(
                environment, beside=page, max_sessions=self.max_sessions, host=self.address.host, port=self.address.port,
                isolate=isolation, backends=self.backends(variables), token=token, **options))
        except BackendError as error:
            raise ValueError(str(error)) from error
        return 0

    def backends(self, variables: dict[str, str]) -> BackendPool | None:
        """What the sessions lease: accounts for `aws`, what --backend starts, or nothing."""
        if self.environment == "aws":
            from grpolab.env.aws.backend import accounts
            from grpolab.env.aws.environment import AwsEnv

            options = {name: value for name, value in self.aws.changed().items() if not name.startswith("web")}
            AwsEnv("http://127.0.0.1:1", **options)  # refuses wrong options before anything starts
            return accounts(max(self.max_sessions, 1), options=options)
        if self.backend is None:
            return None
        command = shlex.split(self.backend)  # as a shell splits it, with nothing expanded
        if not command:
            raise UsageError("--backend: write a command")
        return BackendPool(lambda _: ProcessBackend(command, env=variables), max(self.max_sessions, 1))


def variable(option: str) -> tuple[str, str]:
    """(name, value) of `NAME=VALUE`, or of `NAME` with the value that it has here."""
    name, equals, value = option.partition("=")
    if not name or not (equals or name in os.environ):
        raise UsageError(f"--env {option}: {'it has no name' if not name else f'{name} is not set here'}; write NAME=VALUE")
    return name, value if equals else os.environ[name]
