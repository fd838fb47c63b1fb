"""Multi-turn rollouts: a policy in the seats of a pool, and GRPO on what it does there.

An episode is one token sequence: the question, then in turn what the policy wrote (mask 1, with its sampling logps) and
what the environment answered (mask 0). Nothing is decoded and tokenised again, so what is trained is what was sampled.
While one rollout waits for its environment the others are decoded, in the sampler's one batch.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace

from grpolab.arithmetic import Problem
from grpolab.chat import Example, encode_chat, observation_ids, prompt_ids, user
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.pool import GrpoPool, Seat, rollout_seed
from grpolab.env.protocol import Environment
from grpolab.lab.run import Run
from grpolab.models import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.train.grpo import GRPOConfig, check_reference, describe, grpo_update, prove_both, timings, tokens_of
from grpolab.train.loop import draw, in_thread, loop


@dataclass(frozen=True)
class Limits:
    """Of one episode: turns of the policy, and tokens of the whole sequence, question and observations included."""

    max_turns: int = 4
    max_total_tokens: int = 192

    def __post_init__(self):
        if self.max_turns < 1 or self.max_total_tokens < 2:
            raise ValueError(f"an episode needs a turn and a few tokens, got {self}")


@dataclass(frozen=True)
class Episode:
    """A rollout with its reward, and how it came about: `turns` are pairs (what the policy wrote, what it was told).

    `rollout.finish_reason` is "done" when the environment ended the episode, "turns" at the turn limit, "length" when the
    tokens ran out. The latter two are the policy's doing and earn 0.0; a lost session is not, and gives no episode.
    """

    rollout: Rollout
    question: str
    turns: tuple[tuple[str, str], ...]
    calls: int = 0

    @property
    def text(self) -> str:
        """The transcript, one line a message."""
        lines = [f"environment: {self.question}"]
        for wrote, told in self.turns:
            lines += [f"policy:      {wrote}", f"environment: {told}"]
        return "\n".join(lines)


def demonstrate(tokenizer, env: Environment, task: dict, turns: Sequence[str]) -> Example:
    """`turns` said in an environment whose methods are plain, as a conversation to imitate: mask 1 on the turns alone."""
    said = user(env.reset(task=task).observation["text"])
    for wrote in turns:
        told = env.step({"text": wrote}).observation["text"]
        said += [{"role": "assistant", "content": wrote}, *user(told)]
    return encode_chat(tokenizer, said[:-1])


async def play(seat: Seat, sampler: Sampler, task: dict, *, seed: int, params: SamplingParams, limits: Limits) -> Episode:
    """One episode of `task` on a seat. `params.max_new_tokens` bounds each turn; `seed` makes its draws."""
    tokenizer = sampler.policy.tokenizer
    result = await seat.reset(task=task, seed=seed)
    question = result.observation["text"]
    ids, used, turns, rewards = prompt_ids(tokenizer, question), 0, [], []
    if len(ids) >= limits.max_total_tokens:
        raise ValueError(f"the question takes {len(ids)} tokens, of max_total_tokens={limits.max_total_tokens}: raise that")
    conversation = sampler.conversation(seed=seed)
    try:
        while True:
            room = limits.max_total_tokens - used - len(ids)
            if room < 1:
                reason = "length"
                break
            with seat.span("generate"):
                turn = await conversation.sample(ids, replace(params, max_new_tokens=min(params.max_new_tokens, room)))
            used = len(turn.prompt) + len(turn.tokens)
            if turn.finish_reason == "length":  # cut off: not what the policy wanted to say, so nobody hears it
                reason = "length"
                break
            wrote = sampler.policy.decode(turn.tokens)
            result = await seat.step({"text": wrote})
            told = result.observation["text"]
            turns.append((wrote, told))
            rewards += [] if result.reward is None else [result.reward]
            if result.done or len(turns) == limits.max_turns:
                reason = "done" if result.done else "turns"
                break
            ids = observation_ids(tokenizer, told)
        rollout = conversation.rollout()
    finally:
        conversation.close()
    if reason == "done" and not rewards:
        raise ValueError(f"the environment ended the episode {question!r} without any reward, and none is made up")
    calls = result.metadata.get("calls", 0)
    return Episode(replace(rollout, reward=sum(rewards, 0.0), finish_reason=reason), question, tuple(turns), calls)


async def play_all(pool: GrpoPool, sampler: Sampler, tasks: Sequence[dict], *, seeds: Sequence[int],
                   params: SamplingParams, limits: Limits) -> list[Episode | None]:
    """An episode of each task: every seat takes the next one as it gets free. None where a session was lost (`drop`).

    Which seat plays which episode depends on timing; the episode does not, for its draws come from its own seed.
    """
    episodes: list[Episode | None] = [None] * len(tasks)
    todo = iter(range(len(tasks)))

    async def work(seat: Seat) -> None:
        for i in todo:
            episodes[i] = await play(seat, sampler, tasks[i], seed=seeds[i], params=params, limits=limits)

    await pool.run_group(work)
    return episodes


async def evaluate_episodes(pool: GrpoPool, sampler: Sampler, problems: Sequence[Problem], *, limits: Limits,
                            max_new_tokens: int = 32, seed: int = 0) -> list[Episode]:
    """One greedy episode of each problem; a lost one raises, for an evaluation is of all its questions."""
    params = SamplingParams(greedy=True, max_new_tokens=max_new_tokens)
    seeds = [rollout_seed(seed, 0, i) for i in range(len(problems))]
    episodes = await play_all(pool, sampler, [asdict(p) for p in problems], seeds=seeds, params=params, limits=limits)
    if None in episodes:
        raise RuntimeError(f"{episodes.count(None)} of {len(episodes)} evaluation episodes were lost; run it again")
    return episodes


def as_groups(episodes: Sequence[Episode | None], group_size: int) -> list[Group]:
    """Consecutive episodes as groups. A lost one stands in as an empty rollout without reward, which abstains."""
    groups = []
    for start in range(0, len(episodes), group_size):
        members = episodes[start : start + group_size]
        prompt = next((e.rollout.prompt for e in members if e is not None), None)
        if prompt is not None:
            absent = Rollout(prompt, (), (), (), (), "lost")
            groups.append(Group(tuple(absent if e is None else e.rollout for e in members)))
    return groups


async def multi_turn_grpo(policy: Policy, reference: Policy | None, problems: Sequence[Problem], config: GRPOConfig,
                          pool: GrpoPool, *, limits: Limits | None = None, run: Run | None = None) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300) on episodes; `config` as for one turn, where `max_new_tokens` now bounds each turn.

    Rows hold what `grpo` yields, and: turns, tool_rate (share of episodes with a call), calls, lost, env_s (mean seconds
    that an episode waited for its environment).
    """
    limits = limits or Limits()
    check_reference(policy, reference, config)
    await prove_both(policy, reference, config, limits.max_total_tokens)

    async with Sampler(policy) as sampler:

        async def one_step(step, optimizer):
            began, traced = time.perf_counter(), len(pool.trace)
            asked = draw(problems, config.prompts_per_step, step, config.seed)
            tasks = [asdict(p) for p in asked for _ in range(config.group_size)]
            seeds = [rollout_seed(config.seed, step, i) for i in range(len(tasks))]
            params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens)
            episodes = await play_all(pool, sampler, tasks, seeds=seeds, params=params, limits=limits)
            groups, sampled = as_groups(episodes, config.group_size), time.perf_counter()
            row = await in_thread(policy, lambda: grpo_update(policy, reference, groups, config, optimizer, step))
            waited = sum(s.end - s.start for s in pool.trace[traced:] if s.phase in ("reset", "step")) / len(tasks)
            times = timings(tokens_of(groups), sampled - began, row["trained_tokens"] * config.inner_epochs,
                            time.perf_counter() - sampled)
            return describe(groups) | row | times | _habits(episodes) | {"env_s": waited}

        async for row in loop(policy, config, run, one_step):
            yield row


def _habits(episodes: Sequence[Episode | None]) -> dict:
    kept = [e for e in episodes if e is not None]
    return {"turns": sum(len(e.turns) for e in kept) / len(kept), "calls": sum(e.calls for e in kept) / len(kept),
            "tool_rate": sum(e.calls > 0 for e in kept) / len(kept), "lost": len(episodes) - len(kept)}
