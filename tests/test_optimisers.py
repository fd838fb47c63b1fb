"""bf16 parameters over fp32 master weights: no step is lost, a resumed run is the same run, and the sampler's log-probs are the
trainer's in exact mode."""


import pytest
import torch
from loop_helpers import DEVICE, rows_of

from grpolab.arithmetic import Task, generate
from grpolab.lab.replay import bundle, replay, replay_bundle
from grpolab.models.load import load_policy
from grpolab.runs.run import Run
from grpolab.train import GRPOConfig, SFTConfig, demonstrations, grpo, optimisers, sft
from grpolab.train.loop import apply_gradient, make_optimiser
from grpolab.train.optimisers import Masters
from grpolab.train.plan import plan
from grpolab.train.sft import sft_gradient

PROBLEMS, _ = generate(16, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = SFTConfig(steps=4, batch_size=4, lr=1e-4, warmup=0, save_every=1)


def bf16():
    return load_policy("tiny", dtype="bfloat16", device=DEVICE)


def examples(policy):
    return demonstrations(policy, PROBLEMS)


def weights(policy):
    return [p.detach().clone() for p in policy.model.parameters()]


@pytest.mark.parametrize("optimiser", ["adamw", "adafactor"])
def test_steps_are_those_of_fp32_weights_with_the_same_gradients(optimiser):
    policy, config = bf16(), SFTConfig(steps=40, lr=3e-5, warmup=0, optimiser=optimiser, max_grad_norm=1e9)
    ours, plain = make_optimiser(policy, config), load_policy("tiny", device=DEVICE)
    with torch.no_grad():
        for p, q in zip(plain.model.parameters(), policy.model.parameters()):
            p.copy_(q)
    theirs, began = make_optimiser(plain, config), weights(plain)
    assert isinstance(ours, Masters) and not isinstance(theirs, Masters)
    torch.manual_seed(0)
    for step in range(config.steps):
        for p, q in zip(plain.model.parameters(), policy.model.parameters()):
            q.grad = (torch.randn_like(p) + 0.5).bfloat16().float()
            p.grad = q.grad.clone()
        found = apply_gradient(policy, ours, config, step), apply_gradient(plain, theirs, config, step)
        assert found[0] == found[1]
    for p, q, master in zip(plain.model.parameters(), policy.model.parameters(), ours.masters):
        assert torch.equal(master, p) and torch.equal(q, p.bfloat16()) and q.grad is None and master.grad is None
    moved = torch.cat([(p != b).flatten() for p, b in zip(policy.model.parameters(), began)]).float().mean()
    assert moved > 0.1  # steps of 3e-5 add up, most of which bf16 would round away


def test_states_on_the_host_take_the_steps_of_adamw_in_every_bit():
    policies = [load_policy("tiny", device=DEVICE) for _ in range(2)]
    for policy, name in zip(policies, ("adamw", "adamw_cpu")):
        rows_of(sft(policy, examples(policy), SFTConfig(steps=3, batch_size=4, lr=1e-3, warmup=0, optimiser=name)))
    assert all(torch.equal(a, b) for a, b in zip(*map(weights, policies)))
    optimiser = make_optimiser(policies[1], SFTConfig(optimiser="adamw_cpu"))
    assert all(m.device.type == "cpu" and m.data_ptr() != p.data_ptr() for p, m in zip(optimiser.parameters, optimiser.masters))


def gradient_of(policy, parts):
    """The gradient of SFT on 512 rows, forwarded in so many parts, as one vector in fp64."""
    rows = examples(policy) * 32
    make_optimiser(policy, CONFIG)
    sft_gradient(policy, rows, SFTConfig(token_budget=len(rows) // parts * max(len(e.ids) for e in rows)))
    return torch.cat([p.grad.double().flatten() for p in policy.model.parameters()])


@pytest.mark.full
def test_gradients_of_micro_batches_add_up_in_fp32():
    """And those of a token's embedding within one. In bf16 either sum was off by 12 % of its norm; what is left is that of the
    products."""
    plain = load_policy("tiny", device=DEVICE)
    with torch.no_grad():
        for p in plain.model.parameters():
            p.copy_(p.bfloat16())
    exact = gradient_of(plain, 1)
    for parts in (1, 512):
        error = (gradient_of(bf16(), parts) - exact).norm() / exact.norm()
        assert error < 0.025, (parts, error)


def test_parameters_that_somebody_else_set_win_over_their_copies():
    policy, config = bf16(), SFTConfig(lr=1e-3, warmup=0)
    optimiser = make_optimiser(policy, config)
    p, master = next(policy.model.parameters()), optimiser.masters[0]
    with torch.no_grad():
        p.add_(1.0)
    p.grad = torch.zeros_like(p, dtype=torch.float32)
    apply_gradient(policy, optimiser, config, 0)
    assert torch.equal(master, p.float())


def test_a_checkpoint_of_fp32_parameters_is_refused(tmp_path):
    plain, config = load_policy("tiny", device=DEVICE), SFTConfig()
    optimiser = make_optimiser(plain, config)
    next(plain.model.parameters()).grad = torch.ones_like(next(plain.model.parameters()))
    optimiser.step()
    with pytest.raises(ValueError, match="no fp32 master weights"):
        make_optimiser(bf16(), config).load_state_dict(optimiser.state_dict())


def fp16():
    return load_policy("tiny", dtype="float16", device=DEVICE)


@pytest.mark.full
def test_float16_learns_what_fp32_learns_since_its_losses_are_scaled():
    """Divided by many tokens, a loss has gradients below the smallest number of float16 without the scale."""
    small, gradients = SFTConfig(token_budget=100), {}
    for name, policy in (("fp32", load_policy("tiny", device=DEVICE)), ("scaled", fp16()), ("plain", fp16())):
        make_optimiser(policy, small)
        policy.loss_scale = 1.0 if name == "plain" else policy.loss_scale
        sft_gradient(policy, examples(policy), small, denominator=10**6)
        of = [p.grad.double().flatten() / policy.loss_scale for p in policy.model.parameters()]
        gradients[name] = torch.cat(of)
    errors = {name: float((gradients[name] - gradients["fp32"]).norm() / gradients["fp32"].norm()) for name in gradients}
    assert errors["scaled"] < 0.01 and errors["plain"] > 0.1, errors
    policy, exact = fp16(), load_policy("tiny", device=DEVICE)
    rows, theirs = (rows_of(sft(p, examples(p), SFTConfig(steps=8, batch_size=8, lr=1e-3))) for p in (policy, exact))
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in theirs], rel=0.02)
    assert {r["loss_scale"] for r in rows} == {2.0**14} and "loss_scale" not in theirs[0]


@pytest.mark.full
def test_a_scale_that_is_too_large_costs_steps_but_no_weights_and_is_kept_by_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(optimisers, "FIRST_SCALE", 2.0**25)
    config, began = SFTConfig(steps=40, batch_size=4, lr=1e-3, save_every=1), weights(fp16())
    policy = fp16()
    rows = rows_of(sft(policy, examples(policy), config, run=Run(root=tmp_path)), 2)
    assert [r["lr"] for r in rows] == [0.0, 0.0] and [r["loss_scale"] for r in rows] == [2.0**24, 2.0**23]
    assert policy.version == 0 and all(torch.equal(a, b) for a, b in zip(began, weights(policy)))
    again = fp16()
    rows = rows_of(sft(again, examples(again), config, run=Run(root=tmp_path)), 12)
    assert rows[0]["loss_scale"] == 2.0**22 and rows[-1]["lr"] > 0 and rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.full
@pytest.mark.parametrize("exact", [False, True])
def test_grpo_in_bf16_has_a_ratio_of_one_in_exact_mode(exact):
    policy = bf16()
    config = GRPOConfig(steps=2, prompts_per_step=16, group_size=8, max_new_tokens=21, lr=1e-4, warmup=0, exact=exact)
    rows = rows_of(grpo(policy, None, PROBLEMS, config, reward=lambda text, row, rollout: float(len(set(rollout.tokens)))))
    drift = [row["diff_max"] for row in rows]
    assert drift == [0.0, 0.0] if exact else max(drift) > 0


@pytest.mark.full
def test_an_exact_run_is_replayed_and_its_updates_are_done_again(tmp_path):
    policy, run = bf16(), Run(root=tmp_path, replay_every=4)
    config = GRPOConfig(steps=3, prompts_per_step=2, group_size=4, max_new_tokens=48, lr=1e-3, warmup=0, exact=True)
    reward = lambda text, row, rollout: float(len(set(rollout.tokens)))  # noqa: E731
    rows_of(grpo(policy, None, PROBLEMS, config, reward=reward, run=run))
    found = replay(run, 2)
    assert found.equal, str(found)
    carried = replay_bundle(bundle(run, 2, tmp_path / "step.zip"))
    assert carried.equal, str(carried)


def test_a_plan_counts_the_master_weights():
    wide, narrow = (plan(load_policy("tiny", dtype=dtype, device=DEVICE), SFTConfig(batch_size=2), prompt_tokens=4,
                         completion_tokens=4).memory for dtype in ("float32", "bfloat16"))
    assert 2 * narrow["parameters"] == narrow["gradients"] == wide["parameters"] and "master weights" not in wide
    assert narrow["optimiser (adamw)"] == wide["optimiser (adamw)"] == 2 * narrow["master weights"]
