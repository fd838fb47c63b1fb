"""Episodes: a policy in the slots of a pool.

An episode is one token sequence: the question, then in turn what the policy wrote (mask 1, with its sampling logps) and
what the environment answered (mask 0). Nothing is decoded and tokenised again, so what is trained is what was sampled.
While one rollout waits for its environment the others are decoded, in the sampler's one batch.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

from grpolab.chat import LONG_TEXT, Example, encode_chat, longest_token, observation_ids, prompt_ids, tokenising, user
from grpolab.decode.sampler import Conversation, Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.action_format import TEXT, ActionFormat, told
from grpolab.env.pool import GrpoPool, Slot, rollout_seed
from grpolab.env.protocol import Environment, InvalidAction, SessionLost, StepResult
from grpolab.models.load import Policy
from grpolab.rollouts import CUT, Group, RecordedGroup, Rollout
from grpolab.sync import run_sync
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.logps import check_lengths


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
    """A rollout with its reward, and how it came about: `turns` are pairs (what the policy wrote, the answer to it).

    `rollout.finish_reason` is "done" where the environment ended the episode, "turns" at the turn limit, "length" where the
    tokens ran out: a turn was cut (then the environment does not get it), or an observation did not fit (then `turns` keeps
    its beginning). All three keep what the environment paid until then; the latter two earn 0.0 where it paid nothing.
    "invalid" ended over an action that could not be read; where its session ends over the action, or under `abstain`, its
    reward is None.

    `heard` are the observations that stand in the rollout's tokens, `invalid` counts the actions that could not be read,
    `measures` are the numbers of the action format's `measure`, `env_s` the seconds spent waiting for the environment.
    """

    rollout: Rollout
    question: str
    turns: tuple[tuple[str, str], ...]
    heard: tuple[str, ...] = ()
    invalid: int = 0
    measures: dict = field(default_factory=dict)
    env_s: float = field(default=0.0, compare=False)

    @property
    def calls(self) -> float:
        """Tool calls, by the action format's measure of that name."""
        return self.measures.get("calls", 0)

    @property
    def text(self) -> str:
        """The transcript, one line a message."""
        lines = [f"environment: {self.question}"]
        for written, answer in self.turns:
            lines += [f"policy:      {written}", f"environment: {answer}"]
        return "\n".join(lines)


def as_task(task: Any) -> Any:
    """A task as it travels: any JSON value as it is, a dataclass (a `Problem`) as the dict of its fields."""
    return asdict(task) if is_dataclass(task) and not isinstance(task, type) else task


def demonstrate(tokenizer, env: Environment, task: Any, turns: Sequence[str], *, action_format: ActionFormat = TEXT) -> Example:
    """`turns` taken in an environment, as a conversation to imitate: mask 1 on the turns alone."""
    async def conversation() -> list[dict]:
        messages = user(*action_format.texts(await _awaited(env.reset(task=as_task(task)))))
        for text in turns:
            observation = await _awaited(env.step(action_format.action(text)))
            messages.append({"role": "assistant", "content": text})
            answers = [{"role": action_format.role, "content": answer} for answer in action_format.texts(observation)]
            messages += answers
        if inspect.iscoroutinefunction(getattr(env, "close", None)):  # what it holds belongs to this loop
            await env.close()
        return messages[: len(messages) - len(answers)] if turns else messages

    return encode_chat(tokenizer, run_sync(conversation()), action_format.tools)


async def _awaited(result: Any) -> Any:
    """What a method of an environment returned, awaited where it is async."""
    return await result if inspect.isawaitable(result) else result


async def play(slot: Slot, sampler: Sampler, task: Any, *, seed: int, params: SamplingParams, limits: Limits,
               action_format: ActionFormat = TEXT, reset_seed: int | None = None) -> Episode:
    """One episode of `task` on a slot. `params.max_new_tokens` bounds each turn; `seed` makes its draws, and `reset_seed`
    (default: `seed`) is the environment's."""
    check_limits(sampler.policy, limits)
    with closing(sampler.conversation(seed=seed)) as conversation:
        game = _Play(slot, sampler.policy, conversation, params, limits, action_format)
        return await game.run(as_task(task), seed if reset_seed is None else reset_seed)


class _Play:
    """One episode while it is played."""

    def __init__(self, slot: Slot, policy: Policy, conversation: Conversation, params, limits: Limits,
                 action_format: ActionFormat):
        self.slot, self.policy, self.conversation = slot, policy, conversation
        self.params, self.limits, self.action_format = params, limits, action_format
        self.turns: list[tuple[str, str]] = []
        self.heard: list[str] = []
        self.results: list[StepResult] = []
        self.paid: list[float] = []
        self.invalid, self.env_s = 0, 0.0

    async def run(self, task: Any, seed: int) -> Episode:
        question = await self._timed(self._question(task, seed))
        room = self.limits.max_total_tokens - 1
        ids = await _fitting(self.policy.tokenizer, [question], room,
                             lambda tokenizer, texts: prompt_ids(tokenizer, *texts, self.action_format.tools))
        if ids is None:
            raise ValueError(f"the question takes more than {room} tokens, which leaves no turn of "
                             f"max_total_tokens={self.limits.max_total_tokens}: raise that, or shorten it in to_text")
        reason = await self._turns(ids)
        if reason == "done" and not self.paid:
            raise ValueError(f"the environment ended the episode {question!r:.200} without any reward, and none is made up")
        reward = None if reason == "invalid" and self.action_format.on_invalid != "penalise" else sum(self.paid, 0.0)
        rollout = replace(self.conversation.rollout(), reward=reward, finish_reason=reason)
        return Episode(rollout, question, tuple(self.turns), tuple(self.heard), self.invalid,
                       dict(self.action_format.measure(self.results)), self.env_s)

    async def _question(self, task: Any, seed: int) -> str:
        result = await self.slot.reset(task=task, seed=seed)
        if result.done:
            raise ValueError(f"the environment ended its episode as it was reset (task {task!r:.100}), so no turn of it "
                             "earns anything: give it a task that is still to be done")
        self.paid += [result.reward] if result.reward else []
        before = await self.action_format.introduce(self.slot) if self.action_format.introduce else ""
        return "\n".join(text for text in (before, *self.action_format.texts(result)) if text)

    async def _turns(self, ids: list[int]) -> str:
        """Turn by turn until the episode is over; returns why it is."""
        used = 0
        while True:
            room = self.limits.max_total_tokens - used - len(ids)
            with self.slot.span("generate"):
                turn = await self.conversation.sample(
                    ids, replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room)))
            used = len(turn.prompt) + len(turn.tokens)
            if turn.finish_reason in CUT:  # not what the policy wanted to say, so the environment does not get it
                return "length"
            over, texts = await self._act(self.policy.decode(turn.tokens))
            if over:
                return over
            ids = await _fitting(self.policy.tokenizer, texts, self.limits.max_total_tokens - used - 1,
                                 partial(observation_ids, role=self.action_format.role))
            written, answer = self.turns[-1]
            if ids is None:
                if len(answer) > LONG_TEXT:
                    answer = f"{answer[:LONG_TEXT]} ... ({len(answer)} characters, which did not fit)"
                self.turns[-1] = written, answer
                return "length"
            self.heard.append(answer)

    async def _act(self, text: str) -> tuple[str, list[str]]:
        """Act on a turn of the policy: (why the episode is over, or "", the texts that answer it)."""
        try:
            result = await self._timed(self.action_format.act(self.slot, text))
        except InvalidAction as fault:
            self.invalid += 1
            self.paid += [self.action_format.penalty] if self.action_format.on_invalid == "penalise" else []
            ended = isinstance(fault.__cause__, SessionLost)  # the session, over this action
            over = "invalid" if ended or self.action_format.on_invalid == "abstain" else ""
            answers = [told(str(fault))]
        else:
            self.results.append(result)
            self.paid += [] if result.reward is None else [result.reward]
            over, answers = "done" if result.done else "", self.action_format.texts(result)
        self.turns.append((text, "\n".join(answers)))
        return over or ("turns" if len(self.turns) == self.limits.max_turns else ""), answers

    async def _timed(self, work):
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.env_s += time.perf_counter() - began


def check_limits(policy: Policy, limits: Limits) -> None:
    """Refuse episodes that outgrow the context, before the first is played."""
    check_lengths(policy, limits.max_total_tokens, "whole episode (limits.max_total_tokens)")


async def _fitting(tokenizer, texts: Sequence[str], room: int, encode: Callable) -> list[int] | None:
    """The ids of texts, or None where they are more than `room`. More characters than so many of the longest token could
    stand for are not tokenised at all, and long texts not on the event loop: 2 MB take seconds."""
    length = sum(map(len, texts))
    if room < 1 or length > room * longest_token(tokenizer):
        return None
    if length > LONG_TEXT:
        ids = await asyncio.get_running_loop().run_in_executor(tokenising, encode, tokenizer, texts)
    else:
        ids = encode(tokenizer, texts)
    return ids if len(ids) <= room else None


async def play_all(pool: GrpoPool, sampler: Sampler, tasks: Sequence[Any], *, seeds: Sequence[int], params: SamplingParams,
                   limits: Limits, action_format: ActionFormat = TEXT, reset_seeds: Sequence[int] | None = None
                   ) -> list[Episode | None]:
    """An episode of each task: every slot takes the next one as it gets free. `reset_seeds` (default: `seeds`) are the
    environments', equal within a group. Each episode has `deadlines.episode` s of its own, and draws from its own seed.

    Under the pool's `drop`, an episode that was lost is None and stands in `pool.failures`; its slot goes on. Raises
    GroupFailed where fewer than `min_group` are left, or no slot has a session any more.
    """
    check_limits(sampler.policy, limits)
    resets = seeds if reset_seeds is None else reset_seeds

    def one(slot: Slot, i: int) -> Awaitable[Episode]:
        return play(slot, sampler, tasks[i], seed=seeds[i], params=params, limits=limits, action_format=action_format,
                    reset_seed=resets[i])

    results = await pool.run_group(one, jobs=len(tasks))
    episodes = dict(zip(results.rollouts, results))
    return [episodes.get(i) for i in range(len(tasks))]


async def evaluate_episodes(pool: GrpoPool, sampler: Sampler, problems: Sequence[Any], *, limits: Limits,
                            max_new_tokens: int = 32, seed: int = 0, action_format: ActionFormat = TEXT) -> list[Episode]:
    """One greedy episode of each problem; a lost one raises, for an evaluation is of all its questions."""
    params = SamplingParams(greedy=True, max_new_tokens=max_new_tokens)
    seeds = [rollout_seed(seed, 0, i) for i in range(len(problems))]
    episodes = await play_all(pool, sampler, problems, seeds=seeds, params=params, limits=limits, action_format=action_format)
    if None in episodes:
        raise RuntimeError(f"{episodes.count(None)} of {len(episodes)} evaluation episodes were lost; run it again")
    return episodes


def as_groups(tasks: Sequence, episodes: Sequence[Episode | None], kind: str, min_group: int = 1) -> list[RecordedGroup]:
    """The episodes, equally many of each task in turn, as groups with advantages of this kind: `trained` is what the update
    gets of one. There, an episode that was lost, or abstains, is an empty rollout without reward, and so are all of a group
    in which fewer than `min_group` are left; groups without any reward stand last. A task without any episode is left out.
    ValueError where the rollouts of a group did not get the same question: their rewards do not compare."""
    size, groups = len(episodes) // max(1, len(tasks)), []
    for i, task in enumerate(tasks):
        members = episodes[i * size : (i + 1) * size]
        played = [e for e in members if e is not None]
        if not played:
            continue
        questions = list(dict.fromkeys(e.question for e in played))
        if len(questions) > 1:
            raise ValueError(f"the rollouts of a group got different questions, {questions[0]!r:.90} and {questions[1]!r:.90}: "
                             "the question must depend on nothing but the task and the seed that reset gets")
        rewarded = [e is not None and e.rollout.reward is not None for e in members]
        used = sum(rewarded) >= max(1, min(min_group, size))
        lost = Rollout(played[0].rollout.prompt, (), (), (), (), "lost")
        names = dict.fromkeys(name for e in played for name in e.measures)
        groups.append(RecordedGroup(
            Group(tuple(e.rollout if e else lost for e in members)), (), task, used=used,
            parts={name: [e and e.measures.get(name) for e in members] for name in names},
            turns=[e.turns if e else () for e in members], absent=tuple(not (used and there) for there in rewarded)))
    a = advantages(reward_tensor([g.trained.rewards for g in groups]), kind).tolist() if groups else []
    return sorted((replace(g, advantages=tuple(row)) for g, row in zip(groups, a)), key=lambda g: not g.used)
