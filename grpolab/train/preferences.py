"""Preference pairs: from the checker, from ordinary preference files, and as token ids on disk.

A pair holds one prompt, a chosen and a rejected completion, all as token ids, so that training never tokenises.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpolab.arithmetic import Problem
from grpolab.chat import Example, Message, encode_chat, prompt_ids
from grpolab.checker import check_answer, parse_boxed_answer
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout, given
from grpolab.tasks import prompt_of, read_json
from grpolab.train.logps import check_lengths, parts_of
from grpolab.train.loop import Optimisation

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """One prompt and two completions of it: `chosen` and `rejected` hold the ids after the prompt and their mask (1 where
    the policy writes, end token included). `meta` is for whoever reads the pair; its number "margin" is the one that
    reward-model training knows."""

    prompt: tuple[int, ...]
    chosen: Example
    rejected: Example
    meta: dict = field(default_factory=dict, compare=False)

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("a pair needs a prompt of at least one token")
        for side in (self.chosen, self.rejected):
            if len(side.ids) != len(side.mask) or not any(side.mask):
                raise ValueError(f"a completion needs one mask entry a token and a 1 among them, got {side}")
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected are the same tokens, which prefers nothing: drop the pair")

    @property
    def sides(self) -> tuple[Rollout, Rollout]:
        """Chosen and rejected as rollouts."""
        return tuple(given(self.prompt, s.ids, s.mask) for s in (self.chosen, self.rejected))

    @property
    def longest(self) -> int:
        """Tokens of the prompt with the longer completion."""
        return len(self.prompt) + max(len(self.chosen.ids), len(self.rejected.ids))


# --- from the checker -------------------------------------------------------------------------------------------------

REJECTIONS = ("any", "near", "far")


@dataclass(frozen=True)
class PairRules:
    """Which pairs are made of a question's completions: at most `per_question`, with different rejections; with `balance`
    equally many for each operator; `rejections` that are near misses (one digit of the answer is wrong), far ones (anything
    else, also an answer without an end), or any."""

    per_question: int = 1
    balance: bool = True
    rejections: str = "any"
    seed: int = 0

    def __post_init__(self):
        if self.rejections not in REJECTIONS or self.per_question < 1:
            raise ValueError(f"rejections must be one of {REJECTIONS} and per_question at least 1, got {self}")


def near_miss(text: str, answer: int) -> bool:
    """Whether the last boxed integer has the sign and the number of digits of `answer` and differs in exactly one."""
    boxed = parse_boxed_answer(text)
    if boxed is None or (boxed < 0) != (answer < 0):
        return False
    a, b = str(abs(boxed)), str(abs(answer))
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b)) == 1


async def sample_pairs(
    policy: Policy, problems: Sequence[Problem], *, samples: int = 8, rules: PairRules | None = None,
    temperature: float = 1.0, max_new_tokens: int = 32, seed: int = 0,
) -> tuple[list[Pair], dict[str, int]]:
    """Several completions of each question from `policy`, and `make_pairs` of them."""
    if samples < 2:
        raise ValueError(f"a pair needs at least two samples of a question, got {samples}")
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    async with Sampler(policy) as sampler:
        prompts = [prompt_ids(policy.tokenizer, p.question) for p in problems]
        groups = await sampler.sample(prompts, group_size=samples, params=params)
    return make_pairs(policy, problems, groups, rules)


def make_pairs(
    policy: Policy, problems: Sequence[Problem], groups: Sequence[Group], rules: PairRules | None = None
) -> tuple[list[Pair], dict[str, int]]:
    """Pairs from the completions of each question: a right one that the policy ended itself is chosen, another rejected.

    Returns them with the count of what became of every question ("no pair: ..."), of pairs by operator and by kind of
    rejection, and of pairs that were dropped to balance the operators. Rejections are drawn as often as they occur.
    """
    rules = rules or PairRules()
    counts = Counter(questions=len(problems))
    pairs: list[Pair] = []
    for i, (problem, group) in enumerate(zip(problems, groups, strict=True)):
        rng = random.Random(f"{rules.seed}/{i}")
        kinds = {r: _kind(policy.decode(r.tokens), problem, r) for r in dict.fromkeys(group)}
        right = _distinct(rng, [r for r in group if kinds[r] == "right"])
        wrong = [r for r in group if kinds[r] != "right"]
        rejected = _distinct(rng, [r for r in wrong if rules.rejections in ("any", kinds[r])])
        if not (right and rejected):
            reason = "all wrong" if not right else "all right" if not wrong else f"no {rules.rejections} rejection"
            counts[f"no pair: {reason}"] += 1
            continue
        for k, bad in enumerate(rejected[: rules.per_question]):
            good = right[k % len(right)]
            meta = {"question": problem.question, "answer": problem.answer, "op": problem.op, "rejection": kinds[bad]}
            pairs.append(Pair(good.prompt, Example(good.tokens, good.mask), Example(bad.tokens, bad.mask), meta))
    balanced = _balanced(pairs, {p.op for p in problems}, rules) if rules.balance else pairs
    counts["dropped for balance"] = len(pairs) - len(balanced)
    counts["pairs"] = len(balanced)
    for p in balanced:
        counts.update([f"operator {p.meta['op']}", f"{p.meta['rejection']} misses"])
    return balanced, dict(counts)


def pairs_by_reward(
    policy: Policy, rows: Sequence[Any], groups: Sequence[Group], *, per_row: int = 1, margin: float = 0.0, seed: int = 0
) -> tuple[list[Pair], dict[str, int]]:
    """Pairs from groups with rewards, at most `per_row` of each: chosen is a completion with the best reward among those that
    the policy ended itself, rejected another whose reward is lower by more than `margin`, drawn as often as they occur.

    `meta` holds both texts and rewards, and the row's prompt and plain columns. Returned with the count of what became of
    every row ("no pair: ..."). A completion whose reward abstained is in no pair.
    """
    if per_row < 1 or margin < 0:
        raise ValueError(f"per_row is at least 1 and margin at least 0, got {per_row} and {margin}")
    pairs, counts = [], Counter(rows=len(rows))
    for row, group in zip(rows, groups, strict=True):
        rng = random.Random(f"{seed}/{group[0].prompt}")
        rated = _distinct(rng, [r for r in group if r.reward is not None])
        ended = [r for r in rated if r.finish_reason == "eos"]
        best = max((r.reward for r in ended), default=None)
        chosen = [r for r in ended if r.reward == best]
        rejected = [r for r in rated if chosen and r.reward < best - margin]
        if not rejected:
            reason = "no reward" if not rated else "none ended" if not ended else "no difference"
            counts[f"no pair: {reason}"] += 1
        columns = {k: v for k, v in row.items() if isinstance(v, str | int | float)} if isinstance(row, dict) else {}
        for k, bad in enumerate(rejected[:per_row]):
            good = chosen[k % len(chosen)]
            meta = columns | {"prompt": prompt_of(row)} | {
                key: value for side, r in zip(SIDES, (good, bad))
                for key, value in ((side, policy.decode(r.tokens)), (f"{side}_reward", r.reward))}
            pairs.append(Pair(good.prompt, Example(good.tokens, good.mask), Example(bad.tokens, bad.mask), meta))
    counts["pairs"] = len(pairs)
    return pairs, dict(counts)


def _kind(text: str, problem: Problem, rollout: Rollout) -> str:
    if rollout.finish_reason != "eos":
        return "far"
    return "right" if check_answer(text, problem.answer) else "near" if near_miss(text, problem.answer) else "far"


def _distinct(rng: random.Random, rollouts: list[Rollout]) -> list[Rollout]:
    """In random order, one of each token sequence: a frequent one tends to come early."""
    return list({r.tokens: r for r in rng.sample(rollouts, len(rollouts))}.values())


def _balanced(pairs: list[Pair], ops: set[str], rules: PairRules) -> list[Pair]:
    """As many pairs of each operator as the rarest has, in the order they came."""
    by_op = {op: [i for i, p in enumerate(pairs) if p.meta["op"] == op] for op in sorted(ops)}
    size = min(map(len, by_op.values()), default=0)
    rng = random.Random(f"{rules.seed}/balance")
    return [pairs[i] for i in sorted(i for members in by_op.values() for i in rng.sample(members, size))]


# --- token ids on disk ------------------------------------------------------------------------------------------------

COLUMNS = ("prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask")


def _ids(pair: Pair) -> dict[str, tuple[int, ...]]:
    return dict(zip(COLUMNS, (pair.prompt, pair.chosen.ids, pair.chosen.mask, pair.rejected.ids, pair.rejected.mask)))


def write_pairs(path: str | Path, pairs: Iterable[Pair]) -> Path:
    """One JSON object a line: the ids and masks, and meta."""
    return atomic_write(path, "".join(json.dumps(_ids(p) | {"meta": p.meta}) + "\n" for p in pairs))


def preference_row(pair: Pair) -> dict:
    """A pair of `pairs_by_reward` as a row that `load_preferences` reads: texts for anybody, and the ids that were sampled."""
    return pair.meta | _ids(pair)


def read_pairs(path: str | Path) -> list[Pair]:
    """The pairs of a file that `write_pairs` wrote, identical; a row that does not fit names its line."""
    def pair(row):
        return Pair(*_of_ids(row), row["meta"])

    return read_json(path, pair, "a pair of token ids as write_pairs writes them (load_preferences reads text)")


def _of_ids(row: dict) -> tuple[tuple[int, ...], Example, Example]:
    """Prompt, chosen and rejected of a row."""
    prompt, *ids = (tuple(map(int, row[name])) for name in COLUMNS)
    return prompt, Example(*ids[:2]), Example(*ids[2:])


# --- ordinary preference files ----------------------------------------------------------------------------------------


def load_preferences(source: str | Path | Iterable[dict], tokenizer) -> list[Pair]:
    """Pairs from preference data as the hub's data sets hold them: a JSONL file, or any iterable of rows.

    A row has `chosen` and `rejected`, and `prompt` unless both are whole conversations. Each is text (a prompt is one
    user turn, a completion one assistant turn) or a list of messages {"role", "content"}; whole conversations, with or
    without `prompt` beside them, share their turns up to the prompt's end. Other plain columns go to `meta`. A row that
    does not fit raises ValueError with its line.
    """
    return read_json(source, lambda row: _preference(row, tokenizer), "a preference with prompt, chosen and rejected")


def _preference(row: dict, tokenizer) -> Pair:
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object, got {type(row).__name__}")
    chosen, rejected = (_messages(row[name], name, "assistant") for name in SIDES)
    whole = [m[0]["role"] != "assistant" for m in (chosen, rejected)]  # whole conversations begin with somebody else
    if any(whole):
        if not all(whole):
            raise ValueError("chosen and rejected must both be whole conversations or both answers to the prompt")
        prompt, (chosen, rejected) = _split(chosen, rejected)
        if row.get("prompt") and _messages(row["prompt"], "prompt", "user")[-1] != prompt[-1]:
            raise ValueError("chosen and rejected do not go on from the prompt beside them")
    else:
        prompt = _messages(row["prompt"], "prompt", "user")
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn, so there is nothing to answer")
    rest = {k: v for k, v in row.items() if isinstance(v, str | int | float) and k not in ("prompt", *SIDES)}
    if set(COLUMNS) <= row.keys() and prompt_ids(tokenizer, prompt) == list(row["prompt_ids"]):
        return Pair(*_of_ids(row), rest)
    sides = [_encode(tokenizer, prompt, side) for side in (chosen, rejected)]
    return Pair(sides[0][0], sides[0][1], sides[1][1], rest)


def _messages(value, name: str, role: str) -> list[Message]:
    """Text as one message of `role`, messages as they are."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError(f"{name} must be text or a list of messages with role and content, got {str(value)[:60]!r}")
    if not any(m["content"].strip() for m in messages):
        raise ValueError(f"{name} is empty")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _split(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], tuple[list[Message], list[Message]]]:
    """Two whole conversations -> the turns that they share, up to the first assistant turn that differs; the two rests."""
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), None)
    if not same or chosen[same]["role"] != "assistant" or rejected[same]["role"] != "assistant":
        raise ValueError("whole conversations must be the same up to an assistant turn in which they differ")
    return chosen[:same], (chosen[same:], rejected[same:])


def _encode(tokenizer, prompt: list[Message], completion: list[Message]) -> tuple[tuple[int, ...], Example]:
    """(prompt ids, completion): every turn is cut where sampling would cut it (`encode_chat`)."""
    whole = encode_chat(tokenizer, prompt + completion)
    answered = max((i + 1 for i, m in enumerate(prompt) if m["role"] == "assistant"), default=0)
    earlier = len(encode_chat(tokenizer, prompt[:answered]).ids) if answered else 0
    cut = earlier + whole.mask[earlier:].index(1)
    return whole.ids[:cut], Example(whole.ids[cut:], whole.mask[cut:])


def pair_batches(policy: Policy, pairs: Sequence[Pair], config: Optimisation, *, share: bool, what: str = "rollouts"
                 ) -> Iterator[list[int]]:
    """The indices of the pairs of each micro-batch (`parts_of`), pairs of similar length together."""
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i].longest, pairs[i].prompt))
    sides = [r for i in order for r in pairs[i].sides]
    for part in parts_of(policy, sides, config.token_budget, share=share, what=what, together=2):
        yield order[part.start // 2 : part.stop // 2]


def pair_lengths(pairs: Sequence[Pair], like: torch.Tensor) -> torch.Tensor:
    """Kept tokens of chosen and rejected: (2, P)."""
    return like.new_tensor([[sum(s.mask) for s in (p.chosen, p.rejected)] for p in pairs]).T


def pair_counts(batch: Sequence[Pair]) -> tuple[int, dict]:
    """The pairs of a batch, and what become rates of it."""
    tokens = sum(len(p.prompt) + len(side.ids) for p in batch for side in (p.chosen, p.rejected))
    return len(batch), {"pairs_per_s": len(batch), "tokens_per_s": tokens}


def check_pairs(policy: Policy, pairs: Sequence[Pair]) -> None:
    """Refuse pairs that do not fit the policy's context or vocabulary."""
    check_lengths(policy, max((p.longest for p in pairs), default=0), "pair")
    top = max((max(p.prompt + p.chosen.ids + p.rejected.ids) for p in pairs), default=0)
    size = len(policy.model.get_input_embeddings().weight)
    if top >= size:
        raise ValueError(f"the pairs hold token id {top}, beyond the vocabulary of {size}: they are of another tokenizer")
