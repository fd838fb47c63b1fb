"""On-policy distillation: the student samples, and learns the teacher's distribution at each of its tokens.

    async for row in distil(student, teacher, rows, DistilConfig(steps=50)): ...
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from grpolab.chat import Message, prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import BasePolicy, Policy
from grpolab.rollouts import CUT, Rollout
from grpolab.runs.checkpoints import data_hash, weights_hash
from grpolab.runs.run import Run
from grpolab.tasks import prompt_of
from grpolab.train import distributed, losses
from grpolab.train.grpo import kept_tokens, mean, parts_of
from grpolab.train.layout import lay_out
from grpolab.train.logps import check_lengths, head_of, rollout_states
from grpolab.train.loop import (
    Optimisation,
    accumulate,
    apply_gradient,
    autocast,
    epoch_batches,
    in_thread,
    loop,
    off_loop,
)
from grpolab.train.verify import verify_forward

CHUNK = 2**23  # logits of student and teacher each that exist at a time


@dataclass(frozen=True)
class DistilConfig(Optimisation):
    """One step: `group_size` completions of each of `prompts_per_step` prompts, and the mean over their tokens of a divergence
    between the distributions of teacher and student.

    `beta` is GKD's (arXiv 2306.13649). `vocabulary` "sampled" has on average the gradient of the reverse KL over "full"
    distributions (Thinking Machines, On-Policy Distillation, 2025)."""

    prompts_per_step: int = 16  # questions a step
    group_size: int = 4  # completions of each question
    temperature: float = 1.0  # of sampling, and of both distributions
    max_new_tokens: int = 32  # longest completion
    beta: float = 1.0  # 1: reverse KL(student || teacher); 0: forward KL; between: Jensen-Shannon
    vocabulary: Literal["full", "sampled"] = "full"  # what is compared: whole distributions, or the sampled tokens
    share_prompts: bool = True  # compute a prompt once for its completions (Llama-shaped models)

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "prompts_per_step", "group_size", "max_new_tokens")
        self.check_positive("temperature")
        if not 0 <= self.beta <= 1 or self.vocabulary == "sampled" and self.beta != 1:
            raise ValueError(f"beta lies between 0 and 1, and is 1 for sampled tokens (the reverse KL), got {self.beta}")


async def distil(
    policy: Policy, teacher: BasePolicy, rows: Sequence[Any], config: DistilConfig, *,
    teacher_prompt: Callable[[Any], str | Sequence[Message]] | None = None, run: Run | None = None,
) -> AsyncIterator[dict]:
    """On-policy distillation of `teacher` into `policy` on the prompts of `rows`; a row a step.

    The teacher has the student's tokenizer. `teacher_prompt(row)` is its prompt in place of the row's: with an answer or a
    hint in it, the policy can be its own teacher. In a row, `loss` is the divergence in nats a token, and `reverse_kl` the
    estimate of the reverse KL from the student's own tokens.
    """
    if distributed.world().size > 1:
        raise ValueError("distil runs in one process: start it without torchrun")
    if teacher is not policy and teacher.model is policy.model and type(teacher) is Policy:
        raise ValueError("student and teacher share a model, so the teacher would move along: load it a second time, or give "
                         "the policy itself and a teacher_prompt")
    if teacher is policy and teacher_prompt is None:
        raise ValueError("a policy that is its own teacher needs a teacher_prompt with more in it than the row's prompt")
    sizes = [head_of(p)["head"].shape[0] for p in (policy, teacher)]
    if sizes[0] != sizes[1] or policy.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise ValueError(f"student and teacher have other tokens ({sizes[0]} and {sizes[1]}): their distributions cannot be "
                         "compared")
    batch_of = epoch_batches(range(len(rows)), config.prompts_per_step, config.seed)

    def prompts_of(row: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        own = tuple(prompt_ids(policy.tokenizer, prompt_of(row)))
        return own, own if teacher_prompt is None else tuple(prompt_ids(policy.tokenizer, teacher_prompt(row)))

    def start():
        prompts = [prompts_of(row) for row in rows]
        longest = max(max(map(len, pair)) for pair in prompts) + config.max_new_tokens
        for one in {id(p): p for p in (policy, teacher)}.values():
            check_lengths(one, longest, "prompt and completion")
            with one.acting():
                verify_forward(one, config, longest)
        return prompts

    prompts = await in_thread(policy, start)
    sampler = await off_loop(lambda: Sampler(policy))

    async def gather(step):
        began, chosen = time.perf_counter(), [prompts[i] for i in batch_of(step)]
        params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens,
                                seed=config.seed * 1_000_003 + step)
        groups = await sampler.sample([own for own, _ in chosen], group_size=config.group_size, params=params)
        rollouts = [r for g in groups for r in g]
        theirs = [replace(r, prompt=prompt) for (_, prompt), g in zip(chosen, groups) for r in g]
        sampling = time.perf_counter() - began

        def update(optimiser):
            began = time.perf_counter()
            row = distil_gradient(policy, teacher, rollouts, theirs, config) | apply_gradient(policy, optimiser, config, step)
            return row | {
                "completion_length": mean([len(r.tokens) for r in rollouts]),
                "truncated": mean([float(r.finish_reason in CUT) for r in rollouts]),
                "sampling_s": sampling, "update_s": time.perf_counter() - began}

        return update

    def data():
        frozen = type(teacher) is Policy and teacher is not policy
        return data_hash([prompts, weights_hash(teacher) if frozen else ""])

    async with sampler, aclosing(loop(policy, config, run, gather, data)) as steps:
        async for row in steps:
            yield row


def distil_gradient(policy: Policy, teacher: BasePolicy, rollouts: Sequence[Rollout], theirs: Sequence[Rollout],
                    config: DistilConfig) -> dict:
    """Accumulate the gradient of the mean divergence over the tokens of `rollouts`, whatever the micro-batches. `theirs` are
    the same completions behind the prompts that the teacher gets. Returns {"loss", "reverse_kl"}."""
    order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].prompt), rollouts[i].prompt))
    return accumulate(_losses(policy, teacher, [rollouts[i] for i in order], [theirs[i] for i in order], config))


def _losses(policy, teacher, rollouts, theirs, config) -> Iterator[tuple]:
    """Each micro-batch's share of the mean divergence."""
    count = kept_tokens(rollouts)
    for part in parts_of(policy, rollouts, config):
        own, its = (lay_out(members[part], share=config.share_prompts, pad_id=policy.pad_id) for members in (rollouts, theirs))
        with autocast(policy, config):
            hidden = rollout_states(policy, own, checkpointed=config.checkpoint_activations)
        with torch.no_grad(), teacher.acting(), autocast(teacher, config):
            wanted = rollout_states(teacher, its).to(hidden.device)
        target = own.target.to(hidden.device)  # both have the chosen tokens in one order
        loss, reverse_kl = _divergence(policy, teacher, hidden, wanted, target, config)
        yield loss / count, {"loss": loss.detach() / count, "reverse_kl": reverse_kl / count}


def _divergence(policy, teacher, hidden, wanted, target, config):
    """The divergence and the estimate of the reverse KL, summed over the tokens. No logits outlive their chunk."""
    heads = [{k: None if x is None else x.to(hidden.device) for k, x in head_of(p).items()} for p in (policy, teacher)]
    size = max(1, CHUNK // heads[0]["head"].shape[0])

    def of_chunk(hidden, wanted, target):
        p, q = (_log_distribution(x, head, config.temperature) for x, head in zip((hidden, wanted), heads))
        p_target, q_target = (x.gather(1, target[:, None]) for x in (p, q))
        advantage = (q_target - p_target).detach()
        if config.vocabulary == "full":
            loss = losses.divergence(p, q, config.beta)
        else:
            loss = -torch.exp(p_target - p_target.detach()) * advantage  # -advantage, with the gradient of log p
        return loss.sum(), -advantage.sum()

    chunks = zip(hidden.split(size), wanted.split(size), target.split(size))
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.stack(x).sum() for x in zip(*parts))


def _log_distribution(hidden, head, temperature):
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden.to(head["head"].dtype), head["head"], head["bias"])
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
