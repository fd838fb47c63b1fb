"""Advantages: hand numbers, abstention, and exactly zero for groups without signal."""

import math

import pytest
import torch

from grpolab.train import advantages as adv

KINDS = ("centred", "standardised", "leave_one_out", "batch_standardised")
NAN = float("nan")


def reference(rewards, kind):
    """The definitions in plain Python over lists, None for an abstention."""
    everything = [r for row in rewards for r in row if r is not None]
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    std = lambda xs: math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))  # noqa: E731
    out = []
    for row in rewards:
        known = [r for r in row if r is not None]
        out.append([])
        for i, r in enumerate(row):
            if r is None or max(known) == min(known):
                out[-1].append(0.0)
            elif kind == "centred":
                out[-1].append(r - mean(known))
            elif kind == "standardised":
                out[-1].append((r - mean(known)) / (std(known) + 1e-4))
            elif kind == "leave_one_out":
                out[-1].append(r - mean([x for j, x in enumerate(row) if j != i and x is not None]))
            else:
                out[-1].append((r - mean(known)) / (std(everything) + 1e-4))
    return torch.tensor(out, dtype=torch.float64)


def test_advantages_equal_the_plain_python_definitions():
    for kind in KINDS:
        rewards = [[1.0, 0.0, 0.25, 2.0], [0.5, None, 1.0, 0.0], [0.75, 0.75, 0.75, 0.75], [None, 3.0, None, None]]
        ours = adv.advantages(adv.reward_tensor(rewards).double(), kind)
        torch.testing.assert_close(ours, reference(rewards, kind), atol=1e-12, rtol=0)


def test_the_hand_numbers_of_one_right_in_eight():
    rewards = torch.tensor([[1.0] + [0.0] * 7], dtype=torch.float64)
    assert adv.advantages(rewards)[0, 0].item() == 0.875
    assert adv.advantages(rewards, "leave_one_out")[0, 0].item() == 1.0
    # ddof = 1 and 1e-4 give 2.474; ddof = 0 would give 2.646
    one_right = adv.advantages(rewards, "standardised")[0, 0].item()
    assert one_right == pytest.approx(0.875 / (math.sqrt(0.125) + 1e-4), abs=1e-12)


def test_equal_rewards_are_exactly_zero_at_any_size_and_value():
    for kind in KINDS:
        for size in (1, 2, 3, 4, 7, 8, 16, 32):
            constants = torch.arange(1, 200)[:, None] / 100
            assert adv.advantages(constants.expand(-1, size), kind).eq(0).all()


def test_advantages_of_a_group_sum_to_zero_and_ignore_the_order():
    for kind in KINDS:
        rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rewards[2, 3] = NAN
        a, order = adv.advantages(rewards, kind), torch.tensor([3, 1, 5, 0, 2, 4])
        assert a.sum(1).abs().max() < 1e-12 and a.abs().sum(1).min() > 0.1
        torch.testing.assert_close(adv.advantages(rewards[:, order], kind), a[:, order], atol=1e-12, rtol=0)


def test_abstaining_rewards_get_zero_and_leave_the_rest_as_if_they_were_not_there():
    for kind in KINDS:
        rest = torch.tensor([[1.0, 0.0, 0.5], [2.0, 0.0, 0.0]])
        with_nan = torch.cat([rest, torch.full((2, 1), NAN)], 1)
        a = adv.advantages(with_nan, kind)
        assert a[:, 3].eq(0).all()
        torch.testing.assert_close(a[:, :3], adv.advantages(rest, kind))
        assert adv.advantages(torch.full((2, 4), NAN), kind).eq(0).all()


def test_informative_is_two_different_rewards():
    rewards = adv.reward_tensor([[0, 1], [1, 1], [None, 1], [None, None], [0.1, 0.1 + 1e-7]])
    assert adv.informative(rewards).tolist() == [True, False, False, False, True]


def test_group_health_shares():
    rewards = adv.reward_tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1], [1, None, 1], [None, None, None], [0.2, 0.1, 0.2]])
    assert adv.group_health(rewards) == pytest.approx(
        {"all_wrong": 2 / 5, "mixed": 1 / 5, "all_right": 2 / 5, "uninformative": 3 / 5}
    )
    assert adv.group_health(rewards, right=0.15)["mixed"] == pytest.approx(2 / 5)
    assert adv.group_health(torch.full((2, 3), NAN))["mixed"] == 0.0


def test_bad_rewards_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\(B, G\)"):
        adv.advantages(torch.zeros(4))
    with pytest.raises(ValueError, match="infinite"):
        adv.advantages(torch.tensor([[0.0, float("inf")]]))
    with pytest.raises(ValueError, match="'median'"):
        adv.advantages(torch.zeros(2, 2), "median")
    with pytest.raises(ValueError, match=r"sizes \[1, 2\]"):
        adv.reward_tensor([[1.0, 2.0], [1.0]])
