"""Values of prefixes where they are known."""

import asyncio

import pytest
import torch

from grpolab.chat import prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.lab.credit import Credit, credit, credit_of
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo
from tests.test_rollout_log import PROBLEMS, digits


def first_is_a_digit(text, problem, rollout):
    return float(text[:1].isdigit())


def p_of_a_digit(policy, prompt):
    """By the model's own forward."""
    with torch.no_grad():
        p = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    return sum(p[i].item() for i in range(len(p)) if policy.decode([i])[:1].isdigit())


@pytest.fixture
def asked(tiny):
    return prompt_ids(tiny.tokenizer, "What is 3 + 4?")


def test_a_value_is_the_expected_reward_and_the_credits_add_up(tiny, asked):
    with Sampler(tiny) as sampler:
        rollout = sampler.sample_sync([asked], params=SamplingParams(max_new_tokens=6, seed=1))[0][0]
    found = credit(tiny, rollout, first_is_a_digit, None, max_new_tokens=6, continuations=128, advantage=0.4)
    p, own = p_of_a_digit(tiny, asked), first_is_a_digit(tiny.decode(rollout.tokens), None, None)
    assert 0.05 < p < 0.95 and abs(found.values[0] - p) < 4 * (p * (1 - p) / 128) ** 0.5
    assert found.errors[0] == pytest.approx((p * (1 - p) / 128) ** 0.5, rel=0.3)
    assert set(found.values[1:]) == {own} and set(found.errors[1:]) == {0.0}  # all is decided by the first token
    assert sum(found.credits) == pytest.approx(own - found.values[0]) and found.credits[1:] == [0.0] * 5
    assert "".join(found.tokens) == tiny.decode(rollout.tokens)
    table = found.table()
    assert table["credit"].iloc[0] == found.credits[0] and (table["advantage"] == 0.4).all()
    axes = found.plot()
    assert axes[0].get_ylabel() == "value of the prefix" and "Token 0" in axes[1].get_title(loc="left") + axes[1].get_title()


def test_the_picture_shows_blanks_and_whole_tokens():
    found = Credit(("1", " ", "\n", "$"), (0.2, 0.2, 0.2, 0.2, 1.0), (0.1,) * 5, 0.5, 1.0)
    axes = found.plot()
    assert [t.get_text() for t in axes[1].get_xticklabels()] == ["1", "␣", "↵", r"\$"]
    assert all(tick == int(tick) for tick in axes[0].get_xticks())
    assert r"Token 3, '\$', decides: +0.80" in axes[1].get_title(loc="left") + axes[1].get_title()


def test_of_a_recorded_rollout_by_the_policy_that_wrote_it(tiny, tmp_path):
    run = Run("x", root=tmp_path, replay_every=2)
    config = GRPOConfig(steps=2, prompts_per_step=2, group_size=4, max_new_tokens=4, lr=1e-3)

    async def cell():
        async for _ in grpo(tiny, None, PROBLEMS, config, reward=digits, run=run):
            pass

    asyncio.run(cell())
    seen = []
    found = credit_of(run, 1, 1, 2, lambda text, problem, r: seen.append((problem, r)) or digits(text, problem, r),
                      continuations=4)
    g = run.recorder.groups(1)[1]
    assert found.advantage == g.advantages[2] and found.values[-1] == found.reward == g.group[2].reward
    assert len(seen) == 4 * 4 + 1 and seen[0][0] in PROBLEMS and seen[-1][1] == g.group[2]
    assert all(len(r.tokens) <= 4 and r.prompt == g.group[2].prompt for _, r in seen)
    assert all(r.tokens[:2] == g.group[2].tokens[:2] for _, r in seen[8:12])
    with pytest.raises(ValueError, match="rollouts 0 to 3, not 4"):
        credit_of(run, 1, 1, 4, digits)
    with pytest.raises(ValueError, match="continuations must be at least 2"):
        credit(tiny, g.group[2], digits, None, max_new_tokens=4, continuations=1)
