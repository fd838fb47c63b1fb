"""Simulated accounts as leased backends: one MiniStack process a session, wiped between two tenants and shown to be empty.

    with accounts(8) as pool: ...                                   # a BackendPool; its leases hold http://127.0.0.1:PORT
    async with serve(AwsEnv, max_sessions=8, backends=accounts(8)) as server: ...
"""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlencode, urlsplit

from grpolab.env.aws import simulator
from grpolab.env.aws.allowed import SIMULATED
from grpolab.env.aws.clients import HOST, AccountGone, missing
from grpolab.env.backends import BackendPool, ProcessBackend

ANSWERS = 10.0  # s; what a healthy one needs at most, on a busy machine
START = 30.0  # s; on a busy machine eight start at once

# What each module of MiniStack lists: (signing name, how, target or query, the list in a JSON answer, the name of an entry).
_JSON, _QUERY, _GET = "json", "query", "get"
LISTS: dict[str, tuple[tuple[str, str, str, str, str], ...]] = {
    "s3": (("s3", _GET, "/", "", "Name"),),
    "dynamodb": (("dynamodb", _JSON, "DynamoDB_20120810.ListTables", "TableNames", ""),),
    "sqs": (("sqs", _JSON, "AmazonSQS.ListQueues", "QueueUrls", ""),),
    "sns": (("sns", _QUERY, "ListTopics 2010-03-31", "", "TopicArn"),),
    "iam": (("iam", _QUERY, "ListUsers 2010-05-08", "", "UserName"), ("iam", _QUERY, "ListGroups 2010-05-08", "", "GroupName"),
            ("iam", _QUERY, "ListRoles 2010-05-08", "", "RoleName"),
            ("iam", _QUERY, "ListPolicies 2010-05-08 Scope=Local", "", "PolicyName"),
            ("iam", _QUERY, "ListInstanceProfiles 2010-05-08", "", "InstanceProfileName")),
    "ssm": (("ssm", _JSON, "AmazonSSM.DescribeParameters", "Parameters", "Name"),),
    "secretsmanager": (("secretsmanager", _JSON, "secretsmanager.ListSecrets", "SecretList", "Name"),),
    "kms": (("kms", _JSON, "TrentService.ListKeys", "Keys", "KeyId"),),
    "cloudwatch_logs": (("logs", _JSON, "Logs_20140328.DescribeLogGroups", "logGroups", "logGroupName"),),
    "cloudwatch": (("monitoring", _QUERY, "DescribeAlarms 2010-08-01", "", "AlarmName"),),
    "eventbridge": (("events", _JSON, "AWSEvents.ListRules", "Rules", "Name"),
                    ("events", _JSON, "AWSEvents.ListEventBuses", "EventBuses", "Name")),
}
ALWAYS = {"AWSEvents.ListEventBuses": "default"}  # what an empty account lists


class Simulator(ProcessBackend):
    """One MiniStack process. `services` are MiniStack's names of what it may load. A lease holds its address, or under
    `options` the mapping {"account": address, **options} for `AwsEnv`."""

    def __init__(self, services: tuple[str, ...] = SIMULATED, options: Mapping[str, Any] | None = None):
        # -P keeps the folder of simulator.py, whose modules have common names, off the path.
        super().__init__([sys.executable, "-P", simulator.__file__, *services], health=healthy, scrub=scrub,
                         start_timeout=START)
        self.options = options

    def start(self) -> Any:
        address = super().start()
        return address if self.options is None else {"account": address, **self.options}


def accounts(size: int, *, services: tuple[str, ...] = SIMULATED, options: Mapping[str, Any] | None = None) -> BackendPool:
    """`size` accounts for `serve(AwsEnv, backends=accounts(size))`; `options` are those of `AwsEnv` for every session.
    Raises ImportError where MiniStack is not installed."""
    if find_spec("ministack") is None:
        raise missing(ModuleNotFoundError(name="ministack"))
    return BackendPool(lambda _: Simulator(services, options), size)


def healthy(address: str) -> bool:
    """Whether the process answers within ANSWERS seconds."""
    return _ask(address, "GET", "/_ministack/health")[0] == 200


def scrub(address: str) -> bool:
    """Wipe the account; whether it is empty then. Raises AccountGone."""
    wipe(address)
    return not leftovers(address)


def wipe(address: str) -> None:
    """Delete everything in the account, in all regions; raises AccountGone where the backend does not say that it did."""
    status, answer = _ask(address, "POST", "/_ministack/reset")
    if status != 200 or answer != {"reset": "ok"}:
        raise AccountGone(f"the account at {address} could not be wiped: {status} {answer!r:.100}")


def leftovers(address: str) -> list[str]:
    """The listings of `inventory` that have an entry: [] for an empty account. Raises AccountGone."""
    return list(inventory(address))


def inventory(address: str) -> dict[str, list[str]]:
    """What can be listed in us-east-1, as {"iam ListUsers": ["ada"]}, empty listings left out. Services that were never used
    are not asked, since asking loads them. Raises AccountGone."""
    found = {f"{signing} {_called(what)}": _listed(address, signing, how, what, within, name)
             for module in loaded(address) for signing, how, what, within, name in LISTS.get(module, ())}
    return {listing: names for listing, names in found.items() if names}


def messages(address: str, queue: str) -> list[dict[str, str]]:
    """The messages of a queue in us-east-1, given by its name, those in flight and delayed too, as [{"Body": text, ...}];
    unlike a receive, this changes nothing. Raises AccountGone."""
    status, answer = _ask(address, "GET", f"/_ministack/sqs/messages?{urlencode({'QueueUrl': queue, 'region': 'us-east-1'})}")
    if status != 200:
        raise AccountGone(f"the account at {address} does not show the messages of {queue}: {status} {answer!r:.200}")
    return [message for regions in answer["messages"].values() for queues in regions.values()
            for held in queues.values() for message in held]


def loaded(address: str) -> list[str]:
    """The names of the simulator's modules of services that have been used."""
    return _ask(address, "GET", simulator.LOADED)[1]


def _called(what: str) -> str:
    """The operation's name in a target, a query or a path."""
    return "ListBuckets" if what == "/" else what.split(" ")[0].rpartition(".")[2]


def _listed(address: str, signing: str, how: str, what: str, within: str, name: str) -> list[str]:
    """The names in one listing."""
    headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/{signing}/aws4_request, "
                                "SignedHeaders=host, Signature=none", "Host": HOST}
    if how == _GET:
        status, answer = _ask(address, "GET", what, headers)
    elif how == _JSON:
        headers |= {"X-Amz-Target": what, "Content-Type": "application/x-amz-json-1.1"}
        status, answer = _ask(address, "POST", "/", headers, "{}")
    else:
        action, version, *more = what.split(" ")
        form = urlencode({"Action": action, "Version": version} | dict(pair.split("=") for pair in more))
        status, answer = _ask(address, "POST", "/", headers | {"Content-Type": "application/x-www-form-urlencoded"}, form)
    if status != 200:
        raise AccountGone(f"the account at {address} does not list {what}: {status} {answer!r:.200}")
    if how == _JSON:
        names = [entry[name] if name else entry for entry in answer.get(within, [])]
        return [name for name in names if name != ALWAYS.get(what)]
    return re.findall(f"<{name}>([^<]*)</{name}>", answer)


def _ask(address: str, method: str, path: str, headers: Mapping[str, str] | None = None, body: str | None = None) -> tuple:
    """(status, JSON or text) of one request; raises AccountGone where there is no answer within ANSWERS seconds."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=ANSWERS)
    try:
        # without `close` the server keeps the connection's file for its whole keep-alive of an hour
        connection.request(method, path, body, {"Connection": "close"} | dict(headers or {}))
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as fault:
        raise AccountGone(f"the account at {address} does not answer: {fault!r}") from fault
    finally:
        connection.close()
    return response.status, json.loads(text) if text[:1] in ("{", "[") else text
