"""`grpolab serve` and `grpolab serve-policy`: an environment server and a policy's endpoint, as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from grpolab.access import check_token, is_loopback
from grpolab.cli import UsageError
from grpolab.cli.recipe import entries, refuse_unread
from grpolab.env.aws.options import AwsOptions
from grpolab.env.process import Isolation
from grpolab.env.server import serve_forever
from grpolab.env.session import ServeLimits
from grpolab.env.worker import load_factory
from grpolab.signals import at_signals


@dataclass(frozen=True)
class Address:
    """Where a server listens, and which token it asks for."""

    host: str = "127.0.0.1"  # address to listen on; any but loopback needs --token-file
    port: int = 8000  # port to listen on; 0 takes a free one and prints it
    token_file: Path | None = None  # file that holds the bearer token which clients must send (an OpenAI client's api_key)

    def token(self) -> str | None:
        """The token of the file; UsageError for an address that other machines reach without one."""
        if self.token_file is not None:
            return check_token(self.token_file.read_text("utf-8", "replace").strip(), str(self.token_file))
        if not is_loopback(self.host):
            raise UsageError(f"--host {self.host} is open to other machines: add --token-file FILE, or stay on 127.0.0.1")
        return None


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
    """A variable that those processes get beside PATH and the like."""
    cwd: Path | None = None  # working folder of those processes
    memory_mib: int | None = None
    """The most private memory that one of those processes may allocate; shared mappings (/dev/shm) are not counted, and each
    process that it starts has as much again."""
    limits: OmitArgPrefixes[ServeLimits] = ServeLimits()
    aws: OmitArgPrefixes[AwsOptions] = AwsOptions()

    def run(self) -> int:
        if self.isolate == "thread" and (self.env or self.cwd or self.memory_mib is not None):
            raise UsageError("--env, --cwd and --memory-mib need --isolate process: a thread has none of them to itself")
        refuse_unread(self, [(" ".join(entries(self.aws)), self.environment == "aws", "is only of `serve aws`")])
        variables = dict(map(variable, self.env))
        isolation = "thread" if self.isolate == "thread" else Isolation(variables, self.cwd, self.memory_mib)
        token = self.address.token()
        # A thread's module is imported here, while signals still end this process: on the loop they would wait for it.
        environment = self.environment if self.isolate == "process" else load_factory(self.environment)
        options = asdict(self.limits) | {"ping_interval": self.limits.ping_interval or None}
        asyncio.run(serve_forever(
            environment, max_sessions=self.max_sessions, host=self.address.host, port=self.address.port, isolate=isolation,
            arguments=entries(self.aws), token=token, **options))
        return 0


def variable(option: str) -> tuple[str, str]:
    """(name, value) of `NAME=VALUE`, or of `NAME` with the value that it has here."""
    name, equals, value = option.partition("=")
    if not name or not (equals or name in os.environ):
        raise UsageError(f"--env {option}: {'it has no name' if not name else f'{name} is not set here'}; write NAME=VALUE")
    return name, value if equals else os.environ[name]


@dataclass(frozen=True)
class ServePolicy:
    """Serve a model behind an OpenAI-compatible endpoint until SIGTERM or SIGINT."""

    model: Positional[str]  # tiny, smollm2-135m, a Hugging Face id, or a folder
    name: str | None = None  # what requests call the model (default: its own name)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights; a trainer that sends its own has the same
    address: OmitArgPrefixes[Address] = Address()
    slots: int | None = None  # completions decoded together (default: what the memory holds)
    seed: int = 0  # of the requests that bring none
    weights: Path | None = None  # file through which a trainer sends its updates (RemoteSampler.publish)
    packed: bool = True
    """Decode with copies of the weights that are laid out for it; --no-packed with the weights themselves: slower, and there is
    one model in memory, of a trainer on this machine, too (--weight-bridge shared)."""
    adapters: Path | None = None  # folder from which clients may load LoRA adapters (AdapterSwap)
    policy_version: int = 0  # version of the weights at the start
    max_sessions: int = 4096  # sessions open at a time
    constrained: bool = False
    """Sample under a mask where a request's response_format or tool_choice asks for a form (needs grpolab[constrained])."""

    def run(self) -> int:
        token = self.address.token()
        from grpolab.decode.sampler import Sampler  # torch is not needed for --help, nor to refuse an address
        from grpolab.models.load import load_policy

        policy = load_policy(self.model, dtype=self.dtype)
        print(policy.origin)
        policy.version = self.policy_version
        engine = "auto" if self.packed else "unpacked"
        asyncio.run(self.serve(Sampler(policy, slots=self.slots, seed=self.seed, engine=engine), token))
        return 0

    async def serve(self, sampler, token: str | None) -> None:
        from grpolab.serve.service import serve_policy

        stop = asyncio.Event()
        with at_signals(stop.set, signal.SIGTERM, signal.SIGINT):
            async with sampler, serve_policy(
                sampler, name=self.name, host=self.address.host, port=self.address.port, token=token, seed=self.seed,
                max_sessions=self.max_sessions, weights=self.weights, adapters=self.adapters,
                constrained=self.constrained,
            ) as service:
                print(f"serving {service.name} at {service.url}/v1", flush=True)
                await stop.wait()
