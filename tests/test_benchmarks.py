"""Every script of benchmarks/ does its work, in seconds: the smallest race, the smallest run; and records know their code."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from grpolab.runs.run import repository

ROOT = repository()
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
sys.path.insert(0, str(BENCHMARKS))
import async_grpo  # noqa: E402
import baselines  # noqa: E402
import board  # noqa: E402
import critic  # noqa: E402
import distillation  # noqa: E402
import estimators  # noqa: E402
import grpo_seeds  # noqa: E402
import illnesses  # noqa: E402
import long_prompts  # noqa: E402
import longer_answers  # noqa: E402
import prompt_lookup  # noqa: E402
import records  # noqa: E402
import report  # noqa: E402
import rollouts  # noqa: E402
import seeds  # noqa: E402
import several_rewards  # noqa: E402
import smollm2_arithmetic as sums  # noqa: E402
import smollm2_aws as accounts  # noqa: E402
import smollm2_aws_seeds as seeded  # noqa: E402
import smollm2_english as english  # noqa: E402
import smollm2_runs as runs  # noqa: E402
import smollm2_tools as asking  # noqa: E402

from grpolab.chat import CHAT_TEMPLATE  # noqa: E402
from grpolab.lab.board import Speedrun  # noqa: E402
from grpolab.rollouts import Group  # noqa: E402
from grpolab.train import DistilConfig, GRPOConfig, SFTConfig  # noqa: E402


def script(name, *arguments):
    """A script's output, from a process of its own."""
    done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *map(str, arguments)], capture_output=True, text=True,
                          timeout=240, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SMALLEST = {  # script -> the arguments of its smallest race, and a list in the record that it must leave
    "accelerator": (["--device", "cpu", "--models", "tiny", "--rounds", 1, "--tokens", 4, "--steps", 2, "--dtypes", "float32",
                     "float16"], "rows"),
    "aws": (["--rounds", 1, "--steps", 2, "--processes", 1], "table"),
    "bridges": (["--models", "tiny", "--kinds", "shared memory", "--rounds", 1, "--tokens", 2], "rows"),
    "decode": (["--models", "tiny", "--workloads", "single", "--rounds", 1], "rows"),
    "pool": (["--rounds", 1], "table"),
    "service": (["--models", "tiny", "--callers", 1, "--rounds", 1, "--requests", 2], "rows"),
    "threads": (["--models", "tiny", "--rounds", 1], "rows"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "decode" else pytest.param(n, marks=pytest.mark.full) for n in SMALLEST])
def test_the_smallest_race_leaves_a_record_of_this_code(name, tmp_path):
    arguments, table = SMALLEST[name]
    path = tmp_path / f"{name}.json"
    script(name, *arguments, "--out", path)
    record = json.loads(path.read_text())
    assert record[table] and all(record["provenance"]["code"].values()) and records.stale(tmp_path) == {}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("method", "lengths"), [("grpo", "equal"), ("sft", "mixed"), ("dpo", "mixed")])
def test_our_side_of_the_comparison_with_trl_measures_a_step(method, lengths):
    said = script("against_trl", "--one", "grpolab", "tiny", "fp32", method, lengths, "--steps", 2)
    found = json.loads(said.splitlines()[-1])
    assert len(found["seconds"]) == 1 and found["seconds"][0] > 0 and found["peak_gb"] >= found["loaded_gb"] > 0


@pytest.mark.full
@pytest.mark.slow
def test_memory_of_an_adapter_is_measured():
    pytest.importorskip("peft")
    found = json.loads(script("lora", "--model", "tiny", "--measure", "sft", "lora").splitlines()[-1])
    assert found["trained"] > 0 and found["step_s"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(p.stem for p in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in p.read_text()))
def test_asking_for_help_measures_nothing(name):
    if name not in ("report", "rollouts"):  # these take no arguments and only read or take a moment
        assert script(name, "--help").startswith("usage:")


# --- the long runs, in this process and as short as they get ------------------------------------------------------------


@pytest.mark.full
def test_grpo_over_seeds(monkeypatch, tmp_path):
    """All of a seed's rows: the curve of SFT, rejection sampling, GRPO, bf16."""
    shorter(monkeypatch, grpo_seeds, tmp_path, HELD_OUT=grpo_seeds.HELD_OUT[:4], DEMOS=grpo_seeds.DEMOS[:8], NEW_TOKENS=4,
            PRACTICE=grpo_seeds.PRACTICE[:4], CHOOSING=grpo_seeds.CHOOSING[:4], CURVE=(1, grpo_seeds.BEST))
    asyncio.run(grpo_seeds.main(["0"]))
    record = json.loads((tmp_path / "grpo_seeds.json").read_text())
    assert set(record["seeds"]["0"]) == {"sft", "rejection", "grpo", "bf16"} and record["provenance"]["code"]["train"]


def shorter(monkeypatch, module, tmp_path, **constants):
    """A benchmark with two steps in each training, and with these constants."""
    short = {"steps": 2, "batch_size": 4, "warmup": 0}
    monkeypatch.setattr(module, "SFTConfig", lambda **given: SFTConfig(**given | short), raising=False)
    few = {"steps": 2, "prompts_per_step": 2, "group_size": 2, "warmup": 0}
    monkeypatch.setattr(module, "GRPOConfig", lambda **given: GRPOConfig(**given | few), raising=False)
    for name, value in (constants | {"RESULTS": tmp_path / f"{module.__name__}.json"}).items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.full
def test_baselines_over_seeds(monkeypatch, tmp_path):
    """All policies of a seed, and what is kept is not measured again."""
    asked, rounds = baselines.PRACTICE, (baselines.PRACTICE[:4], baselines.PRACTICE[4:8])
    shorter(monkeypatch, baselines, tmp_path, HELD_OUT=baselines.HELD_OUT[:5], CHOOSING=baselines.CHOOSING[:3], ROUNDS=rounds,
            PRACTICE=asked[:8] + baselines.CHOOSING, NEW_TOKENS=4, CONTROLS=(0,))
    asyncio.run(baselines.main([0, 1]))
    text = (tmp_path / "baselines.json").read_text()
    record = json.loads(text)
    assert set(record["seeds"]["0"]) == {"sft", "rejection", "grpo", "mixed", "majority", "seconds"}
    assert set(record["seeds"]["1"]) == {"sft", "rejection", "grpo", "seconds"} and record["planted"] == baselines.planted()
    assert all(len(row["greedy"]) == len(row["sampled"]) == 5 for row in (record["base"], record["seeds"]["1"]["grpo"]))
    assert record["seeds"]["1"]["rejection"]["tokens"] > 32 and record["seeds"]["1"]["grpo"]["tokens"] > 0
    asyncio.run(baselines.main([0, 1]))
    assert (tmp_path / "baselines.json").read_text() == text


@pytest.mark.full
def test_staleness_over_seeds(monkeypatch, tmp_path):
    short = {"HELD_OUT": async_grpo.HELD_OUT[:4], "NEW_TOKENS": 4}
    shorter(monkeypatch, baselines, tmp_path, **short)
    short |= {"QUESTIONS": async_grpo.QUESTIONS[:4], "STEPS": 3, "TIMED": 12, "PROMPTS": 2, "SIZE": 2, "SECONDS": (0.1, 0.2)}
    shorter(monkeypatch, async_grpo, tmp_path, **short)
    monkeypatch.setattr(async_grpo, "STALENESS", (0, 2))
    monkeypatch.setattr(async_grpo, "ARMS", [(0, "clip"), (2, "none"), (2, "weights")])
    def reward(text, row, rollout):  # differs in each group, or nothing is trained and no rollout gets stale
        return Random(rollout.seed).random()

    monkeypatch.setattr(async_grpo, "finished_and_correct", reward)
    with monkeypatch.context() as patch:
        patch.setattr(async_grpo, "learned", partial(async_grpo.learned, reward=reward))
        asyncio.run(async_grpo.main([0]))
    found = json.loads((tmp_path / "async_grpo.json").read_text())["seeds"]["0"]
    assert set(found) == {"start", "rejection", "0, clip", "2, none", "2, weights"}
    assert found["2, none"]["staleness"] == [0, 1, 2] and found["2, none"]["tokens"] > 0 < found["rejection"]["tokens"]
    timed = asyncio.run(async_grpo.timing())
    assert timed["2, slow"]["staleness"] == 2 and timed["0, slow"]["seconds"] > 0.1


@pytest.mark.full
def test_distillation_over_seeds(monkeypatch, tmp_path):
    short = {"HELD_OUT": distillation.HELD_OUT[:4], "CHOOSING": distillation.CHOOSING[:3], "NEW_TOKENS": 4}
    shorter(monkeypatch, baselines, tmp_path, **short)
    shorter(monkeypatch, distillation, tmp_path, **short, QUESTIONS=distillation.QUESTIONS[:8], TAUGHT=distillation.TAUGHT[:8],
            BUDGETS=(1, 2), PILOT_BATCHES=1, RATES=(1e-3,), TEACHER=tmp_path / "teacher")
    few = {"steps": 2, "prompts_per_step": 2, "group_size": 2}
    monkeypatch.setattr(distillation, "DistilConfig", lambda **given: DistilConfig(**given | few))
    asyncio.run(distillation.main([0]))
    record = json.loads((tmp_path / "distillation.json").read_text())
    assert set(record["seeds"]["0"]) == {"student", *distillation.WAYS} and len(record["teacher"]["greedy"]) == 4
    for way in distillation.WAYS:
        first, last = record["seeds"]["0"][way]["curve"]
        assert 0 < first["tokens"] < last["tokens"] or way in (*distillation.KINDS, "grpo")
        assert last["seconds"] > 0 and last["greedy"] == record["seeds"]["0"][way]["greedy"].count("1") / 4
    assert distillation.best_rate({"pilot": {"sampled": {"0.001": 0.2, "0.0003": 0.4}}}, "sampled") == 3e-4


@pytest.mark.full
def test_several_rewards_over_seeds(monkeypatch, tmp_path):
    short = {"HELD_OUT": baselines.HELD_OUT[:4], "NEW_TOKENS": 4}
    shorter(monkeypatch, baselines, tmp_path, **short)
    shorter(monkeypatch, several_rewards, tmp_path, **short, SHOWN=baselines.SHOWN[:8], PRACTICE=baselines.PRACTICE[:8])
    asyncio.run(several_rewards.main([1]))
    record = json.loads((tmp_path / "several_rewards.json").read_text())
    assert set(record["seeds"]["1"]) == {"start", "right", "sum", "gated"} and len(record["seeds"]["1"]["sum"]["greedy"]) == 4


def test_longer_answers_over_seeds(monkeypatch, tmp_path):
    shorter(monkeypatch, longer_answers, tmp_path, HELD_OUT=longer_answers.HELD_OUT[:4], STEPS=(2,),
            SHOWN=longer_answers.SHOWN[:8], PRACTICE=longer_answers.PRACTICE[:4], ROUNDS=(2,), RATES=(1e-3,), TUNED_ON=(10,))
    asyncio.run(longer_answers.main([0]))
    record = json.loads((tmp_path / "longer_answers.json").read_text())
    row = record["seeds"]["0"]["2"]
    assert 0 <= row["grpo"]["right"] <= 1 and 0 < row["sft"]["long"] < 1 and row["tokens"] > 0
    assert set(row) == {"sft", "grpo", "tokens", "rejection 2"} and set(record["tuned"]) == {"0.001"}


def test_a_long_prompt_once_a_group_has_the_gradient_of_once_a_rollout(monkeypatch, tmp_path):
    shorter(monkeypatch, long_prompts, tmp_path, PROMPTS=(40,), COMPLETION=5, GROUPS=2, SIZE=2, ROUNDS=1)
    long_prompts.main()
    (row,) = json.loads((tmp_path / "long_prompts.json").read_text())["rows"]
    assert row["tokens once a group"] < row["tokens once a rollout"] and row["gradients apart"] < 1e-4


@pytest.mark.full
def test_prompt_lookup_samples_the_same_and_says_what_it_saves(monkeypatch, tmp_path):
    shorter(monkeypatch, prompt_lookup, tmp_path, LOOKUPS=(0, 4), ROUNDS=1, WARM_UP=3, EPISODES=3, NEW=8, TASKS={})
    asyncio.run(prompt_lookup.main())
    (row,) = json.loads((tmp_path / "prompt_lookup.json").read_text())["rows"]
    without, drafted = row["by_lookup"]
    assert without["ratio"] == 1 and without["drafted"] == 0 and drafted["accepted"] <= drafted["drafted"]


@pytest.mark.full
def test_a_critic_over_seeds(monkeypatch, tmp_path):
    short = {"steps": 2, "warmup": 0}
    shorter(monkeypatch, critic, tmp_path, EACH=1, SECRETS=critic.SECRETS[:2], WARM_UP=replace(critic.WARM_UP, steps=60),
            GRPO=replace(critic.GRPO, **short, prompts_per_step=2, group_size=2))
    asyncio.run(critic.main([0]))
    record = json.loads((tmp_path / "critic.json").read_text())
    assert set(record["seeds"]["0"]) == {"start", *critic.WAYS, "rejection"} and len(record["pilot"]) == len(critic.GRID)
    assert len(record["seeds"]["0"]["ppo_50"]["explained by step"]) == 2


@pytest.mark.full
def test_a_recipe_is_searched_for_and_entered(monkeypatch, tmp_path):
    task = Speedrun(target=0.0, seeds=(0,), sft=SFTConfig(steps=2, batch_size=4), questions=(60, 8), shown=10)
    few = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "warmup": 0}
    for name, value in {"SEARCH": tmp_path / "board_search.json", "ENTRIES": tmp_path / "board", "COMMON": few, "MARGIN": 0.0,
                        "STANDARD": task, "RECIPES": {"std": {"lr": 1e-3, **board.STD}}, "Choosing": lambda: task}.items():
        monkeypatch.setattr(board, name, value)
    monkeypatch.setattr(board, "speedrun", partial(board.speedrun, task=task))
    asyncio.run(board.search(["std"]))
    board.enter(threads=1)
    assert set(json.loads((tmp_path / "board" / "std.json").read_text())["seeds"]) == {"0"}


def test_the_claims_of_further_seeds_are_kept(monkeypatch, tmp_path):
    checks = [{"name": n, "measured": 1, "bound": "≥ 0", "passed": True, "claim": n == "gain"} for n in ("same", "gain")]
    monkeypatch.setattr(seeds, "RESULTS", tmp_path / "seeds.json")
    seeds.keep("01_sft", "1", {"passed": True, "checks": checks, "values": {"by_seed": {"agent": 0.9}, "gain": "5 points"}})
    (of,) = json.loads((tmp_path / "seeds.json").read_text())["notebooks"]["01_sft"].values()
    assert [claim["name"] for claim in of["claims"]] == ["gain"] and of["values"] == {"agent": 0.9}


def test_an_illness_is_recorded(monkeypatch, tmp_path, tiny):
    async def untaught(seed):
        return tiny

    monkeypatch.setattr(illnesses, "RECORD", tmp_path / "runs.json")
    (tmp_path / "runs.json").write_text("{}")
    monkeypatch.setattr(illnesses, "taught", untaught)
    monkeypatch.setattr(illnesses, "PLAIN", replace(illnesses.PLAIN, prompts_per_step=2, group_size=2, max_new_tokens=4))
    monkeypatch.setattr(illnesses, "replace", lambda config, **changes: replace(config, **changes | {"steps": 2}))
    asyncio.run(illnesses.main(["gamed"]))
    (run,) = json.loads((tmp_path / "runs.json").read_text()).values()
    assert run["ill"] == ["reward up while the judge falls"] and len(run["rows"]["step"]) == 2


@pytest.mark.full
def test_estimators_are_measured_on_a_seed(monkeypatch, tmp_path):
    shorter(monkeypatch, estimators, tmp_path, SIZE=2, GROUPS=(2,), DRAWS=5)
    estimators.main([0])
    record = json.loads((tmp_path / "estimators.json").read_text())
    row = record["seeds"]["0"]
    assert row["on_policy"][0]["how"] == "exact" and row["samples"][0]["how"] == "5 draws" and len(row["off_policy"]) == 84
    assert record["provenance"]["code"]["train"]


def test_answers_of_policies_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(rollouts, "RESULTS", tmp_path / "rollouts.json")
    rollouts.main({"base": "tiny"})
    questions = json.loads((tmp_path / "rollouts.json").read_text())["questions"]
    assert len(questions) == 20 and set(questions[0]["written"]) == {"base"}


def test_arithmetic_measures_a_policy(monkeypatch, tiny):
    """The recipe's own function on the embedded model in SmolLM2's place."""
    monkeypatch.setattr(runs, "MODEL", "tiny")
    monkeypatch.setattr(runs, "DTYPE", "float32")
    monkeypatch.setattr(sums, "HELD", sums.HELD[:3])
    monkeypatch.setattr(sums, "ASKED", sums.ASKED[:3])
    assert any(len(v) == 3 for v in asyncio.run(sums.measure(tiny)).values() if isinstance(v, str | list))


@pytest.mark.full
def test_a_tool_is_asked_or_not_by_every_policy_of_the_record(monkeypatch, tmp_path):
    """The whole series on the embedded model in SmolLM2's place, in this process."""
    pytest.importorskip("peft")
    short = {"steps": 2, "warmup": 0}
    settings = asking.SETTINGS | {
        "demonstrations": 20, "choosing": 2, "held_out": 3, "shots": 1, "look": 2, "sft": asking.SETTINGS["sft"] | short,
        "grpo": asking.SETTINGS["grpo"] | short | {"prompts_per_step": 2, "group_size": 2},
        "rejection": {"rounds": (1, 2), "episodes": 2, "sft": asking.SETTINGS["rejection"]["sft"] | short}}
    for name, value in {"SETTINGS": settings, "TEMPLATE": CHAT_TEMPLATE, "SIZE": 4,
                        "RESULTS": tmp_path / "smollm2_tools.json"}.items():
        monkeypatch.setattr(asking, name, value)
    for name, value in {"MODEL": "tiny", "DTYPE": "float32", "words": lambda doc: ["0"]}.items():
        monkeypatch.setattr(runs, name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "in_process", lambda script, *words: json.loads(json.dumps(asyncio.run(asking.one(*words)))))
    asking.main()
    record = json.loads((tmp_path / "smollm2_tools.json").read_text())
    assert {"base", "sft", "rewarded sft", "grpo 0", "rejection 0 1", "rejection 0 2"} <= set(record)
    assert record["sft"]["shown"] == 20 > record["rewarded sft"]["shown"] >= record["rewarded sft"]["asking"] > 0
    assert all(len(record[name]["greedy"]["flags"]) == 3 for name in ("sft", "grpo 0", "rejection 0 1"))
    assert len(report.asking(record, tmp_path)[1]) == 7


@pytest.mark.full
def test_every_way_to_administer_accounts_is_recorded(monkeypatch, tmp_path):
    """Three seeds of every stage on the embedded model, which solves nothing: what rejection sampling would keep is given."""
    pytest.importorskip("botocore")
    short = {"steps": 2, "warmup": 0, "batch_size": 4}
    small = {"choosing": 2, "held_out": 4, "samples": 2, "new_tokens": 6, "sft": seeded.SETTINGS["sft"] | short, "look": 2,
             "seats": 4}
    for settings in (accounts.SETTINGS, seeded.SETTINGS):
        for key, value in small.items():
            monkeypatch.setitem(settings, key, value)
    monkeypatch.setitem(seeded.SETTINGS, "grpo", seeded.SETTINGS["grpo"] | {
        "steps": 2, "warmup": 0, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6})
    monkeypatch.setitem(seeded.SETTINGS, "rejection", {
        "rounds": 2, "tasks": 4, "samples": 2, "sft": seeded.SETTINGS["sft"] | short, "look": 2})
    monkeypatch.setitem(seeded.SETTINGS, "many", seeded.SETTINGS["sft"])
    for name, value in {"MODEL": "tiny", "DTYPE": "float32", "words": lambda doc: ["0", "1", "2"]}.items():
        monkeypatch.setattr(runs, name, value)
    monkeypatch.setattr(accounts, "TEMPLATE", CHAT_TEMPLATE)
    monkeypatch.setattr(seeded, "RESULTS", tmp_path / "smollm2_aws_seeds.json")
    monkeypatch.setattr(seeded, "solved", lambda account, tasks, groups, policy: [accounts.solved_chat(t) for t in tasks[:2]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "in_process", lambda script, stage, *seeds: json.loads(json.dumps(
        asyncio.run(seeded.one(stage, *map(int, seeds))))))
    seeded.main()
    record = json.loads((tmp_path / "smollm2_aws_seeds.json").read_text())
    assert {f"{stage} {seed}" for stage in seeded.STAGES for seed in (0, 1, 2)} <= set(record)
    assert record["rejection 1"]["rollouts"] == 16 and record["rejection 1"]["kept"] == [2, 4]
    assert record["summary"]["seeds"] == [0, 1, 2] and len(record["summary"]["sampled"]["left out"]) == 3
    assert {f"crossed {start} {seed}" for start in range(3) for seed in range(3) if start != seed} <= set(record)
    assert not any(name.startswith("again") for name in record)
    assert record["summary"]["crossed"]["greedy"] == [[0.0] * 3] * 3
    _, rows, gaps, over, greedy, _, sampled, sampled_rows, left_out = report.administration_over_seeds(record, tmp_path)
    assert (len(rows), len(gaps), len(over)) == (15, 9, 9) and "every 5th template solves 0.0%" in left_out
    assert "greedy: +0.0 points" in greedy and "sampled: +0.0 points" in sampled and len(sampled_rows) == 3
    del record["crossed 0 1"]  # a run that is repeated elsewhere: the SFT that it begins at is trained once more
    shutil.rmtree(tmp_path / "runs" / "smollm2_aws_seeds" / "sft_0")
    (tmp_path / "smollm2_aws_seeds.json").write_text(json.dumps(record))
    seeded.main()
    record = json.loads((tmp_path / "smollm2_aws_seeds.json").read_text())
    assert "crossed 0 1" in record and [name for name in record if name.startswith("again")] == ["again 0"]


@pytest.mark.full
def test_every_way_to_teach_the_rules_of_chat_is_recorded(monkeypatch, tmp_path):
    """The whole series on the embedded model in SmolLM2's place, in this process. It ends no completion, so that every second
    one is said to have ended and to be right."""
    pytest.importorskip("peft")
    plain = english.sampled

    async def sampled(*arguments, **options):
        return [Group(tuple(replace(r, finish_reason="eos", reward=float(i % 2)) for i, r in enumerate(group)))
                for group in await plain(*arguments, **options)]

    short = {"steps": 2, "warmup": 0, "batch_size": 4}
    settings = english.SETTINGS | {name: english.SETTINGS[name] | short for name in ("sft", "dpo", "reward")} | {
        "new_tokens": 6, "adapter": {"rank": 2}, "samples": {"group_size": 8, "held_out_group_size": 8, "pairs_per_prompt": 2},
        "grpo": english.SETTINGS["grpo"] | {"steps": 2, "warmup": 0, "prompts_per_step": 2, "group_size": 2},
        "rejection": {"rounds": 2, "group_size": 4, "kept_per_prompt": 2, "sft": english.SETTINGS["rejection"]["sft"] | short}}
    for name, value in {"SETTINGS": settings, "PRACTICE": english.PRACTICE[:6], "HELD_OUT": english.HELD_OUT[:4],
                        "RESULTS": tmp_path / "smollm2_english.json", "FOLDER": tmp_path,
                        "sampled": sampled}.items():
        monkeypatch.setattr(english, name, value)
    for name, value in {"MODEL": "tiny", "DTYPE": "float32", "words": lambda doc: ["0"]}.items():
        monkeypatch.setattr(runs, name, value)
    monkeypatch.setattr(runs, "in_process", lambda script, *words: json.loads(json.dumps(asyncio.run(english.one(*words)))))
    english.main()
    text = (tmp_path / "smollm2_english.json").read_text()
    record = json.loads(text)
    assert set(record) == {"settings", "provenance", "made", "base", "samples 0", *(f"{name} 0" for name in english.METHODS)}
    assert record["samples 0"]["train"]["pairs"] > 0 < record["dpo 0"]["pairs"] and record["rejection 0"]["tokens"] >= 16
    assert all(len(record[name]["greedy"]["all rules"]) == 4 for name in ("base", "sft 0", "dpo 0", "grpo 0", "rejection 0"))
    assert len(record["reward 0"]["held_out"]) == record["samples 0"]["held_out"]["pairs"]
    english.main()
    assert (tmp_path / "smollm2_english.json").read_text() == text
    about, rows, lines, *_, rewarded = report.english(record, tmp_path)
    assert [row["policy"] for row in rows] == ["as it is", *report.LEARNED.values()] and len(lines) == 4
    assert all(line["greedy"] == "+0.0 points [+0.0, +0.0]: no difference seen" for line in lines)
    assert "the difference is " in rewarded and "were run: 0." in about
    other = {"samples 1": record["samples 0"]} | {
        f"{name} 1": record[f"{name} 0"] | {"greedy": {"all rules": "1101", "rules": record["base"]["greedy"]["rules"]}
                                                 | {"tokens": 6}} for name in report.LEARNED}
    over = report.english(record | other, tmp_path)[3]
    assert len(over) == 8 and over[0] == {"over 2 seeds": "SFT on the chosen − as it is", "sampled": over[0]["sampled"],
                                          "greedy": "+37.5 points [-439.0, +514.0]: no difference seen"}
    assert over[-1]["greedy"] == "+0.0 points with each seed"


# --- provenance -------------------------------------------------------------------------------------------------------


def test_a_record_is_stale_once_its_code_changes_and_not_for_prose(tmp_path, monkeypatch):
    room = tmp_path / "grpolab" / "env"
    room.mkdir(parents=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (room / "a.py").write_text('"""Says."""\nx = 1\n')
    records.write(tmp_path / "pool.json", {"rows": []})
    (room / "a.py").write_text('"""Says otherwise."""\n# a remark\nx = 1\n')
    assert records.stale(tmp_path) == {}
    (room / "a.py").write_text("x = 2\n")
    assert records.stale(tmp_path)["pool"].startswith("env changed since ")
    records.write(tmp_path / "pool.json", {"rows": [{"peer": 1}]})
    (room / "a.py").write_text("x = 3\n")
    kept = json.loads((tmp_path / "pool.json").read_text())["rows"]
    records.write(tmp_path / "pool.json", {"rows": [*kept, {"peer": 2}]})  # a run of a part: the other row is of older code
    assert records.stale(tmp_path)["pool"].endswith(" (1 of 2 parts)")
    seeds = {"notebooks": {"05": {"1": {"provenance": None}, "2": {"provenance": records.provenance(["env"])}}}}
    (tmp_path / "seeds.json").write_text(json.dumps(seeds))
    assert records.stale(tmp_path)["seeds"] == "made before records carried a hash (1 of 2 parts)"
    (tmp_path / "lora.json").write_text("{}")
    assert records.stale(tmp_path)["lora"] == "made before records carried a hash"
    with pytest.raises(ValueError, match="record 'other' is not in MEASURES"):
        records.write(tmp_path / "other.json", {})


def test_a_record_made_by_another_python_is_not_stale(tmp_path):
    (tmp_path / "a.py").write_text("class A:\n    def f(self, *y) -> list:\n        return [f'{y!r:>{len(y)}}', [], str()]\n")
    assert records.code_hash(tmp_path) == "d233701becbb"  # as on 3.11


def test_a_record_under_a_name_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    done = subprocess.run([sys.executable, BENCHMARKS / "accelerator.py", "--out", tmp_path / "mine.json"], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "mine.json: name the file as the script's record" in done.stderr


@pytest.mark.full
def test_stale_records_are_listed():
    """Not a failure: to record again takes hours. `python benchmarks/records.py` prints the same list."""
    assert {path.stem for path in RESULTS.glob("*.json")} >= set(records.stale())
    for path in RESULTS.glob("*.json"):
        assert records.measured(path.stem)
    for name, why in records.stale().items():
        print(f"{name}: {why}")
