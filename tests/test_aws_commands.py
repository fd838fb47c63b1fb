"""The aws command line in process: what it prints, what it refuses, and that nothing leaves the account."""

import gc
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time

import pytest
from aws_hostile import commands as hostile_commands

from grpolab.env.aws import clients, commands
from grpolab.env.aws.backend import Simulator, wipe
from grpolab.env.aws.command_parser import CommandRefused, split
from grpolab.env.aws.commands import OPERATIONS, Account, Output

TABLE = ("aws dynamodb create-table --table-name users --attribute-definitions AttributeName=id,AttributeType=S "
         "--key-schema AttributeName=id,KeyType=HASH --billing-mode PAY_PER_REQUEST")
ALARM = ("aws cloudwatch put-metric-alarm --alarm-name a --metric-name m --namespace n --statistic Sum --period 60 "
         "--evaluation-periods 1 --threshold 1 --comparison-operator GreaterThanThreshold")
# One thing in every listing.
MAKERS = {
    "s3 list_buckets": "aws s3 mb s3://one-bucket", "dynamodb list_tables": TABLE,
    "sqs list_queues": "aws sqs create-queue --queue-name q",
    "sns list_topics": "aws sns create-topic --name t", "iam list_users": "aws iam create-user --user-name u",
    "iam list_groups": "aws iam create-group --group-name g",
    "iam list_roles": "aws iam create-role --role-name r --assume-role-policy-document '{}'",
    "iam list_policies": """aws iam create-policy --policy-name p --policy-document '{"Version":"2012-10-17","Statement":
        [{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'""".replace("\n", " "),
    "iam list_instance_profiles": "aws iam create-instance-profile --instance-profile-name p",
    "ssm describe_parameters": "aws ssm put-parameter --name a --value b --type String",
    "secretsmanager list_secrets": "aws secretsmanager create-secret --name s --secret-string x",
    "kms list_keys": "aws kms create-key", "logs describe_log_groups": "aws logs create-log-group --log-group-name g",
    "cloudwatch describe_alarms": ALARM,
    "events list_event_buses": "aws events create-event-bus --name b",
    "events list_rules": "aws events put-rule --name r --schedule-expression 'rate(5 minutes)'",
}
CLI = """
import contextlib, io, json, sys
from awscli.clidriver import create_clidriver
answers = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as error:
        status = create_clidriver().main(words)
    answers.append([status, said.getvalue(), error.getvalue()])
print(json.dumps(answers))
"""
watched: list | None = None  # (event, arguments) of this process while a test watches
QUIET = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "subprocess.Popen", "os.system",
         "os.exec", "os.posix_spawn", "open")


def audit(event, arguments):
    """PEP 578: sees every connection, look-up, process and file of this process; cannot be removed, so it is told when."""
    if watched is None or event not in QUIET:
        return
    watched.append((event, arguments))
    where = arguments[1][0] if event == "socket.connect" else arguments[0]
    if event.startswith("socket.") and where != "127.0.0.1":
        raise PermissionError(f"a test does not let {event} {arguments!r:.100} leave this machine")


sys.addaudithook(audit)


@pytest.fixture
def endpoint(_account):
    wipe(_account.endpoint)
    return _account.endpoint


@pytest.fixture
def account(endpoint):
    account = Account(endpoint)
    yield account
    account.close()


def good(output: Output) -> Output:
    assert output.ok, output.stderr
    return output


def test_a_bucket_is_made_listed_and_removed(account):
    assert json.loads(good(account.run("aws s3api create-bucket --bucket logs")).stdout) == {"Location": "/logs"}
    assert good(account.run("aws s3 mb s3://west --region us-west-2")).stdout == "make_bucket: west\n"
    assert [line.split()[2] for line in good(account.run("aws s3 ls")).stdout.splitlines()] == ["logs", "west"]
    assert [b["Name"] for b in account.client("s3").list_buckets()["Buckets"]] == ["logs", "west"]
    where = json.loads(good(account.run("aws s3api get-bucket-location --bucket west")).stdout)
    assert where == {"LocationConstraint": "us-west-2"}
    good(account.run("aws s3api put-object --bucket logs --key a/b.txt"))
    assert good(account.run("aws s3 ls s3://logs")).stdout.split() == ["PRE", "a/"]
    assert good(account.run("aws s3 ls s3://logs --recursive")).stdout.split()[2:] == ["0", "a/b.txt"]
    assert "BucketNotEmpty" in account.run("aws s3 rb s3://logs").stderr
    assert good(account.run("aws s3 rb s3://logs --force")).stdout == "delete: s3://logs/a/b.txt\nremove_bucket: logs\n"


def test_it_prints_what_the_cli_prints(account, tmp_path):
    """The same lines through `aws` itself, in a process of its own."""
    for line in (TABLE, """aws dynamodb put-item --table-name users --item '{"id": {"S": "1"}, "n": {"N": "2"}}'"""):
        good(account.run(line))
    account.run("aws sqs create-queue --queue-name jobs")
    lines = ("aws dynamodb describe-table --table-name users", "aws dynamodb scan --table-name users --output text",
             "aws dynamodb scan --table-name users --query 'Items[].id.S'", "aws dynamodb list-tables --output table",
             "aws sts get-caller-identity", "aws s3api list-buckets --query 'Buckets[*].Name' --output text",
             "aws dynamodb describe-table --table-name nope")
    env = {"HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
           "PATH": os.environ["PATH"], "AWS_DEFAULT_REGION": "us-east-1", "TZ": "UTC",
           "AWS_CONFIG_FILE": str(tmp_path / "config")}
    (tmp_path / "config").write_text("[default]\ncli_timestamp_format = iso8601\n")  # what version 2 of the CLI prints
    given = json.dumps([[*shlex.split(line)[1:], "--endpoint-url", account.endpoint] for line in lines])
    done = subprocess.run([sys.executable, "-c", CLI], input=given, env=env, capture_output=True, text=True, timeout=120)
    for line, (status, said, error) in zip(lines, json.loads(done.stdout), strict=True):
        ours = account.run(line)
        assert (ours.stdout, ours.stderr.strip(), ours.ok) == (said, error.strip(), status == 0), line


@pytest.mark.parametrize("line, said", [
    ("aws s3api create-bucket", "the following arguments are required: --bucket"),
    ("aws s3api create-bucket --buck x", "Unknown options: --buck"),
    ("aws s3api nope", "'nope' is not available in s3api"),
    ("aws lambda list-functions", "'lambda' is not available; there are: s3, s3api"),
    ("aws s3 cp /etc/passwd s3://x", "aws s3 ls, mb, rb, rm"),
    ("ls", "starts with aws"),
    ("aws s3api list-buckets | cat", "pipes (|) are not available"),
    ("aws iam create-user --user-name file:///etc/passwd", "files are not available"),
    ("aws s3api put-object --bucket b --key k --body x", "--body reads a local file"),
    ("aws s3api get-object --bucket b --key k out", "end the command with it"),
    ("aws s3api list-buckets --output yaml", "argument --output: invalid choice: 'yaml'"),
    ("aws s3api list-buckets --region nowhere", "write one as us-east-1"),
    ("aws dynamodb put-item --table-name t --item '{'", "Invalid JSON"),
    ("aws s3api head-bucket --bucket nothing", "An error occurred (404) when calling the HeadBucket operation: Not Found"),
])
def test_a_refusal_says_why(account, line, said):
    output = account.run(line)
    assert not output.ok and output.stdout == "" and said in output.stderr and "max retries" not in output.stderr


def test_help_names_what_there_is(account):
    assert "services: s3, s3api, dynamodb" in good(account.run("aws help")).stdout
    assert "create-table" in good(account.run("aws dynamodb help")).stdout
    options = good(account.run("aws dynamodb create-table help")).stdout
    assert " --table-name " in options and "[--billing-mode]" in options and "--cli-input-json" not in options
    assert not account.run("aws lambda help").ok


def test_an_object_is_read_to_stdout(account):
    account.run("aws s3 mb s3://data")
    account.client("s3").put_object(Bucket="data", Key="note", Body=b"hello\n")
    printed = good(account.run("aws s3api get-object --bucket data --key note /dev/stdout")).stdout
    assert printed.startswith("hello\n{") and json.loads(printed[6:])["ContentLength"] == 6


def test_removing_a_folder_spares_what_begins_like_it(account):
    def held(*removals, keys=("app", "app/a", "app/b/c", "app.log", "apple", "other")):
        account.run("aws s3 rb s3://box --force")
        for line in ("aws s3 mb s3://box", *(f"aws s3api put-object --bucket box --key {key}" for key in keys), *removals):
            assert account.run(line).ok, line
        return [line.split()[-1] for line in account.run("aws s3 ls s3://box --recursive").stdout.splitlines()]

    assert held("aws s3 rm s3://box/app --recursive") == ["app", "app.log", "apple", "other"]
    assert held("aws s3 rm s3://box/app/ --recursive") == ["app", "app.log", "apple", "other"]
    assert held("aws s3 rm s3://box/app/b --recursive") == ["app", "app.log", "app/a", "apple", "other"]
    assert held("aws s3 rm s3://box --recursive") == held("aws s3 rm s3://box/ --recursive") == []


def test_an_at_sign_is_no_file(account):
    account.run("aws sqs create-queue --queue-name q")
    assert account.run("aws sqs send-message --queue-url q --message-body 'user@=x'").ok
    assert account.run("aws ssm put-parameter --name p --type String --value 'mail@=host'").ok
    for line in ("aws sqs create-queue --queue-name r --attributes a@=file:///etc/passwd",
                 "aws sqs create-queue --queue-name r --attributes 'a@=\"file:///etc/passwd\"'"):
        assert "files are not available" in account.run(line).stderr


def test_many_items_come_in_pages(account):
    good(account.run(TABLE))
    for n in range(12):
        account.client("dynamodb").put_item(TableName="users", Item={"id": {"S": str(n)}})
    scan = "aws dynamodb scan --table-name users"
    assert json.loads(good(account.run(f"{scan} --page-size 5")).stdout)["Count"] == 12
    few = json.loads(good(account.run(f"{scan} --max-items 3")).stdout)
    assert len(few["Items"]) == 3 and "NextToken" in few
    assert json.loads(good(account.run(f"{scan} --no-paginate --limit 4")).stdout)["Count"] == 4


@pytest.mark.parametrize("between", ["--no-paginate", "--marker x"])
def test_a_command_changes_nothing_for_the_next(between):
    """awscli, which parses once a process, writes into the tables that are kept here."""
    def parameters(line):
        return commands.parse(*commands.parse_global_options(split(line)[1:])).parameters

    before = parameters("aws iam list-roles --max-items 1")
    parameters(f"aws iam list-roles {between}")
    assert parameters("aws iam list-roles --max-items 1") == before == {"PaginationConfig": {"MaxItems": 1}}


def test_every_allowed_operation_exists():
    for service, operations in OPERATIONS.items():
        assert set(commands.commands_of(service)) == operations, service


@pytest.mark.parametrize("line", [
    "aws a b", "a 'b c' d", 'a "b \\" c" \\d', "a ''", "a=b\\ c", "a'b'\"c\"",
    "'a\\b'", '"a\\b"', "  a  ", "{\"a\": 1}", "a\tb", 'x"\\\\"'])
def test_words_are_split_as_by_a_shell(line):
    assert split(line) == shlex.split(line)


@pytest.mark.parametrize("line", ["a | b", "a;b", "a&b", "a>b", "a<b", "a $b", 'a "$b"', "a `b`", "(a)", "a\nb",
                                  "a\0", "'a", "a\\", "\ud800", 'a "\\$b"', "a 'b' $c 'd'"])
def test_what_only_a_shell_knows_is_refused(line):
    with pytest.raises(CommandRefused):
        split(line)
    assert split("a 'b|c;d&e>f$g`h(i)'") == ["a", "b|c;d&e>f$g`h(i)"]


def test_hostile_commands_get_nothing(endpoint, tmp_path, monkeypatch):
    """More than 200 of them: none succeeds, none opens a file, starts a process or connects elsewhere, and none takes long."""
    global watched
    canary = tmp_path / "canary"
    secret = "CANARY-7f3a"
    canary.write_text(secret)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\naws_access_key_id={secret}\naws_secret_access_key={secret}\n")
    (tmp_path / ".aws" / "config").write_text("[default]\nendpoint_url=http://192.0.2.1\n[plugins]\nx = aws_hostile\n")
    with Simulator() as neighbour, socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        for name, value in {"HOME": str(tmp_path), "AWS_PROFILE": "canary", "AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url,
                            "HTTP_PROXY": url, "http_proxy": url, "ALL_PROXY": url, "AWS_ACCESS_KEY_ID": secret,
                            "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": secret, "AWS_CA_BUNDLE": str(canary),
                            "AWS_DATA_PATH": str(tmp_path), "AWS_CONFIG_FILE": str(canary)}.items():
            monkeypatch.setenv(name, value)
        for cached in (clients._shared_session, commands._session, commands.commands_of):
            cached.cache_clear()
        other = Account(neighbour.address)
        account = Account(endpoint)
        lines = hostile_commands(str(canary), int(neighbour.address.rpartition(":")[2]))
        assert len(lines) >= 200
        try:
            good(other.run("aws s3 mb s3://next-door"))
            good(account.run("aws s3 mb s3://data"))
            good(account.run("aws s3 mb s3://logs"))
            good(account.run("aws s3api put-object --bucket logs --key k"))
            for service in OPERATIONS:  # models are read once
                commands.commands_of(service)
                account.client("s3" if service == "s3api" else service)
            succeeded, leaked, slow = [], [], []
            gc.collect()  # what earlier tests of this process left removes its folders as it goes
            watched = []
            for line in lines:
                start, computed = time.monotonic(), time.process_time()
                output = account.run(line)
                took, computed = time.monotonic() - start, time.process_time() - computed
                shown = line[:100]
                succeeded += [shown] * output.ok
                told = output.stdout + output.stderr
                leaked += [shown] * any(word in told for word in (secret, "next-door", "root:"))
                slow += [(shown, took, computed)] * (computed > 2 or took > 30)  # other processes may take the clock's time
            seen, watched = watched, None
            assert succeeded == [] and leaked == [] and slow == []
            port = int(endpoint.rpartition(":")[2])
            to = {arguments[1] for event, arguments in seen if event == "socket.connect"}
            assert to == {("127.0.0.1", port)}, to  # what is no attack in itself, such as a bucket that is not there
            opened = [str(arguments[0]) for event, arguments in seen if event == "open"]
            assert [path for path in opened if "site-packages" not in path and "lib/python" not in path] == []
            assert {event for event, _ in seen} <= {"socket.connect", "socket.getaddrinfo", "open"}
            trap.settimeout(0.05)
            with pytest.raises(TimeoutError):
                trap.accept()
            assert [line.split()[2] for line in good(other.run("aws s3 ls")).stdout.splitlines()] == ["next-door"]
            assert [line.split()[2] for line in good(account.run("aws s3 ls")).stdout.splitlines()] == ["data", "logs"]
        finally:
            watched = None
            other.close()
            account.close()
            for cached in (clients._shared_session, commands._session, commands.commands_of):
                cached.cache_clear()


def test_a_client_reaches_its_account_alone(account, monkeypatch):
    """Whatever address botocore makes up, nothing is sent there."""
    s3 = account.client("s3")
    monkeypatch.setattr(clients, "SIMULATED", ())
    with pytest.raises(clients.OutsideRequest, match="s3 is not simulated"):
        s3.list_buckets()
    monkeypatch.undo()
    s3.meta.events.register_first("before-sign.s3", lambda request, **_: setattr(request, "url", "http://127.0.0.1:9/x"))
    with pytest.raises(clients.OutsideRequest, match="127.0.0.1:9"):
        s3.list_buckets()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1", "https://127.0.0.1:1", "http://localhost:1", "http://127.0.0.1:1/"])
def test_an_account_is_on_loopback(endpoint):
    with pytest.raises(ValueError, match="127.0.0.1:PORT"):
        Account(endpoint)


def test_a_wipe_leaves_nothing_of_any_service_in_any_region(account):
    def held(name, region=None):
        service, operation = name.split()
        answer = getattr(account.client(service, region), operation)()
        return sum(len(value) for value in answer.values() if isinstance(value, list))

    empty = {name: held(name) for name in MAKERS}
    for name, line in MAKERS.items():
        good(account.run(line))
        assert held(name) == empty[name] + 1, name
    good(account.run("aws sqs create-queue --queue-name far --region eu-west-1"))
    assert held("sqs list_queues", "eu-west-1") == 1
    wipe(account.endpoint)
    assert {name: held(name) for name in MAKERS} == empty and held("sqs list_queues", "eu-west-1") == 0


def test_the_simulator_calls_nobody(account):
    """A subscription is confirmed at its address and a message sent there: not from here, also not on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reached = threading.Event()
        threading.Thread(target=lambda: (listener.accept(), reached.set()), daemon=True).start()
        topic = json.loads(good(account.run("aws sns create-topic --name t")).stdout)["TopicArn"]
        there = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        account.run(f"aws sns subscribe --topic-arn {topic} --protocol http --notification-endpoint {there}")
        account.run(f"aws sns publish --topic-arn {topic} --message hello")
        assert not reached.wait(0.5)
        with socket.create_connection(listener.getsockname()):  # so that the thread ends, and to see that it was listening
            assert reached.wait(5)


def test_it_listens_on_loopback_and_hides_its_port(account):
    port = int(account.endpoint.rpartition(":")[2])
    with open("/proc/net/tcp") as table:
        listening = [row.split()[1] for row in table if row.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    url = json.loads(good(account.run("aws sqs create-queue --queue-name q")).stdout)["QueueUrl"]
    assert url == "http://localhost:4566/000000000000/q"
    good(account.run(f"aws sqs send-message --queue-url {url} --message-body hi"))
    good(account.run("aws sns create-topic --name t"))
    assert not re.search(rf"\b{port}\b", account.run("aws sns list-topics").stdout)
