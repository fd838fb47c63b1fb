"""Whether an account is in the state that a task asks for: reads of the account, never what was typed to get there.

A criterion is plain data: a read out of a closed list, its arguments, a path into the answer, and one comparison.

    {"service": "s3", "read": "get_bucket_tagging", "args": {"Bucket": "apple"},
     "path": ["TagSet", {"Key": "team"}, "Value"], "equals": "blue"}

A step of the path is a name (that entry of every mapping found), a mapping (keep the mappings found that have all of its
entries), a list of mappings (keep those that have all entries of one of them), "@json" (read a text as JSON) or "@minutes"
(a schedule as the minutes between two of its times). Lists are opened at every step and at the end, and a list of one is
the same as what it holds, so a single action and a list with that action are the same. `exists` and `absent` are true
alone; `equals` takes a value or a list in any order; `contains` asks for a value among the found ones, and `count` for how
many there are. A criterion with `keep` holds at the start already and must go on holding. An argument
`{"found": {"service", "read", "args", "path"}}` is the one value that another read finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpolab.env.aws.backend import messages
from grpolab.env.aws.clients import AccountGone, broken

if TYPE_CHECKING:
    from grpolab.env.aws.tasks import Task

_S3 = ("NoSuchBucket",)
_IAM = ("NoSuchEntity",)
_GONE = ("ResourceNotFoundException",)
_QUEUE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist")
_TOPIC = ("NotFound", *_GONE)
# What may be read -> the errors that say that there is nothing to read. Any other error is the backend's.
READS: dict[tuple[str, str], tuple[str, ...]] = {
    ("s3", "head_bucket"): ("404",),
    ("s3", "head_object"): ("404",),
    ("s3", "get_bucket_location"): _S3,
    ("s3", "get_bucket_versioning"): _S3,
    ("s3", "get_bucket_tagging"): (*_S3, "NoSuchTagSet"),
    ("s3", "get_bucket_policy"): (*_S3, "NoSuchBucketPolicy"),
    ("s3", "get_bucket_encryption"): (*_S3, "ServerSideEncryptionConfigurationNotFoundError"),
    ("s3", "get_bucket_lifecycle_configuration"): (*_S3, "NoSuchLifecycleConfiguration"),
    ("s3", "get_bucket_website"): (*_S3, "NoSuchWebsiteConfiguration"),
    ("s3", "get_bucket_logging"): _S3,
    ("s3", "get_bucket_notification_configuration"): _S3,
    ("s3", "get_public_access_block"): (*_S3, "NoSuchPublicAccessBlockConfiguration"),
    ("sqs", "get_queue_attributes"): _QUEUE,
    ("sqs", "list_queue_tags"): _QUEUE,
    ("sqs", "list_messages"): (),  # the simulator's: to receive them would change them
    ("sns", "get_topic_attributes"): _TOPIC,
    ("sns", "list_subscriptions_by_topic"): _TOPIC,
    ("sns", "list_tags_for_resource"): _TOPIC,
    ("dynamodb", "describe_table"): _GONE,
    ("dynamodb", "get_item"): (*_GONE, "ValidationException"),  # the second: a table with another key
    ("dynamodb", "describe_time_to_live"): _GONE,
    ("dynamodb", "describe_continuous_backups"): (*_GONE, "TableNotFoundException"),
    ("dynamodb", "list_tags_of_resource"): (*_GONE, "AccessDeniedException"),  # what it says of a table that is not there
    ("iam", "get_user"): _IAM,
    ("iam", "get_group"): _IAM,
    ("iam", "get_role"): _IAM,
    ("iam", "get_policy"): _IAM,
    ("iam", "get_policy_version"): _IAM,
    ("iam", "get_user_policy"): _IAM,
    ("iam", "get_role_policy"): _IAM,
    ("iam", "get_instance_profile"): _IAM,
    ("iam", "list_user_tags"): _IAM,
    ("iam", "list_role_tags"): _IAM,
    ("iam", "list_user_policies"): _IAM,
    ("iam", "list_role_policies"): _IAM,
    ("iam", "list_attached_user_policies"): _IAM,
    ("iam", "list_attached_group_policies"): _IAM,
    ("iam", "list_attached_role_policies"): _IAM,
    ("iam", "list_access_keys"): _IAM,
    ("ssm", "get_parameter"): ("ParameterNotFound",),
    ("secretsmanager", "get_secret_value"): (*_GONE, "InvalidRequestException"),  # the second: it waits for its deletion
    ("secretsmanager", "describe_secret"): _GONE,
    ("logs", "describe_log_groups"): (),
    ("logs", "describe_log_streams"): _GONE,
    ("logs", "describe_metric_filters"): _GONE,
    ("logs", "list_tags_for_resource"): _GONE,
    ("events", "describe_rule"): _GONE,
    ("events", "list_targets_by_rule"): _GONE,
    ("events", "describe_event_bus"): _GONE,
    ("kms", "list_keys"): (),
    ("kms", "describe_key"): ("NotFoundException",),
    ("kms", "get_key_rotation_status"): ("NotFoundException", "KMSInvalidStateException"),  # the second: it is to be deleted
    ("cloudwatch", "describe_alarms"): (),
}
COMPARISONS = ("exists", "absent", "equals", "contains", "count")
_PARTS = {"service", "read", "args", "path", "keep"}


class GradingError(RuntimeError):
    """The account answered with an error that no criterion expects: a fault of the backend, and no verdict on the task."""


@dataclass(frozen=True)
class Check:
    """One criterion on one account: what was read, whether it holds, and whether it had to be kept rather than reached."""

    read: str
    holds: bool
    keep: bool


@dataclass(frozen=True)
class Grade:
    """The state of an account against a task. `progress` is 1.0 exactly where `achieved`: the share of the criteria to
    reach that hold, counted against those and against every kept one that is broken."""

    achieved: bool
    progress: float
    checks: tuple[Check, ...]


def check_criterion(criterion: Mapping[str, Any]) -> str:
    """The name of a criterion's comparison; ValueError for one that is outside the vocabulary."""
    compared = [name for name in COMPARISONS if name in criterion]
    if len(compared) != 1 or set(criterion) - _PARTS != set(compared):
        raise ValueError(f"a criterion has one of {COMPARISONS} beside {sorted(_PARTS)}: {json.dumps(criterion)[:200]}")
    if compared[0] in ("exists", "absent") and criterion[compared[0]] is not True:
        raise ValueError(f"{compared[0]!r} is true or left out: {json.dumps(criterion)[:200]}")
    _check_read(criterion)
    return compared[0]


def _check_read(criterion: Mapping[str, Any]) -> None:
    """ValueError for a read or a path outside the vocabulary, in the criterion or in an argument that is found."""
    if (criterion["service"], criterion["read"]) not in READS:
        raise ValueError(f"{criterion['service']}.{criterion['read']} is none of the reads that a criterion may ask for")
    for step in criterion.get("path", ()):
        if not isinstance(step, (str, Mapping)) and not (isinstance(step, list) and all(isinstance(s, Mapping) for s in step)):
            raise ValueError(f"a step of a path is a name, a mapping or a list of mappings: {criterion['path']}")
    for value in criterion.get("args", {}).values():
        if isinstance(value, Mapping) and set(value) == {"found"}:
            _check_read(value["found"])


def grade(task: Task, client: Callable[[str], Any]) -> Grade:
    """Read the account of `client` (service name -> botocore client on its endpoint) and compare it with the criteria.

    A criterion whose answer cannot be parsed, or lies in no region that there can be, does not hold, whatever it compares:
    such an answer repeats what a policy wrote.
    Raises AccountGone where the backend does not answer, GradingError where it refuses a read, ValueError for a criterion
    outside the vocabulary.
    """
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    answers: dict[str, Any] = {}  # criteria often look at different parts of one answer
    checks = []
    for criterion in task.criteria:
        how = check_criterion(criterion)
        try:
            holds = _holds(how, criterion[how], _found(criterion, client, answers))
        except broken() as error:
            raise AccountGone(f"task {task.id!r} could not be graded: {error}") from error
        except (ResponseParserError, exceptions.InvalidRegionError):  # readable at the start: what was typed has spoilt it
            holds = False
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            raise GradingError(f"task {task.id!r}: {criterion['service']}.{criterion['read']} failed: {error}") from error
        checks.append(Check(f"{criterion['service']}.{criterion['read']}", holds, criterion.get("keep", False)))
    reached = [check.holds for check in checks if not check.keep]
    lost = sum(check.keep and not check.holds for check in checks)
    progress = sum(reached) / (len(reached) + lost)
    return Grade(progress == 1.0, progress, tuple(checks))


def _found(criterion: Mapping[str, Any], client: Callable[[str], Any], answers: dict[str, Any]) -> list:
    """The values at the end of a criterion's path; none where there is nothing to read."""
    args = {}
    for name, value in criterion.get("args", {}).items():
        if isinstance(value, Mapping) and set(value) == {"found"}:
            values = _found(value["found"], client, answers)
            if len(values) != 1:
                return []
            (value,) = values
        args[name] = value
    key = json.dumps([criterion["service"], criterion["read"], args])
    if key not in answers:
        answers[key] = _read(client(criterion["service"]), criterion["service"], criterion["read"], args)
    found = answers[key]
    for step in criterion.get("path", ()):
        found = _step(found, step)
    return found


def _read(client: Any, service: str, read: str, args: Mapping[str, Any]) -> list:
    """The answer of a read, all its pages, as a list of one; an empty list where the account has no such thing."""
    from botocore.exceptions import ClientError

    try:
        if read == "list_messages":
            return messages(client.meta.endpoint_url, args["QueueUrl"])
        if client.can_paginate(read):
            return [client.get_paginator(read).paginate(**args).build_full_result()]
        return [{k: v for k, v in getattr(client, read)(**args).items() if k != "ResponseMetadata"}]
    except ClientError as error:
        if error.response["Error"]["Code"] in READS[service, read]:
            return []
        raise


def _step(found: list, step: str | Mapping[str, Any] | list[Mapping[str, Any]]) -> list:
    """One step of a path from every value found."""
    if step in ("@json", "@minutes"):
        read = _json if step == "@json" else _minutes
        return _opened([read(text) for text in found if isinstance(text, str) and text])
    mappings = [value for value in found if isinstance(value, Mapping)]
    if isinstance(step, str):
        return _opened([value[step] for value in mappings if step in value])
    ways = step if isinstance(step, list) else [step]
    return [value for value in mappings
            if any(all(_holds("contains", wanted, _opened([value.get(name)])) for name, wanted in way.items()) for way in ways)]


def _json(text: str) -> Any:
    """A text of the account read as JSON; nothing where it is none, since a policy may have written it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []


def _minutes(expression: str) -> int | list:
    """The minutes between two times of a schedule expression of EventBridge: any rate(...), and cron(...) that names minutes
    alone. Nothing for another one, and nothing where the minutes between are not always the same.
    Source of the syntax: https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-scheduled-rule-pattern.html"""
    if rate := re.fullmatch(r"rate\(([0-9]{1,9}) (minute|hour|day)s?\)", expression):
        return int(rate[1]) * {"minute": 1, "hour": 60, "day": 1440}[rate[2]]
    cron = re.fullmatch(r"cron\(([0-9*/,]{1,200}) \* (?:\* \* \?|\? \* \*) \*\)", expression)
    if cron is None:
        return []
    times: set[int] = set()
    for part in cron[1].split(","):
        place = re.fullmatch(r"(\*|[0-5]?[0-9])(?:/([1-9][0-9]?))?", part)
        if place is None:
            return []
        first = 0 if place[1] == "*" else int(place[1])
        every = int(place[2]) if place[2] else 1 if place[1] == "*" else 60
        times.update(range(first, 60, every))
    gaps = {(b - a) % 60 or 60 for a, b in zip(sorted(times), [*sorted(times)[1:], min(times)])}
    return gaps.pop() if len(gaps) == 1 else []


def _opened(found: list) -> list:
    """Values with every list among them replaced by its items."""
    opened = []
    for value in found:
        opened.extend(_opened(value)) if isinstance(value, list) else opened.append(value)
    return opened


def _plain(value: Any) -> Any:
    """A value with every list of one in it replaced by what it holds."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return _plain(value[0]) if len(value) == 1 else [_plain(part) for part in value]
    return value


def _same(found: Any, wanted: Any) -> bool:
    """Equality of plain JSON, where a number is the same as its text: services differ in how they write one."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if _plain(found) == _plain(wanted):
        return True
    if isinstance(found, (dict, list, type(None))) or isinstance(wanted, (dict, list, type(None))):
        return False
    try:
        return float(found) == float(wanted)
    except (TypeError, ValueError, OverflowError):
        return False


def _holds(how: str, wanted: Any, found: list) -> bool:
    """One comparison."""
    if how in ("exists", "absent"):
        return bool(found) == (how == "exists")
    if how == "count":
        return _same(len(found), wanted)
    if how == "contains":
        return any(_same(value, wanted) for value in found)
    left = list(found)
    for value in wanted if isinstance(wanted, list) else [wanted]:
        place = next((i for i, other in enumerate(left) if _same(other, value)), None)
        if place is None:
            return False
        del left[place]
    return not left
