"""The proof of an engine at its start: what it looks at, what it finds, and where it stops."""

import logging

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy
from test_families import FAMILIES, make
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig, OPTConfig, OPTForCausalLM

from grpolab.decode import verify
from grpolab.decode.audit import audit
from grpolab.decode.engines import attention, hf
from grpolab.decode.engines.hf import HFEngine
from grpolab.decode.engines.llama import LlamaEngine
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.verify import batch_dependence, choose_engine, difference, disagreement, thresholds
from grpolab.models import load


def rollouts_of(policy, new=120, **kwargs):
    with Sampler(policy, slots=4, **kwargs) as sampler:
        params = SamplingParams(max_new_tokens=new, seed=0)
        return flat(sampler.sample_sync(ragged_prompts(3), params=params)), sampler


def test_thresholds_are_found_wherever_a_configuration_names_them():
    nested = AutoConfig.for_model("gemma3_text", sliding_window=512)
    nested.inner = {"attention_chunk_size": 8192, "deeper": {"window_size": 77}}
    assert set(thresholds(nested)) >= {77, 512, 8192}
    assert 256 in thresholds(AutoConfig.for_model("gpt_neo"))
    fixed = dict(rope_type="llama3", original_max_position_embeddings=8192, factor=8.0, low_freq_factor=1.0,
                 high_freq_factor=4.0, rope_theta=1e4)
    assert 8192 not in thresholds(AutoConfig.for_model("llama", rope_parameters=fixed))


def test_the_bounds_of_a_difference():
    """fp32: 1e-4 of the largest value; in a lower precision one and a half times what rounding moves the plain forward by."""
    own = torch.randn(50, generator=torch.Generator().manual_seed(0))
    off = lambda share: own + share * own.abs().max()  # noqa: E731
    assert difference(off(0.9e-4), own, None) is None and "at most" in difference(off(1.1e-4), own, None)
    assert difference(off(0.014), own, off(0.01)) is None and "on average" in difference(off(0.016), own, off(0.01))


class Late(LlamaForCausalLM):
    """Another model from position 80 on."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand(len(input_ids), -1)
        return super().forward(torch.where(position_ids < 80, input_ids, 99 - input_ids), position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("name", ["gemma3", "qwen2 windows", "gpt_oss"])
def test_a_bf16_engine_is_judged_by_what_rounding_does_to_the_plain_forward(name):
    """An honest one passes, and one that forgets a window does not, however much or little the family rounds."""
    model = make(name).model.to(torch.bfloat16)
    engine = HFEngine(model)
    assert disagreement(engine, model) is None
    engine.sliding = 10**6
    assert "on average" in disagreement(engine, model)


def test_a_window_too_long_to_probe_ends_the_context(monkeypatch, caplog):
    policy = make("mistral window")  # 24 positions
    monkeypatch.setitem(verify.MOST, "cpu", 20)
    with caplog.at_level(logging.WARNING), Sampler(policy, slots=4) as sampler:
        rollout = sampler.sample_sync([[3] * 10], params=SamplingParams(greedy=True, max_new_tokens=99))[0][0]
        assert len(rollout.tokens) == 14 and rollout.finish_reason == "context"
        assert sampler.context == 24 and "sampled up to 24 positions" in caplog.text
        with pytest.raises(ValueError, match="context of 24"):
            sampler.sample_sync([[3] * 24])


def test_a_subclass_goes_through_its_own_forward(monkeypatch):
    """Were it taken for a plain model, the probe would tell: it goes past position 80."""
    policy = tiny_policy()
    policy.model = Late(policy.model.config).eval()
    rollouts, sampler = rollouts_of(policy)
    assert sampler.engine.name == "hf" and audit(policy, rollouts).max_error < 1e-4
    monkeypatch.setattr(verify, "llama_obstacle", lambda model: None)
    assert "at 157 positions" in disagreement(LlamaEngine(policy.model), policy.model)


@pytest.mark.parametrize("length", [24, 170])
@pytest.mark.parametrize("name", ["qwen2 windows", "llama4 chunks"])
def test_an_engine_blind_to_a_window_is_refused(name, length, monkeypatch):
    """Also where the window is longer than what every probe looks at."""
    kind, shape = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, (kind, {key: length if value == 24 else value for key, value in shape.items()}))
    engine = choose_engine(make(name))
    assert engine.name == "hf"
    engine.sliding = engine.chunk = 10**6
    assert "not its own forward" in disagreement(engine, engine.model)


@pytest.mark.parametrize("fault", ["a thousandth of the largest logit", "a banned token"])
def test_a_small_error_is_a_difference(fault):
    policy = tiny_policy()
    engine = LlamaEngine(policy.model)
    assert disagreement(engine, policy.model) is None
    if fault == "a banned token":  # on one side alone
        assert "logits differ by at most inf" in disagreement(engine, banned(policy).model)
    else:
        forward = engine.forward
        engine.forward = lambda *args: (logits := forward(*args)) + 1e-3 * logits.abs().max()
        assert "logits differ by" in disagreement(engine, policy.model)


def test_fp32_is_compared_without_tf32():
    policy, seen, before = tiny_policy(), [], torch.get_float32_matmul_precision()
    policy.model.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    try:
        torch.set_float32_matmul_precision("high")
        disagreement(HFEngine(policy.model), policy.model)
        assert seen[-1] == "highest" and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("fault", ["a mixture of experts", "rows are computed as they come"])
def test_dependence_on_the_batch_is_seen(fault, monkeypatch):
    """Experts group rows, so who claims independence asks first: this is how."""
    if fault == "a mixture of experts":
        config = MixtralConfig(vocab_size=100, max_position_embeddings=256, num_local_experts=4, num_experts_per_tok=2,
                               hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                               num_key_value_heads=2)
        torch.manual_seed(0)
        policy = tiny_policy(model=AutoModelForCausalLM.from_config(config))
    else:
        monkeypatch.setattr(hf, "ROWS", 1)
        policy = make("gemma3")
    assert batch_dependence(choose_engine(policy)) > 0


def test_where_transformers_does_not_name_the_attention_it_is_set(monkeypatch):
    """transformers has no public way to ask for it."""
    expected = rollouts_of(make("gemma3"), 40)[0]
    for module in (load, hf):
        monkeypatch.setattr(module, "attention_of", lambda model: None)
    assert rollouts_of(make("gemma3"), 40)[0] == expected
    model = make("gpt_neo").model
    attention.set_common(model)
    assert model.config._attn_implementation == "eager"  # it has no torch attention


def test_longrope_ends_where_its_frequencies_change(caplog):
    policy = make("phi3 longrope")
    assert policy.context == 64
    with caplog.at_level(logging.WARNING):
        choose_engine(policy)
    assert "up to 64 of its 250 positions" in caplog.text


def banned(policy, token=7):
    """The model with one token banned by -inf, as a head with such a bias."""
    head = torch.nn.Linear(64, 100)
    head.weight = policy.model.lm_head.weight
    with torch.no_grad():
        head.bias.zero_()[token] = -torch.inf
    policy.model.lm_head = head
    return policy


def test_a_banned_token_is_a_value(monkeypatch):
    rollouts, sampler = rollouts_of(banned(tiny_policy()))
    assert sampler.engine.name == "llama" and sampler.engine.verified
    assert all(7 not in r.tokens for r in rollouts)
    true = attention.mask_bias
    monkeypatch.setattr(attention, "mask_bias", lambda positions, *rest: true(positions + 1, *rest))
    with pytest.raises(ValueError, match="not its own forward"):
        choose_engine(banned(tiny_policy()))


def test_a_row_of_a_wide_model_is_rounded_alike_among_few_and_many():
    """Products over 512 numbers: fewer than 16 rows are rounded otherwise by MKL on Intel."""
    torch.manual_seed(0)
    config = OPTConfig(hidden_size=512, word_embed_proj_dim=512, ffn_dim=512, num_hidden_layers=1, num_attention_heads=4,
                       vocab_size=100, max_position_embeddings=128)
    assert batch_dependence(HFEngine(OPTForCausalLM(config).eval())) == 0


@pytest.mark.parametrize("name", ["gemma3", "phi3 window", "gpt2", "gpt_neo", "opt"])
def test_rollouts_of_the_hf_engine_do_not_depend_on_their_batch(name, has_amx):
    """With more rows than the 16 below which MKL rounds otherwise on some processors. GPT-Neo's rows move with the longest
    one beside them, which the same processors round otherwise: there the probe must say so."""
    policy, params = make(name), SamplingParams(max_new_tokens=40, seed=4)
    prompts = ragged_prompts(20, 3, 60)
    with Sampler(policy, slots=20, engine="hf") as sampler:
        together = flat(sampler.sample_sync(prompts, params=params))
        alone = [sampler.submit([prompts[i]], params=params, seeds=[[rollout.seed]]).future.result()[0][0]
                 for i, rollout in enumerate(together[:5])]
        dependence = sampler.run_sync(batch_dependence, sampler.engine)
    assert sampler.engine.shifted == (name == "gpt_neo")
    assert dependence == 0 or sampler.engine.shifted and has_amx
    assert alone == together[:5] or dependence > 0
