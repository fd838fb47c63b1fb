"""Rollouts of small random models of many families, past their windows, against the model's own uncached forward."""

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy
from transformers import AutoConfig, AutoModelForCausalLM

from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.sync import run_sync

IDS = dict(vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
HEADS = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=250, **IDS)
PLAIN = dict(HEADS, num_key_value_heads=2, intermediate_size=48)
WINDOW = dict(PLAIN, sliding_window=24)
GPT = dict(n_embd=32, n_layer=3, n_head=4, n_positions=250, **IDS)
HEAD, EXPERTS, MIXED = dict(head_dim=8), dict(num_local_experts=4), ["sliding_attention", "full_attention", "sliding_attention"]
ROPE = dict(original_max_position_embeddings=64, rope_theta=1e4)
LONG = dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0], **ROPE)
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
              n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=24,
              n_shared_experts=1, first_k_dense_replace=1)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)


def neo(window, context=250):
    return dict(hidden_size=32, num_layers=2, num_heads=4, window_size=window, max_position_embeddings=context,
                attention_types=[[["global", "local"], 1]], **IDS)


FAMILIES = {
    "llama": ("llama", PLAIN), "llama yarn": ("llama", dict(PLAIN, rope_parameters=dict(rope_type="yarn", factor=4.0, **ROPE))),
    "llama llama3": ("llama", dict(PLAIN, rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ROPE))),
    "llama dynamic": ("llama", dict(PLAIN, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4))),
    "llama longrope": ("llama", dict(PLAIN, rope_parameters=LONG)),
    "qwen2 windows": ("qwen2", dict(WINDOW, use_sliding_window=True, max_window_layers=1)),
    "llama with biases": ("llama", dict(PLAIN, attention_bias=True, mlp_bias=True)), "qwen2": ("qwen2", PLAIN),
    "mistral": ("mistral", dict(PLAIN, sliding_window=None)),
    "qwen3": ("qwen3", dict(PLAIN, **HEAD)), "mistral window": ("mistral", WINDOW),
    "mixtral window": ("mixtral", dict(WINDOW, **EXPERTS)),
    "phi": ("phi", PLAIN), "phi3 window": ("phi3", WINDOW),
    "phi3 longrope": ("phi3", dict(PLAIN, original_max_position_embeddings=64, rope_parameters=LONG)),
    "phimoe longrope": ("phimoe", dict(WINDOW, **EXPERTS, rope_parameters=dict(LONG, short_mscale=1.1, long_mscale=1.2))),
    "gemma": ("gemma", dict(PLAIN, **HEAD)), "gemma2": ("gemma2", dict(WINDOW, **HEAD)),
    "gemma3": ("gemma3_text", dict(WINDOW, **HEAD, layer_types=MIXED)), "olmo": ("olmo", PLAIN), "olmo2": ("olmo2", PLAIN),
    "olmo3": ("olmo3", dict(WINDOW, layer_types=MIXED)), "gpt2": ("gpt2", GPT), "gpt_neo": ("gpt_neo", neo(24)),
    "gpt_neo window 64": ("gpt_neo", neo(64)), "gpt_neox": ("gpt_neox", dict(HEADS, intermediate_size=48)),
    "gptj": ("gptj", dict(GPT, rotary_dim=8)), "codegen": ("codegen", dict(GPT, rotary_dim=8)), "bigcode": ("gpt_bigcode", GPT),
    "opt": ("opt", dict(HEADS, ffn_dim=48, word_embed_proj_dim=32, init_std=0.2)), "falcon": ("falcon", HEADS),
    "stablelm": ("stablelm", PLAIN), "starcoder2": ("starcoder2", WINDOW), "cohere": ("cohere", PLAIN),
    "cohere2": ("cohere2", dict(WINDOW, **HEAD, sliding_window_pattern=3)), "glm": ("glm", dict(PLAIN, **HEAD)),
    "glm4": ("glm4", dict(PLAIN, **HEAD)), "granite": ("granite", PLAIN),
    "smollm3": ("smollm3", dict(WINDOW, use_sliding_window=True, layer_types=MIXED)),
    "exaone4": ("exaone4", dict(WINDOW, sliding_window_pattern=3)), "nemotron": ("nemotron", PLAIN),
    "gpt_oss": ("gpt_oss", dict(WINDOW, **HEAD, **EXPERTS)), "deepseek_v3": ("deepseek_v3", dict(PLAIN, **LATENT)),
    "llama4 chunks": ("llama4_text", dict(PLAIN, **HEAD, attention_chunk_size=24, num_local_experts=2,
                                          intermediate_size_mlp=48)),
    "biogpt": ("biogpt", dict(HEADS, intermediate_size=48)), "xglm": ("xglm", dict(
        d_model=32, num_layers=3, attention_heads=4, ffn_dim=48, max_position_embeddings=250, init_std=0.2, **IDS)),
    "gemma3 with images": ("gemma3", dict(text_config=dict(WINDOW, **HEAD, layer_types=MIXED), vision_config=VISION,
                                          mm_tokens_per_image=4)),
    "gemma4 with images": ("gemma4", dict(text_config=dict(WINDOW, **HEAD))),
    "llama4 with images": ("llama4", dict(text_config=dict(PLAIN, **HEAD, attention_chunk_size=24, num_local_experts=2,
                                                           intermediate_size_mlp=48))),
    "rembert": ("rembert", dict(HEADS, intermediate_size=48, input_embedding_size=16, output_embedding_size=16,
                                is_decoder=True)),
    "modernbert decoder": ("modernbert-decoder", dict(PLAIN, local_attention=24)),
}
STRAIGHT = {"llama", "llama yarn", "llama llama3", "llama with biases", "qwen2", "qwen3", "mistral"}  # by the llama engine
SHIFTED, TO_64 = {"gpt_neo", "gpt_neo window 64"}, {"llama longrope", "phi3 longrope", "phimoe longrope"}


def make(name):
    kind, shape = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    for parameter_name, p in model.named_parameters():  # biases and norms away from 0 and 1, so that they matter
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0 if "norm" in parameter_name or "ln" in parameter_name else 0.0, 0.2)
    return tiny_policy(model=model)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * n.endswith("with images")) for n in FAMILIES])
def test_greedy_rollouts_past_every_window_are_recomputed(name):
    policy = make(name)
    with Sampler(policy, slots=4) as sampler:
        prompts = ragged_prompts(2, 12, 40)
        rollouts = flat(sampler.sample_sync(prompts, params=SamplingParams(greedy=True, max_new_tokens=150)))
        assert (sampler.engine.name == "llama") == (name in STRAIGHT)
        assert getattr(sampler.engine, "shifted", False) == (name in SHIFTED)
        reached = 64 if name in TO_64 else len(prompts[0]) + 150
    found = audit(policy, rollouts)
    assert len(prompts[0]) + len(rollouts[0].tokens) == reached
    assert found.disagreements == 0 and found.max_error < 1e-4


LEARNED = ("gpt2", "opt", "bigcode", "gptj", "gpt_neo")


@pytest.mark.parametrize("name", LEARNED)
def test_a_prompt_that_nearly_fills_the_context_is_sampled(name):
    """Its padding would run past the learned positions; 249 tokens are padded to 256, of a context of 250."""
    policy = make(name)
    with Sampler(policy, slots=4) as sampler:
        prompts = [ragged_prompts(1, n, n, seed=n)[0] for n in (249, 246, 13)]
        rollouts = flat(sampler.sample_sync(prompts, params=SamplingParams(greedy=True, max_new_tokens=4)))
        assert [r.finish_reason for r in rollouts] == ["context", "context", "length"]
        talk = sampler.conversation(seed=0)
        run_sync(talk.sample(prompts[0][:203], SamplingParams(greedy=True, max_new_tokens=3)))
        run_sync(talk.sample(prompts[1][:43], SamplingParams(greedy=True, max_new_tokens=1)))
        rollouts.append(talk.rollout())
    found = audit(policy, rollouts)
    assert found.disagreements == 0 and found.max_error < 1e-4
