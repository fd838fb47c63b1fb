"""What IAM policies allow, by AWS's evaluation logic: an explicit Deny wins, then an Allow, and otherwise the answer is no.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html

A request's action and resource may hold `*` and `?`. Such a request stands for everything that they match: an Allow has to
cover all of it, and a Deny that touches any part of it wins. What cannot be read, such as an unknown condition operator, never
allows and always denies, since a policy may have been written by anybody.
"""

from __future__ import annotations

import ipaddress
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Principal = Mapping[str, str]  # {"Service": "sns.amazonaws.com"} or {"AWS": the ARN of a user or role}


@dataclass(frozen=True)
class Request:
    """What somebody asks to do. `principal` is who asks a resource, or asks to assume a role; None where the policies are those
    of an identity. `context` has condition keys, such as aws:SourceIp."""

    action: str
    resource: str = "*"
    principal: Principal | None = None
    context: Mapping[str, str] = field(default_factory=dict)


def allows(policies: Iterable[Any], action: str, resource: str, context: Mapping[str, str] | None = None,
           principal: Principal | None = None) -> bool:
    """Whether the policies together allow the request. Every policy is a document as `json.loads` gives it."""
    request = Request(action, resource, principal, {key.lower(): value for key, value in (context or {}).items()})
    effects = {statement.get("Effect") for statement in _statements(policies) if _applies(statement, request)}
    return "Allow" in effects and "Deny" not in effects


def allows_only(policies: Iterable[Any], requests: Iterable[Request]) -> bool:
    """Whether everything that a statement allows, under whatever condition, lies within one of the requests."""
    requests = tuple(requests)
    return all(any(_lies_within(statement, request) for request in requests)
               for statement in _statements(policies) if statement.get("Effect") == "Allow")


def _statements(policies: Iterable[Any]) -> Iterator[Mapping]:
    for policy in policies:
        statements = policy.get("Statement") if isinstance(policy, Mapping) else None
        yield from (s for s in (statements if isinstance(statements, list) else [statements]) if isinstance(s, Mapping))


def _applies(statement: Mapping, request: Request) -> bool:
    deny = statement.get("Effect") != "Allow"
    return (_names(statement, "Action", request.action.lower(), deny)
            and ("Resource" not in statement and "NotResource" not in statement and request.principal is not None
                 or _names(_with_variables(statement, request.context), "Resource", request.resource, deny))
            and _names_principal(statement, request.principal, deny)
            and _conditions_hold(statement.get("Condition", {}), request.context, deny))


def _lies_within(statement: Mapping, request: Request) -> bool:
    """Whether all that an Allow statement names is part of the request. A statement of all but a few names everything."""
    actions = _texts(statement["Action"]) if "Action" in statement else ["*"]
    resources = _texts(statement["Resource"]) if "Resource" in statement else ["*"]
    principals = _pairs(statement.get("Principal", "*")) if request.principal is not None else []
    return (all(_matches(request.action.lower(), action.lower()) for action in actions)
            and all(_matches(request.resource, resource) for resource in resources)
            and all(pair in (request.principal or {}).items() for pair in principals))


def _names(statement: Mapping, element: str, wanted: str, deny: bool) -> bool:
    """Whether an element, or its Not form, is about what is wanted: all of it for an Allow, any of it for a Deny."""
    texts = [text.lower() if element == "Action" else text
             for text in _texts(statement.get(element, statement.get(f"Not{element}", [])))]
    if element in statement:
        return any(_matches(text, wanted, overlap=deny) for text in texts)
    if f"Not{element}" in statement:
        return not any(_matches(text, wanted, overlap=not deny) for text in texts)
    return deny


def _names_principal(statement: Mapping, principal: Principal | None, deny: bool) -> bool:
    named = "Principal" in statement or "NotPrincipal" in statement
    if principal is None or not named:
        return deny or (principal is None and not named)
    pairs = _pairs(statement.get("Principal", statement.get("NotPrincipal")))
    # A whole account, as its id or its root, is denied with everybody in it; to allow it only lets the account decide.
    accounts = {text for name in principal.values() for text in (name.split(":")[4:5] if name.startswith("arn:") else ())}
    listed = ("AWS", "*") in pairs or any(pair in pairs for pair in principal.items()) or (deny and any(
        text == account or text == f"arn:aws:iam::{account}:root" for _, text in pairs for account in accounts))
    return listed == ("Principal" in statement)


def _pairs(principals: Any) -> list[tuple[str, str]]:
    """The (kind, name) pairs of a Principal element; "*" and {"AWS": "*"} are the same: everybody."""
    if not isinstance(principals, Mapping):
        return [("AWS", text) for text in _texts(principals)]
    return [(kind, text) for kind, names in principals.items() for text in _texts(names)]


def _with_variables(statement: Mapping, context: Mapping[str, str]) -> dict:
    """The statement's resources with ${aws:username} and the like filled in; an unknown one stays, and matches nothing."""
    return {element: [re.sub(r"\$\{([^}]*)\}", lambda variable: str(context.get(variable[1].lower(), variable[0])), text)
                      for text in _texts(statement[element])]
            for element in ("Resource", "NotResource") if element in statement}


def _conditions_hold(conditions: Any, context: Mapping[str, str], deny: bool) -> bool:
    if not isinstance(conditions, Mapping) or not all(isinstance(keys, Mapping) for keys in conditions.values()):
        return deny
    results = [_condition_holds(name, context.get(key.lower()), _texts(wanted))
               for name, keys in conditions.items() for key, wanted in keys.items()]
    return all(deny if result is None else result for result in results)


def _condition_holds(name: str, value: str | None, wanted: list[str]) -> bool | None:
    """One operator on one key; None for what cannot be read."""
    quantifier, _, name = name.rpartition(":")
    base = name.removesuffix("IfExists")
    negated = "Not" in base
    if base == "Null":
        return (value is None) == ("true" in wanted)
    test = _OPERATORS.get(base.replace("Not", ""))
    if test is None:
        return None
    if value is None:
        return negated or base != name or quantifier == "ForAllValues"
    try:
        return any(test(value, text) for text in wanted) != negated
    except (ValueError, TypeError):
        return None


def _compared(read: Callable[[str], Any], compare: Callable[[Any, Any], bool]) -> Callable[[str, str], bool]:
    return lambda value, wanted: compare(read(value), read(wanted))


_ORDERS = {"Equals": operator.eq, "LessThan": operator.lt, "LessThanEquals": operator.le, "GreaterThan": operator.gt,
           "GreaterThanEquals": operator.ge}
# Names without their "Not": (the request's value, the policy's) -> whether they match.
_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": operator.eq, "BinaryEquals": operator.eq,
    "StringEqualsIgnoreCase": _compared(str.casefold, operator.eq), "Bool": _compared(str.casefold, operator.eq),
    **dict.fromkeys(("StringLike", "ArnLike", "ArnEquals"), lambda value, wanted: _matches(wanted, value)),
    "IpAddress": lambda value, wanted: ipaddress.ip_address(value) in ipaddress.ip_network(wanted, strict=False),
    **{f"Numeric{name}": _compared(float, order) for name, order in _ORDERS.items()},
    **{f"Date{name}": _compared(datetime.fromisoformat, order) for name, order in _ORDERS.items()},
}


def _texts(value: Any) -> list[str]:
    """A value or a list of values as texts; a number or a bool as JSON writes it."""
    values = value if isinstance(value, list) else [value]
    return [str(v).lower() if isinstance(v, bool) else str(v) for v in values if isinstance(v, (str, int, float))]


def _matches(pattern: str, text: str, overlap: bool = False) -> bool:
    """Whether a pattern with `*` and `?` matches everything that `text` does, wildcards of its own included; with `overlap`,
    whether both match some same string. In one pass over the pattern, since a policy's author may be hostile."""
    def past_stars(places: set[int]) -> set[int]:
        for place in sorted(places) if overlap else ():
            while text[place:place + 1] == "*":
                place += 1
                places.add(place)
        return places

    places = past_stars({0})  # up to where the text may be used up by the pattern so far
    for c in pattern:
        if not places:
            return False
        if c == "*":
            places = set(range(min(places), len(text) + 1))
            continue
        reached = {p + 1 for p in places if p < len(text) and text[p] != "*"
                   and (text[p] == c or c == "?" or (overlap and text[p] == "?"))}
        stayed = {p for p in places if overlap and text[p:p + 1] == "*"}
        places = past_stars(reached | stayed)
    return len(text) in places
