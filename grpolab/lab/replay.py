"""Replay: a recorded rollout generated again from the weights of its step and its seed, compared in every bit.

What a rollout is depends on weights, prompt and seed alone, so equal bits prove that the record, the weights and the sampler
are what they were; where one differs, the report says at which token, by how much, and what is not as it was recorded.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import index
from pathlib import Path

import torch
from torch.nn import Module

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab.restore import (
    State,
    as_config,
    check_synchronous,
    device_and_dtype,
    restore,
    rows_of,
    session_at,
    with_threads,
)
from grpolab.models.load import Policy, load_policy
from grpolab.rollouts import RecordedGroup, Rollout
from grpolab.runs.checkpoints import computed_on, weights_hash
from grpolab.runs.rollout_log import recorded
from grpolab.runs.run import Run
from grpolab.sync import run_sync

BUNDLE = 2  # the format of a bundle
POLICY_FILES = {".json", ".jinja", ".txt", ".model", ".safetensors"}  # of a saved policy: nothing that would be unpickled
UNSEEDED = ("", "atropos", "record", "remote")  # engines of sources whose seeds are not the run's


@dataclass(frozen=True)
class Replayed:
    """One rollout twice; `difference` says in words what is not the same, "" where every bit is."""

    step: int
    group: int
    rollout: int
    recorded: Rollout
    again: Rollout
    difference: str

    @property
    def equal(self) -> bool:
        return not self.difference

    def __str__(self):
        outcome = self.difference or f"all {len(self.again.tokens)} tokens and their log-probs agree in every bit"
        return f"step {self.step}, group {self.group}, rollout {self.rollout}: {outcome}"


@dataclass(frozen=True)
class Replay:
    """The replay of some rollouts of a step. `differs` names what is not as it was recorded: weights, versions, threads."""

    rollouts: tuple[Replayed, ...]
    differs: tuple[str, ...]
    kept: int | None  # the step whose weights were kept; None for a bundle

    @property
    def equal(self) -> bool:
        return all(r.equal for r in self.rollouts)

    def __str__(self):
        different, n = [r for r in self.rollouts if not r.equal], len(self.rollouts)
        lines = [f"step {self.rollouts[0].step}: {n - len(different)} of {n} rollouts agree in every bit"] * (n > 1)
        lines += map(str, different[:5] if n > 1 else self.rollouts)
        return "\n".join(lines + [f"not as recorded: {d}" for d in self.differs])

    __repr__ = __str__


def replay(run: Run, step: int, group: int | None = None, rollout: int | None = None, *,
           reference: Policy | None = None) -> Replay:
    """Generate a recorded rollout again (None: all of the group, all of the step) and compare.

    The weights are the kept ones or, between two kept steps, those with the recorded updates done again (`restore`). In a run
    that sampled ahead each token is drawn from the weights of its version."""
    groups, session = run.recorder.groups(step), session_at(run, step)
    check_seeded(groups, step, session)
    places = select(groups, step, group, rollout)
    versions = {v for g, i in places for v in groups[g].group[i].token_versions}
    steps = {row.get("version"): row["step"] for row in rows_of(run) if row["step"] <= step}
    earlier = {v: restore(run, steps[v], reference=reference).policy.model for v in versions if steps.get(v, step) < step}
    return _compared(groups, places, session, restore(run, step, reference=reference), earlier)


def _compared(groups: Sequence[RecordedGroup], places: list[tuple[int, int]], session: dict, state: State,
              earlier: Mapping[int, Module]) -> Replay:
    """The rollouts at these places beside the same sampled again. `earlier`: by version, models that drew tokens before."""
    again, differs = with_threads(session.get("threads"), lambda: regenerate(state, groups, places, session, earlier))
    rollouts = tuple(Replayed(state.step, g, i, groups[g].group[i], a, difference(groups[g].group[i], a, bool(groups[g].turns)))
                     for (g, i), a in zip(places, again))
    return Replay(rollouts, (*state.notes, *differs), state.kept)


def check_seeded(groups: Sequence[RecordedGroup], step: int, session: dict) -> None:
    """ValueError where the rollouts of a step were not drawn from seeds that the record holds, so that sampling them again
    would give others and prove nothing."""
    agents = any("run" in g.parts and not g.turns for g in groups)
    if agents or session.get("engine") in UNSEEDED:
        source = "an agent's calls of the served policy" if agents else "a source of their own (grpo_from)"
        raise ValueError(f"the rollouts of step {step} came from {source}, not from seeds of the run, so they cannot be "
                         "sampled again: replay and fork are for runs of grpo and multi_turn_grpo; rollouts(), browse and "
                         "rescore read this record, too")


def select(groups: Sequence[RecordedGroup], step: int, group: int | None, rollout: int | None) -> list[tuple[int, int]]:
    """The places (group, rollout) that are wanted, without lost rollouts. ValueError where that leaves none."""
    if group is not None and not 0 <= group < len(groups):
        raise ValueError(f"step {step} has groups 0 to {len(groups) - 1}, not {group}")
    numbers = range(len(groups)) if group is None else [group]
    places = [(g, i) for g in numbers for i in range(len(groups[g].group)) if rollout in (None, i)]
    if not places:
        size = max(len(groups[g].group) for g in numbers)
        raise ValueError(f"step {step} has groups of rollouts 0 to {size - 1}, not {rollout}")
    if not (there := [(g, i) for g, i in places if groups[g].group[i].finish_reason != "lost"]):
        raise ValueError(f"the selected rollouts of step {step} were lost with their environment: nothing was written")
    return there


def regenerate(state: State, groups: Sequence[RecordedGroup], places: list[tuple[int, int]], session: dict,
               earlier: Mapping[int, Module]) -> tuple[list[Rollout], list[str]]:
    """The rollouts at these places sampled again, and what is not as in the recorded session."""
    params = SamplingParams(temperature=state.config.temperature, max_new_tokens=state.config.max_new_tokens)
    rollouts = [(groups[g].group[i], bool(groups[g].turns)) for g, i in places]
    with Sampler(state.policy, threads=session.get("threads"), exact=state.config.exact) as sampler:
        single = [r for r, episode in rollouts if not episode]
        if earlier:
            sampled = _drawn_ahead(sampler, state.policy, earlier, single, params)
        else:
            request = sampler.submit([r.prompt for r in single], params=params, seeds=[[r.seed] for r in single])
            sampled = iter([g[0] for g in request.result()])
        again = [_episode(sampler, r, params) if episode else next(sampled) for r, episode in rollouts]
        now = computed_on(state.policy, sampler.engine.name)
    if not session:
        return again, ["the machine and versions of the step are not known: the record does not name them, or is damaged"]
    return again, [f"{name} {now[name]!r}, recorded {session[name]!r}" for name in now
                   if name not in ("policy", "training") and session.get(name) and session[name] != now[name]]


def _drawn_ahead(sampler: Sampler, policy: Policy, earlier: Mapping[int, Module], rollouts: Sequence[Rollout],
                 params: SamplingParams) -> Iterator[Rollout]:
    """One after the other, each with the weights of its versions, which change between the tokens where they did."""
    models = {policy.version: copy.deepcopy(policy.model)} | earlier

    @torch.no_grad()
    def take(version: int) -> None:
        if version != policy.version:
            for own, its in zip(policy.model.parameters(), models[version].parameters(), strict=True):
                own.copy_(its)
            policy.version = version

    for r in rollouts:
        versions, drawn = r.token_versions, [0]

        def next_token(_, __, tokens, ___):  # in the sampler's thread, between two decode steps
            drawn[0] += len(tokens)  # noqa: B023
            if drawn[0] < len(versions):  # noqa: B023
                take(versions[drawn[0]])  # noqa: B023

        sampler.run_sync(take, r.policy_version)
        yield sampler.submit([r.prompt], params=params, seeds=[[r.seed]], on_tokens=next_token).result()[0][0]


def _episode(sampler: Sampler, r: Rollout, params: SamplingParams) -> Rollout:
    """Turn by turn, with the recorded text of the environment between. Two turns of the policy with nothing between them are
    sampled as one."""
    conversation, context = sampler.conversation(seed=r.seed), r.prompt
    for by_policy, pairs in groupby(zip(r.mask, r.tokens), key=lambda pair: bool(pair[0])):
        ids = tuple(token for _, token in pairs)
        if not by_policy:
            context = ids
            continue
        turn = run_sync(conversation.sample(context, replace(params, max_new_tokens=len(ids))))
        if turn.tokens != ids:
            break
    return conversation.rollout()


def difference(r: Rollout, again: Rollout, episode: bool = False) -> str:
    """What is not the same in a recorded rollout and the same sampled again. The finish reason of an episode is its
    environment's: not compared."""
    n = min(len(r.tokens), len(again.tokens))
    other = next((t for t in range(n) if r.tokens[t] != again.tokens[t]), n)
    nats = max((abs(r.logps[t] - again.logps[t]) for t in range(other)), default=0.0)
    if other < n:
        return (f"parts at token {other}: {r.tokens[other]} recorded, {again.tokens[other]} now; the log-probs before it "
                f"differ by at most {nats:.2g} nats")
    if len(r.tokens) != len(again.tokens):
        return f"{len(r.tokens)} tokens recorded, {len(again.tokens)} now, equal as far as both go"
    if not episode and r.versions != again.versions:
        return f"the tokens agree; their versions are {r.token_versions} recorded, {again.token_versions} now"
    if (r.logps, r.raw_logps) != (again.logps, again.raw_logps):
        first = next(t for t in range(n) if (r.logps[t], r.raw_logps[t]) != (again.logps[t], again.raw_logps[t]))
        return f"the tokens agree; log-probs differ from token {first} on, by at most {nats:.2g} nats"
    if not episode and r.finish_reason != again.finish_reason:
        return f"finished as {r.finish_reason!r} in the record, as {again.finish_reason!r} now"
    return ""


# --- one step as a file -----------------------------------------------------------------------------------------------


def bundle(run: Run, step: int, path: str | Path, *, reference: Policy | None = None) -> Path:
    """One file (zip) with all that `replay_bundle` needs of a step elsewhere: its rollouts with ids and seeds, the policy
    before it, and versions."""
    run.recorder.groups(step)  # raises where the record does not hold it
    state = restore(run, step, reference=reference)
    check_synchronous(state.config, "a bundle")
    about = {"bundle": BUNDLE, "step": state.step, "config": asdict(state.config), "session": session_at(run, step),
             "notes": list(state.notes), "weights": weights_hash(state.policy)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file, tempfile.TemporaryDirectory() as folder:
        file.writestr("bundle.json", json.dumps(about, indent=1))
        file.writestr("rollouts.jsonl", "".join(json.dumps(line) + "\n" for line in run.recorder.lines([step])))
        for part in sorted(state.policy.save(Path(folder) / "policy").iterdir()):
            if part.suffix in POLICY_FILES:
                file.write(part, f"policy/{part.name}")
    return atomic_write(path, buffer.getvalue())


def replay_bundle(path: str | Path, group: int | None = None, rollout: int | None = None) -> Replay:
    """`replay` of a bundle. ValueError for a file that is damaged, also where only the hash of its weights shows it."""
    try:
        with zipfile.ZipFile(path) as file, tempfile.TemporaryDirectory() as folder:
            about = json.loads(file.read("bundle.json"))
            step, session, notes = index(about["step"]), dict(about["session"]), tuple(map(str, about["notes"]))
            groups = [recorded(json.loads(line)) for line in file.read("rollouts.jsonl").splitlines()]
            for name in file.namelist():  # written under their own names, never under a path from the file
                if Path(name).parts[0] == "policy" and Path(name).suffix in POLICY_FILES:
                    (Path(folder) / Path(name).name).write_bytes(file.read(name))
            policy, config = load_policy(folder, **device_and_dtype(session)), as_config(about["config"])
        if weights_hash(policy) != about["weights"]:
            raise ValueError("its weights have another hash than was noted")
    except FileNotFoundError:
        raise
    except Exception as error:  # each layer of a damaged file, or of one made by others, raises types of its own
        raise ValueError(f"{path} is not a whole bundle of a step ({error}): make it again with bundle(run, step, path)"
                         ) from error
    check_seeded(groups, step, session)
    places = select(groups, step, group, rollout)
    return _compared(groups, places, session, State(step, None, policy, None, config, notes), {})
