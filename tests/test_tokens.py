"""Completions token by token: the shades follow the numbers, nothing from outside becomes markup."""

import re
from html import unescape

import pytest

from grpolab.lab.tokens import DOWN, UP, by_step, group_view, tokens_html
from grpolab.models.load import load_policy
from grpolab.rollouts import Group, Rollout


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny", device="cpu")


def rollout(policy, text, *, mask=None, reward=None, logp=-0.5, finish_reason="eos"):
    tokens = tuple(policy.tokenizer(text, add_special_tokens=False)["input_ids"])
    logps = (logp,) * len(tokens)
    return Rollout((1,), tokens, mask or (1,) * len(tokens), logps, logps, finish_reason, reward=reward)


def spans(html):
    """(hover, style, text) of each token."""
    found = re.findall(r"<span title='(.*?)' style='(.*?)'>(.*?)</span>", html)
    return [(unescape(hover), style, unescape(text)) for hover, style, text in found]


def opacity(style):
    return float(re.search(r"rgba\([\d,]+,([\d.]+)\)", style)[1])


def test_the_shade_follows_the_sign_and_the_size(policy):
    group = Group((rollout(policy, "12"), rollout(policy, "34")))
    view = group_view(policy, group, by="delta", logps=[[-0.5, 0.5], [-1.0, -0.3]])
    styles = [style for _, style, _ in spans(view.data)]
    assert "rgba" not in styles[0] and UP in styles[1] and DOWN in styles[2] and UP in styles[3]
    assert opacity(styles[1]) == 0.7 and opacity(styles[2]) == 0.45 and opacity(styles[3]) < opacity(styles[2])
    halved = group_view(policy, group, by="delta", logps=[[-0.5, 0.5], [-1.0, -0.3]], scale=2.0)
    assert opacity(spans(halved.data)[1][1]) == 0.45
    assert DOWN in spans(group_view(policy, group, by="logp").data)[0][1]


def test_hover_shows_every_number(policy):
    view = group_view(policy, [rollout(policy, "1")], by="logp", advantages=[1], logps=[[-0.25, 9.0]])  # padded logps are cut
    assert spans(view.data)[0][0] == "advantage +1 · logp -0.5 · delta +0.25"


def test_what_the_environment_wrote_is_outlined_and_not_shaded(policy):
    view = group_view(policy, [rollout(policy, "12", mask=(1, 0))], advantages=[1.0])
    (_, chosen, _), (hover, written, _) = spans(view.data)
    assert "rgba" in chosen and "outline" not in chosen
    assert "background" not in written and "outline" in written and "the environment" in hover
    assert "written by the environment" in view.data


def test_verdict_and_reward_stand_apart_from_the_completion(policy):
    texts = ["= \\boxed{75}.", "= \\boxed{74}.", "75"]
    group = [rollout(policy, t, reward=x) for t, x in zip(texts, (1.0, 0.0, None))]
    group.append(rollout(policy, texts[0], finish_reason="length"))
    view = group_view(policy, group, by="logp", question="28 + 47?", answer=75)
    cells = [re.findall(r"<td style='text-align:left[^']*'>(.*?)</td>", row) for row in view.data.split("<tr>")[2:]]
    assert [c[0] for c in cells] == ["1", "0", "–", "–"]
    assert [c[1] for c in cells] == ["✓ right", "✗ 74, not 75", "✗ no \\boxed{}", "✓ right, cut (length)"]
    assert all("boxed" not in c[0] and c[2].startswith("<span") for c in cells)
    assert ">mine</td>" in group_view(policy, group[:1], by="logp", verdicts=["mine"]).data


def test_tokens_are_shaded_where_the_policy_chose(policy):
    ids = policy.tokenizer("<1 ", add_special_tokens=False)["input_ids"]
    styles = tokens_html(policy.tokenizer, ids, [0, 1, 1]).split("<span")[1:]
    assert [UP in s for s in styles] == [False, True, True] and ["outline" in s for s in styles] == [True, False, False]
    assert "&lt;" in styles[0] and "␣" in styles[2]


def test_hostile_text_stays_text(policy):
    class Hostile:
        tokenizer = type("T", (), {"decode": staticmethod(lambda ids: "'><script>alert(1)</script>")})

        @staticmethod
        def decode(ids):
            return ""

    group = [rollout(policy, "1")]
    view = group_view(Hostile, group, by="logp", question="<script>", verdicts=["<script>"])
    page = by_step({"<script>": view})._repr_html_() + tokens_html(Hostile.tokenizer, [1], [1])
    assert "<script" not in page and "'>&lt;" not in re.search(r"title='(.*?)' style", page)[1]


@pytest.mark.parametrize("by", ["advantage", "delta", "x"])
def test_a_quantity_that_is_not_there_is_refused(policy, by):
    with pytest.raises(ValueError, match=f"by={by!r} is not there.*which needs advantages.*which needs logps"):
        group_view(policy, [rollout(policy, "1")], by=by)
    with pytest.raises(ValueError, match="2 tokens needs as many logps, got 1"):
        group_view(policy, [rollout(policy, "12")], logps=[[-1.0]])
