"""Values of prefixes where they are known."""

import pytest
import torch
from loop_helpers import digits, rows_of

from grpolab.lab.credit import Credit, credit_of
from grpolab.models.load import load_policy
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo
from tests.test_rollout_log import PROBLEMS


def first_is_a_one(text, problem, rollout):
    return float(text.startswith("1"))


def p_of_a_one(policy, prompt):
    """By the model's own forward."""
    with torch.no_grad():
        p = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    return sum(p[i].item() for i in range(len(p)) if policy.decode([i]).startswith("1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run("x", root=tmp_path_factory.mktemp("runs"), replay_every=2)
    config = GRPOConfig(steps=2, prompts_per_step=2, group_size=4, max_new_tokens=6, lr=1e-3)
    rows_of(grpo(load_policy("tiny", device="cpu"), None, PROBLEMS, config, reward=digits, run=run))
    return run


def test_a_value_is_the_expected_reward_and_the_credits_add_up(run, tiny):
    r = run.recorder.groups(0)[1].group[2]  # of the first step, so the policy is the embedded model
    found = credit_of(run, 0, 1, 2, first_is_a_one, continuations=128)
    p, own = p_of_a_one(tiny, list(r.prompt)), first_is_a_one(tiny.decode(r.tokens), None, None)
    assert 0.05 < p < 0.97 and abs(found.values[0] - p) < 4 * (p * (1 - p) / 128) ** 0.5
    assert found.errors[0] == pytest.approx((p * (1 - p) / 128) ** 0.5, rel=0.3)
    assert set(found.values[1:]) == {own} and set(found.errors[1:]) == {0.0}  # all is decided by the first token
    assert sum(found.credits) == pytest.approx(own - found.values[0]) and set(found.credits[1:]) <= {0.0}
    assert "".join(found.tokens).startswith(tiny.decode(r.tokens))


def test_the_figure_shows_blanks_and_whole_tokens():
    left, right = Credit(("1", " ", "\n", "$"), (0.2, 0.2, 0.2, 0.2, 1.0), (0.1,) * 5, 0.5).plot()
    assert [t.get_text() for t in right.get_xticklabels()] == ["1", "␣", "↵", r"\$"]
    assert all(tick == int(tick) for tick in left.get_xticks())
    assert r"Token 3, '\$', decides: +0.80" in right.get_title(loc="left") + right.get_title()


def test_the_policy_that_wrote_it_goes_on_from_every_prefix(run):
    seen = []
    found = credit_of(run, 1, 1, 2, lambda text, problem, r: seen.append((problem, r)) or digits(text, problem, r),
                      continuations=4)
    g = run.recorder.groups(1)[1]
    r, n = g.group[2], len(g.group[2].tokens)
    assert found.advantage == g.advantages[2] and found.values[-1] == r.reward
    assert len(seen) == 4 * n + 1 and seen[0][0] in PROBLEMS and seen[-1][1] == r
    assert all(len(x.tokens) <= 6 and x.prompt == r.prompt for _, x in seen)
    assert all(x.tokens[:2] == r.tokens[:2] for _, x in seen[8:12])
    with pytest.raises(ValueError, match="rollouts 0 to 3, not 4"):
        credit_of(run, 1, 1, 4, digits)
    with pytest.raises(ValueError, match="continuations must be at least 2"):
        credit_of(run, 1, 1, 2, digits, continuations=1)
