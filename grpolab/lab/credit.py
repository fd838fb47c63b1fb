"""Credit: what each token of a rollout was worth.

GRPO gives every token of a rollout the same advantage. The value of a prefix, V(prefix) = E[reward | prefix], tells where
the answer was won or lost; it is estimated by letting the same policy go on from every prefix many times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams, fold_seed
from grpolab.lab import plots
from grpolab.lab.replay import select
from grpolab.lab.rescore import as_problem
from grpolab.lab.restore import restore, session_at, with_threads
from grpolab.lab.tokens import visible
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run
from grpolab.train.rewards import Reward, score


@dataclass(frozen=True)
class Credit:
    """`tokens` (T,) as texts; `values` (T + 1,), V after 0, ..., T of them, with their standard `errors`; `advantage`, the one
    number that the update gave them all. The credit of token t is values[t + 1] - values[t], and all of them add up to the
    reward minus V(prompt): what a group's mean estimates, too."""

    tokens: tuple[str, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]
    advantage: float
    reward: float

    @property
    def credits(self) -> list[float]:
        """What each token added to the value (T,)."""
        return [after - before for before, after in zip(self.values, self.values[1:])]

    def table(self) -> pd.DataFrame:
        """A row a token: value before and after it, its credit, and GRPO's advantage."""
        return pd.DataFrame({"token": self.tokens, "value": self.values[:-1], "value_after": self.values[1:],
                             "credit": self.credits, "advantage": self.advantage})

    def plot(self, axes=None):
        """V along the rollout, and each token's credit beside the flat advantage; returns both Axes."""
        axes = plt.subplots(1, 2, figsize=(9.6, 3.2))[1] if axes is None else axes
        table, values, errors = self.table(), np.array(self.values), 1.96 * np.array(self.errors)
        axes[0].fill_between(range(len(values)), values - errors, values + errors, color=plots.REWARD, alpha=0.25)
        axes[0].plot(values, color=plots.REWARD, marker="o", markersize=3)
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no half of a token
        axes[0].set(title=f"V goes from {values[0]:.2f} to {values[-1]:.2f}", xlabel="tokens written",
                    ylabel="value of the prefix")
        axes[1].bar(table.index, table["credit"], color=[plots.POLICY if c >= 0 else plots.WARNING for c in table["credit"]])
        axes[1].axhline(self.advantage, color=plots.REFERENCE, linestyle="--", label=f"GRPO's advantage {self.advantage:.2f}")
        labels, most = [visible(t).replace("$", r"\$") for t in self.tokens], table["credit"].abs().idxmax()
        turned = 90 if max(map(len, labels)) > 2 else 0  # longer ones would cover each other
        axes[1].set_xticks(range(len(labels)), labels, fontsize=8, rotation=turned)
        axes[1].set(title=f"Token {most}, '{labels[most]}', decides: {self.credits[most]:+.2f}", xlabel="token",
                    ylabel="credit")
        axes[1].legend()
        return axes


def credit(policy: Policy, rollout: Rollout, reward: Reward, problem: Any, *, max_new_tokens: int, advantage: float = math.nan,
           temperature: float = 1.0, continuations: int = 64, seed: int = 0, threads: int | None = None) -> Credit:
    """V of every prefix of a rollout's completion by so many continuations each; V of the whole is its own reward.

    All prefixes are decoded in one batch, and each one's keys and values are shared by its continuations. Abstentions do not
    count. ValueError for a rollout of an episode, whose environment would have to go on, too."""
    if not all(rollout.mask) or not rollout.tokens:
        raise ValueError("the credit of a rollout needs one turn of a policy that wrote all its tokens; this one is an "
                         "episode's, or empty")
    if continuations < 2:
        raise ValueError(f"continuations must be at least 2, got {continuations}")

    def rewards(rollouts) -> np.ndarray:  # NaN where the reward abstains
        return np.array(score(policy, [problem], [rollouts], reward)[0].rewards, dtype=float)

    with Sampler(policy, threads=threads) as sampler:
        requests = [
            sampler.submit([rollout.prompt + rollout.tokens[:t]], group_size=continuations, params=SamplingParams(
                temperature=temperature, max_new_tokens=max_new_tokens - t, seed=fold_seed(seed, t)))
            for t in range(len(rollout.tokens))
        ]
        groups = [request.result()[0] for request in requests]
    values, errors = [], []
    for t, group in enumerate(groups):
        sampled = rewards([_joined(rollout, t, rest) for rest in group])
        sampled = sampled[~np.isnan(sampled)]
        values.append(sampled.mean().item() if len(sampled) else math.nan)
        errors.append(sampled.std(ddof=1).item() / math.sqrt(len(sampled)) if len(sampled) > 1 else math.nan)
    (own,) = rewards([rollout]).tolist()
    texts = tuple(policy.tokenizer.decode([t]) for t in rollout.tokens)
    return Credit(texts, (*values, own), (*errors, 0.0), advantage, own)


def _joined(rollout: Rollout, t: int, rest: Rollout) -> Rollout:
    """The first `t` tokens of a rollout, continued by `rest`."""
    tokens = rollout.tokens[:t] + rest.tokens
    return replace(rest, prompt=rollout.prompt, tokens=tokens, mask=(1,) * len(tokens), kept_mass=(),
                   logps=rollout.logps[:t] + rest.logps, raw_logps=rollout.raw_logps[:t] + rest.raw_logps)


def credit_of(run: Run, step: int, group: int, rollout: int, reward: Reward, *, continuations: int = 64, seed: int = 0,
              reference: Policy | None = None) -> Credit:
    """`credit` of a recorded rollout, by the policy that wrote it."""
    groups, session = run.recorder.groups(step), session_at(run, step)
    select(groups, step, group, rollout)
    g, threads = groups[group], session.get("threads")

    def work():
        state = restore(run, step, reference=reference)
        return credit(state.policy, g.group[rollout], reward, as_problem(g.problem), advantage=g.advantages[rollout],
                      max_new_tokens=state.config.max_new_tokens, temperature=state.config.temperature,
                      continuations=continuations, seed=seed, threads=threads)

    return with_threads(threads, work)
