"""Credit: what each token of a rollout was worth.

GRPO gives every token of a rollout the same advantage. The value of a prefix, V(prefix) = E[reward | prefix], tells where
the answer was won or lost; it is estimated by letting the same policy go on from every prefix many times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams, fold_seed
from grpolab.lab import plots
from grpolab.lab.replay import select
from grpolab.lab.rescore import as_problem
from grpolab.lab.restore import check_synchronous, restore, session_at, with_threads
from grpolab.lab.tokens import visible
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run
from grpolab.train.rewards import Reward, score


@dataclass(frozen=True)
class Credit:
    """`tokens` (T,) as texts; `values` (T + 1,), V after 0, ..., T of them, with their standard `errors`; `advantage`, the one
    number that the update gave them all. The credit of token t is values[t + 1] - values[t], and all of them add up to the
    reward minus V(prompt), which the mean of a group estimates."""

    tokens: tuple[str, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]
    advantage: float

    @property
    def credits(self) -> list[float]:
        """What each token added to the value (T,)."""
        return [after - before for before, after in zip(self.values, self.values[1:])]

    def plot(self):
        """V along the rollout, and each token's credit beside the flat advantage; returns both Axes."""
        left, right = axes = plt.subplots(1, 2, figsize=(9.6, 3.2))[1]
        values, errors, credits = np.array(self.values), 1.96 * np.array(self.errors), np.array(self.credits)
        left.fill_between(range(len(values)), values - errors, values + errors, color=plots.REWARD, alpha=0.25)
        left.plot(values, color=plots.REWARD, marker="o", markersize=3)
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set(title=f"V goes from {values[0]:.2f} to {values[-1]:.2f}", xlabel="tokens written",
                 ylabel="value of the prefix")
        right.bar(range(len(credits)), credits, yerr=np.hypot(errors[1:], errors[:-1]), capsize=2,
                  color=[plots.POLICY if c >= 0 else plots.WARNING for c in credits])
        right.axhline(self.advantage, color=plots.REFERENCE, linestyle="--", label=f"GRPO's advantage {self.advantage:.2f}")
        labels, most = [visible(t).replace("$", r"\$") for t in self.tokens], int(np.nanargmax(np.abs(credits)))
        right.set_xticks(range(len(labels)), labels, fontsize=8, rotation=90 if max(map(len, labels)) > 2 else 0)
        right.set(title=f"Token {most}, '{labels[most]}', decides: {credits[most]:+.2f}", xlabel="token", ylabel="credit")
        right.legend()
        return axes


def credit_of(run: Run, step: int, group: int, rollout: int, reward: Reward, *, continuations: int = 64) -> Credit:
    """V of every prefix of a recorded rollout's completion by so many continuations each, sampled from the policy that wrote
    it; V of the whole is its own reward.

    All prefixes are decoded in one batch, and each one's keys and values are shared by its continuations. Abstentions do not
    count. ValueError for a rollout of an episode, whose environment would have to go on, too."""
    groups, threads = run.recorder.groups(step), session_at(run, step).get("threads")
    select(groups, step, group, rollout)
    g = groups[group]
    r, problem = g.group[rollout], as_problem(g.problem)
    if not all(r.mask) or not r.tokens:
        raise ValueError("the credit of a rollout needs one turn of a policy that wrote all its tokens; this one is an "
                         "episode's, or empty")
    if continuations < 2:
        raise ValueError(f"continuations must be at least 2, got {continuations}")
    state = restore(run, step)
    policy, config = state.policy, state.config
    check_synchronous(config, "the credit of a token")

    def rewards(rollouts) -> np.ndarray:  # NaN where the reward abstains
        return np.array(score(policy, [problem], [rollouts], reward)[0].rewards, dtype=float)

    def sampled():
        with Sampler(policy, threads=threads) as sampler:
            requests = [
                sampler.submit([r.prompt + r.tokens[:t]], group_size=continuations, params=SamplingParams(
                    temperature=config.temperature, max_new_tokens=config.max_new_tokens - t, seed=fold_seed(0, t)))
                for t in range(len(r.tokens))
            ]
            return [request.result()[0] for request in requests]

    values, errors = [], []
    for t, rests in enumerate(with_threads(threads, sampled)):
        of = rewards([_joined(r, t, rest) for rest in rests])
        of = of[~np.isnan(of)]
        values.append(of.mean().item() if len(of) else math.nan)
        errors.append(of.std(ddof=1).item() / math.sqrt(len(of)) if len(of) > 1 else math.nan)
    texts = tuple(policy.tokenizer.decode([t]) for t in r.tokens)
    return Credit(texts, (*values, rewards([r]).item()), (*errors, 0.0), g.advantages[rollout])


def _joined(rollout: Rollout, t: int, rest: Rollout) -> Rollout:
    """The first `t` tokens of a rollout, continued by `rest`."""
    tokens = rollout.tokens[:t] + rest.tokens
    return replace(rest, prompt=rollout.prompt, tokens=tokens, mask=(1,) * len(tokens), kept_mass=(), versions=(),
                   logps=rollout.logps[:t] + rest.logps, raw_logps=rollout.raw_logps[:t] + rest.raw_logps)
