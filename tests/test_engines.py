"""The engines against the forward of transformers, on many kinds of model; the choice between them; exact mode."""

import logging

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy
from test_families import STRAIGHT, make
from test_losses import token_logps
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from grpolab.decode import verify
from grpolab.decode.audit import audit
from grpolab.decode.engines import attention
from grpolab.decode.engines.hf import HFEngine
from grpolab.decode.engines.llama import LlamaEngine
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.verify import choose_engine
from grpolab.models.load import attention_of


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.bfloat16),
                                             ("gemma2", torch.bfloat16), ("llama", torch.float16)])
def test_low_precision_is_within_rounding_by_teacher_forcing(name, dtype):
    policy = make(name)
    policy.model.to(dtype)
    with Sampler(policy, slots=6) as sampler:
        assert (sampler.engine.name == "llama") == (name in STRAIGHT)
        groups = sampler.sample_sync(ragged_prompts(8), params=SamplingParams(greedy=True, max_new_tokens=32))
    found = audit(policy, flat(groups))
    assert found.worst_ulps <= 8 and found.disagreements < 0.1 * found.tokens  # at this size; SmolLM2 is held to 2


SHAPE = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
REFUSED = {
    "mamba": (dict(vocab_size=50, hidden_size=32, num_hidden_layers=2), "MambaForCausalLM cannot be sampled"),
    "bloom": (dict(vocab_size=50, hidden_size=32, n_layer=2, n_head=4), "BloomForCausalLM cannot be sampled"),
    "moshi": (dict(SHAPE, ffn_dim=64, num_codebooks=2, audio_vocab_size=20, sliding_window=64, max_position_embeddings=128),
              "MoshiForCausalLM cannot .* Use a decoder-only model"),
    "cpmant": (dict(SHAPE, dim_head=8, dim_ff=48), "CpmAntForCausalLM cannot .* Use a decoder-only model"),
    "t5": (dict(d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=50), "T5ForConditionalGeneration cannot be sampled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_such_a_cache_are_refused_by_name_and_remedy(name):
    shape, message = REFUSED[name]
    config = AutoConfig.for_model(name, **shape)
    kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    with pytest.raises(ValueError, match=message):
        choose_engine(tiny_policy(model=kind.from_config(config)))


def test_auto_takes_the_hf_engine_when_the_check_fails(monkeypatch, caplog):
    rotate = LlamaEngine._rotate
    monkeypatch.setattr(LlamaEngine, "_rotate", lambda self, h, rotation: (rotate(self, h, rotation), h.mul_(1.01)))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_engine(tiny_policy()), HFEngine)
    assert "logits differ by" in caplog.text
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM: .* logits differ"):
        choose_engine(tiny_policy(), "llama")
    with pytest.raises(ValueError, match="gpt2"):
        choose_engine(make("gpt2"), "llama")


def test_an_hf_engine_that_is_wrong_is_refused(monkeypatch):
    true = attention.mask_bias
    monkeypatch.setattr(attention, "mask_bias", lambda positions, *rest: true(positions + 1, *rest))
    with pytest.raises(ValueError, match="cached step is not its own forward"):
        choose_engine(make("gpt2"))


def trainer_logps(policy, rollouts):
    """As the trainer computes them: right-padded batch, autograd on, the head in chunks."""
    rows = [torch.tensor(r.prompt + r.tokens) for r in rollouts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask, old_logps = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for i, r in enumerate(rollouts):
        span = slice(len(r.prompt), len(r.prompt) + len(r.tokens))
        mask[i, span], old_logps[i, span] = 1, torch.tensor(r.logps)
    hidden = policy.model.model(ids, use_cache=False).last_hidden_state
    return token_logps(hidden, policy.model.lm_head.weight, ids, mask), old_logps, mask


def test_exact_mode_equals_the_trainer_in_every_bit():
    """bfloat16: the first inner step's ratio is exactly 1; without exact mode it is not."""
    share = {}
    for exact in (True, False):
        policy = tiny_policy(dtype=torch.bfloat16)
        with Sampler(policy, slots=8, exact=exact) as sampler:
            rollouts = flat(sampler.sample_sync(ragged_prompts(6), group_size=4,
                                                params=SamplingParams(max_new_tokens=30, seed=0)))
            logps, old_logps, mask = trainer_logps(policy, rollouts)  # `close` gives the model its own attention back
        assert logps.requires_grad
        differs = (logps.detach() != old_logps)[mask.bool()]
        share[exact] = float(differs.float().mean())
    assert share[True] == 0.0 and share[False] > 0.5


def test_exact_mode_is_refused_where_amx_multiplies(monkeypatch):
    """There the start-up probe finds no difference for this model, while one logp in seventy of the test above has one."""
    assert not verify.by_amx()  # conftest.py sees to that
    monkeypatch.setattr(verify, "by_amx", lambda: True)
    with pytest.raises(ValueError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        verify.choose_exact_engine(tiny_policy(dtype=torch.bfloat16))
    assert verify.choose_engine(tiny_policy(dtype=torch.bfloat16)).verified


def test_exact_mode_ends_with_the_sampler():
    """Also where a second sampler was in exact mode meanwhile, and where the model came with another attention."""
    policy = tiny_policy(dtype=torch.bfloat16)
    policy.model.set_attn_implementation("eager")
    with Sampler(policy, exact=True) as first:
        assert first.engine.name == "llama" and attention_of(policy.model) == attention.EXACT
        with Sampler(policy, exact=True) as second:
            assert second.engine.name == "llama"
        assert attention_of(policy.model) == "eager"
        first.sample_sync([[1, 2]])
        assert attention_of(policy.model) == attention.EXACT
    assert attention_of(policy.model) == "eager"


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_where_exact_mode_is_refused_the_model_keeps_its_attention(own):
    policy = tiny_policy()
    policy.model.set_attn_implementation(own)
    for engine, message in (("auto", "exact mode is impossible here"), ("fast", "'fast'")):
        with pytest.raises(ValueError, match=message):
            Sampler(policy, exact=True, engine=engine).engine  # noqa: B018  (waits for the choice)
        assert attention_of(policy.model) == own
