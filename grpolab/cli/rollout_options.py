"""Where the rollouts of `grpolab grpo` come from, where they are not completions of prompts by this process: episodes in an
environment or with tools, runs of an agent, Atropos, or a served policy, to which the updates are brought."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from grpolab.cli import UsageError
from grpolab.decode.sampler import Sampler
from grpolab.env.action_format import TEXT, ActionFormat
from grpolab.env.curriculum import Curriculum
from grpolab.env.pool import GrpoPool
from grpolab.env.worker import load_factory
from grpolab.models.load import Policy
from grpolab.runs.run import Run
from grpolab.train import distributed
from grpolab.train.episodes import Limits, evaluate_episodes
from grpolab.train.grpo import GRPOConfig, asked, grpo_from
from grpolab.train.loop import off_loop
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.sources import Source, sampled
from grpolab.train.tools import Tools

KINDS = ("env", "tools", "agent", "atropos_url")
COMPLETIONS = (None, "server_url")  # of prompts, sampled by this process or by a served policy
READ_BY = {  # options that only some sources of rollouts read
    "reward": (*COMPLETIONS, "tools"), "data curriculum": (*COMPLETIONS, "env", "tools", "agent"), "action_format": ("env",),
    "pool_size max_turns": ("env", "tools"), "max_total_tokens": KINDS, "timeout": ("agent", "atropos_url"),
    "refills": COMPLETIONS, "held_out held_out_data": (*COMPLETIONS, "env", "tools"),
    "exact": (None, "env", "tools", "agent"),
}


@dataclass(frozen=True)
class RolloutOptions:
    """At most one of --env, --tools, --agent and --atropos-url."""

    env: str | None = None
    """An environment: the address of a server (ws://...), or calculator, guess or package.module:Class, made in this process"""
    tools: tuple[str, ...] = ()
    """Functions, or one class, that the policy may call: file.py:name; --reward then takes the ToolRun of an episode."""
    agent: str | None = None  # file.py:function, async (base_url, task) -> reward, which asks the policy at that endpoint
    atropos_url: str | None = None  # Atropos' trajectory API (run-api)
    pool_size: int = 32  # sessions of the environment or the tools that are open at a time
    max_turns: int = 4  # turns in an episode
    max_total_tokens: int = 512  # tokens in an episode, an agent's conversation, or a sequence of Atropos
    action_format: str | None = None  # module:name of an ActionFormat (default: {"text": ...} for --env)
    timeout: float = 120.0  # seconds that one run of an agent, or Atropos' next batch, may take
    server_url: str | None = None
    """A served policy (serve-policy) that samples the completions or, with --atropos-url, answers Atropos' environments"""
    weight_bridge: Literal["shared", "lora_only", "lora_restart", "none"] | None = None
    """How it gets the updates: all weights in a file (shared: its --weights; on processors both use that one copy), an
    adapter through a folder (lora_only: its --adapters), or by starting it again with the saved adapter (lora_restart) or
    model (none), which this process then does"""
    bridge_path: Path | None = None  # that file, or the folder of adapters or models
    sync_every: int = 1  # optimiser steps from one update of the server to the next
    curriculum: str | None = None  # a field of the rows: its values in order are tiers, and the next opens when one is learned

    @property
    def kind(self) -> str | None:
        """Which of the four it is; None for completions of prompts."""
        return next((name for name in KINDS if getattr(self, name)), None)

    def check(self, reward: str | None, lora_rank: int) -> None:
        chosen = [flag_of(name) for name in KINDS if getattr(self, name)]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(chosen)}: rollouts come from one of them")
        if self.kind == "tools" and not reward:
            raise UsageError("--tools needs --reward file.py:function, which is told an episode's ToolRun")
        self._check_bridge(lora_rank)

    def _check_bridge(self, lora_rank: int) -> None:
        parts = {"--server-url": self.server_url, "--weight-bridge": self.weight_bridge, "--bridge-path": self.bridge_path}
        missing = [name for name, value in parts.items() if value is None]
        if 0 < len(missing) < len(parts):
            raise UsageError(f"{', '.join(sorted(parts.keys() - {*missing}))} without {' and '.join(missing)}: a served policy "
                             "needs an address, a way for the updates, and a file or folder for them")
        if not missing and self.kind not in (None, "atropos_url"):
            raise UsageError("--server-url: a served policy samples prompts, or answers Atropos' environments")
        if self.weight_bridge and self.weight_bridge.startswith("lora") != bool(lora_rank):
            raise UsageError(f"--weight-bridge {self.weight_bridge} " + (
                "sends whole models: with --lora-rank take lora_only or lora_restart" if lora_rank else
                "sends an adapter: add --lora-rank N"))

    def conditions(self) -> list[tuple[str, Any, str]]:
        """Which options this source of rollouts reads: rules of `recipe.refuse_unread`."""
        source = self.kind or ("server_url" if self.server_url else None)
        return [("sync_every", self.server_url, "is of --server-url: leave it out"), *(
            (options, source in sources, f"is of {', '.join(map(flag_of, sources))}, not of {flag_of(source)}: leave it out")
            for options, sources in READ_BY.items())]

    def tasks(self, rows: Sequence[Any], seed: int) -> Any:
        """The rows, or the curriculum that they make."""
        if not self.curriculum:
            return rows
        missing = next((n for n, row in enumerate(rows, 1) if not isinstance(row, dict) or self.curriculum not in row), None)
        if missing:
            raise ValueError(f"--curriculum {self.curriculum}: row {missing} has no such field, which says its tier")
        try:
            levels = sorted({row[self.curriculum] for row in rows})
        except TypeError as error:
            raise ValueError(f"--curriculum {self.curriculum}: its values have no order; take numbers alone, or texts alone "
                             f"({error})") from error
        return Curriculum([[row for row in rows if row[self.curriculum] == level] for level in levels], seed=seed)


def flag_of(source: str | None) -> str:
    return "--" + source.replace("_", "-") if source else "completions of prompts"


Steps = Callable[[Run], AsyncIterator[dict]]


def rollouts_of(options: RolloutOptions, policy: Policy, reference: Policy | None, rows: Any, config: GRPOConfig,
                reward: Callable | None) -> tuple[Steps, Callable[[Sequence[Any]], Callable] | None]:
    """(run -> GRPO's rows, held-out tasks -> a measure) of --env, --tools, --agent or --atropos-url. The measure is the tasks'
    mean reward, greedily; None for agents and Atropos."""
    if options.kind == "agent":
        from grpolab.serve.agents import agent_grpo

        agent = load_object(options.agent, "--agent")
        return lambda run: agent_grpo(policy, reference, rows, config, agent, timeout=options.timeout,
                                      max_total_tokens=options.max_total_tokens, run=run), None
    if options.kind == "atropos_url":
        return lambda run: posted(options, policy, reference, config, run), None
    limits = Limits(options.max_turns, options.max_total_tokens)
    if options.tools:
        functions = [load_object(name, "--tools") for name in options.tools]
        make: Any = Tools(functions[0] if len(functions) == 1 and isinstance(functions[0], type) else functions, reward)
        form = make.action_format(policy.tokenizer)
    else:
        make = options.env if "://" in options.env else load_factory(options.env)
        form = load_object(options.action_format, "--action-format") if options.action_format else TEXT
        if not isinstance(form, ActionFormat):
            raise ValueError(f"--action-format {options.action_format} is {form!r:.60}, no ActionFormat")
    pool = GrpoPool(make, size=options.pool_size, seed=config.seed, queue=60.0)

    async def played(run: Run) -> AsyncIterator[dict]:
        steps = multi_turn_grpo(policy, reference, rows, config, pool, limits=limits, action_format=form, run=run)
        async with pool, aclosing(steps):
            async for row in steps:
                yield row

    def measured(held_out: Sequence[Any]) -> Callable:
        async def measure(policy: Policy) -> float:
            async with await off_loop(lambda: Sampler(policy)) as sampler:
                played = await evaluate_episodes(pool, sampler, held_out, limits=limits, action_format=form,
                                                 max_new_tokens=config.max_new_tokens)
            rewards = [e.rollout.reward for e in played if e.rollout.reward is not None]
            return sum(rewards) / len(rewards) if rewards else float("nan")

        return measure

    return played, measured


async def posted(options: RolloutOptions, policy: Policy, reference: Policy | None, config: GRPOConfig,
                 run: Run) -> AsyncIterator[dict]:
    """GRPO's rows from what Atropos' environments post; a served policy that they sample from follows this one."""
    from grpolab.serve.atropos import AtroposTrainer, atropos_source

    trainer = AtroposTrainer(options.atropos_url, batch_size=config.prompts_per_step * config.group_size,
                             max_token_len=options.max_total_tokens, num_steps=config.steps, timeout=options.timeout,
                             name=str(run.folder.resolve()))  # a run that goes on is the same trainer
    async with bridged(options, policy) as (_, follow):
        # Environments begin when it registers, in the first step: the server then has the weights of a run that goes on.
        source = follow(atropos_source(trainer, policy, config))
        rows = grpo_from(policy, reference, source, config, longest=options.max_total_tokens, run=run)
        async with aclosing(rows) as steps:
            async for row in steps:
                yield row


async def served(options: RolloutOptions, policy: Policy, reference: Policy | None, rows: Any, config: GRPOConfig,
                 reward: Callable, run: Run) -> AsyncIterator[dict]:
    """GRPO's rows from completions that a served policy samples."""
    tasks, ids_of, longest = await asked(policy, rows, config, reward, None, run, 1.0)
    async with bridged(options, policy) as (sampler, follow):
        source = follow(sampled(policy, sampler, tasks, ids_of, config, reward))
        steps = grpo_from(policy, reference, source, config, longest=longest, run=run, content=tasks.content)
        async with aclosing(steps) as rows:
            async for row in rows:
                yield row


@asynccontextmanager
async def bridged(options: RolloutOptions, policy: Policy) -> AsyncIterator[tuple[Any, Callable[[Source], Source]]]:
    """(sampler, source -> the source before whose steps the updates are brought to the server) of --server-url; (None, the
    source itself) without one. What a server refuses ends the command with its text."""
    from grpolab.serve.http_client import RemoteError
    from grpolab.serve.mapped import Mapped
    from grpolab.serve.remote import RemoteSampler, following
    from grpolab.serve.weight_sync import AdapterSwap, Restart, SharedFile

    whole = Mapped if policy.device.type == "cpu" else SharedFile
    bridges = {"shared": whole, "lora_only": AdapterSwap, "lora_restart": Restart, "none": Restart}
    try:
        if options.server_url is None:
            yield None, lambda source: source
            return
        if distributed.world().size > 1:
            raise ValueError("--server-url: one process trains and publishes; start it without torchrun")
        bridge = bridges[options.weight_bridge](options.bridge_path)
        async with RemoteSampler(options.server_url, policy, bridge=bridge) as sampler:
            yield sampler, lambda source: following(sampler, source, options.sync_every)
    except RemoteError as error:
        raise ConnectionError(str(error)) from error


def load_reward(name: str) -> Callable:
    """The reward that --reward names: a function, or an object with `batch`, as Several."""
    reward = load_object(name, "--reward")
    if not callable(reward) and not hasattr(reward, "batch"):
        raise ValueError(f"--reward {name} is no function, but {reward!r:.60}")
    return reward


def load_object(name: str, option: str) -> Any:
    """What `module:name` or `path/to/file.py:name` names."""
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(".py")
    if not (module and attribute) or module.startswith(".") and not is_file:
        raise ValueError(f"{option} is module:function or file.py:function, got {name!r}")
    if is_file and not Path(module).is_file():
        raise ValueError(f"{option} {name}: there is no file {module}")
    try:
        loaded = (_module_of(Path(module).resolve(), Path(module).stat().st_mtime_ns) if is_file else
                  importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        if not isinstance(error, ImportError | SyntaxError):  # whose texts say where
            traceback.print_exception(error)
        raise ValueError(f"{option} {name} cannot be imported: {error!r}") from error
    if not hasattr(loaded, attribute):
        raise ValueError(f"{module} has no function {attribute!r}")
    return getattr(loaded, attribute)


@cache
def _module_of(file: Path, written: int) -> ModuleType:
    """The module of a file, one for all that is named of it, so that tools and reward share its state and its classes."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, loaded)  # where a dataclass of the file looks for its annotations
    spec.loader.exec_module(loaded)
    return loaded
