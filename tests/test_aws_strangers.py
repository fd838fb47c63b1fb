"""What a stranger tried on the AWS environment: a part of a task, other ways to do one, and lines that break a step."""

import base64
import json
import re
import time

import pytest

from grpolab.env.aws import commands
from grpolab.env.aws.backend import wipe
from grpolab.env.aws.commands import OPERATIONS, Output
from grpolab.env.aws.criteria import check_criterion
from grpolab.env.aws.environment import AwsEnv, read_command, read_task, shorten

# --- Lines that break a step ------------------------------------------------------------------------------------------


def token(value):
    return base64.b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize("line", [
    *(f"aws iam list-users --starting-token {token(value)}" for value in
      ("x", 1, None, {"boto_encoded_keys": [["a"]]}, {"boto_truncate_amount": "x"}, {"boto_truncate_amount": [1]})),
    *(f"aws sts get-caller-identity --query '{query}'" for query in
      ("&a", "[&a]", "ceil(`1e309`)", 'max_by(`[{"a":1},{"a":"b"}]`, &a)')),
    *(f"aws sts get-caller-identity --output {how} --query '`{literal}`'" for how, literal in
      (("text", '[1,{"a":1}]'), ("text", '{"a":[{"b":1},2]}'), ("table", '[{"a":1},[1]]'), ("table", '{"a":[{"b":1},2]}')))])
def test_a_token_or_a_query_that_makes_no_sense_is_the_commands_failure(account, line):
    output = account.run(line)
    assert not output.ok and output.stderr.strip() and output.stdout == ""


@pytest.mark.parametrize("query", [
    "|".join(["[@,@]"] * 40), "|".join(["[@,@][]"] * 40), "Arn|" + "|".join(["join(@,[@,@])"] * 30),
    "|".join(["{a:@,b:@}"] * 40), "|".join(["[@,@]"] * 40) + "|to_string(@)|length(@)",
    "[" + "|".join(["[@,@]"] * 40) + "] == [" + "|".join(["[@,@]"] * 40) + "]",
    "|".join(["[@,@][]"] * 14) + "|[join('" + "a" * 9000 + "', [*].Arn)]|length([0])",
    "|".join(["[@,@][]"] * 12) + "|[*].[" + ",".join(["Arn"] * 2000) + "]"])
def test_a_query_may_not_explode(account, query):
    """Each step of such a query doubles its result: forty would fill any machine."""
    start = time.monotonic()
    output = account.run(f"aws sts get-caller-identity --query '{query}'")
    assert not output.ok and "--query" in output.stderr and time.monotonic() - start < 5


def test_an_ordinary_query_is_not_held_up(account):
    wipe(account.endpoint)
    for n in range(50):
        account.client("sqs").create_queue(QueueName=f"queue-{n}")
    query = 'QueueUrls[?contains(@, `"queue-1"`)].{url: @, n: length(@)} | sort_by(@, &url)[*].url | join(`","`, @)'
    output = account.run(f"aws sqs list-queues --output text --query '{query}'")
    assert output.ok and output.stdout.count("/queue-1") == 11


@pytest.mark.parametrize("line", ["aws sqs receive-message --queue-url q --wait-time-seconds 20",
                                  "aws sqs receive-message --queue-url slow"])
def test_waiting_for_a_message_is_no_lost_account(account, line):
    """Long polling is what AWS recommends, and longer than a request may take here; nobody else sends anything."""
    account.run("aws sqs create-queue --queue-name q")
    account.run("aws sqs create-queue --queue-name slow --attributes ReceiveMessageWaitTimeSeconds=20")
    start = time.monotonic()
    assert account.run(line).ok and time.monotonic() - start < 5


@pytest.mark.parametrize("line", [
    "aws iam create-user --user-name emma --tags Key=k,Value=\ufffe",
    "aws iam create-user --user-name emma --tags '[{\"Key\":\"k\",\"Value\":\"\\u0001\"}]'",
    "aws sns create-topic --name t --attributes DisplayName=\uffff",
    "aws sns create-topic --name t --attributes '{\"DisplayName\":\"\\ud800\"}'"])
def test_a_character_that_no_answer_can_hold_is_refused(account, line):
    """XML has no such character: with one in the account, every answer that holds it would be unreadable, the grader's too."""
    wipe(account.endpoint)
    output = account.run(line)
    assert not output.ok and "character" in output.stderr and output.call is None
    assert account.client("iam").list_users()["Users"] == [] and account.client("sns").list_topics().get("Topics", []) == []


def test_an_observation_is_text_that_can_be_written(account):
    output = account.run("aws sts get-caller-identity --query '`\"\\ud800\"`'")
    assert shorten(output, 100).encode("utf-8")
    deep = "[" * 5000 + "]" * 5000
    assert len(shorten(Output(True, deep, ""), 100)) <= 100
    assert shorten(Output(True, "1.10\n", ""), 100) == "1.10" and shorten(Output(True, '{"a": 1}', ""), 100) == '{"a":1}'


@pytest.mark.full
def test_every_operation_that_is_offered_is_simulated(account):
    """As far as the simulator says so: with made-up values the answers are errors, of which none is `unknown operation`."""
    unknown = []
    for service, operations in OPERATIONS.items():
        known = commands.commands_of(service)
        for operation in sorted(operations):
            model = known[operation][1]
            call = getattr(account.client(model.service_model.service_name), operation.replace("-", "_"))
            try:
                call(**made_up(model.input_shape))
            except Exception as fault:
                if re.search(r"InvalidAction|Unknown|not valid for this|NotImplemented", str(fault)):
                    unknown.append(f"{service} {operation}")
    assert unknown == []


def made_up(shape):
    """A value of a shape that passes botocore's check."""
    if shape is None:
        return {}
    least = max(int(shape.metadata.get("min", 1)), 1)
    kinds = {"structure": lambda: {name: made_up(shape.members[name]) for name in shape.required_members},
             "list": lambda: [made_up(shape.member)] * least, "map": lambda: {"k" * 3: made_up(shape.value)},
             "string": lambda: (shape.enum or ["x" * max(least, 3)])[0], "boolean": lambda: True, "blob": lambda: b"x",
             "timestamp": lambda: 1_700_000_000, "float": lambda: 1.0, "double": lambda: 1.0}
    return kinds.get(shape.type_name, lambda: least)()


# --- An episode -------------------------------------------------------------------------------------------------------


MADE_UP = "BUSH/rabbit"


def test_a_bucket_is_made_in_a_region_that_there_can_be(account):
    """botocore follows a bucket to where it lies, so with such a bucket nothing could be asked of it, by the grader either."""
    wipe(account.endpoint)
    where = f"--create-bucket-configuration LocationConstraint={MADE_UP}"
    output = account.run(f"aws s3api create-bucket --bucket rabbit {where}")
    assert not output.ok and MADE_UP in output.stderr and output.call is None
    assert account.client("s3").list_buckets()["Buckets"] == []


def test_an_answer_that_cannot_be_read_is_a_check_that_fails(account):
    """Some of the simulator's answers are no XML with a `<` in them. Writing one is no way out of an episode, and what cannot
    be listed does not count as absent."""
    task = read_task("expert-wrong-subscription")
    topic = task.setup[0].split()[-1]
    env = AwsEnv(account.endpoint, max_turns=2)
    env.reset(seed=1, task=task.id)
    arn = f"arn:aws:sns:us-east-1:000000000000:{topic}"
    spoil = f"aws sns subscribe --topic-arn {arn} --protocol 'x<' --notification-endpoint y"
    assert env.step({"command": spoil}).observation["ok"]
    result = env.step({"command": spoil})
    assert (result.reward, result.done, result.metadata["progress"]) == (0.0, True, 0.0)
    env.close()


def test_a_command_is_found_in_any_text_at_once():
    """A text of many spaces may not hold up the server's other sessions: a pattern once took the square of their number."""
    start = time.monotonic()
    for text in ("aws s3 " + " " * 200_000 + "x", "` " * 100_000 + "x", "aws `" * 40_000):
        assert read_command({"text": text})
    assert time.monotonic() - start < 2
    assert read_command({"text": "Sure:\r\n> aws s3 ls `\r\nand so on"}) == "aws s3 ls"


@pytest.mark.parametrize("step", [["a"], [{"a": 1}, "b"], 3, None])
def test_a_step_that_is_none_is_refused(step):
    with pytest.raises(ValueError, match="a step of a path is"):
        check_criterion({"service": "s3", "read": "head_bucket", "args": {}, "path": [step], "exists": True})
