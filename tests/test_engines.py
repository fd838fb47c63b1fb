"""The engines against the forward of transformers, on many kinds of model; the choice between them; exact mode."""

import logging

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy
from test_losses import token_logps
from transformers import AutoModelForCausalLM
from transformers import models as families

from grpolab.decode import verify
from grpolab.decode.audit import audit, recompute
from grpolab.decode.engines import attention
from grpolab.decode.engines.hf import HFEngine
from grpolab.decode.engines.llama import LlamaEngine
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.verify import choose_engine
from grpolab.models.load import attention_of

SHAPE = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
             vocab_size=100, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             initializer_range=0.2)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64, rope_theta=1e4)
FAMILIES = {  # name -> (config, the engine that auto takes)
    "llama": (lambda: families.llama.LlamaConfig(**SHAPE), "llama"),
    "llama3 rope": (lambda: families.llama.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE), "llama"),
    "llama with biases": (lambda: families.llama.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True), "llama"),
    "qwen2": (lambda: families.qwen2.Qwen2Config(**SHAPE), "llama"),
    "qwen3": (lambda: families.qwen3.Qwen3Config(**SHAPE, head_dim=32), "llama"),
    "mistral": (lambda: families.mistral.MistralConfig(**SHAPE, sliding_window=None), "llama"),
    "sliding mistral": (lambda: families.mistral.MistralConfig(**SHAPE, sliding_window=8), "hf"),
    "gemma2": (lambda: families.gemma2.Gemma2Config(**SHAPE, head_dim=16, sliding_window=8), "hf"),
    "gpt2": (lambda: families.gpt2.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=256,
                                              bos_token_id=1, eos_token_id=2, initializer_range=0.2), "hf"),
}


def policy_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name][0]())
    for parameter_name, p in model.named_parameters():  # biases and norms away from 0 and 1, so that they matter
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0 if "norm" in parameter_name or "ln" in parameter_name else 0.0, 0.2)
    return tiny_policy(model=model, dtype=dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_as_its_own_forward(name):
    policy = policy_of(name)
    with Sampler(policy, slots=6) as sampler:
        assert sampler.engine.name == FAMILIES[name][1]
        prompts = ragged_prompts(5)
        greedy = sampler.sample_sync(prompts, group_size=2, params=SamplingParams(greedy=True, max_new_tokens=24))
        sampled = sampler.sample_sync(prompts, group_size=2, params=SamplingParams(max_new_tokens=24, seed=0))
    assert [g[1].tokens for g in greedy] == [recompute(policy, p, 24) for p in prompts]
    assert audit(policy, flat(sampled)).max_error <= 1e-4


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.bfloat16),
                                             ("gemma2", torch.bfloat16), ("llama", torch.float16)])
def test_low_precision_is_within_rounding_by_teacher_forcing(name, dtype):
    policy = policy_of(name, dtype)
    with Sampler(policy, slots=6) as sampler:
        assert sampler.engine.name == FAMILIES[name][1]
        groups = sampler.sample_sync(ragged_prompts(8), params=SamplingParams(greedy=True, max_new_tokens=32))
    found = audit(policy, flat(groups))
    assert found.worst_ulps <= 8 and found.disagreements < 0.1 * found.tokens  # at this size; SmolLM2 is held to 2


@pytest.mark.parametrize("name", ["mamba", "bloom", "t5"])
def test_models_without_such_a_cache_are_refused_by_name(name):
    config = {"mamba": lambda: families.mamba.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=50),
              "bloom": lambda: families.bloom.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50),
              "t5": lambda: families.t5.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)}[name]()
    if name == "t5":
        model = families.t5.T5ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be sampled"):
        choose_engine(model.eval())


def test_auto_takes_the_hf_engine_when_the_check_fails(monkeypatch, caplog):
    rotate = LlamaEngine._rotate
    monkeypatch.setattr(LlamaEngine, "_rotate", lambda self, h, rotation: (rotate(self, h, rotation), h.mul_(1.01)))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_engine(tiny_policy().model), HFEngine)
    assert "logits differ by" in caplog.text
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM: logits differ"):
        choose_engine(tiny_policy().model, "llama")


def test_an_hf_engine_that_is_wrong_is_refused(monkeypatch):
    true = attention.mask_bias
    monkeypatch.setattr(attention, "mask_bias", lambda positions, *rest: true(positions + 1, *rest))
    with pytest.raises(ValueError, match="cached step is not its own forward"):
        choose_engine(policy_of("gpt2").model)


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="'fast'"):
        choose_engine(tiny_policy().model, "fast")
    with pytest.raises(ValueError, match="gpt2"):
        choose_engine(policy_of("gpt2").model, "llama")


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


def test_exact_mode_is_refused_where_the_probe_differs():
    """And the model keeps the attention that it had, which is the trainer's too."""
    policy = tiny_policy()
    with pytest.raises(ValueError, match="exact mode is impossible here"):
        Sampler(policy, exact=True).engine  # noqa: B018  (waits for the choice)
    assert attention_of(policy.model) == "sdpa"
    policy.model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="exact mode is impossible here"):
        Sampler(policy, exact=True).engine  # noqa: B018
    assert attention_of(policy.model) == "eager"


def test_exact_mode_of_a_model_that_no_engine_takes_leaves_its_attention(monkeypatch):
    def refuse(model, *_):
        raise ValueError("none fits")

    policy = tiny_policy()
    monkeypatch.setattr(verify, "choose_engine", refuse)
    with pytest.raises(ValueError, match="none fits"):
        Sampler(policy, exact=True).engine  # noqa: B018
    assert attention_of(policy.model) == "sdpa"
