"""The training commands: their flags are the configurations' fields, and they train what they say."""

import ast
import asyncio
import dataclasses
import gc
import json
import re
import resource
import signal
import sys
import tomllib
import types
from pathlib import Path

import pandas as pd
import pytest
import safetensors.torch
import torch

from grpolab.__main__ import COMMANDS, main, parse
from grpolab.cli import recipe
from grpolab.cli import train as commands
from grpolab.cli.progress import Progress
from grpolab.cli.rollout_options import load_object
from grpolab.models.load import load_policy
from grpolab.serve.service import serve_policy

OTHER = {"schedule": "cosine", "optimiser": "adafactor", "autocast": "bfloat16", "advantage_kind": "standardised",
         "aggregation": "sequence", "objective": "cispo", "ratio": "sequence", "kl_kind": "k1", "kind": "ipo",
         "clip_eps": (0.1, 0.3), "max_logp_diff": (0.5, 2.0), "dual_clip": 3.0, "sampler_cap": 2.0,
         "minibatches": 2, "label_smoothing": 0.1, "checkpoint_activations": True, "length_normalised": True,
         "exact": True, "share_prompts": False, "kl_to": "sampler"}


def command(method, *flags):
    data = ["--data", "x.jsonl"] if method in ("dpo", "reward") else []
    return parse(method, getattr(commands, COMMANDS[method][1]), recipe.renamed(["tiny", *data, *flags], method))


def parsed(method, *flags):
    return command(method, *flags).config


CONFIGS = {method: type(parsed(method)) for method in ("sft", "grpo", "dpo", "reward")}


@pytest.mark.parametrize("method", CONFIGS)
def test_every_field_is_a_flag(method):
    """All flags at once, but for two that exclude others."""
    default, changed, flags = CONFIGS[method](), {}, []
    for f in dataclasses.fields(default):
        old = getattr(default, f.name)
        new = OTHER.get(f.name, old + 1 if isinstance(old, int) else old + 0.5 if isinstance(old, float) else old)
        assert old != new
        if f.name in ("objective", "kind"):
            assert getattr(parsed(method, f"--{f.name}", new), f.name) == new
            continue
        changed[f.name] = new
        values = new if isinstance(new, tuple) else [] if isinstance(new, bool) else [new]
        flags += [("--no-" if new is False else "--") + f.name.replace("_", "-"), *map(str, values)]
    assert parsed(method, *flags) == dataclasses.replace(default, **changed)


def test_the_help_texts_are_read_with_garbage_about():
    """A finaliser that parses, while the parser reads the source of the options."""
    def collected(phase, info):
        ast.parse("f(" * 20 + ")" * 20)

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    try:
        gc.set_threshold(5)
        parsed("sft")
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


def test_none_is_a_value_where_the_field_allows_it():
    assert parsed("grpo", "--max-logp-diff", "none").max_logp_diff is None
    assert parsed("grpo", "--sampler-cap", "none").sampler_cap is None


@pytest.mark.parametrize("flags, says", [(["--clip-eps", "wide"], "--clip-eps"), (["--lr", "-1"], "lr"),
                                         (["--kl-kind", "foo"], "Expected one of ('k1', 'k2',"),
                                         (["--stepz", "3"], "--steps"), (["--steps", "many"], "--steps")])
def test_a_value_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["grpo", "./no/such/model", *flags])
    assert exit.value.code == 2 and says in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_a_dry_run_prints_the_plan_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["grpo", "tiny", "--dry-run", "--kl-coef", "0.1", "--max-new-tokens", "4", "--group-size", "2"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("parameters", "optimiser (adamw)", "reference", "KV cache", "time of the run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("row, flags, says", [
    ({"prompt": "a"}, [], "row 1.*no 'answer'|has no 'answer'"), ({"prompt": "a", "answer": "x"}, [], "row 1: .*no number"),
    ({"answer": 1}, [], "line 1"), ({"prompt": "a", "answer": 1}, ["--reward", "math"], "module:function"),
    ({"prompt": "a", "answer": 1}, ["--reward", "math:nothing"], "no function 'nothing'"),
])
def test_rows_and_rewards_that_do_not_fit_are_refused_first(tmp_path, monkeypatch, capsys, row, flags, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert main(["grpo", "./no/such/model", "--data", "rows.jsonl", *flags]) == 1
    assert re.search(says, capsys.readouterr().err) and not (tmp_path / "runs").exists()


def test_a_reward_is_a_function_of_a_file(tmp_path):
    (tmp_path / "own_reward.py").write_text("def one(text, row, rollout):\n    return 1.0\n")
    assert load_object(f"{tmp_path}/own_reward.py:one", "--reward")("", {}, None) == 1.0
    (tmp_path / "own_rewards.py").write_text(
        "from grpolab.train import Several\n\nboth = Several({'one': (lambda text, row, rollout: 1.0, 1.0)})\n")
    assert command("grpo", "--reward", f"{tmp_path}/own_rewards.py:both").rewarded.rewards
    for name, text, why in (("syntax", "def one(:", "SyntaxE"), ("fault", "{}['no']", "KeyE"), ("end", "exit()", "Exit")):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ValueError, match=f"--reward .*{name}.py:one cannot be imported: .*{why}"):
            load_object(f"{tmp_path}/{name}.py:one", "--reward")
    with pytest.raises(ValueError, match="is module:function or file.py:function, got '.x:one'"):
        load_object(".x:one", "--reward")
    with pytest.raises(ValueError, match="there is no file"):
        load_object(f"{tmp_path}/other.py:one", "--reward")
    tools = tmp_path / "tools.py"
    tools.write_text("notes = []\ndef store(): notes.append(1)\ndef recall(): return len(notes)\n")
    load_object(f"{tools}:store", "--tools")()
    assert load_object(f"{tools}:recall", "--tools")() == 1  # one module for both
    tools.write_text("def recall(): return 'written anew'\n")
    assert load_object(f"{tools}:recall", "--tools")() == "written anew"


@pytest.mark.full
def test_bf16_parameters_are_trained_and_saved_as_such(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["sft", "tiny", "--dtype", "bfloat16", "--steps", "1", "--batch-size", "4", "--problems", "8"]
    assert main([*asked, "--dry-run"]) == 0 and "master weights" in capsys.readouterr().out
    assert main(asked) == 0
    tensors = safetensors.torch.load_file(tmp_path / "runs" / "cli_sft" / "tiny" / "policy" / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16"}
SMALL = ["--ops", "+", "--max-operand", "9", "--problems", "20", "--steps", "2"]


def test_sft_trains_holds_out_problems_and_keeps_the_best(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "tiny", *SMALL, "--batch-size", "4", "--name", "mine", "--held-out", "10", "--select-every", "1",
                 "--fixed-prompts", "arithmetic"]) == 0
    out = capsys.readouterr().out
    run = tmp_path / "runs" / "mine" / "tiny"
    assert "step 2/2" in out and "held_out_loss" in out and "eval_score" in out and "the best by what was measured" in out
    *_, last = out.splitlines()
    assert last.startswith("runs/mine/tiny: ") and all(name in last for name in ("metrics.csv", "policy/", "recipe.toml"))
    lines = (run / "measured.csv").read_text().splitlines()
    assert lines[0].startswith("steps,score,fixed_stop_token") and len(lines) == 4 and len(list(run.glob("best-*"))) == 1
    assert load_policy(str(run / "policy")).provenance["steps"] == 2
    assert len((run / "metrics.csv").read_text().splitlines()) == 3


def test_what_is_held_out_is_not_trained_on_and_does_not_change_what_is(monkeypatch):
    def rows_of(*more):
        return command("grpo", *SMALL[:6], *more).read()

    (bare, none), (rows, held_out) = rows_of(), rows_of("--held-out", "30")
    assert bare == rows and not none and len(held_out) == 30 and not set(held_out) & set(rows)


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_preferences_are_planned_trained_on_and_selected_by_held_out_rows(tmp_path, monkeypatch, capsys, method):
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"{a} + 1", "chosen": f"{a + 1}.", "rejected": f"{a}.", "answer": a + 1} for a in range(8)]
    for name, part in (("pairs", pairs[:4]), ("held", pairs[4:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    asked = [method, "tiny", "--data", "pairs.jsonl", "--steps", "2", "--batch-size", "2", "--lr", "1e-3",
             "--held-out-data", "held.jsonl", "--select-every", "2"]
    assert main([*asked, "--dry-run"]) == 0 and "4 a step" in capsys.readouterr().out
    assert main([*asked, "--show-every", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2/2" in out and "tokens_per_s" in out and out.count("→") == (1 if method == "dpo" else 2)
    assert ("  score " in out) == (method == "reward")
    run = tmp_path / "runs" / f"cli_{method}" / "tiny"
    measured = (run / "measured.csv").read_text().splitlines()
    assert measured[0] == "steps,score" and [line.split(",")[0] for line in measured[1:]] == ["0", "2"]
    assert (run / "policy" / "config.json").is_file()


def test_grpo_takes_rows_and_a_reward_of_ones_own_and_is_selected_by_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "worth": 7.0}\n{"prompt": "b", "worth": 7.0}')
    (tmp_path / "sevens.py").write_text("async def seven(text, row, rollout):\n    return row['worth']\n")
    asked = ["grpo", "tiny", "--data", "rows.jsonl", "--held-out-data", "rows.jsonl", "--reward", "sevens:seven",
             "--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4",
             "--select-every", "5"]
    assert main(asked) == 0
    assert (tmp_path / "runs" / "cli_grpo" / "tiny" / "measured.csv").read_text() == "steps,score\n0,7.0\n1,7.0\n"


@pytest.mark.parametrize("flags, says", [
    (["--select-every", "5"], "add --held-out-data FILE, or --held-out N"),
    (["--fixed-prompts", "english"], "needs --select-every"),
    (["--held-out", "3"], "add it, or leave --held-out"),
    (["--held-out", "3", "--held-out-data", "x.jsonl", "--select-every", "5"], "not both"),
    (["--select-every", "-1"], "start at 0"),
    (["--held-out", "3", "--data", "rows.jsonl", "--select-every", "5"], "--held-out 3 makes .*give --held-out-data"),
    (["--held-out", "5000", "--ops", "+", "--max-operand", "9", "--select-every", "5"], "key space"),
    (["--data", "rows.jsonl", "--held-out-data", "rows2.jsonl", "--select-every", "2"], "rows2.jsonl, row 1.*no number"),
])
def test_what_cannot_be_held_out_is_refused(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}')
    (tmp_path / "rows2.jsonl").write_text('{"prompt": "a", "answer": "x"}')
    assert main(["grpo", "tiny", *flags]) == (1 if "5000" in flags or "rows2.jsonl" in flags else 2)
    assert re.search(says, capsys.readouterr().err) and not (tmp_path / "runs").exists()


def test_held_out_rows_of_which_sft_would_measure_nothing_are_refused(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}')
    assert main(["sft", "./no/such/model", "--held-out-data", str(tmp_path / "rows.jsonl")]) == 2
    assert "show no completion whose loss could be measured: add --select-every N" in capsys.readouterr().err


def test_a_start_without_reward_says_that_demonstrations_come_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["grpo", "tiny", *SMALL, "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "2"]
    assert main([*asked, "--replay-every", "1"]) == 0
    assert capsys.readouterr().out.count("grpolab sft tiny") == 1
    assert main(["replay", str(tmp_path / "runs" / "cli_grpo" / "tiny"), "1"]) == 0


def test_the_default_number_of_problems_fits_a_small_task():
    assert len(command("grpo", "--ops", "+", "--max-operand", "9").read()[0]) == 50
    with pytest.raises(ValueError, match="at most 4/5"):
        command("grpo", "--ops", "+", "--max-operand", "9", "--problems", "90").read()


# --- recipes ----------------------------------------------------------------------------------------------------------


def recipe_file(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def train(path, *overrides):
    """The command that `grpolab train` would run."""
    method, arguments = recipe.read(path, overrides, ("sft", "grpo", "dpo", "reward"))
    return parse(method, getattr(commands, COMMANDS[method][1]), arguments)


def test_what_print_config_prints_is_the_same_training(tmp_path, capsys):
    flags = ["--clip-eps", "0.1", "0.3", "--ops", "+-", "--max-logp-diff", "none", "--max-grad-norm", "inf", "--exact",
             "--report-to", "wandb", "tensorboard", "--held-out-data", "r\u00f6ws \U0001f600\x7f.jsonl", "--lora-rank", "2",
             "--lora-target", "q_proj", "--fixed-prompts", "english", "--select-every", "5"]
    assert main(["grpo", "tiny", *flags, "--print-config"]) == 0
    path = recipe_file(tmp_path, capsys.readouterr().out)
    assert train(path) == command("grpo", *flags)
    assert recipe.written("grpo", {"data": Path("\udce4")}).encode()  # of a training that is done by then


def test_the_command_line_wins_over_the_file(tmp_path):
    path = recipe_file(tmp_path, 'method = "grpo"\nmodel = "tiny"\nsteps = 5\nlearning_rate = 0.5\nexact = true\nops = "+"\n')
    asked = train(path, "--lr=0.25", "--no-exact", "--num_generations", "4")
    assert (asked.config.steps, asked.config.lr, asked.config.exact, asked.config.group_size) == (5, 0.25, False, 4)
    assert asked.model == "tiny" and train(path, "smollm2-135m").model == "smollm2-135m" and asked.task.ops == "+"
    named = train(path, "--name", "lr")  # a value that is also an option's name
    assert (named.config.lr, named.name) == (0.5, "lr")


@pytest.mark.parametrize("text, says", [
    ("steps = ", "is no TOML"), ('model = "tiny"', "a recipe says method"), ('method = "grpo"', "and model"),
    ('method = "grpo"\nmodel = "tiny"\nlr = 1e-3\nlearning-rate = 1e-5', "lr and learning-rate are one option"),
    ('method = "grpo"\nmodel = "tiny"\nmodel-name = "smollm2-135m"', "model and model-name are one option"),
    ('method = "grpo"\nmodel = "tiny"\nwandb = true\nreport-to = ["trackio"]', "report-to and wandb are one option"),
    ('method = "ppo"\nmodel = "tiny"', "'ppo'"), ('method = "sft"\nmodel = "tiny"\n[sft]\nsteps = 3', "sft is {'steps': 3}"),
    ('method = "sft"\nmodel = "tiny"\nlora_dropout = 0.1', "--lora-rank"), ("a = " + "[" * 5000, "is no TOML: maximum rec"),
    ('method = "grpo"\nmodel = "tiny"\nenv = ""', "env is '': an option is a text that is not empty"),
    ('method = "sft"\nmodel = "tiny"\nstepz = 3', "--steps"), ('method = "sft"\nmodel = "tiny"\nsteps = "x"', "--steps"),
])
def test_a_file_that_is_no_recipe_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys, text, says):
    monkeypatch.setattr(commands, "load_policy", None)
    try:
        assert main(["train", recipe_file(tmp_path, text)]) == 2
    except SystemExit as exit:
        assert exit.code == 2
    assert says in capsys.readouterr().err


def test_train_without_a_file_or_with_one_that_is_not_there(tmp_path, capsys):
    assert main(["train"]) == 2 and "name a file" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "no.toml")]) == 1 and "no.toml" in capsys.readouterr().err


@pytest.mark.parametrize("method", CONFIGS)
def test_every_name_of_another_trainer_is_one_of_an_option_here(method):
    own = {name.replace("_", "-") for name in options_of(command(method))}
    any_method = {name.replace("_", "-") for m in CONFIGS for name in options_of(command(m))}
    assert set(recipe.RENAMED_OF.get(method, {}).values()) <= own and set(recipe.RENAMED.values()) <= any_method
    assert not own & {*recipe.RENAMED, *recipe.RENAMED_OF.get(method, {})}
    assert recipe.renamed(["--beta", "0.1"], method) == ["--kl-coef" if method == "grpo" else "--beta", "0.1"]


def options_of(command):
    values = {f.name: getattr(command, f.name, None) for f in dataclasses.fields(command)}
    return [name for key, value in values.items() for name in (options_of(value) if dataclasses.is_dataclass(value) else [key])]


def test_the_page_for_people_who_know_trl_lists_every_name_and_names_what_exists():
    page = (Path(__file__).parents[1] / "docs" / "trl.md").read_text()
    assert all(f"| `{there}` | `{here}` |" in page for there, here in recipe.RENAMED.items())
    assert all(f"| `{there} ({m.upper()})` | `{here}` |" in page
               for m, of in recipe.RENAMED_OF.items() for there, here in of.items())
    refused = recipe.NO_OPTION | {f"{k} ({m.upper()})": why for m, of in recipe.NO_OPTION_OF.items() for k, why in of.items()}
    assert all(f"| `{there}` | {why} |" in page for there, why in refused.items())
    fields = {f"{type(c).__name__}.{f.name}" for c in map(parsed, CONFIGS) for f in dataclasses.fields(c)}
    assert set(re.findall(r"`(\w+Config\.\w+)`", page)) <= fields
    flags = {name.replace("_", "-") for m in CONFIGS for name in options_of(command(m))}
    tables = "".join(line.split("|", 2)[2] for line in page.splitlines() if line.startswith("|"))
    assert set(re.findall(r"--([a-z][a-z-]+)", tables)) <= flags and len(flags) > 80


@pytest.mark.parametrize("flags, says", [
    (["--lora-dropout", "0.1"], "add --lora-rank"), (["--epsilon-high=0.28"], "both sides"), (["--bf16"], "--autocast"),
    (["--batch-size", "4"], "--prompts-per-step"), (["--top_p", "0.9"], "whole distribution"),
    (["--gradient-accumulation-steps", "0"], "at least 1"), (["--max-tool-calling-iterations", "3"], "with one more"),
    (["--steps-per-generation=4"], "gradient_accumulation_steps of TRL"),
])
def test_an_option_that_has_no_counterpart_says_what_has(monkeypatch, capsys, flags, says):
    monkeypatch.setattr(commands, "load_policy", None)
    assert main(["grpo", "tiny", *flags]) == 2 and says in capsys.readouterr().err


def test_a_loss_of_trls_dpo_is_said_as_it_is_computed_here(capsys):
    assert main(["dpo", "tiny", "--loss-type", "ipo"]) == 2 and "--kind ipo --length-normalised" in capsys.readouterr().err


def test_names_of_the_shell_of_another_trainer(capsys):
    """As Atropos' example trainer is started: one clip, the model by a flag, micro-batches that add up, a tracker's switch."""
    flags = ["--model-name", "tiny", "--clip-eps", "0.1", "--optimizer", "adamw_cpu", "--use-wandb", "--tensorboard",
             "--kl-coef", "0.1", "--kl-to", "sampler", "--training-steps", "7", "--gradient-accumulation-steps", "3",
             "--print-config"]
    assert main(["grpo", *flags]) == 0
    config = tomllib.loads(capsys.readouterr().out)
    assert config == {"method": "grpo", "model": "tiny", "clip_eps": [0.1, 0.1], "optimiser": "adamw_cpu", "kl_coef": 0.1,
                      "report_to": ["wandb", "tensorboard"], "kl_to": "sampler", "steps": 7, "prompts_per_step": 192}
    assert main(["sft", "tiny", "--batch-size=4", "--gradient_accumulation_steps", "4", "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["batch_size"] == 16


def test_a_recipe_in_yaml_is_the_one_in_toml(tmp_path, capsys):
    """Read by `--config`, with an option that wins over it; what is no mapping is refused."""
    path = tmp_path / "run.yaml"
    path.write_text("method: grpo\nmodel_name_or_path: tiny\nlearning_rate: 1.0e-3\nclip_eps: [0.1, 0.3]\n"
                    "gradient_checkpointing: false\nwandb: true\ntrackio: false\nkl_kind: k3\ndual_clip: null\n")
    assert main(["train", "--config", str(path), "--steps", "9", "--print-config"]) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert found == {"method": "grpo", "model": "tiny", "lr": 1e-3, "clip_eps": [0.1, 0.3], "steps": 9, "report_to": ["wandb"],
                     "kl_kind": "k3"}
    for text, says in (("- steps", "no options"), ("a: b: c", "is no YAML"), ("3: 4", "no options"),
                       ("lr: 1.0\nlr: 2.0", "lr stands there twice"),
                       ("name: 2024-13-45", "run.yaml is no YAML: month"), ("name: !!timestamp x", "run.yaml is no YAML"),
                       ("method: grpo\nmodel: a\nbf16: true", "--bf16")):
        path.write_text(text)
        assert main(["train", str(path)]) == 2 and says in capsys.readouterr().err


def test_resume_goes_on_or_says_that_there_is_nothing_to_go_on_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["sft", "tiny", *SMALL[:6], "--batch-size", "4", "--steps", "4", "--save-every", "1", "--out", "kept"]
    assert main([*asked, "--resume"]) == 2 and "holds no checkpoint" in capsys.readouterr().err
    real = commands.Run.log

    def stops(run, row):
        if row["step"] == 2:
            raise KeyboardInterrupt
        return real(run, row)

    with monkeypatch.context() as patch:
        patch.setattr(commands.Run, "log", stops)
        assert main(asked) == 130
    told = capsys.readouterr().err
    assert "kept/cli_sft/tiny: checkpoint-00000003/, metrics.csv" in told and "the same command continues" in told
    for other, says in ((["--lr", "0.5", "--schedule", "cosine"], "lr 0.0001 -> 0.5, schedule 'constant' -> 'cosine'"),
                        (["--lora-rank", "2"], "a run that started from other weights")):
        assert main([*asked, "--resume", *other]) == 2 and says in capsys.readouterr().err
    assert main([*asked, "--resume"]) == 0
    assert "step 1/4" not in (out := capsys.readouterr().out) and "step 4/4" in out
    assert "resume" not in (tmp_path / "kept/cli_sft/tiny/recipe.toml").read_text()


# --- on a terminal, and what ends a training --------------------------------------------------------------------------

QUICK = ["sft", "tiny", "--ops", "+", "--max-operand", "9", "--problems", "20", "--batch-size", "4", "--steps", "4"]


def test_a_terminal_gets_a_bar_and_a_pipe_lines(monkeypatch, capsys):
    row = {"loss": 0.5, "kl": 0.01, "sampler_kl": 0.02, "tokens_per_s": 12340.0, "seconds": 1.0}

    def told():
        with Progress("sft", 4) as progress:
            for step in (2, 3):  # of a run that goes on
                progress.update({"step": step} | row)
            progress.say("a sample")
        return capsys.readouterr()

    plain = told()
    assert "step 3/4  loss 0.5  kl 0.01  sampler_kl 0.02  tokens_per_s 12,340  0 s left\n" in plain.out and not plain.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    both = told()  # stdout is a file
    assert both.out == plain.out and "sft: 100%" in both.err and "loss 0.5  kl 0.01  tokens_per_s" in both.err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert told().out == "a sample\n"
    monkeypatch.setattr("grpolab.cli.progress.distributed.first", lambda: False)
    assert told() == ("a sample\n", "")  # its stdout is none (`Training.run`)


@pytest.mark.full
def test_samples_on_the_way_change_no_bit_of_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = []
    for every, seen in (("2", 2), ("0", 0)):
        assert main([*QUICK, "--show-every", every, "--name", every]) == 0 and capsys.readouterr().out.count("→") == seen
        weights.append(safetensors.torch.load_file(tmp_path / "runs" / every / "tiny" / "policy" / "model.safetensors"))
    assert all(bool((weights[1][name] == value).all()) for name, value in weights[0].items())


def test_errors_are_sentences_and_faults_keep_their_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with commands.Run("cli_sft", "tiny").held():
        assert main(QUICK) == 1
    told = capsys.readouterr().err
    assert "grpolab sft: runs/cli_sft/tiny is in use: another loop of this process" in told and "Traceback" not in told
    assert main([*QUICK, "--lr", "1e30"]) == 1
    told = capsys.readouterr().err
    assert re.search(r"grpolab sft: the gradient norm at step \d is \w+: lower lr", told) and "Traceback" not in told

    def broken(*args, **options):
        return torch.ones(2) @ torch.ones(3)

    monkeypatch.setattr(commands, "sft", broken)
    assert main(QUICK) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "in broken" in told and told.splitlines()[-1].startswith("grpolab sft: inconsistent")


def test_a_full_disk_leaves_the_last_checkpoint_whole_and_the_command_goes_on_from_it(tmp_path, monkeypatch, capsys):
    """A process that may write no larger files (EFBIG) stands for a full disk (ENOSPC)."""
    monkeypatch.chdir(tmp_path)
    asked, limits, real = [*QUICK, "--save-every", "1"], resource.getrlimit(resource.RLIMIT_FSIZE), commands.Run.log

    def full_after_the_third(run, row):
        if row["step"] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        return real(run, row)

    with monkeypatch.context() as patch:
        patch.setattr(commands.Run, "log", full_after_the_third)
        try:
            assert main(asked) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told, folder = capsys.readouterr().err, tmp_path / "runs" / "cli_sft" / "tiny"
    assert re.search("File too large: '.*/cli_sft/tiny/checkpoint-00000003'. Nothing is left", told) and "Traceback" not in told
    assert [p.name for p in folder.glob("*checkpoint*")] == ["checkpoint-00000002"] and not list(folder.glob(".*.partial"))
    assert main(asked) == 0 and "going on after step 2" in capsys.readouterr().err
    assert list(pd.read_csv(folder / "metrics.csv")["step"]) == [0, 1, 2, 3]


def test_an_interrupt_in_the_last_step_keeps_the_steps_until_the_policy_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, real = tmp_path / "runs" / "cli_sft" / "tiny", commands.Run.log

    def interrupted(run, row):
        if row["step"] == 3:
            signal.raise_signal(signal.SIGINT)
        return real(run, row)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(commands.Run, "log", interrupted)
        assert main(QUICK) == 130
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-00000004"] and not (folder / "policy").exists()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(commands.Policy, "save", full)
        patch.setattr(commands.Run, "save_checkpoint", full)
        assert main([*QUICK, "--name", "no_room"]) == 1
    with monkeypatch.context() as patch:  # room for the policy alone
        patch.setattr(commands.Run, "save_checkpoint", full)
        assert main([*QUICK, "--name", "little_room"]) == 0 and (tmp_path / "runs/little_room/tiny/policy").is_dir()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(commands.Policy, "save", full)
        assert main(QUICK) == 1
    assert list(folder.glob("checkpoint-*")) and "going on after step 4" in capsys.readouterr().err
    assert main(QUICK) == 0 and (folder / "policy").is_dir() and not list(folder.glob("checkpoint-*"))
    assert list(pd.read_csv(folder / "metrics.csv")["step"]) == [0, 1, 2, 3]


def test_a_run_with_another_reward_takes_no_others_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pays.py").write_text("def one(text, row, rollout):\n    return 1.0\n\n\n"
                                      "def two(text, row, rollout):\n    return 2.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": 2}\n' * 4)
    asked = ["grpo", "tiny", *THREE_STEPS, "--data", "rows.jsonl", "--reward"]
    table = tmp_path / "runs" / "cli_grpo" / "tiny" / "metrics.csv"
    assert main([*asked, "pays.py:one"]) == 0 and main([*asked, "pays.py:one", "--show-every", "0"]) == 0
    assert not (tmp_path / "runs/cli_grpo/tiny.1").exists() and set(pd.read_csv(table)["reward"]) == {1.0}
    monkeypatch.setattr("grpolab.runs.run._begun", set())  # in another process
    assert main([*asked, "pays.py:two"]) == 0
    assert "tiny held a run of another configuration (reward 'pays.py:one' -> 'pays.py:two')" in capsys.readouterr().err
    assert set(pd.read_csv(table)["reward"]) == {2.0} and 'reward = "pays.py:two"' in table.with_name("recipe.toml").read_text()
    note = json.loads((table.parent / "run.json").read_text())
    assert note["options"] == {"reward": "pays.py:two"}  # Python knows of none, and takes the folder as it is
    config = command("grpo", *asked[2:], "pays.py:two").config
    assert commands.Run("cli_grpo", "tiny").differs(config, load_policy("tiny")) is None
    before = tmp_path / "runs" / "cli_grpo" / "tiny.1"
    assert set(pd.read_csv(before / "metrics.csv")["reward"]) == {1.0} and (before / "policy").is_dir()
    assert 'reward = "pays.py:one"' in (before / "recipe.toml").read_text()
    assert main(["sft", "runs/cli_grpo/tiny/policy", "--out", "runs/cli_grpo", "--name", "tiny"]) == 2
    assert "policy lies in runs/cli_grpo/tiny/policy, where this run would write" in capsys.readouterr().err


# --- what a training leaves -------------------------------------------------------------------------------------------

THREE_STEPS = ["--steps", "3", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4"]
OF_SUMS = ["--ops", "+", "--max-operand", "9"]  # what arithmetic alone reads
SHORT = [*THREE_STEPS, *OF_SUMS]


def test_exports_a_recipe_a_sample_and_rows_for_trackers(tmp_path, monkeypatch, capsys):
    module = types.SimpleNamespace(rows=[], ended=0)
    module.init = lambda project, name: types.SimpleNamespace(
        log=lambda row, step: module.rows.append((project, name, step, row["reward"])))
    module.finish = lambda: setattr(module, "ended", module.ended + 1)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.chdir(tmp_path)
    backup = tmp_path / "kept" / "cli_grpo" / "tiny" / "policy-240101"  # a copy that somebody made
    backup.mkdir(parents=True)
    flags = [*SHORT, "--export-every", "1", "--keep-last", "2", "--show-every", "2", "--out", "kept", "--report-to",
             "tensorboard", "wandb"]
    assert main(["grpo", "tiny", *flags]) == 0
    folder, out = tmp_path / "kept" / "cli_grpo" / "tiny", capsys.readouterr().out
    assert sorted(p.name for p in folder.glob("policy-*")) == ["policy-000002", "policy-000003", backup.name]
    assert load_policy(str(folder / "policy-000002")).provenance["steps"] == 2
    assert train(str(folder / "recipe.toml")) == command("grpo", *flags)
    assert out.count("→") == 1 and "0 s left" in out and list((folder / "tensorboard").iterdir())
    assert module.rows == [("mine", "cli_grpo-tiny", step, 0.0) for step in range(3)] and module.ended == 1
    assert main(["grpo", "tiny", *SHORT, "--report-to", "trackio"]) == 1
    assert "pip install trackio" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="of_the_reward"), commands.tracker("wandb", folder):
        raise ModuleNotFoundError("No module named 'of_the_reward'")  # and no word of --report-to


def test_an_adapter_is_trained_beside_its_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = []
    monkeypatch.setattr(commands, "load_policy", lambda *a, **k: loaded.append(a) or load_policy(*a, **k))
    assert main(["grpo", "tiny", *SHORT, "--lora-rank", "2", "--kl-coef", "0.1"]) == 0 and len(loaded) == 1
    assert (tmp_path / "runs/cli_grpo/tiny/policy/adapter_config.json").is_file()


async def test_one_interrupt_lets_the_step_end_and_a_second_ends_the_process(capsys, monkeypatch):
    ended, statuses = [], []

    async def step():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
            ended.append(True)
            raise

    monkeypatch.setattr(commands.os, "_exit", statuses.append)
    before = signal.getsignal(signal.SIGINT)
    for again in (False, True):
        working = asyncio.ensure_future(commands.until_interrupted(step()))
        await asyncio.sleep(0.05)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        if again:
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await working
        assert statuses == [130] * again and len(ended) == 1 + again
        assert signal.getsignal(signal.SIGINT) == before  # the loop lives on, as one that nest_asyncio patched does
    said = capsys.readouterr().err
    assert said.count("again for at once") == 2 and said.count("interrupted twice") == 1


# --- where rollouts come from -----------------------------------------------------------------------------------------

EPISODES = [*THREE_STEPS, "--pool-size", "4", "--max-turns", "2", "--max-total-tokens", "64"]


@pytest.mark.parametrize("flags", [["--env", "calculator", "--held-out", "3", "--select-every", "3", *OF_SUMS],
                                   pytest.param(["--env", "guess"], marks=pytest.mark.full),
                                   ["--env", "own_env:Echo", "--data", "words.jsonl", "--curriculum", "level"]])
def test_episodes_in_an_environment(tmp_path, monkeypatch, capsys, flags):
    (tmp_path / "own_env.py").write_text(ECHO)
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"word": w, "level": len(w)}) + "\n" for w in ("tea", "milk")))
    monkeypatch.chdir(tmp_path)
    assert main(["grpo", "tiny", *EPISODES, *flags]) == 0
    out = capsys.readouterr().out
    assert "step 3/3" in out
    assert ("tier 0" in out) == ("--curriculum" in flags) and ("the best" in out) == ("--held-out" in flags)


ECHO = """
class Echo:
    def reset(self, task=None):
        from grpolab.env.protocol import StepResult
        return StepResult({"text": "Say " + task["word"]})
    def step(self, action):
        from grpolab.env.protocol import StepResult
        return StepResult({"text": "thanks"}, float("a" in action["text"]), done=True)
    def state(self):
        return {}
    def close(self): ...
"""

TOOLS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Kept:
    room: str

def room_of(name: str) -> str:
    "The room of a person."
    return "7"

def judge(run):
    return float(len(run.calls))

async def agent(base_url, task):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=base_url, api_key="-") as client:
        reply = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": task["prompt"]}])
    return float("7" in reply.choices[0].message.content)
"""


def test_an_environment_that_draws_its_own_questions_is_measured_on_held_out_tasks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.jsonl").write_text('{"secret": 5}\n{"secret": 9}\n')
    asked = ["grpo", "tiny", *EPISODES, "--env", "guess", "--select-every", "3", "--held-out-data"]
    assert main([*asked, "none.jsonl"]) == 1 and "none.jsonl" in capsys.readouterr().err
    assert main([*asked, "held.jsonl"]) == 0
    assert main([*asked, "held.jsonl", "--data", "held.jsonl", "--name", "tasks"]) == 0  # whose rows have no answers
    assert pd.read_csv(tmp_path / "runs/cli_grpo/tiny/measured.csv")["score"].notna().tolist() == [True, True]


@pytest.mark.parametrize("flags", [["--tools", "own_tools.py:room_of", "--reward", "own_tools.py:judge"],
                                   ["--agent", "own_tools.py:agent"]])
def test_tools_and_agents(tmp_path, monkeypatch, capsys, flags):
    (tmp_path / "own_tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Where is Ann?"}\n{"prompt": "Where is Bob?"}\n')
    monkeypatch.chdir(tmp_path)
    more = ["--max-total-tokens", "400", "--data", "rows.jsonl"]
    assert main(["grpo", "tiny", *(EPISODES if "--tools" in flags else THREE_STEPS), *more, *flags]) == 0
    assert "step 3/3  reward" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["shared", pytest.param("lora_only", marks=pytest.mark.full)])
def test_a_served_policy_samples_and_follows(tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def some(text, row, rollout):\n    return sum(rollout.tokens) % 97 / 97\n")
    path = tmp_path / ("weights.safetensors" if way == "shared" else "adapters")
    options = {"weights": path} if way == "shared" else {"adapters": path}
    lora = ["--lora-rank", "2"] if way == "lora_only" else []
    with asyncio.Runner() as runner:  # the command needs the main thread without a loop; the service has a thread of its own
        serving = serve_policy(load_policy("tiny"), **options)
        service = runner.run(serving.__aenter__())
        try:
            assert main(["grpo", "tiny", *SHORT, "--reward", "own.py:some", "--lr", "1e-2", "--weight-bridge-mode", way, *lora,
                         "--server-url", service.url, "--bridge-path", str(path)]) == 0
        finally:
            runner.run(serving.__aexit__(None, None, None))
    assert service.policy.version == 2 and not path.is_file()  # before the third step
    rows = pd.read_csv(tmp_path / "runs" / "cli_grpo" / "tiny" / "metrics.csv")
    assert list(rows["staleness"]) == [0, 0, 0] and rows["diff_max"].max() < 1e-3 and rows["sync_s"].min() > 0


def test_a_server_that_is_not_there_is_named_before_the_first_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["--server-url", "http://127.0.0.1:9", "--weight-bridge", "shared", "--bridge-path", str(tmp_path / "weights")]
    assert main(["grpo", "tiny", *SHORT, *asked]) == 1
    told = capsys.readouterr()
    assert "http://127.0.0.1:9/weights gave no answer" in told.err and "step 1" not in told.out
    assert not list(tmp_path.glob("weights*"))


@pytest.mark.parametrize("flags, says", [
    (["--env", "calculator", "--agent", "x.py:f"], "one of them"), (["--tools", "x.py:f"], "needs --reward"),
    (["--env", "calculator", "--reward", "x.py:f"], "not of --env"), (["--action-format", "x:y"], "is of --env"),
    (["--server-url", "http://h", "--weight-bridge", "shared"], "without --bridge-path"),
    (["--server-url", "http://h", "--weight-bridge", "lora_only", "--bridge-path", "x"], "add --lora-rank"),
    (["--server-url", "http://h", "--weight-bridge", "shared", "--bridge-path", "x", "--env", "calculator"], "prompts"),
    (["--tools", "x.py:f", "--reward", "x.py:r", "--action-format", "x:y"], "is of --env"),
    (["--env", "guess", "--select-every", "2", "--held-out", "3"], "give --held-out-data"),
    (["--agent", "x.py:f", "--select-every", "2", "--held-out", "3"], "not of --agent"), (["--keep-last", "0"], "at least 1"),
    *[(["--atropos-url", "http://127.0.0.1:1", *option], f"{' '.join(option)} is of") for option in (
        ["--data", "x.jsonl"], ["--refills", "3"], ["--problems", "7"], ["--max-turns", "9"],
        ["--pool-size", "9"], ["--curriculum", "level"], ["--exact"])],
    *[([option, value], f"{option} {value} is of") for option, value in (
        ("--max-turns", "0"), ("--pool-size", "0"), ("--max-total-tokens", "64"), ("--timeout", "-3.0"))],
    (["--atropos-url", "http://127.0.0.1:1", "--dataset-name=x.jsonl"], "--data x.jsonl is of completions of prompts, "),
    (["--vllm-restart-interval", "7"], "--sync-every 7 is of --server-url"), (["--problems", "0"], "--problems 0: at least 1"),
    (["--agent", "x.py:f", "--max-turns", "9"], "not of --agent"), (["--env", "guess", "--timeout", "9"], "not of --env"),
    (["--env", "guess", "--ops", "+"], "--ops + is of arithmetic"), (["--data", "x.jsonl", "--problems", "7"], "arithmetic"),
    (["--lora-alpha", "64"], "--lora-alpha 64.0 is an adapter's"), (["--lora-target", "q", "v"], "--lora-target q v is an"),
    (["--tools", "x.py:f", "--reward", "x.py:r"], "needs --data"), (["--keep-last", "5"], "is of --export-every"),
    (["--env", ""], "--env is followed by ''"), (["--curriculum="], "--curriculum= is followed by ''"),
])
def test_rollouts_that_do_not_fit_together_are_refused_first(monkeypatch, capsys, flags, says):
    monkeypatch.setattr(commands, "load_policy", None)
    assert main(["grpo", "tiny", *flags]) == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_weights_for_a_replay_are_of_grpo_alone(capsys, method):
    assert main([method, "tiny", "--data", "x.jsonl", "--replay-every", "1"]) == 2
    assert "--replay-every 1 is of grpo" in capsys.readouterr().err


def test_rows_without_the_field_of_the_curriculum_are_refused(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": 2, "level": 1}\n{"prompt": "1 + 2", "answer": 3}\n')
    assert main(["grpo", "tiny", *THREE_STEPS, "--data", str(tmp_path / "rows.jsonl"), "--curriculum", "level", "--out",
                 str(tmp_path)]) == 1
    assert "row 2 has no such field" in capsys.readouterr().err
