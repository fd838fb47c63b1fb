"""The reward model: zeros at first, one number from the last token, the same after the disk, one of the hub's kind."""

import copy
from types import SimpleNamespace

import pytest
import torch
from loop_helpers import rows_of
from test_train import preferences, trained_scorer
from transformers import AutoModelForSequenceClassification

from grpolab.models.lora import LoRA
from grpolab.sync import run_sync
from grpolab.train.preferences import load_preferences
from grpolab.train.reward_model import RewardConfig, RewardModel, reward_model


def sequences(pairs):
    return [s.prompt + s.tokens for p in pairs for s in p.sides]


def test_a_new_one_says_zero_and_leaves_the_policy_alone(tiny):
    model = RewardModel.from_policy(tiny)
    assert model.score(sequences(preferences(tiny))) == [0.0] * 18 and repr(model).startswith("RewardModel('tiny'")
    before = tiny.model.get_decoder().embed_tokens.weight.clone()
    with torch.no_grad():
        for p in model.model.parameters():
            p.add_(1)
    assert torch.equal(tiny.model.get_decoder().embed_tokens.weight, before)


def test_the_score_is_read_at_the_last_token_whatever_is_beside_it(tiny):
    model = trained_scorer(tiny)
    rows = sequences(preferences(tiny))
    assert len({len(r) for r in rows}) > 3
    with torch.no_grad():  # the library's own forward, one row at a time, so without padding
        plain = [model.model(torch.tensor([r])).logits.item() for r in rows]
    assert model.score(rows) == pytest.approx(plain, abs=1e-5)
    assert model.score(rows, token_budget=1) == pytest.approx(plain, abs=1e-6)
    cut = [r[:-1] for r in rows]
    assert max(abs(a - b) for a, b in zip(model.score(cut), plain)) > 1e-3  # the end token counts


def test_equal_sequences_score_equal_in_every_bit(tiny):
    model = trained_scorer(tiny)
    rows = sequences(preferences(tiny))
    for budget in (50, 333, 8192):
        scores = model.score(rows + rows[::-1], token_budget=budget)
        assert scores == scores[::-1]
    assert model.score([]) == []


def test_a_margin_that_is_no_number_is_refused(tiny):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "slightly better"}]
    model = RewardModel.from_policy(tiny)
    with pytest.raises(ValueError, match="pair 0: the margin in its meta is 'slightly better'"):
        rows_of(reward_model(model, load_preferences(rows, tiny.tokenizer), RewardConfig(steps=1, batch_size=1)))


def test_it_scores_identically_after_the_disk(tiny, tmp_path):
    model = trained_scorer(tiny)
    rows = sequences(preferences(tiny))
    again = RewardModel.load(model.save(tmp_path / "reward"), device="cpu")
    assert again.score(rows) == model.score(rows) and not (tmp_path / "reward").match("*.bin")
    assert {p.suffix for p in (tmp_path / "reward").iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert again.eos_ids == model.eos_ids[:1] and again.name == "reward"


def test_what_is_no_reward_model_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="is no reward model"):
        RewardModel.load(tiny.save(tmp_path / "policy"))
    config = tiny.model.config.__class__(**{**tiny.model.config.to_dict(), "num_labels": 2})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    tiny.tokenizer.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="it has 2 labels and lacks nothing"):
        RewardModel.load(tmp_path / "two")
    with pytest.raises(ValueError, match="not a readable reward model"):
        RewardModel.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="a sequence needs 1 to 512 tokens, got 0"):
        RewardModel.from_policy(tiny).score([(), (1,)])
    with pytest.raises(ValueError, match="got 3 to 513"):
        RewardModel.from_policy(tiny).score([(1,) * 513, (1, 2, 3)])


def test_others_read_it_right_where_the_end_token_was_the_padding(tiny, tmp_path):
    """transformers finds a row's last token by what is not padding; SmolLM2 pads with its end token."""
    policy = copy.copy(tiny)
    policy.tokenizer = copy.deepcopy(tiny.tokenizer)
    policy.tokenizer.pad_token_id = policy.eos_ids[0]
    model = trained_scorer(policy)
    assert model.pad_id not in model.eos_ids and policy.pad_id in policy.eos_ids
    rows = sequences(preferences(tiny))
    loaded = RewardModel.load(model.save(tmp_path / "reward"), device="cpu")
    ids = loaded.tokenizer.pad({"input_ids": [list(r) for r in rows]}, return_tensors="pt", padding_side="right").input_ids
    with torch.no_grad():
        together = loaded.model(ids).logits.flatten().tolist()
    assert together == pytest.approx(model.score(rows), abs=1e-5)
    assert all(p.data_ptr() % 64 == 0 for p in loaded.model.parameters())
    policy.tokenizer = SimpleNamespace(pad_token_id=1, all_special_ids=[1], bos_token_id=None)
    with pytest.raises(ValueError, match="has no other special token to pad with"):
        RewardModel.from_policy(policy)


def test_an_adapter_and_the_head_alone_are_trained_and_saved_as_one_model(tiny, tmp_path):
    pytest.importorskip("peft")
    rows = [{"prompt": f"{a} + 1?", "chosen": f"{a + 1}", "rejected": "no"} for a in range(8)]
    pairs = load_preferences(rows, tiny.tokenizer)
    model = RewardModel.from_policy(tiny, LoRA(rank=2))
    before = {name: p.clone() for name, p in model.model.named_parameters()}

    async def train():
        return [row["accuracy"] async for row in reward_model(model, pairs, RewardConfig(steps=6, batch_size=8, lr=1e-2))]

    assert run_sync(train())[-1] == 1.0
    changed = {name for name, p in model.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name or name == "score.weight"}
    loaded = RewardModel.load(model.save(tmp_path / "reward"))
    assert loaded.score(sequences(pairs)) == pytest.approx(model.score(sequences(pairs)), abs=1e-4)
    assert any("lora_A" in name for name, _ in model.model.named_parameters())
