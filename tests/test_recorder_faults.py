"""What a stranger does to a run's folder and to a fork: nothing wrong comes out without a word."""

import asyncio
import random
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import grpolab.lab.restore
from grpolab.lab.counterfactual import fork, without_group
from grpolab.lab.replay import bundle, replay, replay_bundle
from grpolab.lab.restore import restore
from grpolab.models.load import Policy, load_policy
from grpolab.models.lora import LoRA
from grpolab.runs.checkpoints import load_state
from grpolab.runs.run import Run
from tests.test_counterfactual import CONFIG, PROBLEMS, flat, forked, fresh, left, run  # noqa: F401
from tests.test_rollout_log import digits, train

# --- which rollout it is ----------------------------------------------------------------------------------------------


def test_numbers_of_a_data_frame_are_numbers(run, tmp_path):  # noqa: F811
    step = np.int64(3)
    assert len(run.rollouts(step)) == 12 and replay(run, step, np.int64(1), np.int64(0)).equal
    assert replay_bundle(bundle(run, step, tmp_path / "b.zip")).equal
    assert forked(run, step).recorder.steps() == [0, 1, 2, 3, 4]


# --- damaged, foreign, half gone --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_record_of_another_run_is_named(run, tiny, tmp_path):  # noqa: F811
    other = Run("other", root=tmp_path / "other")
    train(tiny, other, replace(CONFIG, lr=5e-3, seed=1, save_every=20))
    shutil.rmtree(run.recorder.folder)
    shutil.copytree(other.recorder.folder, run.recorder.folder)
    with pytest.raises(ValueError, match="the recorded rollouts of step 3 are not those of its weights"):
        replay(run, 4)
    with pytest.raises(ValueError, match="the recorded rollouts of step 3 are not those of its weights"):
        forked(run, 3, edit=without_group(0))
    assert not replay(run, 3).equal


def test_memory_that_does_not_suffice_is_not_taken_for_foreign_rollouts(run, monkeypatch):  # noqa: F811
    def too_large(*_):
        raise torch.OutOfMemoryError("out of memory: tried to allocate 3.00 GiB")

    monkeypatch.setattr(grpolab.lab.restore, "grpo_update", too_large)
    with pytest.raises(torch.OutOfMemoryError, match="3.00 GiB"):
        replay(run, 4)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("name", ["optimiser.safetensors", "model.safetensors", "state.json"])
def test_a_file_of_saved_weights_that_is_cut_short_is_named(run, tiny, tmp_path, name):  # noqa: F811
    cut_short(run.kept()[3] / name)
    with pytest.raises(ValueError, match="step-00000003 cannot be read"):
        restore(run, 3)
    stopped = Run("stopped", root=tmp_path)
    train(fresh(tiny), stopped, stop=3)
    cut_short(stopped.folder / "checkpoint-00000003" / name)
    with pytest.raises(ValueError, match="checkpoint-00000003 is damaged.*delete that folder to start over"):
        train(fresh(tiny), stopped)


def test_a_changed_configuration_or_a_damaged_start_is_named(run):  # noqa: F811
    path = run.kept()[0] / "state.json"
    text = path.read_text()
    path.write_text(text.replace('"lr": 0.001', '"lr": 0.003'))
    assert path.read_text() != text and "where the run had" in replay(run, 2).differs[0]
    path.write_text(text)
    cut_short(run.folder / "replay" / "policy" / "model.safetensors")
    with pytest.raises(ValueError, match=r"the policy that .* started from cannot be loaded"):
        restore(run, 3)


def test_a_damaged_bundle_is_a_value_error_or_the_bundle(run, tmp_path):  # noqa: F811
    """Whatever layer notices: the zip, JSON, base64, the configuration or the hash of the weights."""
    draw, path = random.Random(0), bundle(run, 3, tmp_path / "b.zip")
    whole = path.read_bytes()
    rollouts, refused = [r.recorded for r in replay_bundle(path).rollouts], 0
    for _ in range(20):
        data, at = bytearray(whole), draw.randrange(len(whole))
        data[at : at + draw.choice([1, 1, 40])] = draw.randbytes(draw.choice([1, 40]))
        path.write_bytes(data if draw.random() < 0.8 else data[:at])
        try:
            found = replay_bundle(path, 0, 0)
        except ValueError as error:
            assert "b.zip" in str(error)
            refused += 1
        else:
            assert found.rollouts[0].recorded == rollouts[0] and found.equal
    assert refused > 10


# --- forks ------------------------------------------------------------------------------------------------------------


def test_what_else_differs_in_a_fork_is_told(run, capsys):  # noqa: F811
    with pytest.warns(UserWarning, match="of 12 rollouts of step 3 are not the run's"):
        asyncio.run(fork(run, 3, "other", PROBLEMS[::-1], reward=digits))
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(fork(run, 3, "reward", PROBLEMS))  # the reward forgotten
        assert "rollouts of step 3 have another reward than in the run" in capsys.readouterr().out
        forked(run, 3, "same")
        assert "another reward" not in capsys.readouterr().out


@pytest.mark.full
def test_a_change_of_the_optimiser_is_one(run):  # noqa: F811
    """Weight decay travels with an optimiser's state, and must be the fork's from its step on, and not before."""
    twin = forked(run, 2, "decay", weight_decay=0.5)
    assert not torch.equal(flat(restore(twin, 5).policy), flat(restore(run, 5).policy))
    assert replay(twin, 4).equal and not replay(twin, 4).differs and not restore(twin, 5).notes
    assert torch.equal(flat(restore(twin, 2).policy), flat(restore(run, 2).policy))
    assert load_state(twin.kept()[3], fresh(restore(twin, 3).policy), restore(twin, 3).optimiser)["step"] == 3
    with pytest.raises(ValueError, match="'adafactor' cannot go on with the moments of 'adamw': fork from step 0"):
        forked(run, 2, "other", optimiser="adafactor")
    assert replay(forked(run, 0, "other", optimiser="adafactor"), 4).equal


# --- other policies ---------------------------------------------------------------------------------------------------


def test_a_run_of_an_adapter_comes_again(tiny, tmp_path):
    tiny.save(tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"), device="cpu", adapter=LoRA())
    train(policy, Run("x", root=tmp_path, replay_every=2), replace(CONFIG, save_every=20))
    found = Run(root=tmp_path / "x")
    assert replay(found, 3).equal and replay_bundle(bundle(found, 3, tmp_path / "b.zip")).equal


def test_a_policy_with_dropout_comes_again(tiny, tmp_path):
    """A random GPT-2 in training mode: the updates that are done again drop what the run dropped."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tiny.tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=None,
                        eos_token_id=tiny.eos_ids[0])
    policy = Policy(GPT2LMHeadModel(config).train(), tiny.tokenizer, "gpt2", tiny.eos_ids)
    train(policy, Run("x", root=tmp_path, replay_every=3), replace(CONFIG, save_every=20, max_logp_diff=None))
    found = Run(root=tmp_path / "x")
    replayed = replay(found, 2)
    assert replayed.equal and not replayed.differs and replay(forked(found, 2, watch=None), 4).equal
