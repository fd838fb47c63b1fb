"""What the grader pays: all that is asked, however it is done, and nothing less."""

import re
from types import SimpleNamespace

import pytest

from grpolab.env.aws.backend import wipe
from grpolab.env.aws.criteria import check_criterion
from grpolab.env.aws.environment import read_task
from grpolab.env.aws.grader import grade
from grpolab.env.aws.tasks import load_tasks, play, templates

QUEUE, TOPIC = "arn:aws:sqs:us-east-1:000000000000:", "arn:aws:sns:us-east-1:000000000000:"


def done(account, task, lines):
    """Whether these lines do the task, of a template's own values; every one of them must go well."""
    slots = next(t.slots for t in templates() if t.id == task)
    task = read_task(task)
    wipe(account.endpoint)
    for line in (*task.setup, *task.drifts):
        assert account.run(line).ok, line
    for slot, (_, value) in slots.items():
        lines = [line.replace(f"<{slot}>", value) for line in lines]
    for line, output in play(lines, account.run):
        assert output.ok, (line, output.stderr)
    return grade(task, account.client).achieved


def changed(task, *pairs):
    """The reference solution with each pattern replaced; each must occur."""
    lines = list(read_task(task).solution)
    for old, new in pairs:
        assert any(re.search(old, line) for line in lines), old
        lines = [re.sub(old, new, line) for line in lines]
    return lines


OPEN_TRUST = (r'"Statement":\[', '"Statement":[{"Effect":"Allow","Principal":"*","Action":"sts:AssumeRole"},')
SECURE, PAID = ("--type String", "--type SecureString"), ("--billing-mode PAY_PER_REQUEST",
                                                         "--provisioned-throughput ReadCapacityUnits=1,WriteCapacityUnits=1")
OTHER_METRIC = ("CPUUtilization", "Nonsense")


def for_messages_of(topic):
    """The queue's policy names a topic, as AWS recommends it."""
    return r"\[\{", rf'[{{\\"Condition\\":{{\\"ArnEquals\\":{{\\"aws:SourceArn\\":\\"{TOPIC}{topic}\\"}}}},'


@pytest.mark.parametrize("task, pairs", [
    ("warmup-parameter", [SECURE]), ("beginner-parameter-change", [SECURE]), ("intermediate-parameters", [SECURE]),
    ("intermediate-parameter-rename", [SECURE]), ("advanced-table-known", [SECURE]), ("drift-settings", [SECURE]),
    ("beginner-table", [("AttributeType=S", "AttributeType=N")]),
    ("beginner-table", [("AttributeType=S", "AttributeType=S AttributeName=b,AttributeType=S"),
                        ("KeyType=HASH", "KeyType=HASH AttributeName=b,KeyType=RANGE")]),
    ("advanced-safe-table", [("AttributeType=S", "AttributeType=B")]),
    ("intermediate-table-item", [PAID]), ("advanced-table-known", [PAID]), ("advanced-orders", [PAID]),
    ("intermediate-alarm-silent", [OTHER_METRIC]), ("advanced-alarm-mail", [("--period 300", "--period 60")]),
    ("advanced-two-alarms", [OTHER_METRIC]), ("expert-deaf-alarm", [("Average", "Sum")]),
    ("drift-watch", [("GreaterThan", "LessThan")]), ("drift-watch", [("metricValue=1", "metricValue=7")]),
    ("advanced-error-filter", [("metricValue=1", "metricValue=7")]),
    ("beginner-subscribe-email", [("--protocol email", "--protocol sms")]),
    ("beginner-subscribe-queue", [("--protocol sqs", "--protocol email")]),
    ("advanced-fan-out", [("--protocol sqs", "--protocol email")]),
    ("beginner-role", [("sts:AssumeRole", "s3:GetObject")]), ("expert-open-role", [OPEN_TRUST]), ("drift-access", [OPEN_TRUST]),
    ("advanced-secret-for-role", [(r'"Resource":"\*"', '"Resource":"arn:aws:s3:::x"')]),
    ("advanced-topic-to-queue", [(r'(Resource\\":\\")[^\\]+', rf"\1{QUEUE}other")]),
    ("advanced-topic-to-queue", [for_messages_of("another")]),
    ("drift-news", [("sqs:SendMessage", "sqs:ReceiveMessage")]),
    ("drift-news", [(r'(Resource\\":\\")[^\\]+', rf"\1{QUEUE}other")]),
    ("expert-open-queue", [(r'\[\{', r'[{\\"Effect\\":\\"Allow\\",\\"Principal\\":{\\"Service\\":\\"x.amazonaws.com\\"},'
                            r'\\"Action\\":\\"sqs:ReceiveMessage\\"},{')]),
    ("intermediate-queue-message", [(r"--message-body \S+", "--message-body other")]),
    ("intermediate-rule-target", [("(put-rule.*)", r"\1 --state DISABLED")]),
    ("advanced-scheduled-job", [("(put-rule.*)", r"\1 --state DISABLED")])])
def test_a_part_of_what_is_asked_is_no_solution(account, task, pairs):
    assert done(account, task, read_task(task).solution)
    assert not done(account, task, changed(task, *pairs))


@pytest.mark.parametrize("task, more", [
    ("intermediate-object-move", ["aws s3 rb s3://<a>"]),
    ("expert-wrong-subscription", ["aws sqs delete-queue --queue-url <q>"]),
    ("expert-broken-schedule", ["aws events put-targets --rule <a> --targets Id=2,Arn=" + QUEUE + "<q>",
                                "aws events remove-targets --rule <a> --ids 1"]),
    ("expert-public-bucket", ["""aws s3api put-bucket-policy --bucket <b> --policy '{"Version":"2012-10-17","Statement":[{"""
                              """"Effect":"Allow","Principal":{"AWS":"arn:aws:iam::000000000000:role/<r>"},"Action":"s3:*","""
                              """"Resource":"arn:aws:s3:::<b>/*"}]}'"""]),
    ("beginner-rule-disable", ["aws events put-rule --name <a> --schedule-expression 'rate(1 day)' --state DISABLED"])])
def test_what_was_there_must_stay(account, task, more):
    assert not done(account, task, [*read_task(task).solution, *more])


def test_a_message_in_flight_is_not_removed(account):
    assert not done(account, "warmup-queue-purge", ["aws sqs receive-message --queue-url <a>"])


def test_a_new_key_in_place_of_the_given_one_is_no_solution(account):
    lines = ["aws kms create-key --description <v>", "aws kms create-alias --alias-name alias/<a> --target-key-id "
             "<1:KeyMetadata.KeyId>", "aws kms enable-key-rotation --key-id <1:KeyMetadata.KeyId>"]
    assert not done(account, "expert-key-rotation", lines)


RULE = "aws events put-rule --name <a> --schedule-expression "
OWN = "arn:aws:kms:us-east-1:000000000000:alias/"


@pytest.mark.parametrize("task, lines", [
    ("beginner-rule-schedule", [RULE + "'cron(0/<m> * * * ? *)'"]),
    ("beginner-rule-schedule", [RULE + "'cron(*/<m> * * * ? *)'"]),
    ("advanced-encrypted-bucket", changed("advanced-encrypted-bucket", ("KMSMasterKeyID=alias/", "KMSMasterKeyID=" + OWN))),
    ("advanced-topic-to-queue", changed("advanced-topic-to-queue", (r'(Resource\\":\\")[^\\]+', r"\1*"))),
    ("advanced-topic-to-queue", changed("advanced-topic-to-queue", for_messages_of("sand-robot"))),
    ("expert-open-role", changed("expert-open-role", ('"ec2.amazonaws.com"', '["ec2.amazonaws.com"]'),
                                 ('"sts:AssumeRole"', '["sts:AssumeRole"]'))),
    ("beginner-bucket-region", ["aws s3 mb s3://<a> --region <r>"]),
    ("warmup-object-delete", ["aws s3api delete-objects --bucket <a> --delete Objects=[{Key=<f>}]"]),
    ("warmup-queue-delete", ["aws sqs delete-queue --queue-url https://sqs.us-east-1.amazonaws.com/000000000000/<a>"]),
    ("beginner-secret-change", ["aws secretsmanager update-secret --secret-id <a> --secret-string <v>"]),
    ("beginner-parameter-change", ["aws ssm put-parameter --name <p> --value <v> --overwrite"]),
    ("beginner-item", ["aws dynamodb update-item --table-name <a> --key id={S=<u>} --update-expression 'SET age = :n' "
                       "--expression-attribute-values :n={N=<n>}"]),
    ("intermediate-bucket-empty", ["aws s3 rb s3://<a> --force"]),
    ("intermediate-queue-message", ["aws sqs create-queue --queue-name <a>", "aws sqs send-message-batch --queue-url <a> "
                                    "--entries Id=1,MessageBody=<o> Id=2,MessageBody=<v>"])])
def test_another_sensible_way_counts(account, task, lines):
    assert done(account, task, lines)


@pytest.mark.parametrize("expression, minutes", [
    ("rate(10 minutes)", 10), ("rate(1 minute)", 1), ("rate(2 hours)", 120), ("rate(1 day)", 1440), ("cron(* * * * ? *)", 1),
    ("cron(*/15 * * * ? *)", 15), ("cron(0/20 * ? * * *)", 20), 
    ("cron(0,30 * * * ? *)", None), ("cron(0/25 * * * ? *)", None),
    ("cron(0/10 9 * * ? *)", None), ("cron(0/0 * * * ? *)", None), ("cron(x * * * ? *)", None),
    ("at(2030-01-01T00:00:00)", None), ("", None), ("cron(0-30/10 * * * ? *)", None), ("rate(" + "9" * 5000 + " days)", None)])
def test_minutes_of_a_schedule(expression, minutes):
    """0/25 comes at the minutes 0, 25 and 50: not every 25."""
    read = SimpleNamespace(can_paginate=lambda name: False, describe_rule=lambda **_: {"S": expression})
    row = {"service": "events", "read": "describe_rule", "args": {"Name": "a"}, "path": ["S", "@minutes"]}
    task = SimpleNamespace(id="t", criteria=(row | ({"absent": True} if minutes is None else {"equals": minutes}),))
    assert grade(task, lambda service: read).achieved


# --- Policies ---------------------------------------------------------------------------------------------------------

def test_every_policy_is_judged_by_what_it_allows_and_by_nothing_more():
    """Of each task whose solution writes one; what a policy allows: test_aws_policies."""
    tasks = [task for task in load_tasks() if any("Statement" in line for line in task.solution)]
    compared = [{check_criterion(criterion) for criterion in task.criteria} for task in tasks]
    assert len(tasks) == 15 and all({"allows", "allows_only"} <= of_a_task for of_a_task in compared)


ADMINISTRATOR = "--policy-arn arn:aws:iam::aws:policy/AdministratorAccess"


@pytest.mark.parametrize("task, more", [
    ("expert-secret-in-role", ["aws iam attach-role-policy --role-name <r> " + ADMINISTRATOR]),
    ("expert-policy-least", ["aws iam attach-role-policy --role-name <r> " + ADMINISTRATOR]),
    ("expert-inline-least", ["aws iam attach-user-policy --user-name <u> " + ADMINISTRATOR]),
    ("expert-inline-least", ["aws iam create-group --group-name all",
                             "aws iam add-user-to-group --group-name all --user-name <u>",
                             "aws iam attach-group-policy --group-name all " + ADMINISTRATOR]),
    ("expert-too-powerful-user", ["aws iam put-user-policy --user-name <u> --policy-name p --policy-document "
                                  """'{"Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'"""]),
    ("advanced-bucket-reader-role", ["aws iam put-role-policy --role-name <r> --policy-name p --policy-document "
                                     """'{"Statement":[{"Effect":"Deny","Action":"*","Resource":"*"}]}'"""]),
    ("expert-inline-least", ["aws iam create-policy --policy-name no --policy-document "
                             """'{"Statement":[{"Effect":"Deny","Action":"s3:*","Resource":"*"}]}'""",
                             "aws iam attach-user-policy --user-name <u> --policy-arn arn:aws:iam::000000000000:policy/no"]),
    ("expert-group-too-powerful", ["aws iam put-group-policy --group-name <a> --policy-name p --policy-document "
                                   """'{"Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'"""]),
    ("intermediate-role-policy", ["aws iam attach-role-policy --role-name <a> " + ADMINISTRATOR]),
    ("advanced-audit-user", ["aws iam attach-user-policy --user-name <u> " + ADMINISTRATOR])])
def test_a_policy_attached_beside_it_counts(account, task, more):
    assert not done(account, task, [*read_task(task).solution, *more])


def test_a_secret_may_be_named_as_aws_recommends(account):
    assert done(account, "expert-secret-in-role", changed("expert-secret-in-role", (r"-\*", "-??????")))


# --- Alarms, filters and queues ---------------------------------------------------------------------------------------

METRICS = ("--metrics Id=m,MetricStat={Metric={Namespace=AWS/EC2,MetricName=CPUUtilization},Period=300,Stat=Average} "
           "--threshold <n> --comparison-operator GreaterThanThreshold --evaluation-periods 2")


@pytest.mark.parametrize("task, pairs", [
    *((task, [("(put-metric-alarm)", r"\1 --no-actions-enabled")]) for task in
      ("beginner-alarm", "advanced-alarm-mail", "drift-watch")),
    ("advanced-error-filter", [("-pattern ERROR", "-pattern 'ERROR INFO'")]),
    ("expert-noisy-filter", [("-pattern ERROR", "-pattern ' -ERROR'")]),
    ("drift-watch", [("-pattern ERROR", "-pattern '?ERROR ?INFO'")])])
def test_an_alarm_or_a_filter_that_does_something_else(account, task, pairs):
    assert not done(account, task, changed(task, *pairs))


@pytest.mark.parametrize("task, lines", [
    ("beginner-alarm", ["aws cloudwatch put-metric-alarm --alarm-name <a> " + METRICS]),
    *((task, changed(task, ("-pattern ERROR", f"-pattern '{pattern}'")))
      for task in ("advanced-error-filter", "expert-noisy-filter", "drift-watch")
      for pattern in ("?ERROR", '"ERROR"', '?"ERROR"'))])
def test_another_way_to_write_an_alarm_or_a_filter(account, task, lines):
    assert done(account, task, lines)


@pytest.mark.parametrize("line, says", [
    ("aws sqs create-queue --queue-name a.fifo", "InvalidParameterValue"),
    ("aws sqs create-queue --queue-name a.fifo --attributes FifoQueue=false", "InvalidParameterValue"),
    ("aws cloudwatch put-metric-alarm --alarm-name a --metric-name CPUUtilization --namespace AWS/EC2 --period 300 "
     "--threshold 5 --comparison-operator GreaterThanThreshold --evaluation-periods 2", "Statistic")])
def test_what_aws_refuses_is_refused(account, line, says):
    output = account.run(line)
    assert not output.ok and says in output.stderr
