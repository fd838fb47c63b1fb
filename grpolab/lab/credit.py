"""Credit: what each token of a rollout was worth.

GRPO gives every token of a rollout the same advantage. The value of a prefix, V(prefix) = E[reward | prefix], tells where
the answer was won or lost; it is estimated by letting the same policy go on from every prefix many times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
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
from grpolab.train.rewards import Reward, ask_any


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
        x, credits = range(len(self.values)), self.credits
        low, high = ([v + s * 1.96 * e for v, e in zip(self.values, self.errors)] for s in (-1, 1))
        axes[0].fill_between(x, low, high, color=plots.REWARD, alpha=0.25)
        axes[0].plot(x, self.values, color=plots.REWARD, marker="o", markersize=3)
        most = max(range(len(credits)), key=lambda t: abs(credits[t]))
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no half of a token
        axes[0].set(title=f"V goes from {self.values[0]:.2f} to {self.values[-1]:.2f}", xlabel="tokens written",
                    ylabel="value of the prefix")
        axes[1].bar(range(len(credits)), credits, color=[plots.POLICY if c >= 0 else plots.WARNING for c in credits])
        axes[1].axhline(self.advantage, color=plots.REFERENCE, linestyle="--", label=f"GRPO's advantage {self.advantage:.2f}")
        labels = [visible(t).replace("$", r"\$") for t in self.tokens]
        turned = 90 if max(map(len, labels)) > 2 else 0  # longer ones would cover each other
        axes[1].set_xticks(range(len(labels)), labels, fontsize=8, rotation=turned)
        axes[1].set(title=f"Token {most}, '{visible(self.tokens[most])}', decides: {credits[most]:+.2f}".replace("$", r"\$"),
                    xlabel="token", ylabel="credit")
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
    with Sampler(policy, threads=threads) as sampler:
        asked = [
            sampler.submit([rollout.prompt + rollout.tokens[:t]], group_size=continuations, params=SamplingParams(
                temperature=temperature, max_new_tokens=max_new_tokens - t, seed=fold_seed(seed, t)))
            for t in range(len(rollout.tokens))
        ]
        groups = [request.result()[0] for request in asked]
    values, errors = [], []
    ask = lambda rollouts: ask_any(reward, [[policy.decode(r.tokens) for r in rollouts]], [problem], [rollouts])[0]  # noqa: E731
    for t, group in enumerate(groups):
        wholes = []
        for tail in group:
            tokens = rollout.tokens[:t] + tail.tokens
            wholes.append(replace(
                tail, prompt=rollout.prompt, tokens=tokens, mask=(1,) * len(tokens), kept_mass=(),
                logps=rollout.logps[:t] + tail.logps, raw_logps=rollout.raw_logps[:t] + tail.raw_logps))
        known = torch.tensor([float(r) for r in ask(wholes) if r is not None])
        values.append(known.mean().item())
        errors.append(known.std().item() / math.sqrt(len(known)) if len(known) > 1 else math.nan)
    own = ask([rollout])[0]
    own = math.nan if own is None else float(own)
    texts = tuple(policy.tokenizer.decode([t]) for t in rollout.tokens)
    return Credit(texts, (*values, own), (*errors, 0.0), advantage, own)


def credit_of(run: Run, step: int, group: int, rollout: int, reward: Reward, *, continuations: int = 64, seed: int = 0,
              reference: Policy | None = None) -> Credit:
    """`credit` of a recorded rollout, by the policy that wrote it."""
    groups = dict(enumerate(run.recorder.groups(step)))
    select(groups, step, group, rollout)
    g, threads = groups[group], session_at(run, step).get("threads")

    def work():
        state = restore(run, step, reference=reference)
        return credit(state.policy, g.group[rollout], reward, as_problem(g.problem), advantage=g.advantages[rollout],
                      max_new_tokens=state.config.max_new_tokens, temperature=state.config.temperature,
                      continuations=continuations, seed=seed, threads=threads)

    return with_threads(threads, work)
