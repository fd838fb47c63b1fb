"""`grpolab up run.toml`: training on an environment of Atropos by one command. It starts, each once the one before answers,

    Atropos' trajectory API        run-api
    the policy's server            grpolab serve-policy; with weight-bridge lora_restart or none the trainer starts it itself
    the environment                grpolab.env.gsm8k on the recipe's `data`, or any program on Atropos' BaseEnv
    the trainer                    grpolab grpo --atropos-url ... --server-url ...

each with a log of its own, shows the trainer's, and ends all of them with what they started when the trainer is done, when one
fails, and on Ctrl-C. The file is a recipe for `grpolab train`; options of this command stand in its table [up].
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from tyro.conf import Positional

from grpolab.cli import UsageError, recipe
from grpolab.cli.train import GRPO
from grpolab.env import child_processes
from grpolab.files import atomic_write, locked
from grpolab.models.load import load_tokenizer
from grpolab.serve.weight_sync import refuse_others
from grpolab.tasks import gsm8k

HOST, MEMORY = "127.0.0.1", Path("/dev/shm")
OWN = "{python} -m grpolab.env.gsm8k serve"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # of what runs here no proxy knows


@dataclass(frozen=True, kw_only=True)
class Up:
    """Start Atropos' API, the policy's server, an environment and the trainer; end all of them together. Further options are
    those of `grpolab grpo` and win over the recipe's."""

    recipe: Positional[Path]  # TOML or YAML file, as of grpolab train
    environment: str = OWN  # program that runs the environment; options of Atropos' BaseEnv are added to it
    api: str = "run-api"  # Atropos' program
    api_port: int = 8002
    server_port: int = 9001
    logs: Path = Path("logs")  # folder of the logs, the tokenizer and what passes between trainer and server
    patience: float = 120.0  # seconds until the API or the server must answer
    dry_run: bool = False  # print the commands and the trainer's recipe, and start nothing


@dataclass
class Service:
    """A process that `up` starts; `answers` is the address by which it is known to be ready (None: it is at once)."""

    name: str
    command: Sequence[str]
    answers: str | None = None
    log: Path = Path()
    guard: subprocess.Popen | None = None

    def start(self, logs: Path) -> None:
        self.log = logs / f"{self.name}.log"
        with open(self.log, "wb") as file:
            self.guard = child_processes.start(self.command, dict(os.environ), stdout=file, stderr=file)

    @property
    def ended(self) -> int | None:
        return self.guard.poll()

    def last_lines(self) -> str:
        lines = [line for line in self.log.read_bytes()[-4000:].decode("utf-8", "replace").splitlines() if line.strip()]
        return "\n".join(f"    {line[:300]}" for line in lines[-4:]) or "    it wrote nothing"


def main(arguments: Sequence[str]) -> int:
    """`grpolab up FILE ...`; returns the exit status."""
    if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        raise UsageError("name a file, as in: grpolab up run.toml --steps 30")
    own = table(arguments[0]) if not arguments[0].startswith("-") else []
    up, further = tyro.cli(Up, prog="grpolab up", args=[arguments[0], *own, *arguments[1:]], return_unknown_args=True)
    training, rows = trainer_of(up, further)
    services = services_of(up, training, rows)
    if up.dry_run:
        print("\n".join(f"{s.name:12} {shlex.join(s.command)}" for s in services), training.as_recipe(), sep="\n\n", end="")
        return 0
    check(up, training, rows, services)
    return run(up, training, services)


def table(path: str) -> list[str]:
    """The recipe's table [up] as arguments."""
    entries = recipe.loaded(path).get("up") or {}
    return [part for key, value in entries.items() for part in recipe.spelled(key.replace("_", "-"), value, f"{path}: {key}")]


def trainer_of(up: Up, further: Sequence[str]) -> tuple[GRPO, Path | None]:
    """The trainer of the recipe and of further options, joined to the API and the server; checked. The environment's rows."""
    _, arguments = recipe.read(up.recipe, further, ("grpo",), skip=("up",))
    training: GRPO = tyro.cli(GRPO, prog="grpolab up", args=arguments)
    options = training.rollouts
    if options.kind not in (None, "atropos_url") or training.reward:
        raise UsageError("grpolab up trains on an environment of Atropos: leave --env, --tools, --agent and --reward out")
    if training.print_config or training.dry_run:
        raise UsageError(f"--print-config, or dry-run in {up.recipe}: take it out, and say --dry-run to grpolab up, which "
                         "prints the recipe, too")
    if training.data and not up.environment.startswith(OWN):
        raise UsageError(f"--data {training.data}: {up.environment!r} is not told it; leave it out, or name it in that command")
    way = options.weight_bridge or ("lora_only" if training.lora_rank else "shared")
    memory = MEMORY if way == "shared" and os.access(MEMORY, os.W_OK) else up.logs
    path = options.bridge_path or (memory / f"grpolab-{os.getpid()}.safetensors" if way == "shared" else up.logs / "weights")
    rows, training = training.data, replace(training, data=None, rollouts=replace(
        options, atropos_url=f"http://{HOST}:{up.api_port}", server_url=f"http://{HOST}:{up.server_port}", weight_bridge=way,
        bridge_path=path.resolve()))
    training.check()
    return training, rows


def services_of(up: Up, training: GRPO, rows: Path | None) -> list[Service]:
    """What is started, in this order."""
    options, python = training.rollouts, sys.executable
    api, server = options.atropos_url, options.server_url
    services = [Service("api", [up.api, "--host", HOST, "--port", str(up.api_port)], f"{api}/info")]
    if options.weight_bridge in ("shared", "lora_only"):
        into = "--weights" if options.weight_bridge == "shared" else "--adapters"
        command = [python, "-m", "grpolab", "serve-policy", training.model, "--port", str(up.server_port), into,
                   str(options.bridge_path), "--dtype", training.dtype]
        services.append(Service("server", command, f"{server}/health"))
    folder, config = str(up.logs / "tokenizer"), training.config
    name = Path(training.model).name if Path(training.model).is_dir() else training.model
    told = {
        "env.rollout_server_url": api, "env.tokenizer_name": folder, "env.group_size": config.group_size,
        "env.max_token_length": options.max_total_tokens, "env.total_steps": -1, "env.use_wandb": "wandb" in training.report_to,
        "openai.base_url": f"{server}/v1", "openai.model_name": name, "openai.tokenizer_name": folder, "openai.api_key": "-",
        "openai.server_type": "vllm"}
    if up.environment.startswith(OWN):
        told |= {"env.data_path": rows, "env.max_new_tokens": config.max_new_tokens,
                 "env.temperature": config.temperature, "env.seed": config.seed}
    command = shlex.split(up.environment.replace("{python}", shlex.quote(python)))
    services.append(Service("environment", command + [f"--{name}={value}" for name, value in told.items()]))
    resume = ["--resume"] * training.resume
    services.append(Service("trainer", [python, "-m", "grpolab", "train", str(up.logs / "trainer.toml"), *resume]))
    return services


def check(up: Up, training: GRPO, rows: Path | None, services: Sequence[Service]) -> None:
    """Refuse what would fail later: before anything is started."""
    if up.environment.startswith(OWN) and (rows is None or importlib.util.find_spec("atroposlib") is None):
        raise UsageError("name the environment's rows, --data FILE (GSM8K's form), or another program as [up] environment"
                         if rows is None else "the environment needs atroposlib: pip install atroposlib")
    if rows:
        gsm8k(rows)
    if shutil.which(up.api) is None:
        raise UsageError(f"--api {up.api}: there is no such program; pip install atroposlib, or name it with its path")
    if up.recipe.resolve() == (up.logs / "trainer.toml").resolve():
        raise UsageError(f"{up.recipe} is where the trainer's recipe would be written: name another folder with --logs")
    written = [up.logs / name for name in ("tokenizer", "trainer.toml", *(f"{s.name}.log" for s in services))]
    if not (up.logs / ".process").exists() and (others := [path for path in written if path.exists()]):
        raise UsageError(f"{others[0]} is not of an earlier grpolab up: name another folder with --logs")
    if training.rollouts.weight_bridge == "shared":
        try:
            refuse_others(training.rollouts.bridge_path)
        except ValueError as error:
            raise UsageError(f"--bridge-path: {error}") from error
    if up.api_port == up.server_port or not 0 < min(up.api_port, up.server_port) <= max(up.api_port, up.server_port) < 2**16:
        raise UsageError(f"--api-port {up.api_port} and --server-port {up.server_port}: two ports from 1 to 65535")
    for option, port in (("--api-port", up.api_port), ("--server-port", up.server_port)):
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            why = f"is not free ({error.strerror}): end what listens there, or take another"
            raise UsageError(f"{option} {port} {why}") from error


def run(up: Up, training: GRPO, services: Sequence[Service]) -> int:
    """Write what the processes read, and supervise them."""
    tokenizer, began = load_tokenizer(training.model), time.monotonic()
    up.logs.mkdir(parents=True, exist_ok=True)
    try:
        with locked(up.logs / ".process"), ExitStack() as stack:  # else another one's trainer would read this recipe
            tokenizer.save_pretrained(up.logs / "tokenizer")
            atomic_write(up.logs / "trainer.toml", training.as_recipe())
            if training.rollouts.weight_bridge == "shared":
                remove_mapped()
                stack.callback(remove_mapped, training.rollouts.bridge_path)  # a trainer that is killed leaves it
            supervise(services, up.logs, up.patience)
    except BlockingIOError as error:
        raise UsageError(f"--logs {up.logs} is in use by process {error.args[0]}, another grpolab up: name another "
                         "folder") from error
    print(f"done in {time.monotonic() - began:.0f} s; the logs of all processes are in {up.logs}/")
    return 0


def remove_mapped(*paths: Path) -> None:
    """Remove mapped weights that nobody uses: those at `paths`, and in memory those of an `up` that was killed."""
    left = [file for path in paths for file in (path, path.with_name(f"{path.name}.lock"),
                                                *path.parent.glob(f".{glob.escape(path.name)}.*.partial"))]
    left += [file for file in MEMORY.glob("*grpolab-[0-9]*.safetensors*")
             if not Path("/proc", re.search(r"grpolab-(\d+)", file.name)[1]).exists()]
    for file in left:
        file.unlink(missing_ok=True)


def supervise(services: Sequence[Service], logs: Path, patience: float) -> None:
    """Start one after the other, show the log of the last one, the trainer, until it ends, and end all. ChildProcessError where
    one fails, TimeoutError where one does not answer in `patience` seconds. At Ctrl-C, SIGTERM or a closed terminal the
    trainer may first keep its checkpoint; at a second one all end at once."""
    *others, trainer = services
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal ends it as Ctrl-C does, unless it is ignored (nohup)
            if signal.getsignal(number) != signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.signal(number, signal.default_int_handler))
        for started, service in enumerate(services, 1):
            service.start(logs)
            stack.callback(child_processes.stop, service.guard)
            await_answer(service, services[:started], patience)
            print(f"{service.name:12} {service.answers or 'started'}   log: {service.log}", flush=True)
        # Each read gives what was added since the one before.
        with open(trainer.log, encoding="utf-8", errors="replace", newline="") as log:
            try:
                while trainer.ended is None:
                    refuse_dead(others)
                    print(log.read(), end="", flush=True)
                    time.sleep(0.2)
            except KeyboardInterrupt:
                trainer.guard.send_signal(signal.SIGINT)
                with suppress(OSError):  # of a terminal that was closed
                    print("interrupted: the trainer keeps a checkpoint; once more ends it at once", file=sys.stderr, flush=True)
                trainer.guard.wait()
                raise
            finally:
                with suppress(OSError):
                    print(log.read(), end="", flush=True)
    refuse_dead([trainer])


def await_answer(service: Service, running: Sequence[Service], patience: float) -> None:
    """Wait until a service answers; ChildProcessError where it, or an earlier one, ends before, and TimeoutError after
    `patience` seconds."""
    until = time.monotonic() + patience
    while service.answers:
        refuse_dead(running)
        with suppress(OSError), DIRECT.open(service.answers, timeout=5):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"the {service.name} did not answer at {service.answers} in {patience:g} s:\n"
                               f"{service.last_lines()}\n  its log: {service.log}")
        time.sleep(0.1)


def refuse_dead(services: Sequence[Service]) -> None:
    """ChildProcessError for a service that has ended; environment and trainer may be done."""
    for service in services:
        status = service.ended
        if status is not None and (status or service.name not in ("environment", "trainer")):
            raise ChildProcessError(f"the {service.name} ended with status {status}, so all were ended:\n"
                                    f"{service.last_lines()}\n  its log: {service.log}")
