"""What a step of GRPO is. Apart from `grpo`, whose sources of groups also read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from grpolab.train.loop import Optimisation


@dataclass(frozen=True)
class GRPOConfig(Optimisation):
    """One step: `prompts_per_step` questions, `group_size` rollouts each, `inner_epochs` passes over them in `minibatches`
    optimiser steps a pass, each on nearly equally many whole groups (in fewer steps where fewer groups have a signal).

    The advantage is centred in the group (`advantage_kind`), the loss a sum over all kept tokens divided by their count
    (`aggregation`), the ratio clipped by `clip_eps` = (low, high), the KL penalty is `kl_coef` times the KL to the reference
    (`kl_kind`; a coefficient of 0 needs no reference). `objective`, `ratio` and `dual_clip` as in `losses.policy_loss`;
    `max_grad_norm`, `lr` and the rest as in Optimisation.

    `max_logp_diff` = (mean, largest) bounds by how many nats a token the trainer may differ from the sampler before the first
    optimiser step of a batch; beyond it the step stops with an error (`check_drift`). None asks for nothing. `sampler_cap` is
    for rollouts of another sampler's numerics: the ratio is then to the trainer's own log-probs before the step (a forward
    pass more), and each token is weighed by `losses.sampler_weight`.

    `refills` is dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): up to so many times a step, groups without a difference
    in reward are replaced by groups of further questions. What that costs stands in the row.

    `row_width` > 0 lets rollouts of one prompt share it in rows of so many tokens.

    `exact` samples with the attention that the trainer computes with (`Sampler(exact=True)`), and trains on one rollout a row,
    since behind a shared prompt the keys of a token are added in another order: so the first ratio of a step is 1 in every
    bit. That needs a processor and bf16 parameters; elsewhere the sampler's probe refuses it.
    """

    prompts_per_step: int = 64  # questions a step
    group_size: int = 8  # rollouts of each question
    inner_epochs: int = 1  # passes over a step's rollouts
    minibatches: int = 1  # optimiser steps a pass
    temperature: float = 1.0  # sampling temperature
    max_new_tokens: int = 32  # longest completion
    advantage_kind: Literal["centred", "standardised", "leave_one_out", "batch_standardised"] = "centred"  # of the rewards
    aggregation: Literal["token", "sequence", "constant"] = "token"  # what the loss is averaged over
    clip_eps: tuple[float, float] = (0.2, 0.2)  # the ratio is clipped to 1 - low and 1 + high
    objective: Literal["ppo", "cispo"] = "ppo"  # clipped ratio (PPO), or clipped weight (CISPO)
    ratio: Literal["token", "sequence"] = "token"  # of each token, or of the sequence (GSPO)
    dual_clip: float | None = None  # bound of the ratio where the advantage is negative
    refills: int = 0  # times a step that groups without a difference in reward are replaced
    kl_coef: float = 0.0  # coefficient of the KL penalty; 0 needs no reference
    kl_kind: Literal["k1", "k2", "k3", "unbiased"] = "unbiased"  # estimator of the KL divergence
    row_width: int = 512  # rollouts of one prompt share rows of so many tokens; 0: one rollout a row
    max_logp_diff: tuple[float, float] | None = (0.1, 5.0)  # allowed difference of trainer and sampler: mean, largest
    sampler_cap: float | None = None  # bound of the weights that correct for another sampler
    exact: bool = False  # sample with the trainer's attention (bf16 on a CPU): the first ratio is exactly 1

    def __post_init__(self):
        super().__post_init__()
        if self.sampler_cap is not None and not self.sampler_cap >= 1:
            raise ValueError(f"sampler_cap must be None or at least 1, got {self.sampler_cap}")
        if self.max_logp_diff is not None and not min(self.max_logp_diff) > 0:
            raise ValueError(f"max_logp_diff must be None or (mean, largest), both positive, got {self.max_logp_diff}")
        eps = self.clip_eps
        if not (isinstance(eps, tuple | list) and len(eps) == 2 and all(isinstance(x, int | float) and x >= 0 for x in eps)):
            raise ValueError(f"clip_eps must be (low, high), distances of the ratio from 1 that are not negative, got {eps!r}")
        if self.dual_clip is not None and not (self.dual_clip > 1 and self.objective == "ppo"):
            raise ValueError(f"dual_clip must be None or above 1, and is for objective 'ppo', got {self.dual_clip} with "
                             f"{self.objective!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}: rollouts of a group that are "
                             "greedy are all equal, and at infinity they are noise")
        for name in ("group_size", "prompts_per_step", "inner_epochs", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.group_size == 1 and not self.kl_coef:
            raise ValueError("group_size=1 never trains: an advantage compares with others of the group. Take at least 2")
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError("kl_coef weighs the distance to the reference and must be finite and not negative, got "
                             f"{self.kl_coef}")
        if self.refills < 0:
            raise ValueError(f"refills must be 0 (off) or more rounds of sampling, got {self.refills}")
        if not 1 <= self.minibatches <= self.prompts_per_step:
            raise ValueError(f"minibatches={self.minibatches} must lie between 1 and prompts_per_step={self.prompts_per_step}")

    @property
    def packed_width(self) -> int:
        """Tokens of the rows of a forward pass; 0: one rollout a row."""
        return 0 if self.exact else self.row_width
