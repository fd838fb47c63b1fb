"""The command line, in this process and in one of its own."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from grpolab.__main__ import main
from grpolab.cli.scout import Scout
from grpolab.rollouts import Group
from grpolab.tasks import read_rows
from grpolab.train.preferences import pairs_by_reward
from grpolab.train.reward_model import RewardModel

SERVES = find_spec("httpx2") is not None  # neither it nor peft is there with the minimum dependency versions


def test_data_writes_disjoint_files(tmp_path, capsys):
    assert main(["data", "--train", "30", "--eval", "6", "--out", str(tmp_path / "x")]) == 0
    train, held_out = (read_rows(tmp_path / "x" / f"{name}.jsonl") for name in ("train", "eval"))
    assert (len(train), len(held_out)) == (30, 6) and not any(row in train for row in held_out)
    assert "30 problems" in capsys.readouterr().out


def test_a_saturating_request_is_refused_and_writes_nothing(tmp_path, capsys):
    assert main(["data", "--ops", "*", "--max-factor", "9", "--train", "90", "--eval", "0", "--out", str(tmp_path / "x")]) == 1
    assert "at most 4/5" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_eval_prints_rates_with_intervals(capsys):
    assert main(["eval", "tiny", "--ops", "+-", "--max-operand", "9", "--questions", "5", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "2 samples" in out and "0.0% [0.0%, 43.4%]" in out
    assert "pass@1 " in out and "pass@2 " in out and "pass@4" not in out and "stop token" in out


def test_eval_takes_rows_of_a_file(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "What is 1 + 1?", "answer": 2}\n{"prompt": "What is 2 + 1?", "answer": "#### 3"}\n')
    assert main(["eval", "tiny", "--tasks", str(path), "--samples", "2", "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "of 2 rows" in out and "pass@2" in out
    (tmp_path / "mine.py").write_text("def always(text, row, rollout):\n    return 1.0\n")
    options = ["--samples", "3", "--max-new-tokens", "2"]
    assert main(["eval", "tiny", "--tasks", str(path), "--reward", f"{tmp_path}/mine.py:always", "--at", "3", *options]) == 0
    out = capsys.readouterr().out
    assert "greedy   100.0%" in out and "pass@3   100.0%" in out and "pass@1" not in out
    (tmp_path / "mine.py").write_text("def unsure(text, row, rollout):\n    return float('nan')\n")
    assert main(["eval", "tiny", "--tasks", str(path), "--reward", f"{tmp_path}/mine.py:unsure", *options]) == 1
    assert "mine.py:unsure abstained" in capsys.readouterr().err  # and is not wrong
    (tmp_path / "mine.py").write_text("async def later(text, row, rollout):\n    return 1.0\n")
    assert main(["eval", "tiny", "--tasks", str(path), "--reward", f"{tmp_path}/mine.py:later", *options]) == 1
    assert "scout takes this one" in capsys.readouterr().err
    for command in ("eval", "scout"):
        rows = ["--tasks", str(path)] if command == "eval" else [str(path)]
        assert main([command, "tiny", *rows, "--reward", "grpolab.chat_rules:RULES"]) == 1
        assert "is no function" in capsys.readouterr().err
    assert main(["eval", "tiny", "--tasks", str(path), "--at", "4", *options]) == 2
    assert "pass@k needs k from 1 to --samples, which is 3" in capsys.readouterr().err
    path.write_text('{"prompt": "What is 1 + 1?", "answer": "two"}')
    assert main(["eval", "./no/model", "--tasks", str(path)]) == 1
    assert "row 1: its answer holds no number" in capsys.readouterr().err


def test_data_takes_the_place_of_problems_alone(tmp_path, capsys):
    asked = ["data", "--train", "5", "--eval", "3", "--out", str(tmp_path)]
    assert main(asked) == 0 and main([*asked, "--seed", "2"]) == 0
    empty = [*asked[:3], "--eval", "0", "--out", str(tmp_path / "empty")]
    assert main(empty) == 0 == main(empty)
    problems = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "eval.jsonl").write_text('{"prompt": "mine"}\n')
    assert main(asked) == 2 and "eval.jsonl holds other rows" in capsys.readouterr().err
    assert [(tmp_path / f"{name}.jsonl").read_text() for name in ("train", "eval")] == [problems, '{"prompt": "mine"}\n']


def test_scout_puts_the_tasks_first_of_which_groups_differ(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def odd(text, row, rollout):\n    return float(sum(map(ord, text)) % 2) * row['pays']\n")
    for name, pays in (("never", 0), ("some", 1)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "1 + 1 = ", "pays": {pays}}}\n' * 3)
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "%s", "pays": 1}\n' % ("1" * 3000))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("long", "never", "some")]
    rewarded = ["--reward", f"{tmp_path}/mine.py:odd", "--samples", "6", "--max-new-tokens", "6"]
    assert main(["scout", "tiny", *files, *rewarded, "--save", str(tmp_path / "t.csv")]) == 0
    table = pd.read_csv(tmp_path / "t.csv", index_col=0)
    assert list(table.index) == ["some.jsonl", "never.jsonl", "long.jsonl"]
    assert table["groups that differ"].iloc[0].startswith("100.0%") and table["pass@6"].iloc[0].startswith("100.0% [43.9%")
    assert table["groups that differ"].iloc[1].startswith("0.0%") and "no room in the context" in table["not sampled"].iloc[2]
    assert "[3/3] some.jsonl" in capsys.readouterr().out
    rows = Path(files[1]).read_text()
    assert main(["scout", "tiny", *files, "--save", files[1]]) == 2 and "a file of tasks" in capsys.readouterr().err
    assert Path(files[1]).read_text() == rows
    assert main(["scout", "tiny", files[1], "--samples", "1"]) == 2 and "at least 2" in capsys.readouterr().err
    assert main(["scout", "./no/model", files[1]]) == 1 and "answer" in capsys.readouterr().err
    assert main(["scout", "tiny", files[0], *rewarded]) == 1  # nothing was sampled


@pytest.mark.parametrize("arguments, says", [
    (["scout"], "name tasks"), (["scout", "arithmetic", "--reward", "x.py:f"], "--reward x.py:f is of rows in files"),
    (["scout", "rows.jsonl", "--ops", "+"], "--ops + is of the task arithmetic"),
    (["scout", "arithmetic", "--save", "."], "--save . is a folder"), (["eval", "--reward", ""], "--reward is followed by ''"),
    (["eval", "--tasks", "rows.jsonl", "--questions", "9"], "--questions 9 is of arithmetic"),
    (["eval", "--fixed-prompts", "english", "--max-new-tokens", "9"], "--max-new-tokens 9 is not read with --fixed-prompts"),
    (["speedrun", "--tries", "0"], "--tries 0: at least 1"), (["eval", ""], "tiny is followed by ''"),
])
def test_what_would_do_nothing_is_refused(monkeypatch, capsys, arguments, says):
    for module in ("eval", "scout"):
        monkeypatch.setattr(f"grpolab.cli.{module}.load_policy", None)
    assert main([arguments[0], "tiny", *arguments[1:]]) == 2 and says in capsys.readouterr().err


def test_two_files_of_one_name_are_two_tasks(tmp_path):
    files = [str(tmp_path / folder / "some.jsonl") for folder in "ab"]
    for file in files:
        Path(file).parent.mkdir()
        Path(file).write_text('{"prompt": "1 + 1 = ", "answer": 2}\n')
    assert [name for file in files for name, *_ in Scout("tiny", (*files, "arithmetic")).named(file)] == files
    assert [name for name, *_ in Scout("tiny", tuple(files[:1])).named(files[0])] == ["some.jsonl"]


def test_an_unknown_model_is_an_error_not_a_traceback(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["eval", "./nothing/here"]) == 1
    assert "grpolab eval: './nothing/here' has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "data", "eval", "scout", "serve"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "-h"])
    assert left.value.code == 0 and f"usage: grpolab {command}" in capsys.readouterr().out


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert main(["evil"]) == 2
    assert "did you mean 'eval'" in capsys.readouterr().err


def test_help_and_the_parser_of_an_environment_server_do_not_import_torch():
    code = ("import sys; from grpolab.__main__ import main; main(['--help'])\n"
            "import grpolab.cli.serve; print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "serve-policy" in done.stdout and done.stdout.endswith("False\n")


@pytest.mark.parametrize("command, resumes", [(["eval", "tiny"], False), (["sft", "tiny"], True)])
def test_an_interrupt_says_whether_the_same_command_goes_on(monkeypatch, capsys, command, resumes):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for module in ("eval", "train"):
        monkeypatch.setattr(f"grpolab.cli.{module}.load_policy", interrupt)
    assert main(command) == 130
    assert ("the same command continues" in capsys.readouterr().err) is resumes


@pytest.mark.parametrize("command", [["serve", "calculator"], ["serve-policy", "tiny"]])
def test_an_open_address_names_the_option_that_it_needs(capsys, command):
    assert main([*command, "--host", "0.0.0.0"]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_a_console_script_finds_modules_of_the_current_folder(tmp_path):
    (tmp_path / "nearby.py").write_text("Env = 3\n")
    code = ("import sys; sys.path.remove(''); from grpolab.__main__ import main\n"
            "main(['serve', 'nearby:Env', '--isolate', 'thread'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "'nearby:Env' is a int" in done.stderr


def test_pairs_by_a_reward_are_written_gone_on_with_and_read_by_dpo_and_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def low(text, row, rollout):\n    return -sum(map(ord, text)) / 1000\n")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n} + 1 =", "n": {n}}}\n' for n in range(6)))
    command = ["pairs", "tiny", "--data", "rows.jsonl", "--reward", "mine.py:low", "--samples", "4", "--max-new-tokens", "8",
               "--rows-at-once", "2", "--per-row", "2"]

    def made(policy, rows, groups, **options):
        """The embedded model ends nothing untaught, so every completion is said to have ended."""
        if rows[0]["n"] == 4 and (tmp_path / "interrupted").exists():
            raise KeyboardInterrupt
        ended = [Group(tuple(replace(r, finish_reason="eos") for r in group)) for group in groups]
        return pairs_by_reward(policy, rows, ended, **options)

    monkeypatch.setattr("grpolab.cli.pairs.pairs_by_reward", made)
    assert main([*command, "--out", "whole.jsonl"]) == 0
    assert "[6/6]" in (out := capsys.readouterr().out) and "6 rows" in out and "grpolab dpo and grpolab reward read it" in out
    (tmp_path / "interrupted").touch()
    assert main([*command, "--out", "pairs.jsonl"]) == 130
    assert "the same command continues from what is kept" in capsys.readouterr().err
    partial = tmp_path / ".pairs.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 3 and not (tmp_path / "pairs.jsonl").exists()
    partial.write_text(partial.read_text() + '{"rows": [')  # killed in the middle of a line
    (tmp_path / "interrupted").unlink()
    assert main([*command, "--out", "pairs.jsonl", "--seed", "1"]) == 1
    assert "with another seed has done" in capsys.readouterr().err
    source = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace("-sum", "sum"))
    assert main([*command, "--out", "pairs.jsonl"]) == 1 and "with another reward has done" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(source)
    assert main([*command, "--out", "pairs.jsonl"]) == 0 and "holds the first 4 rows: going on" in capsys.readouterr().out
    assert (tmp_path / "pairs.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text() and not partial.exists()
    rows = read_rows("pairs.jsonl", needs=("chosen", "rejected"))
    assert len(rows) == 12 and all(row["chosen_reward"] > row["rejected_reward"] for row in rows)
    assert main([*command, "--out", "pairs.jsonl"]) == 2 and "are not written over" in capsys.readouterr().err
    if SERVES:
        monkeypatch.setattr("grpolab.serve.judge.Judge",
                            lambda url, model: lambda text, row, rollout: -sum(map(ord, text)) / 1000)
        judged = ["--judge", "http://127.0.0.1:1", "--judge-model", "big"]
        assert main([*command[:4], *judged, *command[6:], "--out", "judged.jsonl"]) == 0
        assert (tmp_path / "judged.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    short = ["tiny", "--data", "pairs.jsonl", "--steps", "1", "--batch-size", "4"]
    adapter = ["--lora-rank", "2"] if find_spec("peft") else []
    assert main(["dpo", *short]) == 0 == main(["reward", *short, *adapter])
    assert RewardModel.load(tmp_path / "runs/cli_reward/tiny/policy").score([[1, 2]])[0] != 0


@pytest.mark.parametrize(("options", "status", "says"), [
    (["--samples", "1"], 2, "--samples is at least 2"), (["--margin", "nan"], 2, "and nan"), (["--judge="], 2, "--judge= is"),
    (["--judge", "http://x"], 2, "with --judge-model NAME"),
    pytest.param(["--judge", "http://127.0.0.1:1", "--judge-model", "big", "--max-new-tokens", "2"], 1,
                 "the judge: http://127.0.0.1:1", marks=pytest.mark.skipif(not SERVES, reason="needs grpolab[serve]")),
    ([], 1, "has no 'answer'"), (["--reward", "grpolab.chat_rules:RULES"], 1, "is no function"),
    (["--reward", "mine.py:same", "--max-new-tokens", "2"], 1, "no row gave a pair (1 rows, 1 no pair: none ended)"),
])
def test_pairs_that_cannot_be_made_are_refused_and_leave_nothing(tmp_path, monkeypatch, capsys, options, status, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def same(text, row, rollout):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    assert main(["pairs", "tiny", "--data", "rows.jsonl", "--out", "pairs.jsonl", *options]) == status
    assert says in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if "pairs" in p.name]
