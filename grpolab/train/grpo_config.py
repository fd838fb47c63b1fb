"""What a step of GRPO is. Apart from `grpo`, whose sources of groups also read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpolab.train import losses
from grpolab.train.loop import Optimisation


@dataclass(frozen=True)
class GRPOConfig(Optimisation):
    """One step: `prompts_per_step` questions, `group_size` rollouts each, `inner_epochs` passes over them in `minibatches`
    optimiser steps a pass, each on nearly equally many whole groups (in fewer steps where fewer groups have a signal).

    The losses' options are those of `losses.policy_loss` and `losses.kl_penalty`. Where trainer and sampler differ by more than
    `max_logp_diff` nats a token before the first optimiser step of a batch, the step stops with an error (`check_drift`; None:
    never). `sampler_cap` is for rollouts of another sampler's numerics: the ratio is then to the trainer's own log-probs before
    the step (a forward pass more), and each token is weighed as there. `refills` is dynamic sampling (DAPO,
    arXiv 2503.14476, eq. 11): groups without a difference in reward are replaced by groups of further questions, up to so many
    times a step.

    The KL penalty is to a frozen reference, or with kl_to="sampler" to the policy that drew the rollouts, by the log-probs that
    came with them: no second model, and a trust region around it (the penalised objective of PPO, arXiv 1707.06347,
    eq. 8, with the estimate and direction of `losses.kl_penalty`; Atropos' example trainer has kl_coef 0.1 and kl_kind "k3").
    It is zero, gradient and all, until the policy has moved away from the one that drew: in the second update of a step, or on
    rollouts of older weights.

    `exact` samples with the trainer's attention (`Sampler(exact=True)`) and trains on one rollout a row, since behind a shared
    prompt the keys of a token are added in another order: so the first ratio of a step is 1 in every bit. That needs a
    processor and bf16 parameters.
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
    kl_to: Literal["reference", "sampler"] = "reference"  # what the penalty keeps the policy close to
    kl_kind: Literal["k1", "k2", "k3", "unbiased"] = "unbiased"  # estimator of the KL divergence
    share_prompts: bool = True  # compute a prompt once for its completions (Llama-shaped models)
    max_logp_diff: tuple[float, float] | None = (0.1, 5.0)  # allowed difference of trainer and sampler: mean, largest
    sampler_cap: float | None = None  # bound of the weights that correct for another sampler
    exact: bool = False  # sample with the trainer's attention (bf16 on a CPU): the first ratio is exactly 1

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "prompts_per_step", "group_size", "inner_epochs", "max_new_tokens", "minibatches")
        self.check_at_least(0, "refills", "kl_coef")
        self.check_positive("temperature")
        cap = 1.0 if self.sampler_cap is None else self.sampler_cap
        losses.check_policy_options(self.objective, self.ratio, self.clip_eps, self.dual_clip, cap)
        pair = isinstance(self.max_logp_diff, tuple | list) and len(self.max_logp_diff) == 2
        if self.max_logp_diff is not None and not (pair and all(bound > 0 for bound in self.max_logp_diff)):
            raise ValueError(f"max_logp_diff must be None or (mean, largest), both positive, got {self.max_logp_diff}")
        if self.group_size == 1 and not self.kl_coef:
            raise ValueError("group_size=1 never trains: an advantage compares with others of the group. Take at least 2")
        if self.kl_to == "sampler" and not self.kl_coef:
            raise ValueError("kl_to='sampler' without a KL penalty: set kl_coef, as to 0.1")
        if self.minibatches > self.prompts_per_step:
            raise ValueError(f"minibatches={self.minibatches} must not exceed prompts_per_step={self.prompts_per_step}")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0 and self.kl_to == "reference"
