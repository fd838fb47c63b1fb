"""The board: an honest entry is verified, and a hostile one is refused with a word."""

import copy
import math
import pickle
from dataclasses import replace
from functools import cached_property

import pytest

from grpolab.__main__ import main
from grpolab.lab import board
from grpolab.lab.board import STANDARD, Speedrun, config_of, read, save, speedrun, summary, verify
from grpolab.runs.run import repository
from grpolab.train import SFTConfig

RECIPE = """\
method = "grpo"
steps = 2
prompts-per-step = 8
group_size = 8
lr = 1e-3
max_new_tokens = 20
clip-eps = [0.2, 0.28]
"""
SMALL = Speedrun(target=0.0, seeds=(0, 1), sft=SFTConfig(steps=60, batch_size=16, lr=1e-3), questions=(200, 20), shown=40)


class Cheat(Speedrun):
    """Practises what is held out, and hashes as the honest task."""

    @cached_property
    def split(self):
        shown, _, held_out = SMALL.split
        return shown, held_out, held_out

    key = SMALL.key


@pytest.fixture(scope="module")
def entry():
    return speedrun(RECIPE, "ours", task=SMALL, threads=1, tries=3)


def edited(entry, **changes):
    """A copy with other values of seed 0."""
    other = copy.deepcopy(entry)
    other["seeds"]["0"] |= changes
    return other


@pytest.fixture(scope="module")
def honest(entry, tmp_path_factory):
    return verify(read(save(entry, tmp_path_factory.mktemp("board") / "ours.json")), task=SMALL)


@pytest.fixture
def replayed(honest, monkeypatch):
    """A replay here gives what the honest entry's gave."""
    monkeypatch.setattr(board, "speedrun", lambda *args, **kwargs: honest.measured)


@pytest.fixture(scope="module")
def cheated():
    return speedrun(RECIPE, "x", task=Cheat(**vars(replace(SMALL))), threads=1)


@pytest.mark.full
def test_an_honest_entry_is_verified_in_every_bit(entry, honest):
    found = honest
    assert not found.refused and found.how == "in every bit" and "verified in every bit" in str(found)
    assert found.measured["seeds"]["1"]["weights"] == entry["seeds"]["1"]["weights"] != entry["seeds"]["0"]["weights"]


@pytest.mark.full
def test_what_its_own_text_shows_is_refused_without_training(entry, monkeypatch):
    monkeypatch.setattr(board, "speedrun", None)
    held_out = SMALL.split[2][0]
    asked = f"{held_out.a} {held_out.op} {held_out.b}"
    for other, why in (
        (edited(entry, asked=[[asked]]), f"1 of the held-out questions, {asked}"),
        (edited(entry, asked=[["1 + 1000"]]), "questions that are not the task's, 1 + 1000"),
        (entry | {"task": "0"}, "another task"),
        (entry | {"machine": entry["machine"] | {"threads": 64}}, "made with 64 threads"),
        (entry | {"seeds": {"7": entry["seeds"]["0"]}}, "has the seeds"),
    ):
        assert why in verify(other, task=SMALL).refused
    assert "asks for 100%" in board.refusal(entry | {"task": replace(SMALL, target=1.0).key}, replace(SMALL, target=1.0))


@pytest.mark.full
@pytest.mark.parametrize(("change", "why"), [
    (lambda e: edited(e, accuracy=0.95), "its result was edited (seed 0, accuracy: 0.95"),
    (lambda e: edited(e, tokens=10), "its result was edited (seed 0, tokens: 10"),
    (lambda e: e | {"start": "0" * 64}, "did not start from the task's checkpoint"),
    (lambda e: edited(e, rewards=[0.0, 0.0], weights="0" * 64), "the rewards part at step 0 of 2"),
])
def test_an_edited_entry_is_refused(entry, replayed, change, why):
    assert why in verify(change(entry), task=SMALL).refused
    assert not verify(entry, task=SMALL).refused


@pytest.mark.full
@pytest.mark.parametrize(("made", "why"), [
    (lambda: speedrun(RECIPE.replace("1e-3", "3e-3"), "x", task=SMALL, threads=1) | {"recipe": RECIPE}, "another recipe"),
    (lambda: speedrun(RECIPE, "x", task=replace(SMALL, sft=SFTConfig(steps=10, batch_size=16, lr=1e-3)), threads=1)
     | {"task": SMALL.key}, "the task's checkpoint"),
])
def test_what_another_training_made_is_refused(made, why, honest, monkeypatch):
    entry = made()
    monkeypatch.setattr(board, "speedrun", lambda *args, **kwargs: honest.measured)
    assert why in verify(entry, task=SMALL).refused


@pytest.mark.full
def test_held_out_questions_are_noticed_also_where_the_entry_hides_them(entry, cheated, replayed):
    assert "of the held-out questions" in verify(cheated, task=SMALL).refused
    hidden = copy.deepcopy(cheated)
    for seed, of in hidden["seeds"].items():
        of["asked"] = entry["seeds"][seed]["asked"]
    assert "other questions or another program made them" in verify(hidden, task=SMALL).refused


@pytest.mark.full
def test_on_another_processor_the_means_are_compared(entry, replayed):
    elsewhere = entry | {"machine": entry["machine"] | {"processor": "another"}, "start": "of other bits"}
    found = verify(elsewhere, task=SMALL)
    assert not found.refused and found.how == "statistically (not the entry's processor)"
    more = copy.deepcopy(elsewhere)
    for of in more["seeds"].values():
        of["accuracy"] = 1.0
    assert "its accuracy is 1 on average" in verify(more, task=SMALL).refused
    fewer = copy.deepcopy(elsewhere)
    for of in fewer["seeds"].values():
        of["tokens"] //= 2
    assert "its tokens is" in verify(fewer, task=SMALL).refused
    fewer["seeds"]["1"]["tokens"] = entry["seeds"]["1"]["tokens"]  # a spread of its own explains nothing
    assert "its tokens is" in verify(fewer, task=SMALL).refused


@pytest.mark.parametrize("change", [
    {"accuracy": math.nan}, {"accuracy": 1.5}, {"seconds": math.nan}, {"seconds": -1.0}, {"tokens": 10**400}, {"tokens": 3},
    {"asked": [1, 2]}, {"asked": [[{}], ["1 + 1"]]}, {"rewards": [0.5]}, {"rewards": ["a", "b"]},
])
def test_numbers_that_its_recipe_cannot_give_are_refused(change, tmp_path):
    with pytest.raises(ValueError, match="no entry of the board"):
        read(save(edited(read(ENTRIES[0]), **change), tmp_path / "a.json"))


@pytest.mark.parametrize(("text", "why"), [
    (pickle.dumps({"board": 1}), "no entry of the board"),
    (b"{}", "no entry of the board"),
    (b"[]", "no entry of the board"),
    (b'{"board": 1, "seeds": {"0": {}}}', "no entry of the board"),
    (b"[" * 100_000, "no entry of the board"),
])
def test_what_is_no_entry_is_refused(text, why, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=why):
        read(path)
    assert main(["verify", str(path)]) == 1 and why in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "why"), [
    ("import os", "no TOML"),
    ('method = "grpo"\nmodel = "mine"', "model, questions, reward and seeds are the task's"),
    ('method = "grpo"\nreward = "mine.py:reward"', "reward"),
    ('method = "grpo"\nseed = 3', "seed"),
    ('method = "sft"', "method = 'sft'"),
    ('method = "grpo"\nsteps = "many"', "valid integer.*input_value='many'"),
    ('method = "grpo"\nsteps = true', "valid integer.*input_value=True"),
    ('method = "grpo"\ngroup_size = 8.5', "valid integer.*input_value=8.5"),
    ('method = "grpo"\nlr = "8"', "valid number.*input_value='8'"),
    ('method = "grpo"\nexact = 1', "valid boolean.*input_value=1"),
    ('method = "grpo"\nclip-eps = [0.2]', "clip_eps"),
    ('method = "grpo"\nlr = 2020-01-01', "valid number.*input_value='2020-01-01'"),
    ('method = "grpo"\ngroup-size = 8\ngroup_size = 9', "twice"),
    ('method = "grpo"\nlr = -1.0', "lr"),
])
def test_a_recipe_sets_the_options_of_grpo_alone(recipe, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        config_of(recipe)
    with pytest.raises(ValueError, match=why):
        read(save(read(ENTRIES[0]) | {"recipe": recipe}, tmp_path / "a.json"))


def test_a_recipe_is_read():
    config = config_of(RECIPE)
    assert config.clip_eps == (0.2, 0.28) and config.prompts_per_step == 8
    found = config_of('method="grpo"\nkl_kind="k3"\nsampler_cap="none"\nmax_grad_norm=inf\nlr=1')
    assert (found.kl_kind, found.sampler_cap, found.max_grad_norm, found.lr) == ("k3", None, math.inf, 1.0)


@pytest.mark.full
def test_speedrun_and_verify_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(board, "STANDARD", SMALL)
    for f in (board.speedrun, board.verify):
        monkeypatch.setitem(f.__kwdefaults__, "task", SMALL)
    (tmp_path / "mine.toml").write_text(RECIPE)
    assert main(["speedrun", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "mine.toml")]) == 1
    assert (tmp_path / "mine.toml").read_text() == RECIPE and "cannot be written" in capsys.readouterr().err
    (tmp_path / "mine.json").write_text('{"port": 1}')
    assert main(["speedrun", str(tmp_path / "mine.toml")]) == 1 and "mine.json is no entry" in capsys.readouterr().err
    (tmp_path / "mine.json").unlink()
    assert main(["speedrun", str(tmp_path / "mine.toml"), "--threads", "1", "--tries", "2"]) in (0, 1)
    assert main(["verify", str(tmp_path / "mine.json")]) == 0
    assert "verified in every bit" in capsys.readouterr().out


ENTRIES = sorted((repository() / "benchmarks" / "results" / "board").glob("*.json"))


def test_the_boards_own_entries_are_whole_and_reach_the_target():
    assert len(ENTRIES) >= 3
    for path in ENTRIES:
        found = read(path)
        assert board.refusal(found, STANDARD) == "" and summary(found)["accuracy"] >= 0.9, path.name
