"""The proof before training: families whose forward a packed row would change are found out, and what is trained is right."""

import asyncio
import copy
import dataclasses
import importlib

import pytest
import torch
from loop_helpers import digits, fresh, rows_of
from transformers import AutoConfig, AutoModelForCausalLM

from grpolab.arithmetic import Task, generate
from grpolab.chat import Example
from grpolab.decode.engines.attention import EXACT, share_attention
from grpolab.decode.verify import thresholds
from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.train import forward, losses
from grpolab.train.dpo import DPOConfig, dpo, dpo_gradient
from grpolab.train.grpo import GRPOConfig, grpo, grpo_gradient, grpo_update
from grpolab.train.logps import way_of
from grpolab.train.loop import make_optimiser
from grpolab.train.preferences import Pair
from grpolab.train.reward_model import RewardModel
from grpolab.train.sft import SFTConfig, sft, sft_gradient
from grpolab.train.verify import verify_forward

grpo_module = importlib.import_module("grpolab.train.grpo")
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
WINDOW = {"sliding_window": 12}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
EIGHT = {"head_dim": 8}
LONGROPE = {"original_max_position_embeddings": 20, "rope_parameters": {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4,
    "original_max_position_embeddings": 20}}
GPT = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
OPT = dict(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
           max_position_embeddings=256)
NEO = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=12,
           max_position_embeddings=256)

# name -> (model type, configuration, the ways that are right for shared prompts under sdpa, eager and the exact attention)
FAMILIES = {
    "llama": ("llama", SMALL, "unpadded rows rows"),
    "qwen2": ("qwen2", SMALL | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}, "rows rows rows"),
    "mistral": ("mistral", SMALL | WINDOW, "rows rows rows"),
    "gemma3": ("gemma3_text", SMALL | MIXED | EIGHT, "rows rows rows"),
    "olmo3": ("olmo3", SMALL | MIXED, "rows rows rows"),
    "phi3": ("phi3", SMALL | WINDOW, "rows rows rows"),
    "longrope": ("phi3", SMALL | LONGROPE, "refused refused refused"),  # beyond its context other lengths are other functions
    "gpt2": ("gpt2", GPT, "rows rows rows"),
    "opt": ("opt", OPT, "rows rows rows"),
    "gpt_neo": ("gpt_neo", NEO, "- rows rows"),  # its local attention counts columns
    "falcon_h1": ("falcon_h1", dict(SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
                                    mamba_d_conv=4, mamba_chunk_size=16), "rows - -"),  # its mixers keep a state
    "bloom": ("bloom", dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "- rows rows"),
    "gemma2": ("gemma2", SMALL | MIXED | EIGHT, "- refused refused"),  # caps its logits
    "granite": ("granite", SMALL | {"logits_scaling": 4.0}, "refused refused refused"),
}
# Eager attention that goes the way of sdpa waits for the full suite; the test of bf16 has it too.
CASES = [pytest.param(name, attention, way, marks=[pytest.mark.full] * (attention == "eager" and ways.startswith(way)))
         for name, (_, _, ways) in FAMILIES.items()
         for attention, way in zip(("sdpa", "eager", EXACT), ways.split()) if way != "-"]


def policy_of(tiny, name, attention="sdpa", dtype=torch.float32):
    """A small model of the family with weights that attend sharply, under the embedded model's tokenizer."""
    kind, options, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **copy.deepcopy(options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if attention == EXACT else attention).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.dim() > 1 else 1.0)
    if attention == EXACT:
        share_attention(model)
    return Policy(model.to(dtype), tiny.tokenizer, name, (2,))


def draws(seed=5):
    generator = torch.Generator().manual_seed(seed)
    return lambda n: tuple(torch.randint(10, 60, (n,), generator=generator).tolist())


def plain_logps(policy, prompt, tokens):
    ids = torch.tensor([prompt + tokens])
    logps = policy.model(ids, use_cache=False).logits[0].float().log_softmax(-1)
    return logps[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def gradient(policy):
    parameters = list(policy.model.parameters())
    found = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().float() for p in parameters])
    policy.model.zero_grad()
    return found


def assert_gradient(policy, own, bound):
    found = gradient(policy)
    assert own.norm() > 1e-3 and float((found - own).norm() / own.norm()) < bound


def check_sft(policy, bound):
    draw = draws()
    examples = [Example(draw(n), (0,) + (1,) * (n - 1)) for n in (9, 25, 31, 14, 40, 22, 7, 50)]
    config = SFTConfig()
    verify_forward(policy, config, 50)
    for e in examples:
        (-plain_logps(policy, e.ids[:1], e.ids[1:]).sum() / sum(len(e.ids) - 1 for e in examples)).backward()
    own = gradient(policy)
    sft_gradient(policy, examples, config)
    assert_gradient(policy, own, bound)


def check_dpo(policy, bound):
    draw = draws()
    pairs = [Pair(draw(p), *(Example(draw(n), (1,) * n) for n in ns)) for p, *ns in ((9, 20, 31), (22, 15, 18), (3, 4, 3))]
    verify_forward(policy, DPOConfig(), 40)
    sums = torch.stack([plain_logps(policy, p.prompt, s.ids).sum() for p in pairs for s in (p.chosen, p.rejected)]).view(-1, 2)
    losses.dpo_loss(*sums.T, *sums.detach().T, beta=0.1, denominator=3)[0].backward()
    own = gradient(policy)
    dpo_gradient(policy, pairs, sums.detach(), DPOConfig())
    assert_gradient(policy, own, bound)


def check_grpo(policy, bound):
    draw = draws()
    pieces = [(p, draw(n)) for p, ns in ((draw(21), (24, 30, 17, 26)), (draw(4), (3, 40, 5))) for n in ns]
    a, tokens = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -0.5, -0.5]), sum(len(t) for _, t in pieces)
    verify_forward(policy, GRPOConfig(), 51)
    rollouts = []
    for (p, t), advantage in zip(pieces, a):
        logps = plain_logps(policy, p, t)
        (-advantage * (logps - logps.detach()).exp().sum() / tokens).backward()
        rollouts.append(Rollout(p, t, (1,) * len(t), tuple(logps.tolist()), tuple(logps.tolist()), "eos"))
    own = gradient(policy)
    metrics = grpo_gradient(policy, None, rollouts, a, GRPOConfig())
    assert_gradient(policy, own, bound)
    assert bound > 0.01 or metrics["diff_max"] < 1e-3


@pytest.mark.parametrize(("name", "attention", "way"), CASES)
def test_what_a_loop_trains_on_is_the_models_own_forward_or_it_is_refused(tiny, name, attention, way):
    """Gradients of packed SFT, DPO and GRPO against plain forwards of one sequence each, written here."""
    policy = policy_of(tiny, name, attention)
    if way == "refused":
        why = "no forward of the trainer is the model's own" if name == "longrope" else "changes its logits after the head"
        with pytest.raises(ValueError, match=why):
            verify_forward(policy, GRPOConfig(), 50)
        return
    for check in (check_sft, check_dpo, check_grpo):
        check(policy, 1e-3)
    assert way_of(policy, "rollouts") == way


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neo", "gpt2", "gemma2"])
def test_a_bf16_policy_is_judged_by_what_it_differs_from_itself(tiny, name):
    policy, way = policy_of(tiny, name, "eager", torch.bfloat16), FAMILIES[name][2].split()[1]
    if way == "refused":
        with pytest.raises(ValueError, match="changes its logits after the head"):
            verify_forward(policy, GRPOConfig(), 60)
        return
    check_grpo(policy, 0.15)
    assert way_of(policy, "rollouts") == way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_gradient_of_right_values_is_found_out(tiny, monkeypatch, dtype):
    """Every value is right, and queries and keys get none of theirs."""
    tiny.model.to(dtype)
    assert verify_forward(fresh(tiny), GRPOConfig(), 60) == "unpadded"
    honest = forward._rotated
    monkeypatch.setattr(forward, "_rotated", lambda *args: honest(*args).detach())
    assert verify_forward(fresh(tiny), GRPOConfig(), 60) == "rows"


def test_a_cap_is_seen_where_logits_are_small(tiny):
    policy = policy_of(tiny, "gemma2", "eager")
    with torch.no_grad():
        for p in policy.model.parameters():
            p.div_(6.0 if p.dim() > 1 else 1.0)  # weights as a model begins with: a cap at 30 hardly moves their logits
    with pytest.raises(ValueError, match="changes its logits after the head"):
        verify_forward(policy, GRPOConfig(), 60)


def test_the_proof_leaves_no_gradient_and_changes_nothing(tiny):
    for autocast, keep in ((None, False), ("bfloat16", True)):
        tiny.model.train()
        modes, state = [m.training for m in tiny.model.modules()], copy.deepcopy(tiny.model.state_dict())
        drawn, hooks = torch.get_rng_state(), sum(len(m._forward_hooks) for m in tiny.model.modules())
        verify_forward(tiny, GRPOConfig(autocast=autocast, checkpoint_activations=keep), 60)
        assert all(p.grad is None for p in tiny.model.parameters()) and tiny.version == 0
        assert all(torch.equal(x, state[k]) for k, x in tiny.model.state_dict().items())
        assert [m.training for m in tiny.model.modules()] == modes and torch.equal(torch.get_rng_state(), drawn)
        assert sum(len(m._forward_hooks) for m in tiny.model.modules()) == hooks


def test_the_probe_goes_past_windows_and_scaling_and_no_further_than_the_data(tiny):
    assert 12 in thresholds(policy_of(tiny, "gemma3").model.config)
    assert 20 in thresholds(policy_of(tiny, "longrope").model.config)
    seen = []
    policy = policy_of(tiny, "longrope")
    policy.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    with pytest.raises(ValueError, match="no forward of the trainer is the model's own"):
        verify_forward(policy, GRPOConfig(share_prompts=False), 64)
    assert max(seen) > 20
    seen.clear()
    verify_forward(policy, GRPOConfig(share_prompts=False), 18)
    assert max(seen) <= 18 and way_of(policy, "rollouts") == "rows"


def test_a_reward_model_is_proved_too(tiny, monkeypatch):
    assert verify_forward(RewardModel.from_policy(tiny), SFTConfig(), 60, "rewards") == "unpadded"
    blind = lambda q, k, v, scale: v.repeat_interleave(q.shape[2] // v.shape[2], 2)  # noqa: E731
    monkeypatch.setattr("grpolab.train.forward.attention", blind)
    model = RewardModel.from_policy(tiny)  # under a head of zeros every reward is equal: its states are compared
    assert verify_forward(model, SFTConfig(), 60, "rewards") == "rows"


def test_the_same_proof_of_the_same_model_is_not_made_twice(tiny):
    """Other lengths, or a changed module, are proved anew."""
    policy, forwards = fresh(tiny), []
    count = policy.model.forward
    policy.model.forward = lambda *args, **options: forwards.append(1) or count(*args, **options)
    made = []
    for change in (lambda: None, lambda: None, lambda: policy.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)):
        change()
        verify_forward(policy, GRPOConfig(), 60)
        made.append(len(forwards))
    assert 0 < made[0] == made[1] < made[2]
    verify_forward(policy, GRPOConfig(), 70)
    assert len(forwards) > made[2]


def test_the_loops_prove_before_their_first_step(tiny):
    policy, draw = policy_of(tiny, "granite"), draws()
    pairs = [Pair(draw(5), Example(draw(4), (1,) * 4), Example(draw(6), (1,) * 6))]
    examples = [Example(draw(9), (0,) + (1,) * 8)]

    async def first(rows):
        async for _ in rows:
            raise AssertionError("trained")

    for rows in (sft(policy, examples, SFTConfig()), dpo(policy, policy_of(tiny, "granite"), pairs, DPOConfig())):
        with pytest.raises(ValueError, match="changes its logits after the head"):
            asyncio.run(first(rows))


# --- sampler against trainer, and the one denominator -----------------------------------------------------------------


def sampled(policy, seed=3, rewards=(1.0, 0.0, 1.0), shift=0.0):
    """Two groups of three with the policy's own logps, moved by `shift`."""
    draw, groups = draws(seed), []
    for _ in range(2):
        prompt, rollouts = draw(4), []
        for n, reward in zip((3, 5, 4), rewards):
            tokens = draw(n)
            logps = tuple((plain_logps(policy, prompt, tokens) + shift).tolist())
            rollouts.append(Rollout(prompt, tokens, (1,) * n, logps, logps, "eos", reward=reward))
        groups.append(Group(tuple(rollouts)))
    return groups


@pytest.mark.parametrize(("shift", "token", "bounds"), [(0.3, 0.0, (0.1, 5.0)), (float("nan"), 0.0, (0.1, 5.0)),
                                                        (0.0, 6.0, (10.0, 5.0))], ids=["on average", "NaN", "one token"])
def test_a_step_whose_sampler_and_trainer_disagree_stops_before_the_optimiser(tiny, shift, token, bounds):
    config, before = GRPOConfig(max_logp_diff=bounds), copy.deepcopy(tiny.model.state_dict())
    groups = sampled(tiny, shift=shift)
    optimiser, first = make_optimiser(tiny, config), groups[0][0]
    moved = (first.logps[0] - token, *first.logps[1:])
    groups[0] = Group((dataclasses.replace(first, logps=moved, raw_logps=moved), *groups[0].rollouts[1:]))
    with pytest.raises(RuntimeError, match="step 7: sampler and trainer disagree by .*max_logp_diff="):
        grpo_update(tiny, None, groups, config, optimiser, 7)
    assert all(torch.equal(x, before[k]) for k, x in tiny.model.state_dict().items()) and tiny.version == 0
    assert all(p.grad is None for p in tiny.model.parameters())
    assert grpo_update(tiny, None, sampled(tiny), config, optimiser, 7)["diff_max"] < 1e-4 and tiny.version == 1


def test_grpo_after_an_exact_sampler_trains_on_what_was_sampled(tiny):
    """`Sampler(exact=True)` leaves another attention in the model, which adds its mask: packed rows saw the future there."""
    policy = fresh(tiny)
    share_attention(policy.model)
    problems, _ = generate(6, 0, seed=2, task=Task("+-", max_operand=20))
    config = GRPOConfig(steps=1, prompts_per_step=6, group_size=4, max_new_tokens=12)
    row = rows_of(grpo(policy, None, problems, config, reward=digits))[0]
    assert row["diff_max"] < 1e-3 and row["grad_norm"] > 0 and way_of(policy, "rollouts") == "rows"


def test_groups_without_signal_count_in_the_denominator_with_and_without_a_kl_penalty(tiny):
    """kl_coef 0 and 1e-9 are one objective: leaving out a forward pass leaves the gradient."""
    groups = sampled(tiny) + sampled(tiny, seed=9, rewards=(1.0, 1.0, 1.0)) * 3
    reference, norms = Policy(copy.deepcopy(tiny.model), tiny.tokenizer, "reference", tiny.eos_ids), []
    start = copy.deepcopy(tiny.model.state_dict())
    for aggregation in ("token", "sequence", "constant"):
        for kl_coef in (0.0, 1e-9):
            tiny.model.load_state_dict(start)
            config = GRPOConfig(kl_coef=kl_coef, aggregation=aggregation, max_grad_norm=1e9)
            row = grpo_update(tiny, reference, groups, config, make_optimiser(tiny, config), 0)
            norms.append(row["grad_norm"])
            assert row["ratio"] == pytest.approx(1.0, abs=1e-5) and row["trained_groups"] == (8 if kl_coef else 2)
        assert norms[-1] == pytest.approx(norms[-2], rel=1e-5) and norms[-1] > 1e-3


@pytest.mark.parametrize("options", [{}, {"aggregation": "sequence"}, {"sampler_cap": 2.0}, {"minibatches": 2}])
def test_rollouts_without_an_advantage_are_left_out_and_leave_the_gradient(tiny, monkeypatch, options):
    """The middle one of three rewards has none, nor has one that abstains; with a KL penalty they are needed."""
    tiny.model.double()
    rewards = (1.0, 0.5, 0.0), (1.0, None, 0.0)
    groups = [g.with_rewards(list(of)) for g, of in zip(sampled(tiny), rewards)]
    config, steps = GRPOConfig(max_logp_diff=None, **options), []
    own = grpo_module.grpo_gradient
    monkeypatch.setattr(grpo_module, "apply_gradient", lambda policy, *_: steps.append(gradient(policy)) or {})
    monkeypatch.setattr(grpo_module, "grpo_gradient", lambda policy, reference, rollouts, *rest, **how: seen.extend(rollouts)
                        or own(policy, reference, rollouts, *rest, **how))
    found = {}
    for kl in ({}, {"kl_coef": 1e-12, "kl_to": "sampler"}):  # one objective
        seen = []
        grpo_update(tiny, None, groups, dataclasses.replace(config, **kl), None, 0)
        found[bool(kl)], steps = torch.cat(steps), []
        assert len(seen) == (6 if kl else 4)
    assert found[True].norm() > 1e-3 and (found[False] - found[True]).norm() < 1e-7 * found[True].norm()
