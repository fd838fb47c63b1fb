"""GRPO on episodes: groups of them from the seats of a pool, their rewards from the environment (`episodes.py`)."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.dialect import TEXT, Dialect
from grpolab.env.pool import GrpoPool, rollout_seed
from grpolab.lab.run import Run
from grpolab.lab.states import data_hash
from grpolab.models import Policy
from grpolab.train.episodes import (
    Episode,
    Limits,
    as_groups,
    as_task,
    check_limits,
    demonstrate,
    evaluate_episodes,
    play,
    play_all,
)
from grpolab.train.grpo import GRPOConfig, check_reference, describe, grpo_update, prove_both, timings, tokens_of
from grpolab.train.loop import epoch_batches, in_thread, loop, off_loop
from grpolab.train.recorded import episodes_as_recorded

__all__ = ["Episode", "Limits", "as_groups", "demonstrate", "evaluate_episodes", "multi_turn_grpo", "play", "play_all"]


async def multi_turn_grpo(policy: Policy, reference: Policy | None, problems: Any, config: GRPOConfig, pool: GrpoPool, *,
                          limits: Limits | None = None, dialect: Dialect = TEXT, success: float = 1.0,
                          run: Run | None = None) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300) on episodes; `config` as for one turn, where `max_new_tokens` now bounds each turn.

    `problems` are tasks, JSON values or dataclasses, or a curriculum: an object with `next_tasks(n)` and
    `record_result(task, rate)`, told after each step how large a share of a group earned at least `success`; with
    `state()` and `load(state)` too, a run that was interrupted goes on exactly, and one whose cell is run again begins with
    the curriculum as it was when it first began. An
    environment may also draw its question from the seed: the rollouts of a group are reset with one, their draws have
    their own. `dialect` says how text becomes actions and observations text.

    Rows hold what `grpo` yields, and: turns, tool_rate (share of episodes with a call), calls and what else the dialect
    measures, invalid (actions an episode that could not be read), abstained, unheard (share of the episodes in which no
    turn reached the environment), lost, env_s (mean seconds that an episode waited for its environment); with a
    curriculum, its tier and, as JSON, what it was told.
    """
    limits = limits or Limits()
    check_reference(policy, reference, config)
    check_limits(policy, limits)
    if config.refills:
        raise ValueError(f"refills={config.refills}: dynamic sampling is grpo's; leave it 0 for episodes")
    await in_thread(policy, lambda: prove_both(policy, reference, config, limits.max_total_tokens))
    sampler = await off_loop(lambda: Sampler(policy))
    told: list[str] = []  # the warnings that were given
    source = _Source(problems, config, run, success)

    async def gather(step):
        began, size = time.perf_counter(), config.group_size
        asked = source.tasks(step)
        episodes = await play_all(
            pool, sampler, [task for task in asked for _ in range(size)], limits=limits, dialect=dialect,
            params=SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
            seeds=[_draws_of(config.seed, step, i) for i in range(len(asked) * size)],
            reset_seeds=[rollout_seed(config.seed, step, -1 - g) for g in range(len(asked)) for _ in range(size)])
        groups = as_groups(episodes, size, pool.min_group if pool.on_failure == "drop" else 1)
        scored = [g for g in groups if any(reward is not None for reward in g.rewards)]
        sampling, habits = time.perf_counter() - began, _habits(episodes)
        _warn(habits, config, limits, told)

        def update(optimiser):
            if run is not None:
                recorded = episodes_as_recorded(asked, episodes, groups, scored, config.advantage_kind)
                run.record(step, policy, recorded, sampler.engine.name)
            began = time.perf_counter()
            row = grpo_update(policy, reference, scored, config, optimiser, step)
            times = timings(tokens_of(groups), sampling, row["trained_tokens"] * config.inner_epochs,
                            time.perf_counter() - began)
            return describe(groups) | row | times | habits | source.record(asked, episodes)

        return update

    def data():
        return data_hash(source.content(), reference if config.kl_coef else None)

    async with sampler, aclosing(loop(policy, config, run, gather, data)) as rows:
        async for row in rows:
            yield row


def _draws_of(seed: int, step: int, rollout: int) -> int:
    """The seed of one rollout's draws, below 2**63: of the width of the sampler's, not of an environment's."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rollout}".encode()).digest()[:8], "big") >> 1


def _habits(episodes: Sequence[Episode | None]) -> dict:
    kept = [e for e in episodes if e is not None]

    def share(values) -> float:
        return sum(values) / len(kept)

    measured = dict.fromkeys(name for e in kept for name in e.measures)
    return {name: share(e.measures.get(name, 0) for e in kept) for name in measured} | {
        "turns": share(len(e.turns) for e in kept), "tool_rate": share(e.calls > 0 for e in kept),
        "invalid": share(e.invalid for e in kept), "abstained": share(e.rollout.reward is None for e in kept),
        "unheard": share(not e.turns for e in kept), "lost": len(episodes) - len(kept),
        "env_s": share(e.env_s for e in kept)}


def _warn(habits: dict, config: GRPOConfig, limits: Limits, told: list[str]) -> None:
    """Once a run, where a step can teach nothing, say why."""
    if habits["unheard"] == 1 and not told:
        told.append("unheard")
        warnings.warn(f"no turn of this step's episodes was ended by the policy, so no environment heard one, and there is "
                      f"nothing to learn from: it never writes its end token within max_new_tokens={config.max_new_tokens} "
                      f"(and {limits}). Raise that, or show it first how a turn ends (`sft` on `demonstrate`)", stacklevel=2)
    if habits["abstained"] == 1 and not told:
        told.append("abstained")
        warnings.warn("every episode of this step abstained over an action that could not be read, so there is nothing to "
                      "learn from: use on_invalid='tell' or 'penalise', or show the form of an action first", stacklevel=2)


class _Source:
    """The tasks of a step: drawn from a list, or wanted by a curriculum, which is told what came of them. The rows hold
    its state at the run's start and all that it was told since, so that a run which goes on brings it back to there; and a
    run that starts again takes the curriculum back to that start, as it does the policy."""

    def __init__(self, problems: Any, config: GRPOConfig, run: Run | None, success: float):
        self.problems, self.config, self.run, self.success = problems, config, run, success
        self.adaptive = hasattr(problems, "next_tasks")
        self.batch_of = None if self.adaptive else epoch_batches(problems, config.prompts_per_step, config.seed)
        self.begun: dict | None = None  # what the first row says

    def content(self) -> list:
        """What is trained on, for a hash. A curriculum changes as it goes, and `load` refuses the state of other tasks."""
        return [getattr(self.problems, "config", None)] if self.adaptive else [as_task(p) for p in self.problems]

    def tasks(self, step: int) -> list:
        if not self.adaptive:
            return [as_task(p) for p in self.batch_of(step)]
        if self.begun is None:
            self._begin(step)
        return list(self.problems.next_tasks(self.config.prompts_per_step))

    def record(self, asked: Sequence, episodes: Sequence[Episode | None]) -> dict:
        """Tell the curriculum each group's rate of success; returns what of it belongs into the row."""
        if not self.adaptive:
            return {}
        size, results = self.config.group_size, []
        for g, task in enumerate(asked):
            rewards = [e.rollout.reward for e in episodes[g * size : (g + 1) * size] if e is not None]
            rewards = [r for r in rewards if r is not None]
            if rewards:
                results.append((task, sum(r >= self.success for r in rewards) / len(rewards)))
        row = {"tier": self.problems.tier} if hasattr(self.problems, "tier") else {}
        for task, rate in results:
            self.problems.record_result(task, rate)
        said, self.begun = self.begun | {"results": results}, {}
        return row | {"curriculum": json.dumps(said)}

    def _begin(self, step: int) -> None:
        kept = hasattr(self.problems, "state") and hasattr(self.problems, "load")
        if not step:
            self._take_back(kept)
            self.begun = {"start": json.loads(json.dumps(self.problems.state()))} if kept else {}  # as it is now
            self._remember(self.begun.get("start"))
            return
        rows = [json.loads(row["curriculum"]) for row in (self.run.metrics if self.run else ()) if "curriculum" in row]
        self.begun = {}
        if len(rows) != step or not kept or "start" not in rows[0]:
            raise ValueError(f"the run goes on after step {step}, and its curriculum cannot be brought back to there: it "
                             "needs `state()` and `load(state)`, as a Curriculum has, and the rows of the steps before")
        self.problems.load(rows[0]["start"])
        self._remember(rows[0]["start"])
        for task, rate in (result for row in rows for result in row["results"]):
            self.problems.record_result(task, rate)

    def _take_back(self, kept: bool) -> None:
        """A curriculum that an earlier loop of this run has told something goes back to where that loop began."""
        starts, name = _starts_of(self.problems), self._folder()
        if name not in starts:
            return
        if not kept:
            raise ValueError("an earlier loop of this run told this curriculum its results, and it cannot be taken back: make "
                             "it anew, or give it `state()` and `load(state)`, as a Curriculum has")
        if self.problems.state() != starts[name]:
            self.problems.load(starts[name])
            print(f"the curriculum goes back to where {self.run.shown(self.run.folder)} started")
        for later in list(starts)[list(starts).index(name) :]:  # they began with what this run made of it
            del starts[later]

    def _remember(self, start: dict | None) -> None:
        if self.run:
            _starts_of(self.problems)[self._folder()] = start

    def _folder(self) -> str:
        return str(self.run.folder.resolve()) if self.run else ""


# A curriculum by its id, since it need not be hashable: itself, weakly, and the folders of the runs that told it something, in
# order, each with its state at their start.
_told_by: dict[int, tuple[weakref.ref, dict[str, dict | None]]] = {}


def _starts_of(curriculum: Any) -> dict[str, dict | None]:
    known, starts = _told_by.get(id(curriculum), (lambda: None, {}))
    if known() is not curriculum:
        starts, place = {}, id(curriculum)
        _told_by[place] = weakref.ref(curriculum, lambda _: _told_by.pop(place, None)), starts
    return starts
