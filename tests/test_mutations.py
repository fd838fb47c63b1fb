"""Every mutant of the losses and advantages is killed by the test named before it.

A mutant is the module with one text replaced; its killer must fail on it by an assertion (a mutant that merely
breaks with another error is not killed), and pass on the module as it is.
"""

import importlib.util
import inspect
import sys

import pytest
import test_advantages
import test_expected_gradients
import test_invariance
import test_losses

from grpolab.train import advantages, losses

FORMULA = "policy_loss_equals_an_independent_formula_in_every_option"
LOSSES = [
    ("token_logps_value_and_gradient_equal_the_plain_form", "x.div_(temperature)", "x.div_(1)"),
    ("token_logps_value_and_gradient_equal_the_plain_form",
     "h, g = hidden[at], grad[at, None] / -ctx.temperature", "h, g = hidden[at], -grad[at, None]"),
    ("token_logps_value_and_gradient_equal_the_plain_form", "return total.addmm_(a, b)", "return a @ b"),
    ("token_logps_value_and_gradient_equal_the_plain_form",
     "grad_bias = _added(grad_bias, dlogits.T", "grad_bias = _added(None, dlogits.T"),
    ("token_logps_value_and_gradient_equal_the_plain_form", ".scatter_add_(1, y, at_y.new_full((), -1.0).expand_as(y))", ""),
    ("token_logps_value_and_gradient_equal_the_plain_form",
     "targets[at], ctx.temperature, with_dlogits=True)", "targets[at], 1.0, with_dlogits=True)"),
    ("autocast_gives_the_same_gradients_chunked_or_not_even_around_the_backward",
     "with torch.autocast(h.device.type, enabled=False):\n                if", "if True:\n                if"),
    ("no_tensor_of_all_logits_exists_in_the_forward_or_the_backward",
     "zip(hidden.split(chunk), targets.split(chunk))", "((hidden, targets),)"),
    ("half_precision_products_are_normalised_in_fp32",
     "entropies, dtype = [], [], torch.promote_types(logits.dtype, torch.float32)", "entropies, dtype = [], [], logits.dtype"),
    ("entropy_comes_with_the_logps_and_carries_no_gradient",
     "x.mul_(mass).sum(1, keepdim=True) / total", "x.mul_(mass).sum(1, keepdim=True)"),
    ("entropy_comes_with_the_logps_and_carries_no_gradient", "x.clamp_(min=torch.finfo(dtype).min)", "x"),
    ("entropy_comes_with_the_logps_and_carries_no_gradient", "ctx.mark_non_differentiable(entropies)", "pass"),
    ("the_end_token_is_trained_for_every_eos_id_and_also_where_pad_is_eos",
     "    return mask.bool()\n", "    return mask.bool() & (mask.flip(1).cumsum(1).flip(1) > 1)  # drop the end token\n"),
    ("what_is_masked_moves_nothing_whatever_it_holds", "return x.masked_fill(~keep, 0)", "return x * keep"),
    ("the_gradient_does_not_know_the_micro_batches", "return total / denominator", "return total / terms.sum()"),
    ("the_gradient_does_not_know_the_micro_batches", "v.amax() if", "v.sum() if"),
    ("a_batch_without_tokens_is_zero_with_zero_gradient",
     "if denominator == 0 and not bool(terms.any()):\n        return total ",
     "if denominator == 0:\n        return total / denominator "),
    ("bad_input_is_refused_by_name", "if denominator == 0 and not bool(terms.any()):", "if denominator == 0:"),
    ("the_gradient_does_not_know_the_padding",
     "x = x / keep.sum(1, keepdim=True).clamp(min=1)\n    return", "x = x / keep.shape[1]\n    return"),
    ("counts_by_aggregation", "        return keep.sum()\n", "        return keep.sum() * 0 + keep.numel()\n"),
    ("counts_by_aggregation", "keep.any(1).sum() *", "keep.all(1).logical_not().sum() *"),
    ("sft_loss_is_cross_entropy_of_the_kept_tokens", "loss = -aggregate(", "loss = aggregate("),
    ("dpo_at_initialisation_is_log_two_with_gradient_half_beta", "accuracy=delta > 0", "accuracy=delta >= 0"),
    ("dpo_at_initialisation_is_log_two_with_gradient_half_beta",
     "chosen_logps - ref_chosen_logps.detach(), rejected_logps", "chosen_logps, rejected_logps"),
    ("bradley_terry_by_hand", "accuracy=gap > 0", "accuracy=gap < 0"),
    ("bradley_terry_by_hand", "F.logsigmoid(gap - margin)", "F.logsigmoid(gap + margin)"),
    ("bradley_terry_by_hand",
     "+ centering * (chosen_rewards + rejected_rewards)", "+ centering * (chosen_rewards - rejected_rewards)"),
    ("dpo_loss_by_hand", "delta = chosen - rejected", "delta = rejected - chosen"),
    ("dpo_loss_by_hand", "F.logsigmoid(-beta * delta)", "F.logsigmoid(beta * delta)"),
    ("dpo_loss_by_hand", "1 / (2 * beta)", "1 / beta"),
    ("dpo_loss_by_hand", "(1 - beta * delta).clamp(min=0)", "(1 - beta * delta)"),
    ("dpo_loss_by_hand", "chosen / lengths[0], rejected / lengths[1]", "chosen / lengths[1], rejected / lengths[0]"),
    ("dpo_loss_by_hand", "-(1 - label_smoothing) *", "-"),
    (FORMULA, "-torch.minimum(r * a, clipped * a)", "-torch.maximum(r * a, clipped * a)"),
    (FORMULA, "-torch.minimum(r * a, clipped * a)", "-(clipped * a)"),
    (FORMULA, "-torch.minimum(r * a, clipped * a)", "-(r * a)"),
    (FORMULA, "r.clamp(1 - clip_eps[0], 1 + clip_eps[1])", "r.clamp(1 - clip_eps[1], 1 + clip_eps[0])"),
    (FORMULA, "torch.minimum(x, -dual_clip * a)", "torch.maximum(x, -dual_clip * a)"),
    (FORMULA, "torch.where(a < 0, torch.minimum", "torch.where(a > 0, torch.minimum"),
    (FORMULA, "-clipped.detach() * a * logps", "-clipped * a * logps"),
    (FORMULA, "-clipped.detach() * a * logps", "-r.detach() * a * logps"),
    ("metrics_of_the_policy_loss_by_hand", "(r < 1 - clip_eps[0]) & (a < 0)", "(r < 1 - clip_eps[0])"),
    ("metrics_of_the_policy_loss_by_hand", "(r > 1 + clip_eps[1]) & (a > 0)", "(r > 1 + clip_eps[1])"),
    ("token_sums_have_the_true_policy_gradient_and_row_means_do_not",
     "-torch.minimum(r * a, clipped * a)", "torch.minimum(r * a, clipped * a)"),
    ("the_defaults_are_ppo_at_a_fifth_over_the_tokens", "clip_eps=(0.2, 0.2)", "clip_eps=(0.2, 0.28)"),
    (FORMULA, "log_ratio.sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp(min=1)", "log_ratio.sum(1, keepdim=True)"),
    (FORMULA, "(old_logps - sampled).clamp(max=math.log(sampler_cap)).exp()", "(old_logps - sampled).exp()"),
    ("exploding_ratios_overflow_nothing_in_fp32",
     "return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()", "return log_ratio.exp()"),
    ("exploding_ratios_overflow_nothing_in_fp32",
     "x = kl * _exp(log_ratio)", "x = kl * log_ratio.exp()"),
    ("importance_weights_correct_a_sampler_that_is_not_the_policy",
     "(old_logps - sampled).clamp", "(sampled - old_logps).clamp"),
    ("importance_weights_correct_a_sampler_that_is_not_the_policy",
     "x = x * weight", "x = x"),
    ("old_and_reference_logps_are_constants_even_when_they_come_with_a_graph",
     "_fill(old_logps, keep).detach()\n    sampled", "_fill(old_logps, keep)\n    sampled"),
    ("old_and_reference_logps_are_constants_even_when_they_come_with_a_graph", "ref_chosen_logps.detach()", "ref_chosen_logps"),
    ("old_and_reference_logps_are_constants_even_when_they_come_with_a_graph",
     '_fill(ref_logps, keep).detach(), "k3"', '_fill(ref_logps, keep), "k3"'),
    ("old_and_reference_logps_are_constants_even_when_they_come_with_a_graph",
     "(logps if old_logps is None else _fill(old_logps, keep)).detach()", "(logps if old_logps is None else old_logps)"),
    ("metrics_of_the_policy_loss_by_hand", "(r > dual_clip) & (a < 0)", "(r > dual_clip) & (a > 0)"),
    ("metrics_of_the_policy_loss_by_hand", '"diff_abs_mean": (logps - sampled)', '"diff_abs_mean": (logps - old_logps)'),
    ("kl_estimates_by_hand", "d = (ref_logps - logps).clamp", "d = (logps - ref_logps).clamp"),
    ("kl_estimates_by_hand", "d**2 / 2", "d**2"),
    ("kl_estimates_by_hand", "d.expm1() - d", "d.exp() - d"),
    ("kl_penalties_on_policy", "x = kl * _exp(log_ratio)", "x = kl"),
    ("kl_penalties_on_policy", "kl * _exp(log_ratio)", "kl * _exp(log_ratio.detach())"),
    ("kl_penalties_on_policy", "kl * _exp(log_ratio)", "kl.detach() * _exp(log_ratio)"),
    ("the_unbiased_kl_penalty_stays_so_off_policy_and_k2_does_not",
     "(logps if old_logps is None else _fill(old_logps, keep)).detach()", "logps.detach()"),
]

ADVANTAGES = [
    ("the_hand_numbers_of_one_right_in_eight", "(squares / (n - 1)).sqrt()", "(squares / n).sqrt()"),
    ("the_hand_numbers_of_one_right_in_eight", "STD_FLOOR = 1e-4", "STD_FLOOR = 1e-8"),
    ("equal_rewards_are_exactly_zero_at_any_size_and_value", " | ~informative(rewards)[:, None]", ""),
    ("informative_is_two_different_rewards", "> ROUNDING * torch.maximum(low.abs(), high.abs())", "> 1e-4"),
    ("informative_is_two_different_rewards", "high - low > ROUNDING", "high - low > -ROUNDING"),
    ("advantages_of_a_group_sum_to_zero_and_ignore_the_order", "rewards - rewards.nanmean(1, keepdim=True)", "rewards"),
    ("advantages_equal_the_plain_python_definitions",
     "rewards - rewards.nanmean(1, keepdim=True)", "rewards - rewards.nanmean()"),
    ("advantages_equal_the_plain_python_definitions", "_std(rewards.flatten(), dim=0)", "_std(rewards, dim=1)"),
    ("abstaining_rewards_get_zero_and_leave_the_rest_as_if_they_were_not_there",
     "rewards - rewards.nanmean(1, keepdim=True)", "rewards - rewards.mean(1, keepdim=True)"),
    ("abstaining_rewards_get_zero_and_leave_the_rest_as_if_they_were_not_there",
     "a = centred * n / (n - 1)", "a = centred * rewards.shape[1] / (rewards.shape[1] - 1)"),
    ("abstaining_rewards_get_zero_and_leave_the_rest_as_if_they_were_not_there",
     "rewards.isnan() | ~informative", "~informative"),
    ("group_baselines_scale_the_true_gradient_and_leave_one_out_does_not", "a = centred * n / (n - 1)", "a = centred"),
    ("group_health_shares", "(rewards >= right)", "(rewards > right)"),
    ("group_health_shares", "rewards = rewards[~rewards.isnan().all(1)]", ""),
]

SUITES = (test_advantages, test_expected_gradients, test_invariance, test_losses)
KILLERS = {name.removeprefix("test_"): test for suite in SUITES for name, test in vars(suite).items() if "test_" in name}
MUTANTS = [(losses, *m) for m in LOSSES] + [(advantages, *m) for m in ADVANTAGES]


def run_with(monkeypatch, folder, module, source, killer):
    """The test `killer` with `module` replaced by what `source` defines."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or the next mutant could be read from this one's cache
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    for suite in SUITES:
        for name, value in vars(suite).copy().items():
            if value is module:
                monkeypatch.setattr(suite, name, mutant)
    KILLERS[killer]()


@pytest.mark.parametrize("module, killer, old, new", MUTANTS, ids=[f"{i}-{m[2][:40]}" for i, m in enumerate(MUTANTS)])
def test_the_mutant_is_killed_by_its_test(monkeypatch, tmp_path, module, killer, old, new):
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the text to mutate must occur once: {old!r}"
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError)):  # ValueError: what the losses refuse
        run_with(monkeypatch, tmp_path, module, source.replace(old, new), killer)


def test_the_unchanged_sources_survive_every_killer(monkeypatch, tmp_path):
    for module in (losses, advantages):
        for killer in sorted({m[1] for m in MUTANTS if m[0] is module}):
            run_with(monkeypatch, tmp_path, module, inspect.getsource(module), killer)
