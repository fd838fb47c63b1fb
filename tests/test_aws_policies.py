"""What IAM policies allow, by the rules that AWS documents."""

import pytest

from grpolab.env.aws.policies import Request, allows, allows_only

GET, OBJECT = "s3:GetObject", "arn:aws:s3:::pear/a.txt"
OBJECTS = "arn:aws:s3:::pear/*"
EC2, ROLE = {"Service": "ec2.amazonaws.com"}, {"AWS": "arn:aws:iam::000000000000:role/reader"}


def policy(*statements):
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(**elements):
    return {"Effect": "Allow", "Action": GET, "Resource": OBJECTS} | elements


def deny(**elements):
    return allow(**elements) | {"Effect": "Deny"}


def without(statement, *names):
    return {name: value for name, value in statement.items() if name not in names}


def allowed(*documents, resource=OBJECT, principal=None, context=()):
    return allows(documents, Request(GET, resource, principal, dict(context)))


@pytest.mark.parametrize("statements, expected", [
    ([], False), ([allow()], True), ([deny()], False), ([allow(), deny()], False), ([deny(), allow()], False),
    ([allow(Action="s3:getobject")], True), ([allow(Action="s3:Get*")], True), ([allow(Action="*")], True),
    ([allow(Action=["s3:PutObject", "s3:G?tObject"])], True), ([allow(Action="s3:PutObject")], False),
    ([allow(Resource="*")], True), ([allow(Resource=OBJECT)], True), ([allow(Resource="arn:aws:s3:::pear")], False),
    ([allow(Resource="arn:aws:s3:::PEAR/*")], False), ([allow(Resource=["x", "arn:aws:s3:::*"])], True),
    ([allow(Resource="arn:aws:s3:::[p]ear/*")], False),
    ([without(allow(NotAction="iam:*"), "Action")], False), ([without(allow(NotResource="x"), "Resource")], False),
    ([allow(), without(deny(NotAction="s3:P*"), "Action")], False), ([allow(), deny(Resource="*")], False),
    ([allow(), deny(Action="s3:PutObject")], True), ([allow(Resource="arn:aws:s3:::${aws:userid}/*")], False),
    ([allow(), deny(Resource="arn:aws:s3:::${aws:userid}/*")], False),
    ([allow(Principal="*")], False), ([without(allow(), "Resource")], False), ([{"Effect": "Allow"}], False),
    ([allow(), {"Effect": "Deny"}], False), ([allow(Action={"a": 1})], False), ([None, 3, []], False)])
def test_deny_comes_before_allow(statements, expected):
    assert allowed(policy(*statements)) is expected
    assert allowed(*map(policy, statements)) is expected  # the same in policies of their own


@pytest.mark.parametrize("document", [None, "text", 1, {"Statement": "x"}, {}, {"Statement": [["x"]]}])
def test_what_is_no_policy_allows_nothing(document):
    assert not allowed(document) and allowed({"Statement": allow()})  # a single statement needs no list


@pytest.mark.parametrize("condition, holds", [
    ({"StringEquals": {"AWS:requestedregion": "us-east-1"}}, True),
    ({"StringEquals": {"aws:RequestedRegion": ["eu-west-1", "US-east-1"]}}, False),
    ({"StringLike": {"aws:RequestedRegion": "us-*"}}, True),
    ({"ArnLike": {"aws:SourceArn": "arn:aws:sns:*:*:news"}}, True), ({"ArnEquals": {"aws:SourceArn": "arn:aws:sns:x"}}, False),
    ({"Bool": {"aws:SecureTransport": "true"}}, True), ({"Bool": {"aws:SecureTransport": True}}, True),
    ({"Bool": {"aws:SecureTransport": "false"}}, False),
    ({"Bool": {"aws:SecureTransport": "true"}, "StringEquals": {"aws:RequestedRegion": "eu-west-1"}}, False)])
def test_conditions(condition, holds):
    context = {"aws:SourceArn": "arn:aws:sns:us-east-1:0:news"}
    assert allowed(policy(allow(Condition=condition)), context=context) is holds
    assert allowed(policy(allow(), deny(Condition=condition)), context=context) is not holds


@pytest.mark.parametrize("condition", [
    {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, {"DateLessThan": {"aws:CurrentTime": "2030-01-01T00:00:00Z"}},
    {"StringEquals": {"aws:SourceVpc": "vpc-1"}}, {"Likes": {"aws:SourceIp": "x"}}, "x", {"Bool": 1}])
def test_a_condition_that_is_not_understood_never_allows_and_always_denies(condition):
    assert not allowed(policy(allow(Condition=condition)))
    assert not allowed(policy(allow(), deny(Condition=condition)))


@pytest.mark.parametrize("statement, principal, expected", [
    (allow(Principal="*"), EC2, True), (allow(Principal={"AWS": "*"}), ROLE, True), (allow(Principal=EC2), EC2, True),
    (allow(Principal=EC2), ROLE, False), (allow(Principal={"Service": ["lambda.amazonaws.com", EC2["Service"]]}), EC2, True),
    (allow(Principal=ROLE), ROLE, True), (allow(Principal=ROLE), {"AWS": ROLE["AWS"] + "s"}, False), (allow(), EC2, False),
    (allow(Principal={"AWS": "000000000000"}), ROLE, False),  # lets the account decide, which is no decision
    (allow(NotPrincipal=EC2), ROLE, False),
    (without(allow(Principal=EC2), "Resource"), EC2, True)])
def test_principals(statement, principal, expected):
    assert allowed(policy(statement), principal=principal) is expected


@pytest.mark.parametrize("root", ["000000000000", "arn:aws:iam::000000000000:root", "*"])
def test_an_account_is_denied_with_everybody_in_it(root):
    assert not allowed(policy(allow(Principal=ROLE), deny(Principal={"AWS": root})), principal=ROLE)


@pytest.mark.parametrize("statements, expected", [
    ([allow()], True), ([allow(Resource="arn:aws:s3:::p*")], True), ([allow(Resource=OBJECT)], False),
    ([allow(Resource="arn:aws:s3:::pear/?*")], False), ([allow(Resource="arn:aws:s3:::pear/?")], False),
    ([allow(), deny(Resource=OBJECT)], False), ([allow(), deny(Resource="*/secret*")], False),
    ([allow(), deny(Resource="arn:aws:s3:::plum/*")], True),
    ([allow(), without(deny(NotResource=OBJECT), "Resource")], False)])
def test_a_request_with_wildcards_is_all_that_it_matches(statements, expected):
    assert allowed(policy(*statements), resource=OBJECTS) is expected


@pytest.mark.parametrize("statements, only", [
    ([allow()], True), ([allow(), deny(Action="*", Resource="*")], True), ([allow(Resource=OBJECT)], True), ([], True),
    ([allow(Action="s3:*")], False), ([allow(Resource="*")], False), ([allow(Action=[GET, "s3:ListBucket"])], False),
    ([allow(), allow(Resource="arn:aws:s3:::plum/*")], False), ([without(allow(NotAction="iam:*"), "Action")], False),
    ([without(allow(NotResource="x"), "Resource")], False),
    ([allow(Resource="*", Condition={"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}})], False)])
def test_nothing_beyond_a_request(statements, only):
    assert allows_only([policy(*statements)], Request(GET, OBJECTS)) is only


@pytest.mark.parametrize("principal, only", [
    (EC2, True), ("*", False), ({"AWS": "*"}, False), (EC2 | {"AWS": "*"}, False), ({"Service": ["x", EC2["Service"]]}, False)])
def test_nobody_beyond_a_principal(principal, only):
    trust = without(allow(Action="sts:AssumeRole", Principal=principal), "Resource")
    assert allows_only([policy(trust)], Request("sts:AssumeRole", principal=EC2)) is only
    assert not allows_only([policy(without(trust, "Principal"))], Request("sts:AssumeRole", principal=EC2))


def test_a_hostile_pattern_takes_no_time():
    assert not allowed(policy(allow(Resource="*a" * 3000 + "b")), resource="a" * 100)
