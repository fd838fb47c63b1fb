"""LoRA through peft: what is trained and kept, what the fast paths compute, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_helpers import rows_of

peft = pytest.importorskip("peft")

from grpolab.arithmetic import Problem  # noqa: E402
from grpolab.decode.audit import audit  # noqa: E402
from grpolab.decode.sampler import Sampler  # noqa: E402
from grpolab.decode.sampling import SamplingParams  # noqa: E402
from grpolab.models import lora  # noqa: E402
from grpolab.models.load import load_policy, load_tokenizer  # noqa: E402
from grpolab.models.lora import LoRA  # noqa: E402
from grpolab.runs.run import Run  # noqa: E402
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, grpo, sft  # noqa: E402
from grpolab.train.forward import readable  # noqa: E402
from grpolab.train.reward_model import RewardModel  # noqa: E402
from grpolab.train.sft import sft_value  # noqa: E402

PROBLEMS = [Problem(a, "+", 7) for a in range(12)]
ADAPTER = LoRA(rank=4, alpha=8.0, target=("q_proj", "v_proj", "down_proj"), seed=3)
CONFIG = SFTConfig(steps=4, batch_size=4, lr=1e-2, save_every=2)


def adapted(moved: bool = False):
    policy = load_policy("tiny", adapter=ADAPTER)
    if moved:
        generator = torch.Generator().manual_seed(0)
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.data = 0.3 * torch.randn(p.shape, generator=generator)
        policy.version += 1
    return policy


def logits(policy):
    ids = torch.arange(40)[None] % 90 + 5
    with torch.no_grad():
        return policy.model(ids).logits


def tensors(policy, kind="lora_"):
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if kind in n}


def test_a_fresh_adapter_changes_nothing_and_is_all_that_is_trained():
    policy, plain = adapted(), load_policy("tiny")
    assert torch.equal(logits(policy), logits(plain)) and len(lora.layers(policy.model)) == 3 * 4
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == set(tensors(policy))
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    rows_of(sft(policy, demonstrations(policy, PROBLEMS), CONFIG))
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == trained


def test_both_fast_paths_read_the_adapter():
    policy = adapted(moved=True)
    assert readable(policy.model)
    with Sampler(policy, slots=4) as sampler:
        prompts = [[5, 6, 7, 8 + i] for i in range(4)]
        groups = sampler.sample_sync(prompts, group_size=2, params=SamplingParams(max_new_tokens=24, seed=1, ignore_eos=True))
        assert sampler.engine.name == "llama"
    assert audit(policy, [r for g in groups for r in g]).raw_max_error < 1e-4


def test_the_gradient_is_that_of_peft():
    from grpolab.train.sft import sft_gradient

    policy = adapted(moved=True)
    examples = demonstrations(policy, PROBLEMS[:4])
    sft_gradient(policy, examples, CONFIG)
    ours = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    total = sum(sum(e.mask[1:]) for e in examples)
    for e in examples:
        logps = policy.model(torch.tensor([e.ids])).logits[0, :-1].log_softmax(-1)
        loss = -(logps[range(len(e.ids) - 1), e.ids[1:]] * torch.tensor(e.mask[1:])).sum() / total
        loss.backward()
    theirs = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() < 1e-4 * theirs[name].norm()
    assert set(ours) == set(theirs) == set(tensors(policy))


def test_merged_weights_give_the_same_log_probs():
    policy, merged = adapted(moved=True), adapted(moved=True)
    merged.merge_adapter()
    assert not lora.layers(merged.model) and all(p.requires_grad for p in merged.model.parameters())
    error = (logits(policy).log_softmax(-1) - logits(merged).log_softmax(-1)).abs().max()
    assert 0 < error < 1e-4 and (logits(merged) - logits(load_policy("tiny"))).abs().max() > 0.1


def test_a_saved_adapter_loads_here_and_in_peft(tmp_path):
    policy = adapted(moved=True)
    policy.save(tmp_path / "saved")
    names = {f.name for f in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names
    again = load_policy(str(tmp_path / "saved"))
    assert torch.equal(logits(again), logits(policy))
    assert all(p.requires_grad == ("lora_" in n) for n, p in again.model.named_parameters())
    theirs = peft.PeftModel.from_pretrained(load_policy("tiny").model, str(tmp_path / "saved"))
    with torch.no_grad():
        assert torch.equal(theirs(torch.arange(40)[None] % 90 + 5).logits, logits(policy))


def test_the_reference_is_the_model_without_its_adapter():
    policy, plain = adapted(), load_policy("tiny")
    config = GRPOConfig(steps=3, prompts_per_step=4, group_size=4, max_new_tokens=8, lr=1e-2, kl_coef=0.1)
    reward = lambda text, row, rollout: float(text.count("1"))  # noqa: E731
    rows = rows_of(grpo(policy, policy.without_adapter(), PROBLEMS, config, reward=reward))
    other = adapted()
    twin = rows_of(grpo(other, plain, PROBLEMS, config, reward=reward))
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 1e-4
    assert [r["kl"] for r in rows] == pytest.approx([r["kl"] for r in twin], abs=1e-6)
    with policy.without_adapter().acting():
        assert torch.equal(logits(policy), logits(plain))
    assert not torch.equal(logits(policy), logits(plain))


def test_a_resumed_run_is_the_same_in_every_bit(tmp_path):
    whole, cut = adapted(), adapted()
    examples = demonstrations(whole, PROBLEMS)
    rows_of(sft(whole, examples, CONFIG, run=Run("whole", root=tmp_path)))
    rows_of(sft(cut, examples, CONFIG, run=Run("cut", root=tmp_path)), 2)
    kept = next((tmp_path / "cut").glob("checkpoint-*")) / "model.safetensors"
    from safetensors.torch import load_file

    assert set(load_file(kept)) == set(tensors(cut))  # the adapter alone
    fresh = adapted()
    rows_of(sft(fresh, examples, CONFIG, run=Run("cut", root=tmp_path)))
    a, b = tensors(whole), tensors(fresh)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_dropout_is_of_updates_alone_and_drawn_from_seed_and_step(tmp_path):
    """A run that goes on is the same in every bit; the forward of sampler, evaluation and reference has none."""
    dropping = replace(ADAPTER, dropout=0.5)
    with_dropout, without = load_policy("tiny", adapter=dropping), adapted()
    examples = demonstrations(without, PROBLEMS)
    rows = rows_of(sft(with_dropout, examples, CONFIG, held_out=examples, run=Run("whole", root=tmp_path)))
    assert rows[0]["loss"] == pytest.approx(rows_of(sft(without, examples, CONFIG))[0]["loss"])  # B = 0: nothing to drop yet
    assert not any(map(torch.equal, tensors(with_dropout, "lora_A").values(), tensors(without, "lora_A").values()))
    assert torch.equal(logits(with_dropout), logits(with_dropout)) and not with_dropout.model.training
    torch.manual_seed(99)  # the other runs drew nothing from it
    cut = load_policy("tiny", adapter=dropping)
    rows_of(sft(cut, examples, CONFIG, held_out=examples, run=Run("cut", root=tmp_path)), 2)
    fresh = load_policy("tiny", adapter=dropping)
    again = rows_of(sft(fresh, examples, CONFIG, held_out=examples, run=Run("cut", root=tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(tensors(with_dropout).values(), tensors(fresh).values()))
    assert again[-1]["held_out_loss"] == rows[-1]["held_out_loss"]
    with_dropout.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["lora_dropout"] == 0.5
    assert [d.p for d in lora.dropouts(load_policy(str(tmp_path / "saved")).model)] == [0.5] * 12
    assert lora.dropouts(without.model) == []


def test_grpo_with_dropout_compares_the_forwards_without_it():
    policy = load_policy("tiny", adapter=replace(ADAPTER, dropout=0.5))
    config = GRPOConfig(steps=3, prompts_per_step=4, group_size=4, max_new_tokens=8, lr=3e-2)
    rows = rows_of(grpo(policy, None, PROBLEMS, config, reward=lambda text, row, rollout: float(text.count("1"))))
    assert max(row["diff_max"] for row in rows) < 1e-3 and rows[0]["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert rows[-1]["ratio_max"] > 1.01  # the update's own log-probs have it


@pytest.mark.parametrize("make, says", [
    (lambda: LoRA(rank=0), "positive"), (lambda: LoRA(dropout=1.0), "a share from 0 to below 1"),
    (lambda: LoRA(alpha=-1.0), "positive"), (lambda: LoRA(target="q_proj"), "names"),
    (lambda: load_policy("tiny", adapter=LoRA(target=("query", "q_proj"))), r"no projections \['query'\].*q_proj"),
    (lambda: load_policy("tiny", adapter=LoRA(rank=129)), r"rank 129 is more than the projection 'q_proj' of shape"),
    (lambda: load_policy("tiny").without_adapter(), "no adapter to switch off"),
    (lambda: load_policy("tiny", adapter=LoRA(target=("lm_head",))), r"no projections \['lm_head'\]"),
    (lambda: Sampler(adapted().without_adapter()), "would be sampled with its adapter"),
])
def test_what_does_not_fit_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_an_adapter_does_not_take_the_place_of_its_model(tmp_path):
    folder = str(load_policy("tiny").save(tmp_path / "base"))
    policy = load_policy(folder, adapter=ADAPTER)
    with pytest.raises(ValueError, match="holds the model of this adapter"):
        policy.save(folder)
    policy.tokenizer.chat_template = policy.tokenizer.chat_template.replace("User", "Human")
    saved = str(policy.save(tmp_path / "adapter"))
    for tokenizer in (load_policy(saved).tokenizer, load_tokenizer(saved)):  # and not its model's
        assert tokenizer.chat_template == policy.tokenizer.chat_template
    Path(folder).rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="the model of the adapter .*adapter, base_model_name_or_path"):
        load_policy(saved)


@pytest.mark.parametrize("more", [dict(use_dora=True), dict(lora_bias=True), dict(modules_to_save=["embed_tokens"]), "IA3"])
def test_what_is_more_than_lora_is_refused_and_changes_nothing(tmp_path, more):
    base = load_policy("tiny").model
    config = (peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]) if more == "IA3" else
              peft.LoraConfig(r=2, target_modules=["q_proj"], **more))
    config.base_model_name_or_path = "tiny"
    peft.get_peft_model(base, config).save_pretrained(str(tmp_path))
    policy = adapted(moved=True)
    ids = torch.tensor([[5, 6, 7]])
    before = policy.model(ids).logits
    for put in (lambda: lora.exchange(policy.model, tmp_path), lambda: load_policy(str(tmp_path))):
        with pytest.raises(ValueError, match="more than LoRA|no readable adapter"):
            put()
    assert torch.equal(policy.model(ids).logits, before)


def test_a_value_without_the_adapter_is_its_models():
    policy = adapted(moved=True)
    rows = demonstrations(policy, PROBLEMS)
    bare = policy.without_adapter()
    assert sft_value(bare, rows, CONFIG) == pytest.approx(sft_value(load_policy("tiny"), rows, CONFIG), abs=1e-6)
    assert abs(sft_value(bare, rows, CONFIG) - sft_value(policy, rows, CONFIG)) > 5e-3 and bare.lock is policy.lock


def test_a_scale_that_peft_changes_is_sampled_with():
    policy = adapted(moved=True)
    with Sampler(policy) as sampler:
        for factor in (1, 4):
            for layer in lora.layers(policy.model):
                layer.scaling["default"] *= factor
            found = audit(policy, sampler.sample_sync([[5, 6, 7]], params=SamplingParams(seed=0, max_new_tokens=8))[0])
            assert found.raw_max_error < 1e-4, factor


def test_what_is_no_adapter_is_refused():
    with pytest.raises(TypeError, match=r"an adapter is a LoRA\(rank=..., alpha=..., target=...\), got {'rank': 4}"):
        load_policy("tiny", adapter={"rank": 4})


def test_an_adapter_for_another_model_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    adapted().save(tmp_path / "a")
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    name = sorted(saved)[0]
    for broken, says in (({k: v for k, v in saved.items() if k != name}, "lacks"),
                         (saved | {"x.lora_A": saved[name].clone()}, "also holds"),
                         (saved | {name: saved[name][:, :3].clone()}, "another shape")):
        save_file(broken, tmp_path / "a" / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=f"not for this model.*{says}"):
            load_policy(str(tmp_path / "a"))
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match="does not say which model"):
        load_policy(str(tmp_path / "a"))


def test_without_peft_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"grpolab\[lora\]"):
        load_policy("tiny", adapter=ADAPTER)


def test_an_adapter_of_a_short_name_is_saved_with_its_hub_id(tmp_path):
    policy = load_policy("tiny")
    lora.inject(policy.model, LoRA(rank=2), "smollm2-135m")
    lora.save(policy.model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert lora.base_of(tmp_path) == "smollm2-135m"


@pytest.mark.full
def test_an_adapter_prints_no_warning_of_a_kernel_that_is_not_used():
    code = "from grpolab import load_policy; from grpolab.models.lora import LoRA; load_policy('tiny', adapter=LoRA(rank=2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "gemm_4bit" not in done.stderr, done.stderr


def test_a_reward_model_of_an_adapted_policy_has_the_adapter_merged():
    policy = load_policy("tiny", device="cpu", adapter=LoRA())
    with torch.no_grad():
        for layer in lora.layers(policy.model):
            for b in layer.lora_B.values():
                b.weight.normal_(std=0.1)
    model = RewardModel.from_policy(policy)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        ours, theirs = (m.base_model(ids).last_hidden_state for m in (model.model, policy.model.model))
    assert torch.allclose(ours, theirs, atol=1e-4) and lora.layers(policy.model)
    assert all(p.requires_grad for p in model.model.parameters())
