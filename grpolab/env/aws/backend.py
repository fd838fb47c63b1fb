"""Simulated accounts as leased backends: one MiniStack process a session, wiped between two tenants and shown to be empty.

    with accounts(8) as pool: ...                                   # a BackendPool; its leases hold http://127.0.0.1:PORT
    async with serve(AwsEnv, max_sessions=8, backends=accounts(8)) as server: ...
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlencode, urlsplit

import jmespath
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from grpolab.env.aws import simulator
from grpolab.env.aws.clients import SIMULATED, AccountGone, make_client
from grpolab.env.backends import BackendPool, ProcessBackend

ANSWER_SECONDS = 10.0  # what a healthy one needs at most, on a busy machine
START_SECONDS = 30.0  # on a busy machine eight start at once
REGION = "us-east-1"  # where the global services are listed
GLOBAL_SERVICES = ("s3", "iam")
# (service, operation that lists what it holds, path to the names in its answer)
LISTINGS = (
    ("s3", "list_buckets", "Buckets[].Name"),
    ("iam", "list_users", "Users[].UserName"),
    ("iam", "list_groups", "Groups[].GroupName"),
    ("iam", "list_roles", "Roles[].RoleName"),
    ("iam", "list_policies", "Policies[?!starts_with(Arn, 'arn:aws:iam::aws:')].PolicyName"),
    ("iam", "list_instance_profiles", "InstanceProfiles[].InstanceProfileName"),
    ("dynamodb", "list_tables", "TableNames"),
    ("sqs", "list_queues", "QueueUrls"),
    ("sns", "list_topics", "Topics[].TopicArn"),
    ("ssm", "describe_parameters", "Parameters[].Name"),
    ("secretsmanager", "list_secrets", "SecretList[].Name"),
    ("kms", "list_keys", "Keys[].KeyId"),
    ("logs", "describe_log_groups", "logGroups[].logGroupName"),
    ("monitoring", "describe_alarms", "MetricAlarms[].AlarmName"),
    ("events", "list_rules", "Rules[].Name"),
    ("events", "list_event_buses", "EventBuses[?Name != 'default'].Name"),
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
    """What the account holds, as {"iam list_users": ["ada"]}, with the region behind it where that is not us-east-1; empty
    listings are left out. Only the services and regions of requests since the last wipe but one are asked: asking loads them.
    Raises AccountGone."""
    used = sorted({(service, REGION if service in GLOBAL_SERVICES else region)
                   for service, region in _ask(address, "GET", simulator.USAGE)[1]})
    listed = {f"{service} {operation}" + ("" if region == REGION else f" {region}"):
              _names(address, service, region, operation, path)
              for service, region in used for of, operation, path in LISTINGS if of == service}
    return {listing: names for listing, names in listed.items() if names}


def messages(address: str, queue: str) -> list[dict[str, str]]:
    """The messages of a queue in us-east-1, given by its name, those in flight and delayed too, as [{"Body": text, ...}];
    unlike a receive, this changes nothing. Raises AccountGone."""
    status, answer = _ask(address, "GET", f"/_ministack/sqs/messages?{urlencode({'QueueUrl': queue, 'region': REGION})}")
    if status != 200:
        raise AccountGone(f"the account at {address} does not show the messages of {queue}: {status} {answer!r:.200}")
    return [message for regions in answer["messages"].values() for queues in regions.values()
            for of_queue in queues.values() for message in of_queue]


def _names(address: str, service: str, region: str, operation: str, path: str) -> list[str]:
    try:
        answer = getattr(_inspecting_client(service, address, region), operation)()
    except (BotoCoreError, ClientError) as error:
        raise AccountGone(f"the account at {address} does not answer {operation}: {error}") from error
    except ResponseParserError:  # something is there, with a name that no XML can hold
        return ["(unreadable)"]
    return jmespath.search(path, answer) or []


@lru_cache(256)
def _inspecting_client(service: str, address: str, region: str) -> Any:
    return make_client({"monitoring": "cloudwatch"}.get(service, service), address, region, simulator.INSPECTOR)


def _ask(address: str, method: str, path: str) -> tuple[int, Any]:
    """(status, JSON or text) of one request; raises AccountGone where there is no answer within ANSWER_SECONDS."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=ANSWER_SECONDS)
    try:
        # without `close` the server keeps the connection's file for its whole keep-alive of an hour
        connection.request(method, path, headers={"Connection": "close"})
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise AccountGone(f"the account at {address} does not answer: {error!r}") from error
    finally:
        connection.close()
    return response.status, json.loads(text) if text[:1] in ("{", "[") else text
