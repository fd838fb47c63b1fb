"""A reward model: a decoder that reads prompt and completion, and a linear head that makes one number of its last state.

It is a Hugging Face sequence-classification model with one label, so it saves and loads like any of them, and one from
the hub serves as well.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpolab.models import lora
from grpolab.models.load import Policy, choose_device, evaluating, in_own_memory, read_checkpoint, refuse_gaps
from grpolab.rollouts import Rollout, given
from grpolab.runs.checkpoints import data_hash
from grpolab.runs.run import Run
from grpolab.sync import MODEL_LOADING
from grpolab.train import losses
from grpolab.train.layout import lay_out
from grpolab.train.logps import parts_of, rollout_states, way_of
from grpolab.train.loop import Optimisation, accumulate, autocast, off_loop, over_batches
from grpolab.train.preferences import Pair, check_pairs, pair_batches, pair_counts
from grpolab.train.verify import verify_forward


class RewardModel(Policy):
    """A Policy's parts (model, tokenizer, lock, version), so that the loops train it alike; it scores instead of sampling.

    model = RewardModel.from_policy(policy)      # a copy of its decoder, and a head of zeros
    model.score([prompt + completion, ...])      # token ids, the end token included where there is one
    """

    @classmethod
    def from_policy(cls, policy: Policy, adapter: lora.LoRA | None = None) -> RewardModel:
        """A copy of the policy's decoder, its adapter merged, under a head of zeros: every reward is 0. The policy stays as it
        is. With an `adapter`, that and the head alone are trained."""
        config = type(policy.model.config).from_dict(policy.model.config.to_dict())
        tokenizer = copy.deepcopy(policy.tokenizer)
        tokenizer.pad_token_id = config.pad_token_id = _filler(policy)
        config.num_labels = 1
        with MODEL_LOADING:
            from transformers import AutoModelForSequenceClassification

            model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
        with policy.lock:
            source = policy.model
            if lora.layers(source):
                source = copy.deepcopy(source)
                lora.merge(source)
            model.base_model.load_state_dict(source.get_decoder().state_dict())
        torch.nn.init.zeros_(_head(model).weight)
        if adapter:
            lora.inject(model, adapter, policy.name)
            _head(model).requires_grad_(True)
        return cls(model.to(policy.device).eval(), tokenizer, policy.name, policy.eos_ids)

    @classmethod
    def load(cls, name: str | Path, *, device: str | None = None, dtype=None) -> RewardModel:
        """What `save` wrote, or any sequence-classification model with one label; ValueError for anything else."""
        target, dtype = choose_device(device, dtype)
        try:
            model, report, tokenizer = read_checkpoint("AutoModelForSequenceClassification", name, dtype)
        except Exception as error:  # transformers raises a different type for each way a checkpoint can be missing or broken
            raise ValueError(f"{name} is not a readable reward model: {error}") from error
        if report["missing_keys"] or model.config.num_labels != 1:
            raise ValueError(f"{name} is no reward model: it has {model.config.num_labels} labels and lacks "
                             f"{sorted(report['missing_keys']) or 'nothing'}; RewardModel.from_policy makes one of a policy")
        refuse_gaps(report, name)
        return cls(in_own_memory(model).to(target).eval(), tokenizer, Path(name).name, (tokenizer.eos_token_id,))

    def save(self, folder: str | Path) -> Path:
        """As `Policy.save`, its adapter merged: a saved reward model is whole."""
        if not lora.layers(self.model):
            return super().save(folder)
        with self.lock:
            whole = RewardModel(copy.deepcopy(self.model), self.tokenizer, self.name, self.eos_ids)
        lora.merge(whole.model)
        return whole.save(folder)

    def forward(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Token ids of N sequences -> rewards (N,) in fp32, with gradient; each read at its own last token."""
        return self.read([given(s, (), ()) for s in sequences])[1]

    def read(
        self, rollouts: Sequence[Rollout], *, way: str | None = None, checkpointed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The decoder's last state of each rollout (N, D), and the head's rewards (N,) of them. Neighbours share how they
        begin, where the forward allows it."""
        asked = [given(r.prompt, (*r.tokens, self.pad_id), (*[0] * len(r.tokens), 1)) for r in rollouts]  # what would follow
        states = rollout_states(self, lay_out(asked), way=way or way_of(self, "rewards"), checkpointed=checkpointed)
        return states, self.head(states)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """The head's number of each state: (N, D) -> (N,)."""
        head = _head(self.model)
        with torch.autocast(self.device.type, enabled=False):  # the one number that everything depends on stays in fp32
            return torch.nn.functional.linear(states.to(head.weight.dtype), head.weight, head.bias).float().squeeze(1)

    def score(self, sequences: Sequence[Sequence[int]], *, token_budget: int = 8192) -> list[float]:
        """The reward of each sequence of token ids; equal sequences get equal rewards in every bit."""
        distinct = sorted({tuple(s) for s in sequences}, key=lambda s: (len(s), s))
        if distinct and not (distinct[0] and len(distinct[-1]) <= self.context):
            raise ValueError(f"a sequence needs 1 to {self.context} tokens, got {len(distinct[0])} to {len(distinct[-1])}")
        rewards = {}
        with torch.no_grad(), self.lock, evaluating(self.model):
            for part in parts_of(self, [given(s, (), ()) for s in distinct], token_budget, share=False, what="rewards"):
                rewards |= zip(distinct[part], self.forward(distinct[part]).tolist())
        return [rewards[tuple(s)] for s in sequences]

    def batch(self, texts, problems, rollouts) -> list[float]:
        """The rewards of a GRPO step."""
        return self.score([r.prompt + r.tokens for r in rollouts])

    def __call__(self, text, problem, rollout) -> float:
        return self.batch([text], [problem], [rollout])[0]


def _filler(policy: Policy) -> int:
    """A padding token that ends no answer. transformers reads a row at its last token other than padding, so where the
    end token doubles as padding it would read every finished answer one token early."""
    if policy.pad_id not in policy.eos_ids:
        return policy.pad_id
    spare = [i for i in policy.tokenizer.all_special_ids if i not in policy.eos_ids]
    if not spare:
        raise ValueError(f"{policy.name!r} pads with its end token and has no other special token to pad with: give its "
                         "tokenizer a pad_token")
    return min(spare, key=lambda i: i == policy.tokenizer.bos_token_id)


def _head(model) -> torch.nn.Linear:
    """The head of a sequence-classification model: the module beside its decoder."""
    (head,) = [m for name, m in model.named_children() if name != model.base_model_prefix]
    return head


@dataclass(frozen=True)
class RewardConfig(Optimisation):
    """`batch_size` pairs a step. `margin` is asked for between chosen and rejected, times a pair's own `meta["margin"]`
    where it has one; `centering` pulls the two rewards' sum to zero (`losses.bradley_terry_loss`)."""

    batch_size: int = 32  # pairs a step
    margin: float = 0.0  # difference that is asked for between chosen and rejected
    centering: float = 0.0  # coefficient that pulls the sum of the two rewards to zero

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size")
        self.check_at_least(0, "centering")


def reward_model(
    model: RewardModel, pairs: Sequence[Pair], config: RewardConfig, *, run: Run | None = None
) -> AsyncIterator[dict]:
    """Train a reward model to score chosen above rejected (Bradley–Terry; InstructGPT, arXiv 2203.02155, eq. 1)."""

    def check():
        check_pairs(model, pairs)
        if wrong := [i for i, p in enumerate(pairs) if not isinstance(p.meta.get("margin", 1.0), int | float)]:
            raise ValueError(f"pair {wrong[0]}: the margin in its meta is {pairs[wrong[0]].meta['margin']!r:.40}, no number: "
                             "give one, or call that column something else")
        verify_forward(model, config, max((p.longest for p in pairs), default=0), "rewards")

    return over_batches(model, pairs, config, run, check=check, counts=pair_counts, data=lambda: data_hash(pairs),
                        gradient=lambda part, denominator: reward_gradient(model, part, config, denominator=denominator))


def reward_gradient(
    model: RewardModel, pairs: Sequence[Pair], config: RewardConfig, *, denominator: int | None = None
) -> dict:
    """Accumulate the gradient of the batch's mean Bradley–Terry loss, whatever the micro-batches; returns the metrics. Where
    `pairs` are a part, the `denominator` counts all."""
    metrics = accumulate(model, _losses(model, pairs, config, len(pairs) if denominator is None else denominator))
    return {"loss": metrics.pop("bradley_terry_loss")} | metrics


def _losses(model: RewardModel, pairs: Sequence[Pair], config: RewardConfig, denominator: int) -> Iterator[tuple]:
    """`losses.bradley_terry_loss` of each micro-batch."""
    for indices in pair_batches(model, pairs, config, share=True, what="rewards"):
        part = [pairs[i] for i in indices]
        with autocast(model, config):
            sides = [r for p in part for r in p.sides]
            rewards = model.read(sides, checkpointed=config.checkpoint_activations)[1].view(-1, 2)
        margin = rewards.new_tensor([config.margin * p.meta.get("margin", 1.0) for p in part])
        yield losses.bradley_terry_loss(*rewards.T, denominator=denominator, margin=margin, centering=config.centering)


def held_out_accuracy(pairs: Sequence[Pair]) -> Callable[[RewardModel], Awaitable[float]]:
    """A measure for a `Selection`: the share of `pairs` whose chosen side scores above the rejected one."""
    if not pairs:
        raise ValueError("there are no held-out pairs to measure on")

    async def measure(model: RewardModel) -> float:
        scores = await off_loop(lambda: model.score([r.prompt + r.tokens for p in pairs for r in p.sides]))
        return sum(chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2])) / len(pairs)

    return measure
