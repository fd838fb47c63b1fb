"""The options of the AWS environment. Apart from it, since the command line reads them where botocore is not installed."""

from __future__ import annotations

from dataclasses import dataclass

from grpolab.env.protocol import check_counts

TIERS = ("warmup", "beginner", "intermediate", "advanced", "expert", "drift")


@dataclass(frozen=True)
class AwsOptions:
    """How episodes go; only of `serve aws`.

    `shaping` w pays w * (P(s') - P(s)) each turn, with P the share of the criteria that hold, and 0 in the state after the last
    turn, so that which policies are best stays as it is (Ng, Harada and Russell, 1999): an episode's sum is the terminal reward
    less w * P(s0), whatever was done in between, and stalling earns nothing.
    """

    max_turns: int = 8  # commands in an episode
    tier: str | None = None  # tier of the tasks that are drawn where a client names none
    shaping: float = 0.0  # weight of the potential difference that is paid each turn
    observation_characters: int = 800  # longest observation; an output is cut in its middle

    def __post_init__(self):
        check_counts(max_turns=self.max_turns, observation_characters=self.observation_characters)
        if self.tier is not None and self.tier not in TIERS:
            raise ValueError(f"tier={self.tier!r}: there are {', '.join(TIERS)}")
        if not 0 <= self.shaping <= 1:
            raise ValueError(f"shaping={self.shaping}: from 0 to 1")
