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
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlencode, urlsplit

from grpolab.env.aws import simulator
from grpolab.env.aws.clients import HOST, SIMULATED, AccountGone
from grpolab.env.backends import BackendPool, ProcessBackend

ANSWER_SECONDS = 10.0  # what a healthy one needs at most, on a busy machine
START_SECONDS = 30.0  # on a busy machine eight start at once
REGION = "us-east-1"  # where the global services are listed


@dataclass(frozen=True)
class Listing:
    """An operation that lists what a service holds, in one of MiniStack's modules: asked as JSON where it has a `target`, as a
    form where it has a `version`, else with a bare GET. `entry` is the name of an entry, "" where a text is the entry."""

    module: str
    service: str  # as requests are signed
    operation: str
    entry: str
    target: str = ""
    member: str = ""  # the list in a JSON answer
    version: str = ""
    parameters: str = ""
    default: str = ""  # the entry that an empty account has
    regional: bool = True

    def request(self) -> tuple[str, dict[str, str], str | None]:
        """(method, headers, body)"""
        if self.target:
            return "POST", {"X-Amz-Target": self.target, "Content-Type": "application/x-amz-json-1.1"}, "{}"
        if self.version:
            form = urlencode({"Action": self.operation, "Version": self.version}) + self.parameters
            return "POST", {"Content-Type": "application/x-www-form-urlencoded"}, form
        return "GET", {}, None

    def names(self, answer: Any) -> list[str]:
        """The entries in an answer."""
        if not self.target:
            return re.findall(f"<{self.entry}>([^<]*)</{self.entry}>", answer)
        names = [entry[self.entry] if self.entry else entry for entry in answer.get(self.member, [])]
        return [name for name in names if name != self.default]


def _json(module: str, service: str, prefix: str, operation: str, member: str, entry: str = "", default: str = "") -> Listing:
    return Listing(module, service, operation, entry, target=f"{prefix}.{operation}", member=member, default=default)


def _iam(operation: str, entry: str, parameters: str = "") -> Listing:
    return Listing("iam", "iam", operation, entry, version="2010-05-08", parameters=parameters, regional=False)


LISTINGS = (
    Listing("s3", "s3", "ListBuckets", "Name", regional=False),
    _iam("ListUsers", "UserName"), _iam("ListGroups", "GroupName"), _iam("ListRoles", "RoleName"),
    _iam("ListPolicies", "PolicyName", "&Scope=Local"), _iam("ListInstanceProfiles", "InstanceProfileName"),
    Listing("sns", "sns", "ListTopics", "TopicArn", version="2010-03-31"),
    Listing("cloudwatch", "monitoring", "DescribeAlarms", "AlarmName", version="2010-08-01"),
    _json("dynamodb", "dynamodb", "DynamoDB_20120810", "ListTables", "TableNames"),
    _json("sqs", "sqs", "AmazonSQS", "ListQueues", "QueueUrls"),
    _json("ssm", "ssm", "AmazonSSM", "DescribeParameters", "Parameters", "Name"),
    _json("secretsmanager", "secretsmanager", "secretsmanager", "ListSecrets", "SecretList", "Name"),
    _json("kms", "kms", "TrentService", "ListKeys", "Keys", "KeyId"),
    _json("cloudwatch_logs", "logs", "Logs_20140328", "DescribeLogGroups", "logGroups", "logGroupName"),
    _json("eventbridge", "events", "AWSEvents", "ListRules", "Rules", "Name"),
    _json("eventbridge", "events", "AWSEvents", "ListEventBuses", "EventBuses", "Name", default="default"),
)


class Simulator(ProcessBackend):
    """One MiniStack process. `services` are MiniStack's names of what it may load. A lease holds its address, or under
    `options` the mapping {"account": address, **options} for `AwsEnv`."""

    def __init__(self, services: tuple[str, ...] = SIMULATED, options: Mapping[str, Any] | None = None):
        # -P keeps the folder of simulator.py, whose modules have common names, off the path.
        super().__init__([sys.executable, "-P", simulator.__file__, *services], health=healthy, scrub=scrub,
                         start_timeout=START_SECONDS)
        self.options = options

    def start(self) -> Any:
        address = super().start()
        return address if self.options is None else {"account": address, **self.options}


def accounts(size: int, *, services: tuple[str, ...] = SIMULATED, options: Mapping[str, Any] | None = None) -> BackendPool:
    """`size` accounts for `serve(AwsEnv, backends=accounts(size))`; `options` are those of `AwsEnv` for every session.
    Raises ImportError where MiniStack is not installed."""
    if find_spec("ministack") is None:
        raise ImportError("the aws environment needs ministack: pip install 'grpolab[aws]'")
    return BackendPool(lambda _: Simulator(services, options), size)


def healthy(address: str) -> bool:
    """Whether the process answers within ANSWER_SECONDS."""
    return _ask(address, "GET", "/_ministack/health")[0] == 200


def scrub(address: str) -> bool:
    """Wipe the account; whether it is empty then. Raises AccountGone."""
    wipe(address)
    return not inventory(address)


def wipe(address: str) -> None:
    """Delete everything in the account, in all regions; raises AccountGone where the backend does not say that it did."""
    status, answer = _ask(address, "POST", "/_ministack/reset")
    if status != 200 or answer != {"reset": "ok"}:
        raise AccountGone(f"the account at {address} could not be wiped: {status} {answer!r:.100}")


def inventory(address: str) -> dict[str, list[str]]:
    """What the account holds, as {"iam ListUsers": ["ada"]}, with the region behind it where that is not us-east-1; empty
    listings are left out. Services and regions that nobody used are not asked; asking would load them. Raises AccountGone."""
    modules, regions = usage(address)
    holdings = {}
    for region in (REGION, *sorted({*regions} - {REGION})):
        for listing in LISTINGS:
            if listing.module in modules and (listing.regional or region == REGION):
                where = "" if region == REGION else f" {region}"
                holdings[f"{listing.service} {listing.operation}{where}"] = _names(address, listing, region)
    return {listing: names for listing, names in holdings.items() if names}


def messages(address: str, queue: str) -> list[dict[str, str]]:
    """The messages of a queue in us-east-1, given by its name, those in flight and delayed too, as [{"Body": text, ...}];
    unlike a receive, this changes nothing. Raises AccountGone."""
    status, answer = _ask(address, "GET", f"/_ministack/sqs/messages?{urlencode({'QueueUrl': queue, 'region': REGION})}")
    if status != 200:
        raise AccountGone(f"the account at {address} does not show the messages of {queue}: {status} {answer!r:.200}")
    return [message for regions in answer["messages"].values() for queues in regions.values()
            for of_queue in queues.values() for message in of_queue]


def usage(address: str) -> tuple[list[str], list[str]]:
    """The simulator's modules that have been loaded, and the regions that were asked since the last wipe but one."""
    answer = _ask(address, "GET", simulator.USAGE)[1]
    return answer["modules"], answer["regions"]


def _names(address: str, listing: Listing, region: str) -> list[str]:
    method, headers, body = listing.request()
    signed = {"Authorization": f"AWS4-HMAC-SHA256 Credential=testing/20200101/{region}/{listing.service}/aws4_request, "
                               "SignedHeaders=host, Signature=none", "Host": HOST}
    status, answer = _ask(address, method, "/", headers | signed, body)
    if status != 200:
        raise AccountGone(f"the account at {address} does not answer {listing.operation}: {status} {answer!r:.200}")
    return listing.names(answer)


def _ask(address: str, method: str, path: str, headers: Mapping[str, str] | None = None, body: str | None = None) -> tuple:
    """(status, JSON or text) of one request; raises AccountGone where there is no answer within ANSWER_SECONDS."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=ANSWER_SECONDS)
    try:
        # without `close` the server keeps the connection's file for its whole keep-alive of an hour
        ours = {"Connection": "close", "User-Agent": simulator.INSPECTOR}
        connection.request(method, path, body, ours | dict(headers or {}))
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise AccountGone(f"the account at {address} does not answer: {error!r}") from error
    finally:
        connection.close()
    return response.status, json.loads(text) if text[:1] in ("{", "[") else text
