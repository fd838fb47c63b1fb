"""The tasks of the AWS environment: each solvable by its reference, none done at the start, none by a line for another one."""

import json
import random
from types import SimpleNamespace

import pytest

from grpolab.env.aws import generate, tasks
from grpolab.env.aws.backend import wipe
from grpolab.env.aws.clients import AccountGone
from grpolab.env.aws.criteria import check_criterion
from grpolab.env.aws.environment import read_task
from grpolab.env.aws.generate import SPLITS, FreshTasks, draw, instance, instances
from grpolab.env.aws.grader import GradingError, grade
from grpolab.env.aws.tasks import TIERS, load_tasks, pick_drifts, play, template_ids, templates, words
from grpolab.env.curriculum import Curriculum
from grpolab.files import data_path


def prepared(account, task):
    """The account as the task begins, without drifts."""
    wipe(account.endpoint)
    carry_out(account, task.setup, task)
    return task


def carry_out(account, lines, task):
    for line, output in play(lines, account.run):
        assert output.ok, (task.id, line, output.stderr)


def graded(account, task):
    return grade(task, account.client)


def check_solvable(account, task):
    """Nothing of what is asked holds at the start, all that is to be kept does, and the reference reaches the rest."""
    prepared(account, task)
    if task.drifts:
        assert graded(account, task).achieved, task.id
        carry_out(account, task.drifts, task)
    before = graded(account, task)
    assert not before.achieved and before.progress == 0.0, task.id
    assert before.holds == tuple(bool(criterion.get("keep")) for criterion in task.criteria), task.id
    carry_out(account, task.solution, task)
    after = graded(account, task)
    assert after.achieved and after.progress == 1.0, (task.id, after)


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("tier", TIERS)
def test_the_reference_solves_what_the_start_does_not(account, tier, fresh):
    own = load_tasks(tier)
    for task in instances(tier, len(own), seed=3, split="held_out") if fresh else own:
        check_solvable(account, task)


def test_a_line_for_one_instance_does_nothing_for_another(account):
    for template in templates():
        task, other = instance(template, 1), instance(template, 1, "held_out")
        if len(task.solution) > 1 or template.tier == "drift":
            continue  # one line is not enough for these
        prepared(account, task)
        account.run(other.solution[0])
        assert not graded(account, task).achieved, task.id


def test_each_drift_spoils_something_that_its_line_repairs(account):
    for task in load_tasks("drift"):
        assert len(task.drifts) == len(task.solution) >= 4
        prepared(account, task)
        for drift, repair in zip(task.drifts, task.solution):
            carry_out(account, [drift], task)
            assert not graded(account, task).achieved, (task.id, drift)
            carry_out(account, [repair], task)
            assert graded(account, task).achieved, (task.id, repair)


def test_what_is_to_be_kept_may_not_go(account):
    """Deleting everything that is in question is no solution, nor is a policy that takes the place of the one to remove."""
    task = next(task for task in load_tasks("expert") if task.id == "expert-find-public-bucket")
    bucket = task.solution[-1].split()[-1]
    for lines in ([f"aws s3 rb s3://{bucket}"], [f"aws s3api put-bucket-policy --bucket {bucket} --policy none"]):
        prepared(account, task)
        carry_out(account, lines, task)
        assert not graded(account, task).achieved, lines
    prepared(account, task)
    carry_out(account, task.solution, task)
    kept = next(c["args"]["Bucket"] for c in task.criteria if c.get("keep") and c["read"] == "get_bucket_policy")
    carry_out(account, [f"aws s3api delete-bucket-policy --bucket {kept}"], task)
    after = graded(account, task)
    assert not after.achieved and after.progress == 0.5  # the one thing to reach, beside the one that broke


# --- Instances --------------------------------------------------------------------------------------------------------


def test_no_value_is_in_both_splits():
    for kind, values in words().items():
        if kind == "patterns":
            continue
        assert set(values) == set(SPLITS) and not set(values["train"]) & set(values["held_out"]), kind
        assert all(len(set(values[split])) == len(values[split]) >= 3 for split in SPLITS), kind
    for kind in words()["patterns"]:
        drawn = [{draw(kind, split, random.Random(i)) for i in range(300)} for split in SPLITS]
        assert not drawn[0] & drawn[1] and min(map(len, drawn)) > 50, kind


def test_instances_are_drawn_by_their_seed():
    for template in templates():
        values = instance(template, 0, "held_out").id.partition("/")[2].split(",")
        assert len(values) == len(template.slots) == len(set(values)), template.id
        assert not {value for _, value in template.slots.values()} & set(values), template.id  # its own are for training
    some = instances("beginner", 50, seed=1)
    assert some == instances("beginner", 50, seed=1) != instances("beginner", 50, seed=2)
    assert len({task.id for task in some}) == 50 and {task.tier for task in some} == {"beginner"}
    assert len({task.template for task in some[:32]}) == 32  # each template before any comes again
    held_out = instances("beginner", 50, seed=1, split="held_out")
    assert not {task.id for task in some} & {task.id for task in held_out}
    assert instance("warmup-bucket", 5) == instance("warmup-bucket", 5) != instance("warmup-bucket", 6)
    for wrong in ({"tier": "easy", "n": 1, "seed": 0}, {"tier": "warmup", "n": -1, "seed": 0},
                  {"tier": "warmup", "n": 1, "seed": 0, "split": "test"}):
        with pytest.raises(ValueError, match="easy|-1|test"):
            instances(**wrong)
    with pytest.raises(ValueError, match="warmup-moon"):
        instance("warmup-moon", 0)


def test_more_instances_than_there_are_words_for_are_refused(monkeypatch):
    monkeypatch.setattr(generate, "templates", lambda: [t for t in templates() if t.id == "warmup-user"])
    people = len(words()["person"]["held_out"])
    assert len(instances("warmup", people, 0, "held_out")) == people
    with pytest.raises(ValueError, match=f"n={people + 1}.*warmup"):
        instances("warmup", people + 1, 0, "held_out")


def test_a_task_shows_neither_criteria_nor_solution():
    hidden = instance("expert-find-public-bucket", 0)  # of which the description names no bucket
    assert not any(value in json.dumps(hidden.shown()) for value in hidden.id.partition("/")[2].split(","))
    for task in load_tasks():
        assert task.shown() == {"template": task.id, "tier": task.tier, "description": task.description}
        assert "criteria" not in repr(task) and "solution" not in repr(task)


def test_drifts_are_picked_by_the_seed():
    for task in load_tasks("drift"):
        picks = [pick_drifts(task, seed) for seed in range(40)]
        assert picks == [pick_drifts(task, seed) for seed in range(40)] and len(set(picks)) > 3
        assert {len(pick) for pick in picks} == {2, 3} and set().union(*picks) == set(range(len(task.drifts)))
    assert pick_drifts(load_tasks("warmup")[0], 0) == ()


def test_a_line_takes_an_id_from_an_earlier_output():
    printed = iter(['{"Keys": [{"KeyId": "k1", "Name": "a"}, {"KeyId": "k2", "Name": "b"}]}', "", ""])
    lines = ["aws list", "aws use <1:Keys[0].KeyId>", "aws use <1:Keys[?Name=='b'].KeyId | [0]>"]
    ran = [line for line, _ in play(lines, lambda line: SimpleNamespace(stdout=next(printed)))]
    assert ran == ["aws list", "aws use k1", "aws use k2"]
    for missing in ("<1:Keys[7].KeyId>", "<4:Keys>", "<1:Key>", "<1:[>"):
        with pytest.raises(ValueError, match="is not in the output of line"):
            list(play(["aws list", f"aws use {missing}"], lambda line: SimpleNamespace(stdout='{"Keys": []}')))


KEPT = {"service": "s3", "read": "head_bucket", "args": {"Bucket": "<a>"}, "exists": True, "keep": True}


@pytest.mark.parametrize("change, says", [
    ({"solution": []}, "no solution"), ({"setup": ["rm -r /"]}, "rm -r"), ({"slots": {}}, "its slots are"),
    ({"criteria": []}, "no criterion to reach"), ({"colour": "red"}, "it needs"),
    ({"slots": {"a": ["nme", "x"]}}, "unknown kind 'nme'"),
    ({"slots": {"a": ["patterns", "x"]}}, "unknown kind 'patterns'"), ({"slots": {"a": "name"}}, "not enough|too many"),
    ({"criteria": [KEPT]}, "no criterion to reach"), ({"criteria": [KEPT | {"read": "delete_bucket"}]}, "delete_bucket"),
    ({"criteria": [{"read": "get_user"}]}, "a criterion has one of"), ({"criteria": ["<a>"]}, "")])
def test_a_wrong_line_of_data_is_named(tmp_path, monkeypatch, change, says):
    row = json.loads(data_path("aws", "warmup.jsonl").read_text().splitlines()[0]) | change
    for tier in TIERS:
        (tmp_path / f"{tier}.jsonl").write_text(json.dumps(row) + "\n" if tier == "beginner" else "")
    monkeypatch.setattr(tasks, "data_path", lambda *parts: tmp_path / parts[-1])
    with pytest.raises(ValueError, match=f"beginner.jsonl, line 1: .*{says}"):
        templates.__wrapped__()


# --- The grader -------------------------------------------------------------------------------------------------------


class Answers:
    """A client that gives the same answers always, or raises."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def can_paginate(self, name):
        return False

    def __getattr__(self, name):
        def answer(**args):
            self.asked.append((name, args))
            if isinstance(self.answers[name], Exception):
                raise self.answers[name]
            return {**self.answers[name], "ResponseMetadata": {"HTTPStatusCode": 200}}

        return answer


def criterion(*path, service="s3", read="get_bucket_policy", args=None, **how):
    return {"service": service, "read": read, "args": args or {"Bucket": "apple"}, "path": list(path), **how}


def holds(answer, *path, **how):
    task = SimpleNamespace(id="t", criteria=(criterion(*path, **how),))
    return grade(task, lambda service: Answers(get_bucket_policy=answer)).achieved


POLICY = {"Policy": json.dumps({"Statement": [{"Effect": "Allow", "Action": "a", "Days": 30},
                                              {"Effect": "Deny", "Action": ["b", "c"], "On": True}]})}


@pytest.mark.parametrize("path, how, true", [
    (("Policy",), {"exists": True}, True), (("Policies",), {"exists": True}, False), (("Policies",), {"absent": True}, True),
    (("Policy", "@json", "Statement", "Action"), {"equals": ["c", "b", "a"]}, True),
    (("Policy", "@json", "Statement", "Action"), {"equals": ["b", "a"]}, False),
    (("Policy", "@json", "Statement", "Action"), {"equals": ["b", "a", "a"]}, False),
    (("Policy", "@json", "Statement", {"Effect": "Allow"}, "Action"), {"equals": "a"}, True),
    (("Policy", "@json", "Statement", {"Action": "c"}, "Effect"), {"equals": "Deny"}, True),
    (("Policy", "@json", "Statement", {"Effect": "Allow", "Action": "c"}), {"absent": True}, True),
    (("Policy", "@json", "Statement"), {"count": 2}, True), (("Policy", "@json", "Statement"), {"count": "3"}, False),
    (("Policy", "@json", "Statement", "Days"), {"equals": "30"}, True),
    (("Policy", "@json", "Statement", "Days"), {"equals": "31"}, False),
    (("Policy", "@json", "Statement", "On"), {"equals": True}, True),
    (("Policy", "@json", "Statement", "On"), {"equals": 1}, False),
    (("Policy", "@json", "Statement", "On"), {"equals": "True"}, False),
    (("Policy", "@json", "@json"), {"absent": True}, True)])
def test_paths_and_comparisons(path, how, true):
    assert holds(POLICY, *path, **how) is true


def test_a_text_that_is_no_json_holds_nothing():
    assert holds({"Policy": "[" * 100_000}, "Policy", "@json", absent=True)
    for depth in range(500, 1000, 100):
        text = '{"Statement":' * depth + "1" + "}" * depth
        assert not holds({"Policy": text}, "Policy", "@json", equals={"Statement": 2})


def test_progress_counts_what_is_reached_and_what_broke():
    criteria = (criterion("A", exists=True), criterion("B", exists=True), criterion("C", exists=True, keep=True))
    task = SimpleNamespace(id="t", criteria=criteria)
    for answer, progress in (("", 0.0), ("C", 0.0), ("A", 1 / 3), ("AC", 0.5), ("AB", 2 / 3), ("ABC", 1.0)):
        client = Answers(get_bucket_policy=dict.fromkeys(answer, 1))
        grade_ = grade(task, lambda service, client=client: client)
        assert (grade_.progress, grade_.achieved) == (pytest.approx(progress), answer == "ABC")
        assert len(client.asked) == 1  # one read for the three of them


def test_an_argument_is_found_by_another_read():
    read = {"service": "kms", "read": "describe_key", "args": {"KeyId": "alias/a"}, "path": ["KeyMetadata", "KeyId"]}
    task = SimpleNamespace(id="t", criteria=(criterion("KeyRotationEnabled", service="kms", read="get_key_rotation_status",
                                                       args={"KeyId": {"found": read}}, equals=True),))
    client = Answers(describe_key={"KeyMetadata": {"KeyId": "k1"}}, get_key_rotation_status={"KeyRotationEnabled": True})
    assert grade(task, lambda service: client).achieved
    assert client.asked[-1] == ("get_key_rotation_status", {"KeyId": "k1"})
    client = Answers(describe_key={"KeyMetadata": {}})
    assert not grade(task, lambda service: client).achieved  # nothing to ask for


def test_nothing_there_is_a_verdict_and_a_fault_is_none():
    exceptions = pytest.importorskip("botocore.exceptions")
    def error(code):
        return exceptions.ClientError({"Error": {"Code": code, "Message": "m"}}, "GetBucketPolicy")

    assert holds(error("NoSuchBucket"), absent=True) and not holds(error("NoSuchBucketPolicy"), exists=True)
    for code in ("InternalError", "AccessDenied", "NoSuchEntity"):
        with pytest.raises(GradingError, match=f"'t'.*{code}"):
            holds(error(code), absent=True)
    for gone in (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError):
        with pytest.raises(AccountGone, match="'t'"):
            holds(gone(endpoint_url="http://127.0.0.1:1"), absent=True)


def test_the_vocabulary_of_criteria_is_closed():
    for wrong in (criterion(read="delete_bucket", exists=True), criterion(service="lambda", exists=True), criterion(),
                  criterion(exists=True, equals=1), criterion(exists=False), criterion(like="a", equals="b"),
                  criterion(1, exists=True),
                  criterion(args={"Bucket": {"found": {"service": "s3", "read": "delete_bucket"}}}, exists=True)):
        with pytest.raises(ValueError):
            check_criterion(wrong)


def test_fresh_tasks_are_instances_of_what_the_curriculum_wants():
    """Of its templates, in its order; told under their names; and the same again after a state was loaded."""
    def source():
        return FreshTasks(template_ids("warmup", "beginner"), seed=3)

    fresh, seen, inner = source(), [], Curriculum(template_ids("warmup", "beginner"), seed=3)
    for step in range(30):
        wanted = inner.next_tasks(4)
        asked = fresh.next_tasks(4)
        assert [task.partition("/")[0] for task in asked] == wanted and asked == fresh.next_tasks(4)
        assert [read_task(task).template for task in asked] == wanted
        if step == 20:
            again = source()
            again.load(json.loads(json.dumps(fresh.state())))
            assert again.next_tasks(4) == asked and again.tier == fresh.tier
        for task in asked:
            fresh.record_result(task, 1.0)
            inner.record_result(task.partition("/")[0], 1.0)
        seen += asked
    assert fresh.results == len(seen) == 120 and len(set(seen)) > 100 and fresh.tier == 1
    assert FreshTasks(template_ids("warmup", "beginner"), seed=4).next_tasks(4) != source().next_tasks(4)
