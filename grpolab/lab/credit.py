"""The credit microscope: what each token of a rollout was worth, and how far a sampled gradient is from the exact one.

GRPO gives every token of a rollout the same advantage. The value of a prefix, V(prefix) = E[reward | prefix], tells where
the answer was won or lost; it is estimated by letting the same policy go on from every prefix many times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import MaxNLocator

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams, fold_seed
from grpolab.lab import plots
from grpolab.lab.replay import chosen
from grpolab.lab.rescore import as_problem
from grpolab.lab.restore import rebuild, sitting_of, with_threads
from grpolab.lab.tokens import shown
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run
from grpolab.train.advantages import advantages
from grpolab.train.layout import lay_out
from grpolab.train.logps import rollout_logps
from grpolab.train.rewards import Reward, ask_any

MOST = 20_000  # completions that are enumerated at most


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
        labels = [shown(t).replace("$", r"\$") for t in self.tokens]
        turned = 90 if max(map(len, labels)) > 2 else 0  # longer ones would cover each other
        axes[1].set_xticks(range(len(labels)), labels, fontsize=8, rotation=turned)
        axes[1].set(title=f"Token {most}, '{shown(self.tokens[most])}', decides: {credits[most]:+.2f}".replace("$", r"\$"),
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
    groups = run.recorder.numbered(step)
    chosen(groups, step, group, rollout)
    g, threads = groups[group], sitting_of(run.recorder.sittings(), step).get("threads")

    def work():
        state = rebuild(run, step, reference=reference)
        return credit(state.policy, g.group[rollout], reward, as_problem(g.problem), advantage=g.advantages[rollout],
                      max_new_tokens=state.config.max_new_tokens, temperature=state.config.temperature,
                      continuations=continuations, seed=seed, threads=threads)

    return with_threads(threads, work)


# --- the sampled gradient against the exact one -----------------------------------------------------------------------


def completions(policy: Policy, prompt: Sequence[int], new_tokens: int) -> list[Rollout]:
    """Every completion of up to `new_tokens` tokens: shorter where an end token ends it. ValueError beyond MOST of them."""
    vocab, ends = policy.model.get_output_embeddings().weight.shape[0], set(policy.eos_ids)
    if vocab**new_tokens > MOST:
        raise ValueError(f"{vocab} tokens make {vocab**new_tokens} completions of {new_tokens}, more than the {MOST} that are "
                         "enumerated: ask for fewer new_tokens")
    found, open_ = [], [()]
    for _ in range(new_tokens):
        longer = [head + (v,) for head in open_ for v in range(vocab)]
        found += [tokens for tokens in longer if tokens[-1] in ends]
        open_ = [tokens for tokens in longer if tokens[-1] not in ends]
    zeros = lambda tokens: (0.0,) * len(tokens)  # noqa: E731
    return [Rollout(tuple(prompt), t, (1,) * len(t), zeros(t), zeros(t), "eos" if t[-1] in ends else "length")
            for t in found + open_]


def exact_gradient(policy: Policy, prompt: Sequence[int], reward: Reward, problem: Any, *, new_tokens: int = 1
                   ) -> tuple[torch.Tensor, float]:
    """The gradient of E[reward] over all completions (one vector of all parameters), and E[reward], by enumeration."""
    everything = completions(policy, prompt, new_tokens)
    rewards = torch.tensor([float(reward(policy.decode(r.tokens), problem, r) or 0.0) for r in everything])
    policy.model.zero_grad()
    value = 0.0
    for start in range(0, len(everything), 512):
        part = everything[start : start + 512]
        expected = (_sequence_logps(policy, part).exp() * rewards[start : start + 512].to(policy.device)).sum()
        expected.backward()
        value += expected.item()
    return _taken(policy), value


def gradient_by_group_size(policy: Policy, prompt: Sequence[int], reward: Reward, problem: Any, *, new_tokens: int = 1,
                           sizes: Sequence[int] = (2, 4, 8, 16, 32), groups: int = 32, seed: int = 0,
                           kind: str = "leave_one_out") -> pd.DataFrame:
    """How a group's gradient, the mean of A_i grad log p(y_i), compares with the exact one, by group size: its mean `cosine`,
    its `variance` (E |g - mean|^2 / |exact|^2), and the `bias` of the mean over the groups (|mean - exact| / |exact|, of
    which sqrt(variance / groups) is noise). "leave_one_out" has none; "centred" is (G - 1) / G of it."""
    exact, _ = exact_gradient(policy, prompt, reward, problem, new_tokens=new_tokens)
    if not exact.norm() > 0:
        raise ValueError("the exact gradient is zero: every completion of this prompt has the same reward")
    rows = []
    with Sampler(policy) as sampler:
        for size in sizes:
            params = SamplingParams(max_new_tokens=new_tokens, seed=fold_seed(seed, size))
            found = []
            for group in sampler.sample_sync([prompt] * groups, group_size=size, params=params):
                rewards = [float(reward(policy.decode(r.tokens), problem, r) or 0.0) for r in group]
                a = advantages(torch.tensor([rewards]), kind)[0].to(policy.device)
                with policy.lock:
                    policy.model.zero_grad()
                    (_sequence_logps(policy, list(group)) * a).mean().backward()
                    found.append(_taken(policy))
            g = torch.stack(found)
            cosine = torch.nn.functional.cosine_similarity(g, exact[None]).mean().item()
            variance = ((g - g.mean(0)).square().sum(1).mean() * groups / (groups - 1) / exact.square().sum()).item()
            bias = ((g.mean(0) - exact).norm() / exact.norm()).item()
            rows.append({"group_size": size, "cosine": cosine, "variance": variance, "bias": bias})
    return pd.DataFrame(rows)


def _sequence_logps(policy: Policy, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The log-probability of each completion (N,), with gradient."""
    shape = (len(rollouts), max(len(r.tokens) for r in rollouts))
    logps, _ = rollout_logps(policy, lay_out(rollouts, pad_id=policy.pad_id), shape, 1.0)
    return logps.sum(1)


def _taken(policy: Policy) -> torch.Tensor:
    """The gradient that lies in the parameters as one vector, which are then without."""
    g = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.model.parameters()]).cpu()
    policy.model.zero_grad()
    return g
