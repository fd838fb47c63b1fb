"""Replay: a recorded rollout generated again from the weights of its step and its seed, compared in every bit.

What a rollout is depends on weights, prompt and seed alone, so equal bits prove that the record, the weights and the sampler
are what they were; where it parts, the report says at which token, by how much, and what is not as it was recorded.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import index
from pathlib import Path

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab.restore import State, as_config, device_and_dtype, restore, session_at, with_threads
from grpolab.models.load import Policy, load_policy
from grpolab.rollouts import RecordedGroup, Rollout
from grpolab.runs.checkpoints import computed_on, weights_hash
from grpolab.runs.rollout_log import recorded
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig

BUNDLE = 2  # the format of a bundle
POLICY_FILES = {".json", ".jinja", ".txt", ".model", ".safetensors"}  # of a saved policy: nothing that would be unpickled


@dataclass(frozen=True)
class Replayed:
    """One rollout twice. `token` is the first that is not the recorded one, else the first whose log-prob has other bits,
    else None; `nats` the largest difference of log-probs of equal tokens up to there; `parted` says in words what differs."""

    step: int
    group: int
    rollout: int
    recorded: Rollout
    again: Rollout
    token: int | None
    nats: float
    parted: str

    @property
    def equal(self) -> bool:
        return not self.parted

    def __str__(self):
        outcome = self.parted or f"all {len(self.again.tokens)} tokens and their log-probs agree in every bit"
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
        parted, n = [r for r in self.rollouts if not r.equal], len(self.rollouts)
        lines = [f"step {self.rollouts[0].step}: {n - len(parted)} of {n} rollouts agree in every bit"] * (n > 1)
        lines += [str(r) for r in (parted[:5] if n > 1 else self.rollouts)]
        lines += [f"... and {len(parted) - 5} more"] * (len(parted) > 5)
        lines += [f"not as recorded: {d}" for d in self.differs]
        if parted and not self.differs:
            lines.append("weights, processor, versions and threads are those of the record")
        return "\n".join(lines)

    __repr__ = __str__


def replay(run: Run, step: int, group: int | None = None, rollout: int | None = None, *,
           reference: Policy | None = None) -> Replay:
    """Generate a recorded rollout again (None: all of the group, all of the step) and compare.

    The weights are the kept ones or, between two kept steps, those with the recorded updates done again (`restore`), with as
    many threads as the record names."""
    step = index(step)  # numpy's numbers, too
    groups, session = run.recorder.groups(step), session_at(run, step)
    return _replay(groups, step, session, group, rollout, lambda: restore(run, step, reference=reference))


def _replay(groups: Sequence[RecordedGroup], step: int, session: dict, group: int | None, rollout: int | None,
            state: Callable[[], State]) -> Replay:
    """`state` gives the policy before the step; it is called in the thread that computes."""
    check_seeded(groups, step, session)
    places = select(groups, step, group, rollout)

    def work():
        of = state()
        rollouts, differs = regenerate(of.policy, of.config, step, groups, places, session)
        return Replay(rollouts, (*of.notes, *differs), of.kept)

    return with_threads(session.get("threads"), work)


UNSEEDED = ("atropos", "record", "remote")  # engines of sources whose seeds are not the run's
OWN_SOURCE = "the rollouts came from a source of their own (grpo_from), and the record does not say whether from its seeds"


def check_seeded(groups: Sequence[RecordedGroup], step: int, session: dict) -> None:
    """ValueError where the rollouts of a step were not drawn from seeds that the record holds, so that sampling them again
    would give others and prove nothing."""
    agents = any("run" in g.parts and not g.turns for g in groups)
    seeds = [[r.seed for r in g.group if r.finish_reason != "lost"] for g in groups]
    shared = session.get("engine") == "" and any(len(set(of)) < len(of) for of in seeds)
    if agents or shared or session.get("engine") in UNSEEDED:
        source = "an agent's calls of the served policy" if agents else "a source of their own (grpo_from)"
        raise ValueError(f"the rollouts of step {step} came from {source}, not from seeds of the run, so they cannot be "
                         "sampled again: replay and fork are for runs of grpo and multi_turn_grpo; rollouts(), browse and "
                         "rescore read this record, too")


def select(groups: Sequence[RecordedGroup], step: int, group: int | None, rollout: int | None) -> list[tuple[int, int]]:
    """The places (group, rollout) that are wanted, without lost rollouts. ValueError where that leaves none."""
    if group is not None and not 0 <= group < len(groups):
        raise ValueError(f"step {step} has groups 0 to {len(groups) - 1}, not {group}")
    places = range(len(groups)) if group is None else [group]
    size = max(len(groups[g].group) for g in places)
    if rollout is not None and not 0 <= rollout < size:
        of = f"step {step} has groups of" if group is None else f"group {group} of step {step} has"
        raise ValueError(f"{of} rollouts 0 to {size - 1}, not {rollout}")
    selected = [(g, i) for g in places for i, r in enumerate(groups[g].group)
                if rollout in (None, i) and r.finish_reason != "lost"]
    if not selected:
        raise ValueError(f"the selected rollouts of step {step} were lost with their environment: nothing was written")
    return selected


def differences(then: dict, now: dict) -> tuple[str, ...]:
    """What a computation depends on, where it is not as recorded."""
    if not then:
        return ("the machine and versions of the step are not known: the record does not name them, or is damaged",)
    changed = tuple(f"{name} {now[name]!r}, recorded {then[name]!r}" for name in now
                    if name not in ("policy", "training") and then.get(name) and then[name] != now[name])
    return changed + (OWN_SOURCE,) * (then.get("engine") == "")


def regenerate(policy: Policy, config: GRPOConfig, step: int, groups: Sequence[RecordedGroup], places: list[tuple[int, int]],
               session: dict) -> tuple[tuple[Replayed, ...], tuple[str, ...]]:
    """The rollouts at these places sampled again: (each compared with its record, what is not as in the recorded session)."""
    params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens)
    rollouts = [(groups[g].group[i], bool(groups[g].turns)) for g, i in places]
    with Sampler(policy, threads=session.get("threads"), exact=config.exact) as sampler:
        single = [r for r, episode in rollouts if not episode]
        request = sampler.submit([r.prompt for r in single], params=params, seeds=[[r.seed] for r in single])
        sampled = iter([g[0] for g in request.result()])
        again = [_episode(sampler, r, params) if episode else next(sampled) for r, episode in rollouts]
        differs = differences(session, computed_on(policy, sampler.engine.name))
    return tuple(compare(step, g, i, r, a, episode) for (g, i), (r, episode), a in zip(places, rollouts, again)), differs


def _episode(sampler: Sampler, r: Rollout, params: SamplingParams) -> Rollout:
    """Turn by turn, with the recorded text of the environment between."""
    conversation, context = sampler.conversation(seed=r.seed), list(r.prompt)
    try:
        for by_policy, ids in spans(r):
            if by_policy:
                conversation.sample_sync(context, replace(params, max_new_tokens=len(ids)))
                if conversation.turns[-1].tokens != ids:
                    break
            else:
                context = list(ids)
        return conversation.rollout()
    finally:
        conversation.close()


def spans(r: Rollout) -> list[tuple[bool, tuple[int, ...]]]:
    """Consecutive tokens of one writer: (whether it is the policy, ids). Two turns of the policy with nothing between them
    are one span, and sampled as one."""
    writers = groupby(zip(r.mask, r.tokens), key=lambda pair: bool(pair[0]))
    return [(by_policy, tuple(token for _, token in pairs)) for by_policy, pairs in writers]


def compare(step: int, group: int, rollout: int, r: Rollout, a: Rollout, episode: bool = False) -> Replayed:
    """A recorded rollout and the same generated again. The finish reason of an episode is its environment's: not compared."""
    n = min(len(r.tokens), len(a.tokens))
    other = next((t for t in range(n) if r.tokens[t] != a.tokens[t]), n)
    nats = max((abs(r.logps[t] - a.logps[t]) for t in range(other)), default=0.0)
    bits = next((t for t in range(other) if (r.logps[t], r.raw_logps[t]) != (a.logps[t], a.raw_logps[t])), None)
    token, parted = None, ""
    if other < n:
        token, parted = other, (f"parts at token {other}: {r.tokens[other]} recorded, {a.tokens[other]} now; the log-probs "
                                f"before it differ by at most {nats:.2g} nats")
    elif len(r.tokens) != len(a.tokens):
        token, parted = n, f"{len(r.tokens)} tokens recorded, {len(a.tokens)} now, equal as far as both go"
    elif bits is not None:
        token, parted = bits, f"the tokens agree; log-probs differ from token {bits} on, by at most {nats:.2g} nats"
    elif not episode and r.finish_reason != a.finish_reason:
        parted = f"finished as {r.finish_reason!r} in the record, as {a.finish_reason!r} now"
    return Replayed(step, group, rollout, r, a, token, nats, parted)


# --- a step to carry away ---------------------------------------------------------------------------------------------


def bundle(run: Run, step: int, path: str | Path, *, reference: Policy | None = None) -> Path:
    """One file (zip) with all that `replay_bundle` needs of a step elsewhere: its rollouts with ids and seeds, the policy
    before it, and versions."""
    step = index(step)
    run.recorder.groups(step)  # says what is missing
    session = session_at(run, step)
    state = with_threads(session.get("threads"), lambda: restore(run, step, reference=reference))
    about = {"bundle": BUNDLE, "step": step, "config": asdict(state.config), "session": session, "notes": list(state.notes),
             "weights": weights_hash(state.policy)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file, tempfile.TemporaryDirectory() as folder:
        file.writestr("bundle.json", json.dumps(about, indent=1))
        file.writestr("rollouts.jsonl", "".join(json.dumps(line) + "\n" for line in run.recorder.lines([step])))
        for part in sorted(state.policy.save(Path(folder) / "policy").iterdir()):
            if part.suffix in POLICY_FILES:
                file.write(part, f"policy/{part.name}")
    return atomic_write(path, buffer.getvalue())


def replay_bundle(path: str | Path, group: int | None = None, rollout: int | None = None) -> Replay:
    """`replay` of a bundle. ValueError for a file that is damaged, which the hash of its weights tells, too."""
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
    return _replay(groups, step, session, group, rollout, lambda: State(step, None, policy, None, config, notes))
