"""What the columns of a run mean, the range in which a run is usually healthy, and numbers as people read them."""

from __future__ import annotations

import math
from typing import NamedTuple


class Metric(NamedTuple):
    """`meaning` in one line; `low` and `high` bound the healthy range, None where a side has no bound."""

    meaning: str
    low: float | None = None
    high: float | None = None

    def strays(self, value: float) -> bool:
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)

    @property
    def range(self) -> str:
        low, high = (None if x is None else f"{x:g}" for x in (self.low, self.high))
        return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else ""


# Bounds with two numbers beside them lie between the healthy and the ill runs that benchmarks/illnesses.py records, on the
# embedded model; the others are rules of thumb. Outside of them a run is worth a look, not wrong.
METRICS = {
    "reward": Metric("mean reward of the sampled completions"),
    "mixed": Metric("share of groups whose rewards differ: only these have a gradient from the reward", low=0.1),
    "uninformative": Metric("share of groups whose rewards are all equal: no difference, no gradient", high=0.79),
    "all_wrong": Metric("share of groups without a right completion", high=0.9),
    "all_right": Metric("share of groups with right completions only", high=0.9),
    "kl": Metric("distance to the reference, nats a token", high=0.3),  # healthy: 0.1, k3's tail: 14 once; ill: 10
    "entropy": Metric("how undecided the policy is about the next token, nats", low=0.01),  # healthy: from 0.016; ill: 0.002
    "ratio": Metric("probability now / when sampled, mean over tokens", 0.8, 1.2),
    "ratio_max": Metric("probability now / when sampled, of the token that rose most", high=10.0),  # healthy: 9.6; ill: 268
    "ratio_low": Metric("probability by the policy / when sampled, before the step: 5 % of the tokens lie below"),
    "ratio_median": Metric("probability by the policy / when sampled, before the step: the middle one", 0.8, 1.25),
    "ratio_high": Metric("probability by the policy / when sampled, before the step: 5 % of the tokens lie above"),
    "ess": Metric("effective sample size, share of the tokens that weigh as much as on-policy ones", low=0.5),
    "clip_low": Metric("share of tokens whose push down was stopped by clipping", high=0.1),  # healthy: 0.02; ill: 0.19
    "clip_high": Metric("share of tokens whose push up was stopped by clipping", high=0.1),
    "diff_mean": Metric("trainer's log-prob minus the sampler's, before the step, nats a token", -0.02, 0.02),
    "diff_abs_mean": Metric("disagreement of sampler and trainer before the step, nats a token", high=0.02),  # 0.0028; 0.036
    "diff_max": Metric("disagreement of sampler and trainer on the worst token, nats", high=2.0),  # bfloat16: 1.1; 5.7
    "sampler_kl": Metric("distance to the policy that sampled, nats a token", high=0.1),
    "low_logp": Metric("share of sampled tokens whose log-prob is now below -10", high=0.0035),  # 0.0031; 0.015
    "policy_loss": Metric("the clipped objective, negative", low=-10.0),
    "repetition": Metric("share of 4-grams that a completion has had before", high=0.3),
    "grad_norm": Metric("length of the gradient before it is clipped"),
    "completion_length": Metric("tokens in a completion, mean"),
    "truncated": Metric("share of completions cut at the token limit", high=0.29),  # healthy: at most 0.03; ill: up to 1
    "loss": Metric("what the optimiser lowers"),
    "held_out_loss": Metric("the loss on examples that no step trains on, nats a token"),
    "margin": Metric("how far the chosen answer lies above the rejected one", low=0.0),
    "accuracy": Metric("share of pairs whose chosen answer is ahead; 0.5 is a coin", low=0.5),
    "logps_chosen": Metric("log-probability of the chosen answers, nats"),
    "logps_rejected": Metric("log-probability of the rejected answers, nats"),
    "reward_chosen": Metric("score of the chosen answers"),
    "reward_rejected": Metric("score of the rejected answers"),
    "tool_rate": Metric("share of episodes that used the tool"),
    "tier": Metric("the highest tier of tasks that is open, counted from 0"),
    "turns": Metric("turns of the policy in an episode, mean"),
    "invalid": Metric("actions of an episode that could not be read, mean", high=0.1),
    "lost": Metric("episodes lost to a failing environment", high=0.0),
    "sampling_s": Metric("seconds of sampling in a step"),
    "update_s": Metric("seconds of the update in a step"),
    "seconds": Metric("seconds of a step"),
    "tokens_per_s": Metric("tokens trained on in a second"),
    "pairs_per_s": Metric("pairs trained on in a second"),
}

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def readable(value, digits: int = 4) -> str:
    """`digits` significant digits: 0.9876, 11,660, 5.629·10⁻⁷, 10⁻⁶. What is not a number is its text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = f"{float(mantissa):g}"
        power = f"10{str(int(exponent)).translate(SUPERSCRIPT)}"
        return power if mantissa == "1" else f"{mantissa}·{power}"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def short(text: str, most: int = 120) -> str:
    """Text on one line, at most so many characters of it."""
    text = text.replace("\n", "↵")
    return text if len(text) <= most else text[:most] + "…"
