"""What IAM policies allow, by AWS's evaluation logic: an explicit Deny wins, then an Allow, and otherwise the answer is no.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html

A policy may have been written by anybody, so what is not understood never allows and always denies: NotAction and the like,
and conditions other than of equality, with `*` and `?`, and of TLS. One of networks or times never allows, since a task asks
for access from anywhere and for good.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

# Condition keys of every request.
CONTEXT = {"aws:securetransport": "true", "aws:sourceaccount": "000000000000", "aws:requestedregion": "us-east-1"}

_NOT = frozenset(("NotAction", "NotResource", "NotPrincipal"))


@dataclass(frozen=True)
class Request:
    """What somebody asks to do. `principal` is who asks a resource, or asks to assume a role, as {"Service":
    "sns.amazonaws.com"} or {"AWS": the ARN of a user or role}; None where the policies are those of an identity. `context` has
    condition keys, such as aws:SourceArn. A resource with `*` or `?` stands for all that it matches."""

    action: str
    resource: str = "*"
    principal: Mapping[str, str] | None = None
    context: Mapping[str, str] = field(default_factory=dict)


def allows(policies: Iterable[Any], request: Request) -> bool:
    """Whether the policies together allow the request. Every policy is a document as `json.loads` gives it."""
    effects = {statement.get("Effect") for statement in _statements(policies) if _applies(statement, request)}
    return effects == {"Allow"}


def allows_only(policies: Iterable[Any], request: Request) -> bool:
    """Whether everything that a statement allows, under whatever condition, lies within the request."""
    return all(_lies_within(statement, request) for statement in _statements(policies) if statement.get("Effect") == "Allow")


def _statements(policies: Iterable[Any]) -> Iterator[Mapping]:
    for policy in policies:
        statements = policy.get("Statement") if isinstance(policy, Mapping) else None
        yield from (s for s in (statements if isinstance(statements, list) else [statements]) if isinstance(s, Mapping))


def _applies(statement: Mapping, request: Request) -> bool:
    """Whether a statement is about the request: an Allow about all of it, a Deny about any of it."""
    deny = statement.get("Effect") != "Allow"
    of_a_role = request.principal is not None and "Resource" not in statement
    if "Action" not in statement or not (of_a_role or "Resource" in statement) or not _NOT.isdisjoint(statement):
        return deny
    matches = _touches if deny else _matches
    return (any(matches(action.lower(), request.action.lower()) for action in _texts(statement["Action"]))
            and (of_a_role or any(matches(resource, request.resource) for resource in _texts(statement["Resource"])))
            and _names_principal(statement, request.principal, deny)
            and _conditions_hold(statement.get("Condition", {}), request, deny))


def _names_principal(statement: Mapping, principal: Mapping[str, str] | None, deny: bool) -> bool:
    if principal is None or "Principal" not in statement:
        return deny or (principal is None and "Principal" not in statement)
    pairs = _pairs(statement["Principal"])
    # A whole account, as its id or its root, is denied with everybody in it; to allow it only lets the account decide.
    accounts = {name.split(":")[4] for name in principal.values() if name.startswith("arn:")}
    everybody = deny and any(text in (account, f"arn:aws:iam::{account}:root") for _, text in pairs for account in accounts)
    return everybody or ("AWS", "*") in pairs or any(pair in pairs for pair in principal.items())


def _lies_within(statement: Mapping, request: Request) -> bool:
    """Whether all that an Allow statement names is part of the request. One without these elements names everything."""
    actions = _texts(statement["Action"]) if "Action" in statement else ["*"]
    resources = _texts(statement["Resource"]) if "Resource" in statement else ["*"]
    principals = _pairs(statement.get("Principal", "*")) if request.principal is not None else []
    return (all(action.lower() == request.action.lower() for action in actions)
            and all(_matches(request.resource, resource) for resource in resources)
            and all(pair in (request.principal or {}).items() for pair in principals))


def _pairs(principals: Any) -> list[tuple[str, str]]:
    """The (kind, name) pairs of a Principal element; "*" and {"AWS": "*"} are the same: everybody."""
    if not isinstance(principals, Mapping):
        return [("AWS", text) for text in _texts(principals)]
    return [(kind, text) for kind, names in principals.items() for text in _texts(names)]


def _conditions_hold(conditions: Any, request: Request, deny: bool) -> bool:
    if not isinstance(conditions, Mapping) or not all(isinstance(keys, Mapping) for keys in conditions.values()):
        return deny
    context = CONTEXT | {key.lower(): value for key, value in request.context.items()}
    for operator, keys in conditions.items():
        for key, wanted in keys.items():
            value = context.get(key.lower())
            if operator not in _OPERATORS or value is None:
                if not deny:
                    return False
            elif not any(_OPERATORS[operator](value, text) for text in _texts(wanted)):
                return False
    return True


def _texts(value: Any) -> list[str]:
    """A value or a list of values as texts; a bool as JSON writes it."""
    values = value if isinstance(value, list) else [value]
    return [str(v).lower() if isinstance(v, bool) else str(v) for v in values if isinstance(v, (str, int, float))]


def _matches(pattern: str, text: str) -> bool:
    """Whether a pattern with `*` and `?` matches everything that `text` does, wildcards of its own included."""
    return fnmatchcase(text, pattern.replace("[", "[[]").replace("?", "[!*]"))


def _touches(pattern: str, text: str) -> bool:
    """Whether a pattern may match something that `text` does; of two with wildcards, whether their beginnings agree."""
    one, two = (re.split("[*?]", each)[0] for each in (pattern, text))
    return "${" in pattern or _matches(pattern, text) or (two != text and (one.startswith(two) or two.startswith(one)))


_OPERATORS = {
    "StringEquals": str.__eq__, "Bool": lambda value, wanted: value == wanted.lower(),
    **dict.fromkeys(("StringLike", "ArnLike", "ArnEquals"), lambda value, wanted: _matches(wanted, value)),
}
