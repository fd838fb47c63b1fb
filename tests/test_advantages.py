"""Advantages: hand numbers, abstention, and exactly zero for groups without signal."""

import math
from fractions import Fraction

import numpy as np
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
        {"all_wrong": 1 / 5, "mixed": 2 / 5, "all_right": 2 / 5, "uninformative": 3 / 5}
    )
    graded = adv.group_health(adv.reward_tensor([[0.2, 0.7], [0.5, 0.5], [1.0, 1.5]]))  # whose rewards differ, right or not
    assert graded == pytest.approx({"all_wrong": 1 / 3, "mixed": 2 / 3, "all_right": 0, "uninformative": 1 / 3})
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


def test_large_rewards_keep_their_differences():
    """In fp32, 1e9 + 1 is 1e9: the group would look equal, and nothing be learned."""
    rewards = adv.reward_tensor([[1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3], [0.0, 1.0, 2.0, 3.0]])
    assert adv.informative(rewards).tolist() == [True, True]
    for kind in ("centred", "standardised", "leave_one_out"):
        large, small = adv.advantages(rewards, kind)
        assert torch.allclose(large, small, rtol=1e-6) and large.abs().min() > 0.3


def test_what_only_rounding_tells_apart_is_equal():
    rewards = adv.reward_tensor([[0.1 + 0.2, 0.3], [0.3 + 1e-9, 0.3]])
    assert rewards[0, 0] != rewards[0, 1] and adv.informative(rewards).tolist() == [False, True]
    assert not adv.advantages(rewards, "standardised")[0].any()


@pytest.mark.parametrize("given", [1, True, 0.5, np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.5), torch.tensor(0.5),
                                   Fraction(1, 2)])
def test_numbers_of_every_kind_are_rewards(given):
    assert adv.number(given, "r") == float(given) and type(adv.number(given, "r")) is float
    assert adv.number(None, "r") is None and adv.number(float("nan"), "r") is None


@pytest.mark.parametrize("given, kind", [("0.5", "str"), ([1.0], "list"), (1j, "complex"), (torch.ones(1), "Tensor"),
                                         (np.array("0.5"), "str")])
def test_what_is_no_number_is_no_reward(given, kind):
    with pytest.raises(TypeError, match=f"the reward 'mine' gave .* of type {kind}: a reward is a number, or None"):
        adv.number(given, "mine")


@pytest.mark.parametrize("given", [float("inf"), -math.inf, 10**400, torch.tensor(torch.inf)])
def test_a_reward_is_finite(given):
    with pytest.raises(ValueError, match="the reward 'mine' gave a number that is infinite or too large"):
        adv.number(given, "mine")
