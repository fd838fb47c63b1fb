"""Where a step's groups come from: a source is an async function of the step, and one trainer takes any of them.

    async def source(step: int) -> StepGroups: ...                # or the groups alone

Rollouts of the sampler (`sampled`, which `grpo` uses), episodes of a pool (`multi_turn_grpo`), a record on disk
(`replay_source.recorded_groups`), or anything else that gives groups of rollouts with their rewards. What a source draws is a
function of the step and of its seed, so that an interrupted run draws the same again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams, fold_seed, group_seeds
from grpolab.models.load import Policy
from grpolab.rollouts import Group, RecordedGroup
from grpolab.runs.run import Run
from grpolab.train import distributed
from grpolab.train.advantages import advantages, group_health, informative, reward_tensor
from grpolab.train.grpo_config import GRPOConfig
from grpolab.train.loop import epoch_batches, off_loop
from grpolab.train.rewards import Reward, faults_of_all, report, sample_and_score, watched
from grpolab.train.several_rewards import Several, part_of


@dataclass(frozen=True)
class StepGroups:
    """What a source gives a step.

    groups  to train on, with their rewards (None abstains)
    row     columns of the step's row: costs, measurements; they may replace the trainer's own
    seen    the groups that the row describes (default: `groups`)
    tokens  sampled for the step in all (default: those of `seen`)
    after_step  called once the step was taken; what it returns joins the row (it updates a curriculum)
    advantages  of the groups' rollouts (B, G), where they are not those of their rewards
    record  the groups as a Run's record keeps them (default: `seen`); `engine` names their sampler's
    off_policy  the rollouts are of another policy: the row then says how far it is (`replay_source.importance`)
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
    """What a source returned, as StepGroups. TypeError for what holds no groups, ValueError for groups of different sizes."""
    batch = value if isinstance(value, StepGroups) else StepGroups(value if isinstance(value, list | tuple) else [value])
    if wrong := [g for g in (*batch.groups, *(batch.seen or ())) if not isinstance(g, Group)]:
        raise TypeError(f"a source gives Groups of rollouts with their rewards, or a StepGroups of them, not {wrong[0]!r:.80}")
    if len(sizes := {len(g) for g in batch.groups}) > 1:
        raise ValueError(f"a source gave groups of {sorted(sizes)} rollouts: the groups of a step have one size, and what is "
                         "missing abstains (reward None)")
    if not (batch.groups or batch.seen):
        raise ValueError("a source gave no groups: a step needs some, also where none of them teaches")
    return batch


def as_recorded(sampled: Sequence[tuple[Any, Group]], used: Sequence[Group], kind: str,
                used_advantages: torch.Tensor | None = None) -> list[RecordedGroup]:
    """The groups of a step as its record keeps them: those that the update gets, then the others of those `sampled`, pairs
    (problem, group). `kind` is that of their advantages; `used_advantages` (B, G) are given where they are of no kind."""
    problems = {id(group): problem for problem, group in sampled}
    others = [group for _, group in sampled if all(group is not g for g in used)]

    def of_kind(groups):
        return advantages(reward_tensor([g.rewards for g in groups]), kind).tolist() if groups else []

    a = (of_kind(used) if used_advantages is None else used_advantages.tolist()) + of_kind(others)
    return [RecordedGroup(g, tuple(row), problems.get(id(g)), used=k < len(used), parts={
        name: values for name, (values,) in parts_of([g]).items()}) for k, (g, row) in enumerate(zip([*used, *others], a))]


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
    distinct_rows = list({content_of(row): row for row in tasks.rows}.values()) if config.refills else []

    async def source(step: int) -> StepGroups:
        faults: list[Exception] = []

        async def sample(rows, seed):
            params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=seed)
            shard = distributed.shard(rows)
            prompts = await off_loop(lambda: [prompt_of(row) for row in shard])
            seeds = None
            if distributed.world().size > 1:  # the rollouts that one process would draw, each rank its groups
                seeds = group_seeds(seed, distributed.shard(range(len(rows))), config.group_size)
            own = await sample_and_score(policy, sampler, shard, prompts, config.group_size, params, reward, faults, seeds)
            return await off_loop(lambda: distributed.gathered(f"the groups of step {step}", rows, own))

        rows = await off_loop(lambda: tasks.tasks(step))
        first = await sample(rows, config.seed * 1_000_003 + step)
        first = await watched(policy, rows, first, reward, watch or {}, watch_warnings)
        groups, further, cost = first, [], {}
        if config.refills:
            groups, further, cost = await refill(sample, rows, first, distinct_rows, config, step, gate)
        everything = [*zip(rows, first), *further]
        faults = await faults_of_all(faults, f"the rewards of step {step}")
        errors = report(faults, sum(len(g) for _, g in everything), warnings_given)
        means = {name: reward_tensor(values).nanmean().item() for name, values in parts_of(first).items()}
        a = reward.advantages(groups, config.advantage_kind) if isinstance(reward, Several) else None
        health = group_health(part_of(first, gate)) if gate else {}
        return StepGroups(
            groups, errors | cost | health | means, seen=first, tokens=tokens_of([g for _, g in everything]),
            after_step=lambda: tasks.record(rows, [[r.parts.get(gate) if gate else r.reward for r in g] for g in first]),
            advantages=a, record=lambda: as_recorded(everything, groups, config.advantage_kind, a), engine=sampler.engine.name)

    return source


def parts_of(groups: Sequence[Group]) -> dict[str, list[list[float | None]]]:
    """The rewards that those of the groups were made of, and the watched ones, by name: (B, G)."""
    names = dict.fromkeys(name for g in groups for r in g for name in r.parts)
    return {name: [[r.parts.get(name) for r in g] for g in groups] for name in names}


async def refill(sample, first_rows: Sequence[Any], first: Sequence[Group], rows: Sequence[Any], config: GRPOConfig, step: int,
                 gate: str | None = None) -> tuple[list[Group], list[tuple[Any, Group]], dict]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): (groups to train on, what was sampled further, what it cost).

    Each round samples as many rows, none of them twice in a step, as groups with a difference in reward are missing: a
    function of (seed, step) and of the rewards, so that a resumed run samples the same. Where rounds or rows run out, the
    step trains on fewer groups. `sample(rows, seed)` gives groups with rewards. Rows with the same content count as one.
    `gate` names the part of the reward whose differences count, where that is not the whole.
    """
    used = set(map(content_of, first_rows))
    order = random.Random(f"{config.seed}/{step}/refill").sample(rows, len(rows))
    unused = (r for r in order if content_of(r) not in used)
    further, teaching = [], with_signal(first, gate)
    for extra in range(config.refills):
        more = list(islice(unused, max(0, config.prompts_per_step - len(teaching))))
        if not more:
            break
        fresh = await sample(more, fold_seed(config.seed, step, extra))
        further += zip(more, fresh)
        teaching += with_signal(fresh, gate)
    tokens = tokens_of([g for _, g in further])
    return teaching, further, {
        "refill_prompts": len(further), "refill_tokens": tokens,
        "discarded_groups": len(first) + len(further) - len(teaching),
        "discarded_tokens": tokens_of(first) + tokens - tokens_of(teaching),
    }


def content_of(row: Any) -> Any:
    """Something hashable that equal rows share."""
    try:
        hash(row)
    except TypeError:
        return json.dumps(row, sort_keys=True, default=repr)
    return row


def with_signal(groups: Sequence[Group], gate: str | None = None) -> list[Group]:
    """The groups whose rewards differ, or the part of them that `gate` names."""
    rewards = part_of(groups, gate) if gate else reward_tensor([g.rewards for g in groups])
    return [g for g, keep in zip(groups, informative(rewards).tolist()) if keep]


def tokens_of(groups: Sequence[Group]) -> int:
    return sum(len(r.tokens) for g in groups for r in g)


class Tasks:
    """The tasks of a step: drawn from a list, or chosen by a curriculum, which gets the rates of success. The step's rows hold
    the curriculum's state at the run's start and all results since, so that a run that is continued brings it back to there;
    and a run that starts again takes the curriculum back to that start, as it does the policy."""

    def __init__(self, rows: Any, config: GRPOConfig, run: Run | None, success: float = 1.0):
        self.rows, self.config, self.run, self.success = rows, config, run, success
        self.adaptive = hasattr(rows, "next_tasks")
        self.has_state = hasattr(rows, "state") and hasattr(rows, "load")
        self.batch_of = None if self.adaptive else epoch_batches(rows, config.prompts_per_step, config.seed)
        self.first_entry: dict | None = None  # of the first row, until that is written

    def content(self) -> list:
        """What is trained on, for a hash. A curriculum changes as it goes, and `load` refuses the state of other tasks."""
        return [getattr(self.rows, "config", None)] if self.adaptive else self.rows

    def tasks(self, step: int) -> list:
        """The rows of a step."""
        if not self.adaptive:
            return self.batch_of(step)
        if self.first_entry is None:
            self.first_entry = self._go_on(step) if step else self._start()
        return list(self.rows.next_tasks(self.config.prompts_per_step))

    def record(self, tasks: Sequence, rewards: Sequence[Sequence[float | None]]) -> dict:
        """Record each group's rate of success in the curriculum; returns the columns of the row."""
        if not self.adaptive:
            return {}
        rewarded = [(task, [r for r in of if r is not None]) for task, of in zip(tasks, rewards)]
        results = [(task, sum(r >= self.success for r in of) / len(of)) for task, of in rewarded if of]
        row = {"tier": self.rows.tier} if hasattr(self.rows, "tier") else {}
        for task, rate in results:
            self.rows.record_result(task, rate)
        entry, self.first_entry = self.first_entry | {"results": results}, {}
        return row | {"curriculum": json.dumps(entry, default=asdict)}

    def _go_on(self, step: int) -> dict:
        """Bring the curriculum to where it was before this step."""
        entries = [json.loads(row["curriculum"]) for row in (self.run.metrics if self.run else ()) if "curriculum" in row]
        if len(entries) != step or not self.has_state or "start" not in entries[0]:
            raise ValueError(f"the run goes on after step {step}, and its curriculum cannot be brought back to there: it "
                             "needs `state()` and `load(state)`, as a Curriculum has, and the rows of the steps before")
        self.rows.load(entries[0]["start"])
        self._starts()[str(self.run.folder.resolve())] = entries[0]["start"]
        for task, rate in (result for entry in entries for result in entry["results"]):
            self.rows.record_result(task, rate)
        return {}

    def _start(self) -> dict:
        """Take a curriculum that an earlier loop of this run has changed back to where that loop began."""
        starts, name = (self._starts(), str(self.run.folder.resolve())) if self.run else ({}, "")
        if name in starts and not self.has_state:
            raise ValueError("an earlier loop of this run recorded results in this curriculum, and it cannot be taken back: "
                             "make it anew, or give it `state()` and `load(state)`, as a Curriculum has")
        if name in starts and self.rows.state() != starts[name]:
            self.rows.load(starts[name])
            print(f"the curriculum goes back to where {self.run.shown(self.run.folder)} started")
        for later in list(starts)[list(starts).index(name) :] if name in starts else ():  # they began with its results
            del starts[later]
        starts[name] = json.loads(json.dumps(self.rows.state())) if self.has_state else None  # as it is now
        return {"start": starts[name]} if self.has_state else {}

    def _starts(self) -> dict[str, dict | None]:
        """By folder, in order: the state in which each run of this process began with this curriculum, which keeps them."""
        return vars(self.rows).setdefault("_starts", {})
