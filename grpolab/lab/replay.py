"""Replay: a recorded rollout generated again from the weights of its step and its seed, compared in every bit.

What a rollout is depends on weights, prompt and seed alone, so equal bits prove that the record, the weights and the sampler
are what they were; where it parts, the report says at which token, by how much, and what is not as it was recorded.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import index
from pathlib import Path

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab.restore import as_config, device_and_dtype, restore, session_at, with_threads
from grpolab.models.load import Policy, load_policy
from grpolab.rollouts import RecordedGroup, Rollout
from grpolab.runs.checkpoints import computed_on, weights_hash
from grpolab.runs.rollout_log import recorded
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig

BUNDLE = 1  # the format of a bundle
TEXTS, WEIGHTS = {".json", ".jinja", ".txt", ".model"}, ".safetensors"  # of a saved policy


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
        where = f"step {self.step}, group {self.group}, rollout {self.rollout}"
        if self.equal:
            return f"{where}: all {len(self.again.tokens)} tokens and their log-probs agree in every bit"
        return f"{where}: {self.parted}"


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
        parted = [r for r in self.rollouts if not r.equal]
        n = len(self.rollouts)
        lines = [f"step {self.rollouts[0].step}: {n - len(parted)} of {n} rollouts agree in every bit"] * (n > 1)
        lines += [str(r) for r in (parted[:5] if n > 1 else self.rollouts)]
        lines += [f"... and {len(parted) - 5} more"] * (len(parted) > 5)
        same = "weights, processor, versions and threads are those of the record"
        lines += [f"not as recorded: {d}" for d in self.differs] or ([same] if parted else [])
        return "\n".join(lines)

    __repr__ = __str__


def replay(run: Run, step: int, group: int | None = None, rollout: int | None = None, *, policy: Policy | None = None,
           reference: Policy | None = None, threads: int | None = None) -> Replay:
    """Generate a recorded rollout again (None: all of the group, all of the step) and compare.

    The weights are the kept ones or, between two kept steps, those with the recorded updates done again (`restore`), with as
    many threads as the record names (`threads` takes another number)."""
    step = index(step)  # numpy's numbers, too
    groups, session = dict(enumerate(run.recorder.groups(step))), session_at(run, step)
    check_seeded(groups, step, session)
    places = select(groups, step, group, rollout)
    threads = threads or session.get("threads")

    def work():
        state = restore(run, step, policy=policy, reference=reference)
        rollouts, now = regenerate(state.policy, state.config, step, groups, places, threads)
        return Replay(rollouts, (*state.notes, *differences(session, now)), state.kept)

    return with_threads(threads, work)


Numbered = Mapping[int, RecordedGroup]  # by the number that a group has in its step
UNSEEDED = ("atropos", "record", "remote")  # engines of sources whose seeds are not the run's
OWN_SOURCE = "the rollouts came from a source of their own (grpo_from), and the record does not say whether from its seeds"


def check_seeded(groups: Numbered, step: int, session: dict) -> None:
    """ValueError where the rollouts of a step were not drawn from seeds that the record holds, so that sampling them again
    would give others and prove nothing."""
    agents = any("run" in g.parts and not g.turns for g in groups.values())
    seeds = [[r.seed for r in g.group if r.finish_reason != "lost"] for g in groups.values()]
    shared = session.get("engine") == "" and any(len(set(of)) < len(of) for of in seeds)
    if agents or shared or session.get("engine") in UNSEEDED:
        source = "an agent's calls of the served policy" if agents else "a source of their own (grpo_from)"
        raise ValueError(f"the rollouts of step {step} came from {source}, not from seeds of the run, so they cannot be "
                         "sampled again: replay and fork are for runs of grpo and multi_turn_grpo; rollouts(), browse and "
                         "rescore read this record, too")


def select(groups: Numbered, step: int, group: int | None, rollout: int | None) -> list[tuple[int, int]]:
    """The places (group, rollout) that are asked for, without lost rollouts. ValueError where that leaves none."""
    if group is not None and group not in groups:
        numbers = list(groups)
        held = f"0 to {len(numbers) - 1}" if numbers == list(range(len(numbers))) else ", ".join(map(str, numbers))
        raise ValueError(f"step {step} has groups {held}, not {group}")
    places = groups if group is None else [group]
    size = max(len(groups[g].group) for g in places)
    if rollout is not None and not 0 <= rollout < size:
        of = f"step {step} has groups of" if group is None else f"group {group} of step {step} has"
        raise ValueError(f"{of} rollouts 0 to {size - 1}, not {rollout}")
    selected = [(g, i) for g in places for i in range(len(groups[g].group))
                if (rollout is None or i == rollout) and groups[g].group[i].finish_reason != "lost"]
    if not selected:
        raise ValueError(f"the selected rollouts of step {step} were lost with their environment: nothing was written")
    return selected


def differences(then: dict, now: dict) -> tuple[str, ...]:
    """What a computation depends on, where it is not as recorded."""
    if not then:
        return ("the machine and versions of the step are not known: sessions.json is missing or damaged",)
    changed = tuple(f"{name} {now[name]!r}, recorded {then[name]!r}" for name in now
                    if name not in ("policy", "training") and then.get(name) and then[name] != now[name])
    return changed + (OWN_SOURCE,) * (then.get("engine") == "")


def regenerate(policy: Policy, config: GRPOConfig, step: int, groups: Numbered,
               places: Sequence[tuple[int, int]], threads: int | None) -> tuple[tuple[Replayed, ...], dict]:
    """The rollouts at these places sampled again: (each compared with its record, machine and versions of now)."""
    params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens)
    recorded = [(groups[g].group[i], bool(groups[g].turns)) for g, i in places]
    with Sampler(policy, threads=threads, exact=config.exact) as sampler:
        single = [r for r, episode in recorded if not episode]
        request = sampler.submit([r.prompt for r in single], params=params, seeds=[[r.seed] for r in single])
        sampled = iter([g[0] for g in request.result()])
        again = [_episode(sampler, r, params) if episode else next(sampled) for r, episode in recorded]
        now = computed_on(policy, sampler.engine.name)
    return tuple(compare(step, g, i, r, a, episode) for (g, i), (r, episode), a in zip(places, recorded, again)), now


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


def bundle(run: Run, step: int, path: str | Path, *, with_weights: bool = True, policy: Policy | None = None,
           reference: Policy | None = None) -> Path:
    """One file (zip) with all that `replay_bundle` needs of a step elsewhere: its rollouts with ids and seeds, tokenizer and
    model configuration, versions, and the weights before it, or with `with_weights=False` their hash alone."""
    step = index(step)
    lines = list(run.recorder.lines([step]))
    run.recorder.groups(step)  # says what is missing
    session = session_at(run, step)
    state = with_threads(session.get("threads"), lambda: restore(run, step, policy=policy, reference=reference))
    about = {"bundle": BUNDLE, "step": step, "config": asdict(state.config), "session": session, "notes": list(state.notes),
             "weights": weights_hash(state.policy)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bundle.json", json.dumps(about, indent=1))
        file.writestr("rollouts.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        with tempfile.TemporaryDirectory() as folder:
            for part in sorted(state.policy.save(Path(folder) / "policy").iterdir()):
                if part.suffix in TEXTS or part.suffix == WEIGHTS and with_weights:
                    file.write(part, f"policy/{part.name}")
    return atomic_write(path, buffer.getvalue())


def replay_bundle(path: str | Path, group: int | None = None, rollout: int | None = None, *, policy: Policy | None = None,
                  threads: int | None = None) -> Replay:
    """`replay` of a bundle. `policy` is needed where it came without weights; one whose weights have another hash is refused,
    with its name."""
    try:
        with zipfile.ZipFile(path) as file:
            about = json.loads(file.read("bundle.json"))
            lines = [json.loads(line) for line in file.read("rollouts.jsonl").splitlines()]
            bare = policy is None and not any(name.endswith(WEIGHTS) for name in file.namelist())
            policy = policy if policy or bare else _bundled(file, about)
            groups = {line["group"]: recorded(line) for line in lines}
            step, session, config = index(about["step"]), dict(about["session"]), as_config(dict(about["config"]), path)
            recorded_hash, notes = str(about["weights"]), tuple(map(str, about["notes"]))
    except FileNotFoundError:
        raise
    except Exception as error:  # each layer of a damaged file, or of one made by others, raises types of its own
        raise ValueError(f"{path} is not a whole bundle of a step ({error}): make it again with run.bundle") from error
    if bare:
        raise ValueError(f"the bundle of step {step} came without weights: give the policy that has them, hash "
                         f"{recorded_hash[:12]}")
    if (present := weights_hash(policy)) != recorded_hash:
        raise ValueError(f"{policy.name!r} has not the weights of the bundle {path}: their hash is {present[:12]}, that of the "
                         f"bundle's step {step} {recorded_hash[:12]}")
    check_seeded(groups, step, session)
    threads, places = threads or session.get("threads"), select(groups, step, group, rollout)

    def work():
        rollouts, now = regenerate(policy, config, step, groups, places, threads)
        return Replay(rollouts, (*notes, *differences(session, now)), None)

    return with_threads(threads, work)


def _bundled(file: zipfile.ZipFile, about: dict) -> Policy:
    """The policy inside a bundle; its files are written under their own names, never under a path from the file."""
    names = [n for n in file.namelist() if n.startswith("policy/") and n == f"policy/{Path(n).name}"
             and Path(n).suffix in {*TEXTS, WEIGHTS}]  # nothing that would be unpickled
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / Path(name).name).write_bytes(file.read(name))
        return load_policy(folder, **device_and_dtype([about["session"]]), tell=False)
