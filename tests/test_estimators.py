"""The bench for estimators against what theory says of them, and against its own naive form."""

import itertools
import json
import math

import pandas as pd
import pytest
import torch

from grpolab.lab import estimators
from grpolab.lab.estimators import (
    OFF_POLICY,
    ON_POLICY,
    bench,
    draw,
    measure,
    policy_gradient,
    stale,
    successor,
)
from grpolab.runs.run import repository


@pytest.fixture(scope="module")
def problem():
    return successor(1)


def test_the_problem_is_complete_and_its_scores_belong_to_its_probabilities(problem):
    """Sum p = 1, and its derivative by every weight, sum p grad log p, is 0."""
    p = problem.now.sum(-1).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(2, dtype=p.dtype), atol=1e-12, rtol=0)
    assert len(problem.tokens) == 15 and problem.rewards.sum(1).tolist() == [2, 1] and 0 < p.min()
    assert ((p[..., None] * problem.mask).flatten() @ problem.scores).abs().max() < 1e-12
    assert problem.gradient.norm() > 0.01


def by_hand(problem, size):
    """Mean and variance of leave-one-out over all ordered groups, one at a time, from the scores alone."""
    scores = problem.scores.view(2, 15, 3, -1).mul(problem.mask[..., None]).sum(2)
    p, terms = problem.now.sum(-1).exp(), []
    for x in range(2):
        for group in itertools.product(range(15), repeat=size):
            r = [problem.rewards[x, c].item() for c in group]
            a = [r[i] - (sum(r) - r[i]) / (size - 1) for i in range(size)]
            weight = math.prod(p[x, c].item() for c in group) / 2
            terms.append((weight, sum(a[i] * scores[x, c] for i, c in enumerate(group)) / size))
    mean = sum(w * g for w, g in terms)
    return mean, sum(w * (g - mean).square().sum() for w, g in terms).item()


def test_it_is_what_all_ordered_groups_give_by_hand(problem):
    mean, variance = by_hand(problem, 2)
    found = measure(problem, policy_gradient(), group_size=2)
    norm = problem.gradient.norm().item()
    assert found["how"] == "exact" and found["variance"] == pytest.approx(variance / norm**2, rel=1e-9)
    assert (mean - problem.gradient).norm() / norm < 1e-10


def test_baselines_as_theory_says(problem, size=2):
    table = bench(problem, {k: ON_POLICY[k] for k in list(ON_POLICY)[:5]}, group_size=size).set_index("estimator")
    for name in ("no baseline", "leave one out"):
        assert table["bias"][name] < 1e-10
    mean, constant = table.loc["group mean"], table.loc["group mean, constant (Dr. GRPO)"]
    for row, factor in ((mean, 1), (constant, 3)):
        assert row["scale"] == pytest.approx((size - 1) / size / factor) and row["cosine"] == pytest.approx(1, abs=1e-12)
        assert row["noise"] == pytest.approx(table["noise"]["leave one out"])


@pytest.mark.parametrize("who", [
    lambda p: stale(p, 8), *(pytest.param(who, marks=pytest.mark.full)
                             for who in (estimators.bf16, lambda p: estimators.top_p(p, 0.95)))])
def test_only_weights_of_whole_sequences_are_exact_for_another_sampler_and_only_if_it_can_draw_everything(problem, who):
    table = bench(problem, OFF_POLICY, {"other": who(problem)}, group_size=2).set_index("estimator")
    exact = table["bias"]["weights of sequences"] < 1e-10
    assert exact == bool((who(problem).drawn > -math.inf).all())
    assert (table["bias"][[name for name in table.index if not name.startswith("weights of sequences")]] > 1e-6).all()


@pytest.mark.full
def test_sampled_batches_agree_with_all_of_them_and_variance_falls_with_groups(problem, monkeypatch):
    exact = measure(problem, policy_gradient(), group_size=2)
    monkeypatch.setattr(estimators, "ENUMERATED", 0)
    drawn = measure(problem, policy_gradient(), group_size=2, draws=3000)
    assert drawn["how"] == "3,000 draws" and drawn == measure(problem, policy_gradient(), group_size=2, draws=3000)
    for name in ("variance", "batch_cosine"):
        assert abs(drawn[name] - exact[name]) < 4 * drawn[f"{name}_error"]
    assert drawn["bias"] < 3 * drawn["bias_error"]
    several = measure(problem, policy_gradient(), group_size=2, groups=8, draws=1000)
    assert abs(several["variance"] - exact["variance"] / 8) < 4 * several["variance_error"]
    assert several["batch_cosine"] > exact["batch_cosine"]


def test_a_function_of_ones_own_stands_beside_them(problem):
    """The example at the top of the file: a constant baseline is unbiased."""
    def mine(batch):
        return -(batch.logps * batch.mask).sum(1) @ (batch.rewards.flatten() - 0.2) / len(batch.mask)

    samplers = {"policy": stale(problem), "old": stale(problem, 4)}
    table = bench(problem, {"mine": mine}, samplers, groups=(1, 2), group_size=2, draws=50)
    assert list(table["sampler"]) == ["policy"] * 2 + ["old"] * 2 and list(table["samples"]) == [2, 4] * 2
    assert table["bias"][0] < 1e-10 < table["bias"][2] and list(table["how"][:2]) == ["exact", "50 draws"]


@pytest.mark.full
def test_on_policy_no_correction_changes_leave_one_out(problem):
    """All ratios are 1 there; a clip, a cap or a weight acts on nothing."""
    corrections = {name: of for name, of in OFF_POLICY.items() if name not in ON_POLICY}
    table = bench(problem, corrections, group_size=2)
    one = measure(problem, policy_gradient(), group_size=2)
    assert len(table) == 10 and table["bias"].max() < 1e-9
    assert table["variance"].tolist() == pytest.approx([one["variance"]] * 10, rel=1e-9)


RECORD = json.loads((repository() / "benchmarks" / "results" / "estimators.json").read_text())


def over_problems(record: dict) -> pd.DataFrame:
    """Estimator -> means over the record's problems: `bias`, `noise` (of that of leave-one-out) and `on-policy`, the cosine of
    the mean gradient and the true one; then this cosine for each other sampler, where it was measured."""
    problems = [{part: pd.DataFrame(of[part]) for part in ("on_policy", "off_policy")} for of in record["seeds"].values()]
    tables = []
    for of in problems:
        on = of["on_policy"].set_index("estimator")
        table = on[["bias"]].assign(noise=on["noise"] / on["noise"]["leave one out"], **{"on-policy": on["cosine"]})
        off = of["off_policy"].pivot(index="estimator", columns="sampler", values="cosine")
        tables.append(table.join(off[of["off_policy"]["sampler"].unique()]))
    return sum(tables) / len(tables)


def test_the_table_and_the_figure_are_of_the_record():
    table = over_problems(RECORD)
    assert list(table.index) == [*ON_POLICY, *(k for k in OFF_POLICY if k not in ON_POLICY)]
    cosines = [row["cosine"] for of in RECORD["seeds"].values() for row in of["off_policy"]
               if (row["estimator"], row["sampler"]) == ("clip 0.2", "16 updates old")]
    assert len(cosines) == 3 and table.loc["clip 0.2", "16 updates old"] == pytest.approx(sum(cosines) / 3)
    assert table.loc["leave one out", "noise"] == 1 and table.loc["no baseline", ["bf16"]].isna().all()
    stale_axis, grown = draw(RECORD).axes
    assert "clip 0.2" in stale_axis.get_title() + stale_axis.get_title(loc="left")  # where the style has it
    for ax in (stale_axis, grown):
        drawn = {line.get_label(): line.lines[0].get_ydata() for line in ax.containers}
        assert set(drawn) <= {*ON_POLICY, *OFF_POLICY} and len(drawn) >= 3
    assert drawn["leave one out"][-1] > drawn["mean per sequence"][-1] + 0.02


def test_the_page_shows_the_table():
    page = (repository() / "docs" / "estimators.md").read_text()
    for name, row in over_problems(RECORD).iterrows():
        cells = " | ".join("" if math.isnan(x) else f"{x:.2f}" for x in row)
        assert f"| {name} | {cells} |" in page
