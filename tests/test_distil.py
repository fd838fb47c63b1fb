"""On-policy distillation: the divergences, their gradients, and a student that becomes its teacher."""

import dataclasses
import math

import pytest
import torch
from loop_helpers import flat, rows_of

from grpolab.arithmetic import Task, generate
from grpolab.chat import encode_chat, prompt_ids, user
from grpolab.models.load import load_policy
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run
from grpolab.tasks import prompt_of
from grpolab.train import SFTConfig, demonstrations, sft
from grpolab.train.distil import DistilConfig, distil, distil_gradient
from grpolab.train.grpo import trainer_logps
from grpolab.train.logps import as_rollouts
from grpolab.train.losses import divergence
from grpolab.train.sft import sft_gradient

PROBLEMS = generate(64, 0, seed=3, task=Task("+", max_operand=9))[0]
CONFIG = DistilConfig(steps=2, prompts_per_step=4, group_size=2, max_new_tokens=8, lr=1e-3, seed=3)


@pytest.fixture(scope="module")
def teacher():
    policy = load_policy("tiny")
    rows_of(sft(policy, demonstrations(policy, PROBLEMS), SFTConfig(steps=30, batch_size=16, lr=1e-3)))
    return policy


@pytest.fixture
def student():
    return load_policy("tiny")


def rollouts_of(policy, texts=("5.", " 12 and", "x"), questions=("2 + 3?", "What is 5 + 7?")):
    made = []
    for question in questions:
        for text in texts:
            tokens = tuple(policy.tokenizer.encode(text))
            zeros = (0.0,) * len(tokens)
            mask = (1,) * (len(tokens) - 1) + (int(len(tokens) < 4),)
            made.append(Rollout(tuple(prompt_ids(policy.tokenizer, question)), tokens, mask, zeros, zeros, "eos"))
    return made


def examples_of(policy, n=8):
    return [encode_chat(policy.tokenizer, [*user("2 + 3?"), {"role": "assistant", "content": str(i)}]) for i in range(n)]


def gradient(policy, teacher, rollouts, theirs=None, **options):
    policy.model.zero_grad()
    row = distil_gradient(policy, teacher, rollouts, theirs or rollouts, dataclasses.replace(CONFIG, **options))
    return row, torch.cat([p.grad.flatten() for p in policy.model.parameters()])


# --- the divergence ---------------------------------------------------------------------------------------------------

def test_divergences_are_those_of_the_papers():
    torch.manual_seed(0)
    p, q = torch.randn(5, 7, dtype=torch.float64).log_softmax(-1), torch.randn(5, 7, dtype=torch.float64).log_softmax(-1)
    kl = torch.nn.functional.kl_div  # of (log input, target): KL(target || input)
    assert torch.allclose(divergence(p, q, 1.0), kl(q, p, reduction="none", log_target=True).sum(-1))
    assert torch.allclose(divergence(p, q, 0.0), kl(p, q, reduction="none", log_target=True).sum(-1))
    m = (0.3 * q.exp() + 0.7 * p.exp()).log()
    jsd = 0.3 * kl(m, q, reduction="none", log_target=True) + 0.7 * kl(m, p, reduction="none", log_target=True)
    assert torch.allclose(divergence(p, q, 0.3), jsd.sum(-1))
    assert (divergence(p, q, 0.5) < math.log(2)).all() and divergence(p, p, 0.5).abs().max() < 1e-12
    small = divergence(p, q, 1e-6) / 1e-6, divergence(p, q, 1 - 1e-6) / 1e-6  # GKD: its limits are the two KLs
    assert torch.allclose(small[0], divergence(p, q, 0.0), rtol=1e-4) and torch.allclose(
        small[1], divergence(p, q, 1.0), rtol=1e-4)


def test_what_the_teacher_excludes_has_no_part_in_the_forward_kl():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log()
    assert divergence(p, q, 0.0).item() == pytest.approx(math.log(2)) and divergence(p, q, 1.0).item() == math.inf
    assert math.isfinite(divergence(p, q, 0.5).item())
    with pytest.raises(ValueError, match="beta"):
        divergence(p, q, 1.5)


# --- the gradient -----------------------------------------------------------------------------------------------------

def by_hand(student, teacher, rollouts, theirs, beta, temperature=1.0):
    """The plain forward of the models, a rollout at a time. beta None: the sampled tokens, A = log q - log p."""
    total, count = 0.0, sum(sum(r.mask) for r in rollouts)
    for r, other in zip(rollouts, theirs):
        logs = []
        for policy, x in ((student, r), (teacher, other)):
            logits = policy.model(torch.tensor([x.prompt + x.tokens])).logits[0, len(x.prompt) - 1 : -1] / temperature
            logs.append(logits.log_softmax(-1))
        if beta is None:
            p, q = (x.gather(1, torch.tensor(r.tokens)[:, None])[:, 0] for x in logs)
            each = (p - q).detach() * (1 + p - p.detach())
        else:
            each = divergence(logs[0], logs[1].detach(), beta)
        total = total + (each * torch.tensor(r.mask)).sum() / count
    return total


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.4, None])
def test_the_gradient_is_that_of_the_plain_forwards(student, teacher, beta):
    rollouts = rollouts_of(student)[::-1]
    theirs = [dataclasses.replace(r, prompt=tuple(prompt_ids(student.tokenizer, f"A hint. {i}"))) for i, r in
              enumerate(rollouts)]
    form = {"vocabulary": "sampled"} if beta is None else {"beta": beta}
    row, ours = gradient(student, teacher, rollouts, theirs, temperature=0.7, **form)
    student.model.zero_grad()
    loss = by_hand(student, teacher, rollouts, theirs, beta, 0.7)
    loss.backward()
    plain = torch.cat([p.grad.flatten() for p in student.model.parameters()])
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert (ours - plain).norm() < 1e-4 * plain.norm() and plain.norm() > 0.01


def test_micro_batches_and_rows_do_not_change_it(student, teacher):
    rollouts = rollouts_of(student)
    for options in ({}, {"vocabulary": "sampled"}):
        whole = gradient(student, teacher, rollouts, **options)
        for other in ({"token_budget": 1}, {"share_prompts": False}):
            row, again = gradient(student, teacher, rollouts, **options, **other)
            assert (again - whole[1]).norm() < 1e-4 * whole[1].norm()
            assert row["loss"] == pytest.approx(whole[0]["loss"], rel=1e-4)


def test_the_sampled_form_has_the_gradient_of_the_full_one_on_average(student, teacher):
    """Over every first token, each as often as the student draws it."""
    ids = tuple(prompt_ids(student.tokenizer, "2 + 3?"))
    with torch.no_grad():
        p = student.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    one = [Rollout(ids, (t,), (1,), (0.0,), (0.0,), "length") for t in range(len(p))]
    _, full = gradient(student, teacher, one[:1])
    expected = sum(p[t] * gradient(student, teacher, [r], vocabulary="sampled")[1] for t, r in enumerate(one) if p[t] > 1e-7)
    assert (expected - full).norm() < 1e-3 * full.norm()


def test_log_probs_teach_as_the_policy_that_gave_them(student, teacher):
    rollouts = rollouts_of(student)[::-1]
    theirs = [dataclasses.replace(r, prompt=tuple(prompt_ids(student.tokenizer, f"A hint. {i}"))) for i, r in
              enumerate(rollouts)]
    row, whole = gradient(student, teacher, rollouts, theirs, vocabulary="sampled")
    scores = [[q if m else -50.0 for q, m in zip(of, r.mask)] for of, r in zip(trainer_logps(teacher, theirs, CONFIG), theirs)]
    again, scored = gradient(student, scores, rollouts, theirs, vocabulary="sampled")
    assert again["loss"] == pytest.approx(row["loss"], rel=1e-5) and (whole - scored).norm() < 1e-5 * whole.norm()


def test_the_teachers_own_tokens_teach_as_sft_does(student):
    """The sampled form of the forward KL, whatever the micro-batches."""
    examples = examples_of(student)
    sft_gradient(student, examples, SFTConfig(), denominator=sum(sum(e.mask) for e in examples))
    wanted = torch.cat([p.grad.flatten() for p in student.model.parameters()])
    rollouts = as_rollouts(examples)
    for options in ({}, {"token_budget": 1}):
        _, ours = gradient(student, None, rollouts, vocabulary="sampled", **options)
        assert (ours - wanted).norm() < 1e-4 * wanted.norm() and wanted.norm() > 0.1


def test_examples_of_several_turns_keep_their_masks(student):
    talk = [*user("2 + 3?"), {"role": "assistant", "content": "5"}, *user("4 + 4?"), {"role": "assistant", "content": "8"}]
    example = encode_chat(student.tokenizer, talk)
    (made,) = as_rollouts([example])
    assert made.prompt + made.tokens == example.ids and made.mask[0] == 1 and sum(made.mask) == sum(example.mask)


# --- the loop ---------------------------------------------------------------------------------------------------------

FORMS = [{}, *(pytest.param(form, marks=pytest.mark.full) for form in ({"vocabulary": "sampled"}, {"beta": 0.0}))]


@pytest.mark.parametrize("options", FORMS)
def test_a_student_becomes_its_teacher(student, teacher, options):
    before, config = flat(teacher).clone(), dataclasses.replace(CONFIG, steps=25, prompts_per_step=16, **options)
    rows = rows_of(distil(student, teacher, PROBLEMS, config))
    first, last = (sum(r["reverse_kl"] for r in part) for part in (rows[:3], rows[-3:]))
    assert last < 0.3 * first and torch.equal(flat(teacher), before)


def test_a_policy_that_knows_more_teaches_itself(student):
    """With the answer shown, it copies it; without, it learns to say it."""
    asked = lambda row: f"{prompt_of(row)} Say yes."  # noqa: E731
    rows = rows_of(distil(student, student, PROBLEMS[:8], dataclasses.replace(CONFIG, steps=12), teacher_prompt=asked))
    assert sum(r["loss"] for r in rows[-3:]) < sum(r["loss"] for r in rows[:3])


@pytest.mark.parametrize("options", [{}, {"vocabulary": "sampled"}])
def test_a_share_of_the_steps_has_examples(student, teacher, options):
    """GKD's lambda; without whole distributions such a step is one of SFT, for which no teacher is asked."""
    config, asked = dataclasses.replace(CONFIG, steps=12, on_policy=0.5, **options), []

    async def scores(theirs):
        asked.append(theirs)
        return trainer_logps(teacher, theirs, config)

    source = scores if options else teacher
    rows = rows_of(distil(student, source, PROBLEMS, config, examples=examples_of(student)))
    off = [row for row in rows if row["off_policy"]]
    assert 2 < len(off) < 10 and len(asked) == (12 - len(off) if options else 0)
    assert all(row["completion_length"] == 2 and math.isnan(row["reverse_kl"]) for row in off)
    config = dataclasses.replace(config, on_policy=0.0)
    never = rows_of(distil(student, source, PROBLEMS, config, examples=examples_of(student)), 2)
    assert [row["off_policy"] for row in never] == [1.0, 1.0]
    assert all(math.isfinite(row["reverse_kl"]) and row["grad_norm"] > 0 for row in rows if not row["off_policy"])


def test_a_teacher_that_is_a_function_gets_the_prompts_of_its_own(student, teacher):
    config, seen = dataclasses.replace(CONFIG, steps=1, vocabulary="sampled"), []

    async def scores(theirs):
        seen.extend(theirs)
        return trainer_logps(teacher, theirs, config)

    rows_of(distil(student, scores, PROBLEMS, config, teacher_prompt=lambda row: "A hint."))
    assert len(seen) == 8 and {r.prompt for r in seen} == {tuple(prompt_ids(student.tokenizer, "A hint."))}


@pytest.mark.parametrize(("answer", "said"), [
    (lambda right: None, "a NoneType, not log-probs"),  # it would be SFT on the student's own completions
    (lambda right: [[] for _ in right], "8 lines of 0 log-probs"),
    (lambda right: [*right, right[0]], "9 lines"),
    (lambda right: [[math.nan, *line[1:]] for line in right], "gave nan as the log-prob"),
    (lambda right: [[math.exp(x) for x in line] for line in right], "log-prob of a token: one is finite and not above 0"),
])
def test_a_teacher_that_gives_no_log_probs_is_refused(student, teacher, answer, said):
    config = dataclasses.replace(CONFIG, vocabulary="sampled")

    async def scores(theirs):
        return answer(trainer_logps(teacher, theirs, config))

    with pytest.raises(ValueError, match=said):
        rows_of(distil(student, scores, PROBLEMS, config))
    assert student.version == 0


def test_a_hint_may_be_longer_than_the_context_of_the_student(student, teacher):
    student.model.config.max_position_embeddings = 40
    config = dataclasses.replace(CONFIG, steps=1)
    rows_of(distil(student, teacher, PROBLEMS, config, teacher_prompt=lambda row: f"{prompt_of(row)} The sum is {row.answer}."))
    with pytest.raises(ValueError, match="context"):
        rows_of(distil(student, teacher, PROBLEMS, dataclasses.replace(config, max_new_tokens=30)))


def test_an_interrupted_run_goes_on_bit_for_bit(teacher, tmp_path):
    config = dataclasses.replace(CONFIG, steps=4, save_every=2, on_policy=0.5)
    whole, half, again = (load_policy("tiny") for _ in range(3))
    shown = {"examples": examples_of(whole)}
    assert {row["off_policy"] for row in rows_of(distil(whole, teacher, PROBLEMS, config, **shown))} == {0.0, 1.0}
    rows_of(distil(half, teacher, PROBLEMS, config, run=Run("distil", root=tmp_path), **shown), 3)
    assert len(rows_of(distil(again, teacher, PROBLEMS, config, run=Run("distil", root=tmp_path), **shown))) < 4
    assert torch.equal(flat(again), flat(whole))


@pytest.mark.parametrize("wrong", [{"beta": 2.0}, {"beta": 0.5, "vocabulary": "sampled"}, {"temperature": 0.0},
                                   {"on_policy": -0.1}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(CONFIG, **wrong)


def test_bad_input_is_refused_before_anything_is_sampled(student, teacher):
    with pytest.raises(ValueError, match="teacher_prompt"):
        rows_of(distil(student, student, PROBLEMS, CONFIG))
    with pytest.raises(ValueError, match="share a model"):
        rows_of(distil(student, dataclasses.replace(student), PROBLEMS, CONFIG))
    with pytest.raises(ValueError, match="data set is empty"):
        rows_of(distil(student, teacher, [], CONFIG))
    with pytest.raises(ValueError, match="context"):
        rows_of(distil(student, teacher, PROBLEMS, dataclasses.replace(CONFIG, max_new_tokens=10_000)))
    for on_policy, examples in ((0.5, ()), (1.0, examples_of(student))):
        with pytest.raises(ValueError, match=f"on_policy={on_policy} with {len(examples)} of them"):
            rows_of(distil(student, teacher, PROBLEMS, dataclasses.replace(CONFIG, on_policy=on_policy), examples=examples))
    silent = dataclasses.replace(examples_of(student)[0], mask=(0,) * len(examples_of(student)[0].ids))
    with pytest.raises(ValueError, match="example 0 has no token to train on"):
        rows_of(distil(student, teacher, PROBLEMS, dataclasses.replace(CONFIG, on_policy=0.5), examples=[silent]))

    async def scores(theirs):
        raise AssertionError("asked")

    with pytest.raises(ValueError, match="no distributions: set vocabulary"):
        rows_of(distil(student, scores, PROBLEMS, CONFIG))
    with pytest.raises(ValueError, match="temperature is 0.5"):
        rows_of(distil(student, scores, PROBLEMS, dataclasses.replace(CONFIG, vocabulary="sampled", temperature=0.5)))
    other = load_policy("tiny")
    other.tokenizer = other.tokenizer.__class__.from_pretrained(other.tokenizer.name_or_path)
    other.tokenizer.add_tokens(["<more>"])
    with pytest.raises(ValueError, match="different vocabularies"):
        rows_of(distil(student, other, PROBLEMS, CONFIG))
    assert student.version == 0
