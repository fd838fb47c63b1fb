"""On-policy distillation: the student samples, and learns the teacher's distribution at each of its tokens.

    async for row in distil(student, teacher, rows, DistilConfig(steps=50)): ...

GKD is Agarwal et al., On-Policy Distillation of Language Models (arXiv 2306.13649); the form of the sampled tokens is that of
Thinking Machines, On-Policy Distillation (2025).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from grpolab.chat import Example, Message, prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import CUT, Rollout, padded
from grpolab.runs.checkpoints import data_hash, weights_hash
from grpolab.runs.run import Run
from grpolab.tasks import prompt_of
from grpolab.train import distributed, losses
from grpolab.train.grpo import kept_tokens, mean, parts_of, trainer_logps
from grpolab.train.layout import lay_out
from grpolab.train.logps import as_rollouts, check_lengths, head_of, rollout_logps, rollout_states
from grpolab.train.loop import Optimisation, accumulate, apply_gradient, autocast, epoch_batches, in_thread, loop, off_loop
from grpolab.train.sft import check_examples
from grpolab.train.verify import verify_forward

ROUNDING = 1e-3  # nats that a teacher's log-prob may be above 0
CHUNK = 2**23  # logits of student and teacher each that exist at a time
Scores = Sequence[Sequence[float]]  # log-probs of each rollout's tokens, in nats


@dataclass(frozen=True)
class DistilConfig(Optimisation):
    """One step: `group_size` completions of each of `prompts_per_step` prompts, and the mean over their tokens of a divergence
    between the distributions of teacher and student.

    `beta` is that of GKD's equation 1, `on_policy` the lambda of its algorithm 1: with this probability a step has the
    student's own completions, else `examples`. `vocabulary` "sampled" takes the log-probs of single tokens: of the student's
    own completions they give on average the gradient of the reverse KL over "full" distributions, of examples that of SFT."""

    prompts_per_step: int = 64  # questions a step
    group_size: int = 1  # completions of each question; nothing is compared among them
    temperature: float = 1.0  # of sampling, and of both distributions
    max_new_tokens: int = 32  # longest completion
    beta: float = 1.0  # 1: reverse KL(student || teacher); 0: forward KL; between: Jensen-Shannon
    vocabulary: Literal["full", "sampled"] = "full"  # what is compared: whole distributions, or the sampled tokens
    on_policy: float = 1.0  # probability that a step has the student's completions, and not examples
    share_prompts: bool = True  # compute a prompt once for its completions (Llama-shaped models)

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "prompts_per_step", "group_size", "max_new_tokens")
        self.check_positive("temperature")
        if not 0 <= self.beta <= 1 or self.vocabulary == "sampled" and self.beta != 1:
            raise ValueError(f"beta lies between 0 and 1, and is 1 for sampled tokens (the reverse KL), got {self.beta}")
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy is a probability, got {self.on_policy}")


async def distil(
    policy: Policy, teacher: Policy | Callable[[Sequence[Rollout]], Awaitable[Scores]], rows: Sequence[Any],
    config: DistilConfig, *, teacher_prompt: Callable[[Any], str | Sequence[Message]] | None = None,
    examples: Sequence[Example] = (), run: Run | None = None,
) -> AsyncIterator[dict]:
    """On-policy distillation of `teacher` into `policy` on the prompts of `rows`; a row a step.

    The teacher has the student's tokenizer: a policy, or an async function from rollouts to the log-probs at temperature 1 of
    their tokens (`serve.remote.RemoteTeacher`), which is enough for sampled tokens. `teacher_prompt(row)` is its prompt in
    place of the row's: with an answer or a hint in it, the policy can be its own teacher. `examples`, the teacher's completions
    say, are for `on_policy` below 1; both see them as they are.

    In a row, `loss` is the divergence in nats a token, and `reverse_kl` the estimate of the reverse KL from the student's own
    tokens, NaN where the step had examples. What the teacher's function raises ends the run before the step.
    """
    if distributed.world().size > 1:
        raise ValueError("distil runs in one process: start it without torchrun")
    _check_teacher(policy, teacher, config, teacher_prompt)
    if (config.on_policy < 1) != bool(examples):
        raise ValueError(f"examples are what the steps off the policy have: on_policy={config.on_policy} with {len(examples)} "
                         "of them. Give both, or neither")
    check_examples(examples)
    demos = as_rollouts(examples)
    batch_of = epoch_batches(range(len(rows)), config.prompts_per_step, config.seed)
    examples_of = epoch_batches(demos, config.prompts_per_step * config.group_size, config.seed) if demos else None

    def prompts_of(row: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        own = tuple(prompt_ids(policy.tokenizer, prompt_of(row)))
        return own, own if teacher_prompt is None else tuple(prompt_ids(policy.tokenizer, teacher_prompt(row)))

    def start():
        prompts = [prompts_of(row) for row in rows]
        for k, one in enumerate((policy, teacher)):
            if isinstance(one, Policy):
                longest = max(*(len(pair[k]) + config.max_new_tokens for pair in prompts),
                              *(len(r.prompt) + len(r.tokens) for r in demos), 0)
                check_lengths(one, longest, "prompt and completion")
                with one.acting():
                    verify_forward(one, config, longest)
        return prompts

    prompts = await in_thread(policy, start)
    sampler = await off_loop(lambda: Sampler(policy))

    async def gather(step):
        began, chosen = time.perf_counter(), [prompts[i] for i in batch_of(step)]
        off_policy = random.Random(f"{config.seed}/{step}/on_policy").random() >= config.on_policy
        if off_policy:
            rollouts = theirs = examples_of(step)
        else:
            params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens,
                                    seed=config.seed * 1_000_003 + step)
            groups = await sampler.sample([own for own, _ in chosen], group_size=config.group_size, params=params)
            rollouts = [r for g in groups for r in g]
            theirs = [replace(r, prompt=prompt) for (_, prompt), g in zip(chosen, groups) for r in g]
        source = teacher
        if config.vocabulary == "sampled" and off_policy:
            source = None
        elif not isinstance(teacher, Policy):
            source = checked_scores(await teacher(theirs), theirs)
        sampling = time.perf_counter() - began

        def update(optimiser):
            began = time.perf_counter()
            row = distil_gradient(policy, source, rollouts, theirs, config) | apply_gradient(policy, optimiser, config, step)
            return row | ({"reverse_kl": float("nan")} if off_policy else {}) | {
                "off_policy": float(off_policy),
                "completion_length": mean([len(r.tokens) for r in rollouts]),
                "truncated": mean([float(r.finish_reason in CUT) for r in rollouts]),
                "sampling_s": sampling, "update_s": time.perf_counter() - began}

        return update

    def data():
        frozen = isinstance(teacher, Policy) and not teacher.bare and teacher is not policy
        return data_hash([prompts, examples, weights_hash(teacher) if frozen else ""])

    async with sampler, aclosing(loop(policy, config, run, gather, data)) as steps:
        async for row in steps:
            yield row


def distil_gradient(policy: Policy, teacher: Policy | Scores | None, rollouts: Sequence[Rollout], theirs: Sequence[Rollout],
                    config: DistilConfig) -> dict:
    """Accumulate the gradient of the mean divergence over the tokens of `rollouts`, whatever the micro-batches. `theirs` are
    the same completions behind the prompts that the teacher gets. Returns {"loss", "reverse_kl"}.

    For sampled tokens `teacher` may be the log-probs that it gave to `theirs`, or None where it wrote them itself."""
    order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].prompt), rollouts[i].prompt))
    rollouts, theirs = [rollouts[i] for i in order], [theirs[i] for i in order]
    if config.vocabulary == "full":
        return accumulate(policy, _of_distributions(policy, teacher, rollouts, theirs, config))
    if isinstance(teacher, Policy):
        with teacher.acting():
            scores = trainer_logps(teacher, theirs, config)
    else:
        scores = teacher and [teacher[i] for i in order]
    return accumulate(policy, _of_tokens(policy, scores, rollouts, config))


def _of_tokens(policy, scores, rollouts, config) -> Iterator[tuple]:
    """Each micro-batch's share of the mean of -A log p over the tokens, where A = log q - log p, of which no gradient is taken:
    the reverse KL on average. Of the teacher's own tokens A = 1: its cross-entropy, which is SFT."""
    count = kept_tokens(rollouts)
    for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
        mask = padded([r.mask for r in rollouts[part]]).to(policy.device)
        layout = lay_out(rollouts[part], share=config.share_prompts, pad_id=policy.pad_id)
        with autocast(policy, config):
            logps, _ = rollout_logps(policy, layout, mask.shape, config.temperature, checkpointed=config.checkpoint_activations)
        if scores is None:
            loss, reverse_kl = -(logps * mask).sum(), torch.zeros(())
        else:
            advantage = (padded(scores[part]).to(logps) - logps.detach()) * mask
            ratio = torch.exp(logps - logps.detach())  # 1, with the gradient of log p
            loss, reverse_kl = -(ratio * advantage).sum(), -advantage.sum()
        yield loss / count, {"loss": loss.detach() / count, "reverse_kl": reverse_kl / count}


def _of_distributions(policy, teacher, rollouts, theirs, config) -> Iterator[tuple]:
    """Each micro-batch's share of the mean divergence."""
    count = kept_tokens(rollouts)
    for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
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
        return losses.divergence(p, q, config.beta).sum(), (p - q).gather(1, target[:, None]).sum().detach()

    chunks = zip(hidden.split(size), wanted.split(size), target.split(size))
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.stack(x).sum() for x in zip(*parts))


def _log_distribution(hidden, head, temperature):
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden.to(head["head"].dtype), head["head"], head["bias"])
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def _check_teacher(policy, teacher, config, teacher_prompt) -> None:
    """ValueError for a teacher that cannot teach this policy in this form."""
    if not isinstance(teacher, Policy):
        if config.vocabulary == "full":
            raise ValueError("this teacher gives the log-probs of single tokens, no distributions: set vocabulary to "
                             "'sampled', or load the teacher in this process")
        if config.temperature != 1:
            raise ValueError(f"this teacher's log-probs are those at temperature 1, and temperature is {config.temperature}: "
                             "set it to 1, or load the teacher in this process")
        return
    if teacher is not policy and teacher.model is policy.model and not teacher.bare:
        raise ValueError("student and teacher share a model, so the teacher would move along: load it a second time, or give "
                         "the policy itself and a teacher_prompt")
    if teacher is policy and teacher_prompt is None:
        raise ValueError("a policy that is its own teacher needs a teacher_prompt with more in it than the row's prompt")
    sizes = [head_of(p)["head"].shape[0] for p in (policy, teacher)]
    if sizes[0] != sizes[1] or policy.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise ValueError(f"student and teacher have different vocabularies ({sizes[0]} and {sizes[1]} tokens): their "
                         "distributions cannot be compared")


def checked_scores(scores: Any, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """What a teacher's function gave to these rollouts; ValueError unless it is a log-prob for each of their tokens."""
    try:
        lines = [[float(x) for x in line] for line in scores]
    except (TypeError, ValueError) as error:
        raise ValueError(f"the teacher gave a {type(scores).__name__}, not log-probs for each rollout: {error}") from error
    if [*map(len, lines)] != [len(r.tokens) for r in rollouts]:
        raise ValueError(f"the teacher gave {len(lines)} lines of {sum(map(len, lines))} log-probs in all, and {len(rollouts)} "
                         f"rollouts have {sum(len(r.tokens) for r in rollouts)} tokens: each needs its own")
    chosen = [x for line, r in zip(lines, rollouts) for x, m in zip(line, r.mask) if m]
    if wrong := [x for x in chosen if not -math.inf < x <= ROUNDING]:
        raise ValueError(f"the teacher gave {wrong[0]:.4g} as the log-prob of a token: one is finite and not above 0")
    return lines
