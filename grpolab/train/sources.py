"""Where a step's groups come from: a source is an async function of the step, and one trainer takes any of them.

    async def source(step: int) -> StepGroups: ...                # or the groups alone

Rollouts of the sampler (`sampled`, which `grpo` uses), episodes of a pool (`multi_turn_grpo`), a record on disk
(`replay_source.recorded_groups`), or anything else that gives groups of rollouts with their rewards. What a source draws is a
function of the step and of its seed, so that a run that was interrupted asks for the same again.
"""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams, fold_seed, group_seeds
from grpolab.models.load import Policy
from grpolab.rollouts import Group, RecordedGroup
from grpolab.runs.run import Run
from grpolab.train import distributed
from grpolab.train.advantages import group_health, informative, reward_tensor
from grpolab.train.grpo_config import GRPOConfig
from grpolab.train.loop import epoch_batches, off_loop
from grpolab.train.recorded import as_recorded
from grpolab.train.rewards import Faults, Reward, faults_of_all, report, sample_and_score, watched
from grpolab.train.several_rewards import Several, part_of


@dataclass(frozen=True)
class StepGroups:
    """What a source gives a step.

    groups  to train on, with their rewards (None abstains)
    row     what it cost and what was seen, for the step's row; it may replace the trainer's own numbers
    seen    what the policy made of the tasks as they were drawn, which the row describes (default: the groups)
    tokens  sampled for it in all (default: those of `seen`)
    after_step  called once the step was taken; what it returns joins the row (a curriculum is told there)
    advantages  of the groups' rollouts (B, G), where their rewards alone do not make them (default: they do)
    record  the groups as a Run's record keeps them (default: the groups as they are); `engine` names their sampler's
    off_policy  the rollouts are of another policy: the row then tells how far it is (`replay_source.importance`)
    """

    groups: Sequence[Group]
    row: Mapping[str, Any] = field(default_factory=dict)
    seen: Sequence[Group] | None = None
    tokens: int | None = None
    after_step: Callable[[], dict] = dict
    advantages: torch.Tensor | None = None
    record: Callable[[], Sequence[RecordedGroup]] | None = None
    engine: str = ""
    off_policy: bool = False


# A source may also have `check(policy, config, run)`, which is called before the first step and refuses what it cannot serve.
Source = Callable[[int], Awaitable[StepGroups | Sequence[Group]]]


def as_step_groups(value: StepGroups | Sequence[Group]) -> StepGroups:
    """What a source gave, as StepGroups. TypeError for what holds no groups, ValueError for groups of different sizes."""
    batch = value if isinstance(value, StepGroups) else StepGroups(value if isinstance(value, list | tuple) else [value])
    for name, groups in (("groups", batch.groups), ("seen", batch.seen or ())):
        if wrong := [g for g in groups if not isinstance(g, Group)]:
            raise TypeError(f"a source gives Groups of rollouts with their rewards, or a StepGroups of them; its {name} hold "
                            f"{wrong[0]!r:.80}, a {type(wrong[0]).__name__}")
    if len(sizes := {len(g) for g in batch.groups}) > 1:
        raise ValueError(f"a source gave groups of {sorted(sizes)} rollouts: the groups of a step have one size, and what is "
                         "missing abstains (reward None)")
    if not (batch.groups or batch.seen):
        raise ValueError("a source gave no groups: a step needs some, also where none of them teaches")
    return batch


def sampled(
    policy: Policy, sampler: Sampler, tasks: Tasks, prompt_of: Callable[[Any], Sequence[int]], config: GRPOConfig,
    reward: Reward, watch: Mapping[str, Reward] | None = None,
) -> Source:
    """The source of `grpo`: completions of the tasks' prompts (`prompt_of`: row -> token ids), scored while the others are
    decoded. With `config.refills`, groups without a difference in reward are replaced by groups of further tasks."""
    if isinstance(reward, Several):
        if both := set(reward.rewards) & set(watch or ()):
            raise ValueError(f"{sorted(both)} are among the rewards and among the watched ones: a name stands for one")
        if config.refills and reward.combination == "normalise_then_sum":
            raise ValueError("refills look at the totals, of which 'normalise_then_sum' makes no advantages: leave them 0")
    gate = reward.gate if isinstance(reward, Several) else None
    warnings_given, watch_warnings = [], []
    distinct_rows = distinct(tasks.rows) if config.refills else []

    async def source(step: int) -> StepGroups:
        faults = Faults()
        everything: list[tuple[Any, Group]] = []

        async def ask(rows, seed):
            params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=seed)
            shard = distributed.shard(rows)
            prompts = await off_loop(lambda: [prompt_of(row) for row in shard])
            if distributed.world().size == 1:
                groups = await sample_and_score(policy, sampler, rows, prompts, config.group_size, params, reward, faults)
            else:  # the rollouts that one process would draw, each rank its groups
                seeds = group_seeds(seed, distributed.shard(range(len(rows))), config.group_size)
                own = await sample_and_score(policy, sampler, shard, prompts, config.group_size, params, reward, faults, seeds)
                groups = await off_loop(lambda: distributed.gathered(
                    f"the groups of step {step}", rows, own, distributed.plain_group, distributed.group_of))
            everything.extend(zip(rows, groups))
            return groups

        rows = await off_loop(lambda: tasks.tasks(step))
        first = await ask(rows, config.seed * 1_000_003 + step)
        groups, cost = await refill(ask, rows, first, distinct_rows, config, step, gate) if config.refills else (first, {})
        faults = await faults_of_all(faults, f"the rewards of step {step}")
        errors = report(faults, sum(len(g) for _, g in everything), warnings_given)
        parts = await watched(policy, rows, first, reward, watch, watch_warnings) if watch else {}
        means = {name: reward_tensor(values).nanmean().item() for name, values in (parts_of(first) | parts).items()}
        a = reward.advantages(groups, config.advantage_kind) if isinstance(reward, Several) else None
        health = group_health(part_of(first, gate)) if gate else {}
        return StepGroups(
            groups, errors | cost | health | means, seen=first, tokens=tokens_of([g for _, g in everything]),
            after_step=lambda: tasks.record(rows, [[r.parts.get(gate) if gate else r.reward for r in g] for g in first]),
            advantages=a,
            record=lambda: as_recorded(everything, groups, parts, config.advantage_kind, a), engine=sampler.engine.name,
        )

    return source


def parts_of(groups: Sequence[Group]) -> dict[str, list[list[float | None]]]:
    """What the rewards of the groups were made of, by name: (B, G)."""
    names = dict.fromkeys(name for g in groups for r in g for name in r.parts)
    return {name: [[r.parts.get(name) for r in g] for g in groups] for name in names}


async def refill(ask, asked_rows: Sequence[Any], first: Sequence[Group], rows: Sequence[Any], config, step: int,
                 gate: str | None = None):
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): (groups to train on, what it cost).

    Each round asks as many rows, none of them twice in a step, as groups with a difference in reward are missing: a
    function of (seed, step) and of the rewards, so that a resumed run asks the same. Where rounds or rows run out, the
    step trains on fewer groups. `ask(rows, seed)` samples and scores. Rows with the same content count as one. `gate` names
    the part of the reward whose differences count, where that is not the whole.
    """
    used = set(map(content_of, asked_rows))
    order = random.Random(f"{config.seed}/{step}/refill").sample(rows, len(rows))
    unused = (r for r in order if content_of(r) not in used)
    sampled, teaching = list(first), with_signal(first, gate)
    for extra in range(config.refills):
        more = list(islice(unused, max(0, config.prompts_per_step - len(teaching))))
        if not more:
            break
        fresh = await ask(more, fold_seed(config.seed, step, extra))
        sampled, teaching = sampled + fresh, teaching + with_signal(fresh, gate)
    return teaching, {
        "refill_prompts": len(sampled) - len(first),
        "refill_tokens": tokens_of(sampled) - tokens_of(first),
        "discarded_groups": len(sampled) - len(teaching),
        "discarded_tokens": tokens_of(sampled) - tokens_of(teaching),
    }


def content_of(row: Any) -> Any:
    """Something hashable that equal rows share."""
    try:
        hash(row)
    except TypeError:
        return json.dumps(row, sort_keys=True, default=repr)
    return row


def distinct(rows: Iterable[Any]) -> list[Any]:
    """The rows, each content once, in their order."""
    first: dict = {}
    for row in rows:
        first.setdefault(content_of(row), row)
    return list(first.values())


def with_signal(groups: Sequence[Group], gate: str | None = None) -> list[Group]:
    """The groups whose rewards differ, or the part of them that `gate` names."""
    rewards = part_of(groups, gate) if gate else reward_tensor([g.rewards for g in groups])
    return [g for g, keep in zip(groups, informative(rewards).tolist()) if keep]


def tokens_of(groups: Sequence[Group]) -> int:
    return sum(len(r.tokens) for g in groups for r in g)


class Tasks:
    """The tasks of a step: drawn from a list, or wanted by a curriculum, which is told what came of them. The rows hold
    its state at the run's start and all that it was told since, so that a run which goes on brings it back to there; and a
    run that starts again takes the curriculum back to that start, as it does the policy."""

    def __init__(self, rows: Any, config: GRPOConfig, run: Run | None, success: float = 1.0):
        self.rows, self.config, self.run, self.success = rows, config, run, success
        self.adaptive = hasattr(rows, "next_tasks")
        self.batch_of = None if self.adaptive else epoch_batches(rows, config.prompts_per_step, config.seed)
        self.begun: dict | None = None  # what the first row says

    def content(self) -> list:
        """What is trained on, for a hash. A curriculum changes as it goes, and `load` refuses the state of other tasks."""
        return [getattr(self.rows, "config", None)] if self.adaptive else self.rows

    def tasks(self, step: int) -> list:
        """The rows of a step."""
        if not self.adaptive:
            return self.batch_of(step)
        if self.begun is None:
            self._begin(step)
        return list(self.rows.next_tasks(self.config.prompts_per_step))

    def record(self, tasks: Sequence, rewards: Sequence[Sequence[float | None]]) -> dict:
        """Tell the curriculum each group's rate of success; returns what of it belongs into the row."""
        if not self.adaptive:
            return {}
        results = []
        for task, of in zip(tasks, rewards):
            numbers = [r for r in of if r is not None]
            if numbers:
                results.append((task, sum(r >= self.success for r in numbers) / len(numbers)))
        row = {"tier": self.rows.tier} if hasattr(self.rows, "tier") else {}
        for task, rate in results:
            self.rows.record_result(task, rate)
        entry, self.begun = self.begun | {"results": results}, {}
        return row | {"curriculum": json.dumps(entry)}

    def _begin(self, step: int) -> None:
        can_return = hasattr(self.rows, "state") and hasattr(self.rows, "load")
        if not step:
            self._take_back(can_return)
            self.begun = {"start": json.loads(json.dumps(self.rows.state()))} if can_return else {}  # as it is now
            self._remember(self.begun.get("start"))
            return
        entries = [json.loads(row["curriculum"]) for row in (self.run.metrics if self.run else ()) if "curriculum" in row]
        self.begun = {}
        if len(entries) != step or not can_return or "start" not in entries[0]:
            raise ValueError(f"the run goes on after step {step}, and its curriculum cannot be brought back to there: it "
                             "needs `state()` and `load(state)`, as a Curriculum has, and the rows of the steps before")
        self.rows.load(entries[0]["start"])
        self._remember(entries[0]["start"])
        for task, rate in (result for row in entries for result in row["results"]):
            self.rows.record_result(task, rate)

    def _take_back(self, can_return: bool) -> None:
        """A curriculum that an earlier loop of this run has told something goes back to where that loop began."""
        starts, name = _starts_of(self.rows), self._folder()
        if name not in starts:
            return
        if not can_return:
            raise ValueError("an earlier loop of this run told this curriculum its results, and it cannot be taken back: make "
                             "it anew, or give it `state()` and `load(state)`, as a Curriculum has")
        if self.rows.state() != starts[name]:
            self.rows.load(starts[name])
            print(f"the curriculum goes back to where {self.run.shown(self.run.folder)} started")
        for later in list(starts)[list(starts).index(name) :]:  # they began with what this run made of it
            del starts[later]

    def _remember(self, start: dict | None) -> None:
        if self.run:
            _starts_of(self.rows)[self._folder()] = start

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
