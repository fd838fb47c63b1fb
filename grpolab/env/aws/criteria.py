"""What a task asks of an account, as plain data: a read, its arguments, a path into the answer, and one comparison.

    {"service": "s3", "read": "get_bucket_tagging", "args": {"Bucket": "apple"},
     "path": ["TagSet", {"Key": "team"}, "Value"], "equals": "blue"}

A step of the path is a name (that entry of every mapping), a mapping (keep the mappings that have all of its entries), a list
of mappings (keep those that have all entries of one of them), or one of STEPS, which read a text. Lists are opened at every
step and at the end, and a list of one is the same as its item, so a single action and a list with that action are the same.

`exists` and `absent` are true alone; `equals` takes a value or a list in any order, and `count` how many values there are at
the end of the path. `allows` and `allows_only` take a request (`policies.Request`) and ask the IAM policies at the end of the
path: whether these allow it, and whether they allow nothing else. A criterion with `keep` holds from the start and must go on
holding. An argument {"found": {"service", "read", "args", "path"}} is the one value that another read finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from grpolab.env.aws.policies import Request, allows, allows_only

# Service -> the error codes that say that there is nothing to read. Any other error is the backend's.
NOTHING_THERE: dict[str, tuple[str, ...]] = {
    "s3": ("404", "NoSuchBucket", "NoSuchTagSet", "NoSuchBucketPolicy", "ServerSideEncryptionConfigurationNotFoundError",
           "NoSuchLifecycleConfiguration", "NoSuchWebsiteConfiguration", "NoSuchPublicAccessBlockConfiguration"),
    "sqs": ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"),
    "sns": ("NotFound", "ResourceNotFoundException"),
    # Of a table with another key; of tags where there is no table.
    "dynamodb": ("ResourceNotFoundException", "TableNotFoundException", "ValidationException", "AccessDeniedException"),
    "iam": ("NoSuchEntity",),
    "ssm": ("ParameterNotFound",),
    "secretsmanager": ("ResourceNotFoundException", "InvalidRequestException"),  # the second: it waits for its deletion
    "logs": ("ResourceNotFoundException",),
    "events": ("ResourceNotFoundException",),
    "kms": ("NotFoundException", "KMSInvalidStateException"),  # the second: it waits for its deletion
    "cloudwatch": (),
}
COMPARISONS = ("exists", "absent", "equals", "count", "allows", "allows_only")
_PARTS = {"service", "read", "args", "path", "keep"}


def check_criterion(criterion: Mapping[str, Any]) -> str:
    """The name of a criterion's comparison; ValueError for one that is outside the vocabulary."""
    compared = [name for name in COMPARISONS if name in criterion]
    if len(compared) != 1 or set(criterion) - _PARTS != set(compared):
        raise ValueError(f"a criterion has one of {COMPARISONS} beside {sorted(_PARTS)}: {json.dumps(criterion)[:200]}")
    wanted = criterion[compared[0]]
    if compared[0] in ("exists", "absent") and wanted is not True:
        raise ValueError(f"{compared[0]!r} is true or left out: {json.dumps(criterion)[:200]}")
    if compared[0].startswith("allows"):
        try:
            Request(**wanted)
        except TypeError as error:
            raise ValueError(f"a request has action, resource, principal and context: {json.dumps(wanted)[:200]}") from error
    _check_read(criterion)
    return compared[0]


def _check_read(criterion: Mapping[str, Any]) -> None:
    """ValueError for a read or a path outside the vocabulary, in the criterion or in an argument that another read finds."""
    service, read = criterion.get("service"), str(criterion.get("read"))
    if service not in NOTHING_THERE or not read.startswith(("get_", "list_", "describe_", "head_")):
        raise ValueError(f"{service}.{read} is no read; the services are {', '.join(NOTHING_THERE)}, and a read starts with "
                         "get_, list_, describe_ or head_")
    for step in criterion.get("path", ()):
        if not isinstance(step, (str, Mapping)) and not (isinstance(step, list) and all(isinstance(s, Mapping) for s in step)):
            raise ValueError(f"a step of a path is a name, a mapping or a list of mappings: {criterion['path']}")
    for value in criterion.get("args", {}).values():
        if isinstance(value, Mapping) and set(value) == {"found"}:
            _check_read(value["found"])


def holds(comparison: str, wanted: Any, values: list) -> bool:
    """Whether a comparison is true of the values at the end of a path."""
    if comparison in ("exists", "absent"):
        return bool(values) == (comparison == "exists")
    if comparison == "count":
        return _canonical(len(values)) == _canonical(wanted)
    if comparison == "allows":
        return allows(values, Request(**wanted))
    if comparison == "allows_only":
        return bool(values) and allows_only(values, Request(**wanted))
    wanted = wanted if isinstance(wanted, list) else [wanted]
    return sorted(map(_canonical, values)) == sorted(map(_canonical, wanted))


def follow(values: list, path: Any) -> list:
    """The values at the end of a path that starts at each of `values`."""
    for step in path:
        values = _step(values, step)
    return values


def _step(values: list, step: str | Mapping[str, Any] | list[Mapping[str, Any]]) -> list:
    if isinstance(step, str) and step in STEPS:
        return _opened([STEPS[step](text) for text in values if isinstance(text, str) and text])
    mappings = [value for value in values if isinstance(value, Mapping)]
    if isinstance(step, str):
        return _opened([value[step] for value in mappings if step in value])

    def has(mapping: Mapping, entries: Mapping) -> bool:
        return all(_canonical(wanted) in map(_canonical, _opened([mapping.get(name)])) for name, wanted in entries.items())

    ways = step if isinstance(step, list) else [step]
    return [mapping for mapping in mappings if any(has(mapping, entries) for entries in ways)]


def _json(text: str) -> Any:
    """A text of the account read as JSON; nothing where it is none, since a policy may have written it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []


def _term(pattern: str) -> str | list:
    """The one term that a filter pattern of CloudWatch Logs asks for: ERROR, "ERROR" and ?ERROR are the same.
    https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/FilterAndPatternSyntax.html"""
    term = re.fullmatch(r'\??(?:"([^"\\]+)"|([A-Za-z0-9_]+))', pattern.strip())
    return (term[1] or term[2]) if term else []


def _minutes(expression: str) -> int | list:
    """The minutes between two times of a schedule expression of EventBridge: rate(...), or cron(...) that names every minute
    or every so many of an hour. Nothing for another one, and nothing where the minutes between are not always the same.
    https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-scheduled-rule-pattern.html"""
    if rate := re.fullmatch(r"rate\(([0-9]{1,9}) (minute|hour|day)s?\)", expression):
        return int(rate[1]) * {"minute": 1, "hour": 60, "day": 1440}[rate[2]]
    cron = re.fullmatch(r"cron\((?:\*|[*0]/([1-9][0-9]?)) \* (?:\* \* \?|\? \* \*) \*\)", expression)
    every = int(cron[1] or 1) if cron else 7
    return every if 60 % every == 0 else []


STEPS = {"@json": _json, "@minutes": _minutes, "@term": _term}


def _opened(values: list) -> list:
    """Values with every list among them replaced by its items."""
    opened = []
    for value in values:
        opened.extend(_opened(value)) if isinstance(value, list) else opened.append(value)
    return opened


def _canonical(value: Any) -> str:
    """A text that is the same for values that count as equal: a list of one and its item, a number and its text."""
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(part) for name, part in value.items()}
        if isinstance(value, list):
            return plain(value[0]) if len(value) == 1 else [plain(part) for part in value]
        try:
            return value if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            return value

    return json.dumps(plain(value), sort_keys=True, default=str)
