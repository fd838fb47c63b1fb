"""Whether an account is in the state that a task asks for: reads of the account, never what was typed to get there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from botocore import exceptions
from botocore.parsers import ResponseParserError

from grpolab.env.aws.backend import messages
from grpolab.env.aws.clients import CONNECTION_ERRORS, AccountGone
from grpolab.env.aws.criteria import NOTHING_THERE, check_criterion, follow, holds
from grpolab.env.aws.tasks import Task

Clients = Callable[[str], Any]  # service name -> botocore client on the account's endpoint


class GradingError(RuntimeError):
    """The account answered with an error that no criterion expects: a fault of the backend, and no verdict on the task."""


@dataclass(frozen=True)
class Grade:
    """The state of an account against a task. `progress` is 1.0 exactly where `achieved`: the share of the criteria to
    reach that hold, counted against those and against every kept one that is broken. `holds` is of each criterion."""

    achieved: bool
    progress: float
    holds: tuple[bool, ...]


def grade(task: Task, client: Clients) -> Grade:
    """Read the account of `client` and compare it with the task's criteria.

    A criterion whose answer cannot be parsed, or lies in no region that there can be, does not hold, whatever it compares:
    such an answer repeats what a policy wrote.
    Raises AccountGone where the backend does not answer, GradingError where it refuses a read, ValueError for a criterion
    outside the vocabulary.
    """
    answers: dict[str, list] = {}  # criteria often look at different parts of one answer
    held = tuple(_holds(task.id, criterion, client, answers) for criterion in task.criteria)
    keep = [criterion.get("keep", False) for criterion in task.criteria]
    reached = [h for h, k in zip(held, keep) if not k]
    lost = sum(k and not h for h, k in zip(held, keep))
    progress = sum(reached) / (len(reached) + lost)
    return Grade(progress == 1.0, progress, held)


def _holds(task: str, criterion: Mapping[str, Any], client: Clients, answers: dict[str, list]) -> bool:
    comparison = check_criterion(criterion)
    try:
        return holds(comparison, criterion[comparison], _values(criterion, client, answers))
    except CONNECTION_ERRORS as error:
        raise AccountGone(f"task {task!r} could not be graded: {error}") from error
    except (ResponseParserError, exceptions.InvalidRegionError, RecursionError):
        return False  # it could be read at the start: what was typed has spoilt it
    except (exceptions.BotoCoreError, exceptions.ClientError) as error:
        raise GradingError(f"task {task!r}: {criterion['service']}.{criterion['read']} failed: {error}") from error


def _values(criterion: Mapping[str, Any], client: Clients, answers: dict[str, list]) -> list:
    """The values at the end of a criterion's path; none where there is nothing to read."""
    args = {}
    for name, value in criterion.get("args", {}).items():
        if isinstance(value, Mapping) and set(value) == {"found"}:
            values = _values(value["found"], client, answers)
            if len(values) != 1:
                return []
            (value,) = values
        args[name] = value
    key = json.dumps([criterion["service"], criterion["read"], args])
    if key not in answers:
        answers[key] = _read(client(criterion["service"]), criterion["service"], criterion["read"], args)
    return follow(answers[key], criterion.get("path", ()))


def _read(client: Any, service: str, read: str, args: Mapping[str, Any]) -> list:
    """The answers of a read; an empty list where the account has no such thing."""
    try:
        return _COMPOSED[read](client, **args) if read in _COMPOSED else [_answer(client, read, **args)]
    except exceptions.ClientError as error:
        if error.response["Error"]["Code"] in NOTHING_THERE[service]:
            return []
        raise


def _answer(client: Any, read: str, **args: Any) -> dict:
    """The answer of one operation, all its pages."""
    if client.can_paginate(read):
        return client.get_paginator(read).paginate(**args).build_full_result()
    return {name: value for name, value in getattr(client, read)(**args).items() if name != "ResponseMetadata"}


def _policy_document(iam: Any, PolicyArn: str) -> list:
    """The document of a managed policy's default version."""
    version = _answer(iam, "get_policy", PolicyArn=PolicyArn)["Policy"]["DefaultVersionId"]
    return [_answer(iam, "get_policy_version", PolicyArn=PolicyArn, VersionId=version)["PolicyVersion"]["Document"]]


def _identity_policies(iam: Any, **identity: str) -> list:
    """The documents of all policies of a user, role or group: inline, attached, and those of a user's groups."""
    kind = next(iter(identity)).removesuffix("Name").lower()
    documents = [_answer(iam, f"get_{kind}_policy", **identity, PolicyName=name)["PolicyDocument"]
                 for name in _answer(iam, f"list_{kind}_policies", **identity)["PolicyNames"]]
    for policy in _answer(iam, f"list_attached_{kind}_policies", **identity)["AttachedPolicies"]:
        documents += _policy_document(iam, policy["PolicyArn"])
    for group in _answer(iam, "list_groups_for_user", **identity)["Groups"] if kind == "user" else ():
        documents += _identity_policies(iam, GroupName=group["GroupName"])
    return documents


# Reads that are no operation of AWS, by name; each gives a list.
_COMPOSED = {
    "list_messages": lambda sqs, QueueUrl: messages(sqs.meta.endpoint_url, QueueUrl),  # to receive them would change them
    "get_policy_document": _policy_document,
    "get_identity_policies": _identity_policies,
}
