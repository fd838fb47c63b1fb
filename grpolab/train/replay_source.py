"""Off-policy: the rollouts that a run left on disk, as a source of groups.

The log-probs of the record are those of the policy that sampled. Where the policy has moved away from it, the ratio to them
corrects as far as `clip_eps` lets it; with `sampler_cap` each token is weighed by min(pi / pi_sampled, cap) instead
(`sampler_weight`), and `max_logp_diff` must admit the distance. At the weights that sampled, a step is the recorded
run's own in every bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.runs.rollout_log import Recorder, recorded
from grpolab.runs.run import Run
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.grpo_config import GRPOConfig
from grpolab.train.loop import off_loop
from grpolab.train.sources import StepGroups, as_recorded


def recorded_groups(record: Run | str | Path, steps: Iterable[int] | None = None) -> Recorded:
    """The groups that a run recorded (a Run or its folder), as a source for `grpo_from`: those of `steps` in this order, one a
    step of training (default: all in order; name them again to use them again).

    Raises ValueError for a folder without a record, steps that it does not hold wholly, and groups without log-probs; and as
    the training starts, before the first step, for a record of other tokens or of another temperature, and for a run that
    would write where it reads.
    """
    folder = record.folder if isinstance(record, Run) else Path(record)
    recorder = Recorder(folder / "rollouts")
    try:
        about = json.loads((folder / "run.json").read_text())
        temperature, kind = float(about["config"]["temperature"]), about["config"]["advantage_kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{Run.shown(folder)} holds no run of GRPO whose rollouts could be trained on: its run.json cannot be "
                         f"read, or says no temperature ({error!r})") from error
    every = recorder.steps()
    chosen = every if steps is None else list(steps)
    if not chosen or set(chosen) - set(every):
        there = f"it holds {every[0]} to {every[-1]}" if every else "it holds none: record with Run(..., keep='all')"
        raise ValueError(f"the record of {Run.shown(folder)} lacks steps {sorted(set(chosen) - set(every))}: {there}")
    longest, whole = 1, set()
    for line in recorder.lines(chosen):
        if "logps" not in line:
            raise ValueError(f"{Run.shown(folder)}, step {line['step']}, group {line['group']}: its rollouts lack log-probs: "
                             "nothing corrects for the distance of the policy that sampled")
        whole.add(line["step"])
        longest = max([longest, *(len(r.prompt) + len(r.tokens) for r in recorded(line).group)])
    if damaged := sorted(set(chosen) - whole):
        raise ValueError(f"the record of {Run.shown(folder)} cannot be read at steps {damaged}: leave them out, "
                         "recorded_groups(run, steps=[...])")
    return Recorded(recorder, folder, tuple(chosen), longest, temperature, kind)


@dataclass
class Recorded:
    """The source that `recorded_groups` gives; `longest` is the most tokens of a prompt with its completion."""

    recorder: Recorder
    folder: Path
    steps: tuple[int, ...]
    longest: int
    temperature: float
    kind: str  # of advantage in the record
    trained_kind: str = "centred"  # of advantage in the training

    async def __call__(self, step: int) -> StepGroups:
        """The recorded groups that stand at this step of training; `record_step` in the row says which."""
        groups = await off_loop(lambda: self.recorder.groups(self.steps[step]))
        most = max(len(g.group) for g in groups)
        filled = [g.filled(most) for g in groups]
        trained = [group for group, _ in filled]
        used = [t for g, t in zip(groups, trained) if g.used]
        made = torch.tensor([a for g, (_, a) in zip(groups, filled) if g.used], dtype=torch.float64)
        if not used or torch.equal(made, advantages(reward_tensor([g.rewards for g in used]), self.kind)):
            made = None  # of their totals: the config says of which kind now
        elif self.trained_kind != self.kind:
            raise ValueError(f"advantage_kind={self.trained_kind!r}, and step {self.steps[step]} of {Run.shown(self.folder)} "
                             "has advantages that its rewards alone do not make (several rewards, a critic, agents): set "
                             f"advantage_kind={self.kind!r}, of which those are")
        sampled = [(g.problem, t) for g, t in zip(groups, trained)]
        return StepGroups(used, {"record_step": self.steps[step]}, seen=trained, tokens=0, advantages=made,
                          record=lambda: as_recorded(sampled, used, self.trained_kind, made), engine="record", off_policy=True)

    def check(self, policy: Policy, config: GRPOConfig, run: Run | None) -> None:
        """Refuse, before the first step, what this record cannot train; ValueError says why."""
        name, self.trained_kind = Run.shown(self.folder), config.advantage_kind
        if run is not None and run.folder.resolve() == self.folder.resolve():
            raise ValueError(f"a training into {name} would overwrite the record that it reads: give the run another name")
        if config.steps > len(self.steps):
            raise ValueError(f"steps={config.steps}, and the record of {name} gives {len(self.steps)}: lower it, or name steps "
                             "again, e.g. recorded_groups(run, steps=[*range(10)] * 2)")
        if config.refills:
            raise ValueError(f"refills={config.refills}: a record has no further questions; leave it 0")
        if config.temperature != self.temperature:
            raise ValueError(f"temperature={config.temperature}, and the log-probs of {name} are those at "
                             f"{self.temperature}, at which it sampled: set temperature={self.temperature}")
        size = len(policy.model.get_input_embeddings().weight)
        for i, text in self.recorder.vocabulary().items():
            if i >= size or policy.tokenizer.decode([i]) != text:
                now = repr(policy.tokenizer.decode([i])) if i < size else "none"
                raise ValueError(f"the record of {name} is of another vocabulary than {policy.name!r}: its token {i} is "
                                 f"{text!r}, the policy's {now}. Train the model that sampled it, or one with its tokenizer")

def importance(logps: Sequence[Sequence[float]], rollouts: Sequence[Rollout], cap: float | None) -> dict[str, float]:
    """How far the policy is from the one that sampled: quantiles (5 %, 50 %, 95 %) over tokens of w = pi / pi_sampled, and the
    effective sample size (sum w)^2 / (n sum w^2), a share of 1, of w as it is used: at most `cap` (Kish 1965, section 11.7;
    for importance weights Kong 1992). logps: the policy's, a list a rollout. NaN where there is no token."""
    pairs = [(new, old) for row, r in zip(logps, rollouts) for new, old, m in zip(row, r.logps, r.mask) if m]
    if not pairs:
        return dict.fromkeys(("ratio_low", "ratio_median", "ratio_high", "ess"), float("nan"))
    new, old = torch.tensor(pairs, dtype=torch.float64).T
    w = (new - old).clamp(-20, 20).exp()
    low, median, high = w.sort().values[[int(q * (len(w) - 1)) for q in (0.05, 0.5, 0.95)]].tolist()
    used = w.clamp(max=cap) if cap else w
    return {"ratio_low": low, "ratio_median": median, "ratio_high": high,
            "ess": (used.sum().square() / (len(used) * used.square().sum())).item()}
