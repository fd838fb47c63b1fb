"""On-policy distillation: the student writes, and at each of its tokens a teacher says how it would have gone on.

    async for row in distil(student, teacher, rows, DistilConfig(steps=50)): ...

Sources: GKD (arXiv 2306.13649) for the divergences and their mixture with given texts; Thinking Machines, On-Policy
Distillation (2025), for the form of the sampled tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from grpolab.chat import Example, Message, prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import BasePolicy, Policy
from grpolab.rollouts import CUT, Rollout, padded
from grpolab.runs.checkpoints import data_hash, weights_hash
from grpolab.runs.run import Run
from grpolab.tasks import prompt_of
from grpolab.train import distributed, losses
from grpolab.train.grpo import kept_tokens, mean, parts_of
from grpolab.train.layout import lay_out
from grpolab.train.logps import check_lengths, head_of, rollout_logps, rollout_states
from grpolab.train.loop import Optimisation, apply_gradient, autocast, epoch_batches, in_thread, loop, off_loop
from grpolab.train.verify import verify_forward

CHUNK = 2**23  # logits of student and teacher each that exist at a time


@dataclass(frozen=True)
class DistilConfig(Optimisation):
    """One step: `group_size` completions of each of `prompts_per_step` prompts, and the mean over their tokens of a divergence
    between the distributions of teacher and student.

    `beta` is GKD's (arXiv 2306.13649): 1 is the reverse KL(student || teacher), which leaves out what the teacher does not do;
    0 the forward KL(teacher || student), which covers all that it does; between them lies a Jensen-Shannon divergence.
    `vocabulary` "full" compares whole distributions; "sampled" has the sampled tokens alone, whose expectation is the same
    gradient of the reverse KL (Thinking Machines, On-Policy Distillation, 2025).
    `on_policy` is GKD's lambda: the probability that a step has the student's own completions; else it has `examples`.
    """

    prompts_per_step: int = 16  # questions a step
    group_size: int = 4  # completions of each question
    temperature: float = 1.0  # of sampling, and of both distributions
    max_new_tokens: int = 32  # longest completion
    beta: float = 1.0  # 1: reverse KL; 0: forward KL; between: Jensen-Shannon
    vocabulary: Literal["full", "sampled"] = "full"  # what is compared: whole distributions, or the sampled tokens
    on_policy: float = 1.0  # probability that a step has the student's completions, not the examples
    row_width: int = 512  # completions of one prompt share rows of so many tokens; 0: one a row

    def __post_init__(self):
        super().__post_init__()
        if min(self.prompts_per_step, self.group_size, self.max_new_tokens) < 1 or not 0 < self.temperature < float("inf"):
            raise ValueError("prompts_per_step, group_size and max_new_tokens are at least 1, temperature is positive and "
                             f"finite, got {self}")
        if not (0 <= self.beta <= 1 and 0 <= self.on_policy <= 1):
            raise ValueError(f"beta={self.beta} and on_policy={self.on_policy} lie between 0 and 1")
        if self.vocabulary == "sampled" and (self.beta != 1 or self.on_policy != 1):
            raise ValueError("the sampled form is of the reverse KL on the student's own tokens: leave beta and on_policy at 1")

    @property
    def packed_width(self) -> int:
        return self.row_width


async def distil(
    policy: Policy, teacher: BasePolicy, rows: Sequence[Any], config: DistilConfig, *, examples: Sequence[Example] = (),
    teacher_prompt: Callable[[Any], str | Sequence[Message]] | None = None, run: Run | None = None,
) -> AsyncIterator[dict]:
    """On-policy distillation of `teacher` into `policy` on the prompts of `rows`; a row a step.

    The teacher has the student's tokenizer. `teacher_prompt(row)` is what it is asked in place of the row's prompt: with an
    answer or a hint in it, the policy can be its own teacher. `examples` (texts of the teacher, say) are for on_policy < 1;
    both see them as they are.

    Rows: `loss`, the divergence in nats a token; `reverse_kl`, as the student's own tokens estimate it (NaN where the step had
    examples); `completion_length`, `truncated`; seconds of sampling and update; `off_policy`, whether the step had examples.
    """
    if distributed.world().size > 1:
        raise ValueError("distil runs in one process: start it without torchrun")
    if teacher is not policy and teacher.model is policy.model and type(teacher) is Policy:
        raise ValueError("student and teacher share a model, so the teacher would move along: load it a second time, or give "
                         "the policy itself and a teacher_prompt")
    if not rows:
        raise ValueError("there are no rows to ask the student: give at least one")
    if teacher is policy and teacher_prompt is None:
        raise ValueError("a policy that is its own teacher needs a teacher_prompt with more in it than the row's prompt")
    if config.on_policy < 1 and not examples:
        raise ValueError(f"on_policy={config.on_policy} needs examples, which the other steps are made of")
    given = [_as_rollout(e) for e in examples]
    fixed = type(teacher) is Policy and teacher is not policy
    heads = [head_of(p)["head"].shape[0] for p in (policy, teacher)]
    if heads[0] != heads[1] or policy.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise ValueError(f"student and teacher have other tokens ({heads[0]} and {heads[1]}): their distributions cannot be "
                         "compared")

    def asked(row: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        own = tuple(prompt_ids(policy.tokenizer, prompt_of(row)))
        return own, own if teacher_prompt is None else tuple(prompt_ids(policy.tokenizer, teacher_prompt(row)))

    def start():
        prompts = [asked(row) for row in rows]
        longest = max([len(r.prompt) + len(r.tokens) for r in given]
                      + [max(map(len, pair)) + config.max_new_tokens for pair in prompts])
        for one in {id(p): p for p in (policy, teacher)}.values():
            check_lengths(one, longest, "prompt and completion")
            with one.acting():
                verify_forward(one, config, longest)
        return prompts

    prompts = await in_thread(policy, start)
    batch_of = epoch_batches(range(len(rows)), config.prompts_per_step, config.seed)
    examples_of = epoch_batches(given, config.prompts_per_step * config.group_size, config.seed) if given else None
    sampler = await off_loop(lambda: Sampler(policy))

    async def gather(step):
        began, chosen = time.perf_counter(), [prompts[i] for i in batch_of(step)]
        off_policy = _uniform(config.seed, step) >= config.on_policy
        if off_policy:
            rollouts = theirs = examples_of(step)
        else:
            params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens,
                                    seed=config.seed * 1_000_003 + step)
            groups = await sampler.sample([own for own, _ in chosen], group_size=config.group_size, params=params)
            rollouts = [r for g in groups for r in g]
            theirs = [replace(r, prompt=prompt) for (_, prompt), g in zip(chosen, groups) for r in g]
        sampling = time.perf_counter() - began

        def update(optimiser):
            began = time.perf_counter()
            row = distil_gradient(policy, teacher, rollouts, theirs, config) | apply_gradient(policy, optimiser, config, step)
            return row | ({"reverse_kl": float("nan")} if off_policy else {}) | {
                "off_policy": float(off_policy), "completion_length": mean([len(r.tokens) for r in rollouts]),
                "truncated": mean([float(r.finish_reason in CUT) for r in rollouts]),
                "sampling_s": sampling, "update_s": time.perf_counter() - began}

        return update

    def data():
        return data_hash([prompts, examples, weights_hash(teacher) if fixed else ""])

    async with sampler, aclosing(loop(policy, config, run, gather, data)) as steps:
        async for row in steps:
            yield row


def distil_gradient(policy: Policy, teacher: BasePolicy, rollouts: Sequence[Rollout], theirs: Sequence[Rollout],
                    config: DistilConfig) -> dict:
    """Accumulate the gradient of the mean divergence over the tokens of `rollouts`, whatever the micro-batches. `theirs` are
    the same completions behind the prompts that the teacher gets. Returns {"loss", "reverse_kl"}."""
    count = kept_tokens(rollouts)
    order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].prompt), rollouts[i].prompt))
    rollouts, theirs = [rollouts[i] for i in order], [theirs[i] for i in order]
    totals = torch.zeros(2, dtype=torch.float64)
    for part in parts_of(policy, rollouts, config):
        shape = (len(rollouts[part]), max(len(r.tokens) for r in rollouts[part]))
        layouts = [lay_out(members[part], share=config.row_width > 0, pad_id=policy.pad_id) for members in (rollouts, theirs)]
        compare = _of_distributions if config.vocabulary == "full" else _of_sampled_tokens
        mask = padded([r.mask for r in rollouts[part]]).to(policy.device)
        loss, reverse_kl = compare(policy, teacher, layouts, shape, mask, config)
        (loss / count).backward()
        totals += torch.tensor([loss.item(), reverse_kl.item()], dtype=torch.float64)
    return dict(zip(("loss", "reverse_kl"), (totals / count).tolist()))


def _of_sampled_tokens(policy, teacher, layouts, shape, mask, config):
    with autocast(policy, config):
        logps, _ = rollout_logps(policy, layouts[0], shape, config.temperature, checkpointed=config.checkpoint_activations)
    with torch.no_grad(), teacher.acting(), autocast(teacher, config):
        wanted, _ = rollout_logps(teacher, layouts[1], shape, config.temperature)
    advantage = (wanted - logps.detach()) * mask
    ratio = torch.exp(logps - logps.detach())  # 1, with the gradient of log p
    return -(ratio * advantage).sum(), -advantage.sum()


def _of_distributions(policy, teacher, layouts, shape, mask, config):
    with autocast(policy, config):
        hidden = rollout_states(policy, layouts[0], checkpointed=config.checkpoint_activations)
    with torch.no_grad(), teacher.acting(), autocast(teacher, config):
        wanted = rollout_states(teacher, layouts[1]).to(hidden.device)
    target = layouts[0].target.to(hidden.device)  # both have the chosen tokens in one order
    heads = [{k: None if x is None else x.to(hidden.device) for k, x in head_of(p).items()} for p in (policy, teacher)]
    size = max(1, CHUNK // heads[0]["head"].shape[0])

    def of_chunk(h, w, y):
        mine, its = (_logits(x, head, config.temperature) for x, head in zip((h, w), heads))
        p, q = mine.log_softmax(-1), its.detach().log_softmax(-1)
        return losses.divergence(p, q, config.beta).sum(), (p - q).gather(1, y[:, None]).sum().detach()

    parts = [checkpoint(of_chunk, *of, use_reentrant=False)  # no logits are kept
             for of in zip(hidden.split(size), wanted.split(size), target.split(size))]
    return tuple(torch.stack(x).sum() for x in zip(*parts))


def _logits(hidden, head, temperature):
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden.to(head["head"].dtype), head["head"], head["bias"])
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _as_rollout(example: Example) -> Rollout:
    """An example as a completion of what stands before its first token to train on; ValueError where it has none."""
    if 1 not in example.mask[1:]:
        raise ValueError("an example has no token to train on: its mask marks none after the first")
    at = example.mask.index(1, 1)
    tokens, mask = example.ids[at:], example.mask[at:]
    return Rollout(example.ids[:at], tokens, mask, (0.0,) * len(tokens), (0.0,) * len(tokens), "eos")


def _uniform(seed: int, step: int) -> float:
    """In [0, 1), a function of both."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/on_policy".encode()).digest()[:8], "big") / 2**64
