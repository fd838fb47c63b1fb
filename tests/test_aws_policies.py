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


@pytest.mark.parametrize("statements, allowed", [
    ([], False), ([allow()], True), ([deny()], False), ([allow(), deny()], False), ([deny(), allow()], False),
    ([allow(Action="s3:getobject")], True), ([allow(Action="s3:Get*")], True), ([allow(Action="*")], True),
    ([allow(Action=["s3:PutObject", "s3:G?tObject"])], True), ([allow(Action="s3:PutObject")], False),
    ([allow(Resource="*")], True), ([allow(Resource=OBJECT)], True), ([allow(Resource="arn:aws:s3:::pear")], False),
    ([allow(Resource="arn:aws:s3:::PEAR/*")], False), ([allow(Resource=["x", "arn:aws:s3:::*"])], True),
    ([without(allow(NotAction="iam:*"), "Action")], True), ([without(allow(NotAction="s3:*"), "Action")], False),
    ([without(allow(NotResource="arn:aws:s3:::plum/*"), "Resource")], True),
    ([without(allow(NotResource=OBJECTS), "Resource")], False),
    ([allow(), without(deny(NotAction=GET), "Action")], True), ([allow(), without(deny(NotAction="s3:P*"), "Action")], False),
    ([allow(), without(deny(NotResource=OBJECTS), "Resource")], True), ([allow(), deny(Resource="*")], False),
    ([allow(), deny(Action="s3:PutObject")], True),
    ([allow(Resource="arn:aws:s3:::${aws:username}/*")], True), ([allow(Resource="arn:aws:s3:::${aws:userid}/*")], False),
    ([allow(Principal="*")], False), ([without(allow(), "Resource")], False), ([{"Effect": "Allow"}], False),
    ([allow(), {"Effect": "Deny"}], False), ([allow(Action={"a": 1})], False), ([None, 3, []], False)])
def test_deny_comes_before_allow(statements, allowed):
    context = {"aws:username": "pear"}
    assert allows([policy(*statements)], GET, OBJECT, context) is allowed
    assert allows([policy(s) for s in statements], GET, OBJECT, context) is allowed  # the same in policies of their own


@pytest.mark.parametrize("documents", [None, "text", 1, {"Statement": "x"}, {}, {"Statement": [["x"]]}])
def test_what_is_no_policy_allows_nothing(documents):
    assert not allows([documents], GET, OBJECT)


def test_a_single_statement_needs_no_list():
    assert allows([{"Statement": allow()}], GET, OBJECT)


@pytest.mark.parametrize("condition, holds", [
    ({"IpAddress": {"aws:SourceIp": "203.0.113.0/24"}}, True), ({"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, False),
    ({"IpAddress": {"AWS:SOURCEIP": ["10.0.0.0/8", "203.0.113.7"]}}, True),
    ({"NotIpAddress": {"aws:SourceIp": "203.0.113.0/24"}}, False), ({"NotIpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, True),
    ({"StringEquals": {"aws:RequestedRegion": "us-east-1"}}, True),
    ({"StringEquals": {"aws:RequestedRegion": "US-east-1"}}, False),
    ({"StringEqualsIgnoreCase": {"aws:RequestedRegion": "US-east-1"}}, True),
    ({"StringNotEquals": {"aws:RequestedRegion": ["eu-west-1", "us-east-1"]}}, False),
    ({"StringLike": {"aws:RequestedRegion": "us-*"}}, True), ({"StringNotLike": {"aws:RequestedRegion": "us-*"}}, False),
    ({"ArnLike": {"aws:SourceArn": "arn:aws:sns:*:*:news"}}, True), ({"ArnEquals": {"aws:SourceArn": "arn:aws:sns:x"}}, False),
    ({"Bool": {"aws:SecureTransport": "true"}}, True), ({"Bool": {"aws:SecureTransport": True}}, True),
    ({"Bool": {"aws:SecureTransport": "false"}}, False),
    ({"NumericLessThan": {"s3:max-keys": "10"}}, True), ({"NumericGreaterThanEquals": {"s3:max-keys": 6}}, False),
    ({"NumericNotEquals": {"s3:max-keys": "5"}}, False),
    ({"DateGreaterThan": {"aws:CurrentTime": "2024-01-01T00:00:00Z"}}, True),
    ({"DateLessThan": {"aws:CurrentTime": "2024-01-01T00:00:00Z"}}, False),
    ({"StringEquals": {"aws:SourceVpc": "vpc-1"}}, False), ({"StringEqualsIfExists": {"aws:SourceVpc": "vpc-1"}}, True),
    ({"StringNotEquals": {"aws:SourceVpc": "vpc-1"}}, True), ({"Null": {"aws:SourceVpc": "true"}}, True),
    ({"Null": {"aws:SourceIp": "true"}}, False), ({"ForAllValues:StringEquals": {"aws:TagKeys": "a"}}, True),
    ({"ForAnyValue:StringEquals": {"aws:TagKeys": "a"}}, False),
    ({"Bool": {"aws:SecureTransport": "true"}, "IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, False)])
def test_conditions(condition, holds):
    context = {"aws:SourceIp": "203.0.113.7", "aws:RequestedRegion": "us-east-1", "aws:SecureTransport": "true",
               "s3:max-keys": "5", "aws:SourceArn": "arn:aws:sns:us-east-1:0:news", "aws:CurrentTime": "2026-01-01T00:00:00Z"}
    assert allows([policy(allow(Condition=condition))], GET, OBJECT, context) is holds
    assert allows([policy(allow(), deny(Condition=condition))], GET, OBJECT, context) is not holds


@pytest.mark.parametrize("condition", [{"IpAddress": {"aws:SourceIp": "x"}}, {"Likes": {"aws:SourceIp": "x"}}, "x", {"Bool": 1},
                                       {"DateLessThan": {"aws:SourceIp": "tomorrow"}}])
def test_a_condition_that_cannot_be_read_never_allows_and_always_denies(condition):
    context = {"aws:SourceIp": "203.0.113.7"}
    assert not allows([policy(allow(Condition=condition))], GET, OBJECT, context)
    assert not allows([policy(allow(), deny(Condition=condition))], GET, OBJECT, context)


@pytest.mark.parametrize("statement, principal, allowed", [
    (allow(Principal="*"), EC2, True), (allow(Principal={"AWS": "*"}), ROLE, True), (allow(Principal=EC2), EC2, True),
    (allow(Principal=EC2), ROLE, False), (allow(Principal={"Service": ["lambda.amazonaws.com", EC2["Service"]]}), EC2, True),
    (allow(Principal=ROLE), ROLE, True), (allow(Principal=ROLE), {"AWS": ROLE["AWS"] + "s"}, False), (allow(), EC2, False),
    (allow(Principal={"AWS": "000000000000"}), ROLE, False),  # lets the account decide, which is no decision
    (without(allow(NotPrincipal=EC2), "Principal"), ROLE, True), (without(allow(NotPrincipal=EC2), "Principal"), EC2, False),
    (without(allow(Principal=EC2), "Resource"), EC2, True)])
def test_principals(statement, principal, allowed):
    assert allows([policy(statement)], GET, OBJECT, principal=principal) is allowed


@pytest.mark.parametrize("root", ["000000000000", "arn:aws:iam::000000000000:root", "*"])
def test_an_account_is_denied_with_everybody_in_it(root):
    document = policy(allow(Principal=ROLE), deny(Principal={"AWS": root}))
    assert not allows([document], GET, OBJECT, principal=ROLE)


@pytest.mark.parametrize("statements, allowed", [
    ([allow()], True), ([allow(Resource="arn:aws:s3:::p*")], True), ([allow(Resource=OBJECT)], False),
    ([allow(Resource="arn:aws:s3:::pear/?*")], False), ([allow(), deny(Resource=OBJECT)], False),
    ([allow(), deny(Resource="*/secret*")], False), ([allow(), deny(Resource="arn:aws:s3:::plum/*")], True),
    ([allow(), without(deny(NotResource=OBJECT), "Resource")], False)])
def test_a_request_with_wildcards_is_all_that_it_matches(statements, allowed):
    assert allows([policy(*statements)], GET, OBJECTS) is allowed


@pytest.mark.parametrize("statements, only", [
    ([allow()], True), ([allow(), deny(Action="*", Resource="*")], True), ([allow(Resource=OBJECT)], True), ([], True),
    ([allow(Action="s3:*")], False), ([allow(Resource="*")], False), ([allow(Action=[GET, "s3:ListBucket"])], False),
    ([allow(), allow(Resource="arn:aws:s3:::plum/*")], False), ([without(allow(NotAction="iam:*"), "Action")], False),
    ([without(allow(NotResource="x"), "Resource")], False),
    ([allow(Resource="*", Condition={"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}})], False)])
def test_nothing_beyond_a_request(statements, only):
    assert allows_only([policy(*statements)], [Request(GET, OBJECTS)]) is only


@pytest.mark.parametrize("principal, only", [
    (EC2, True), ("*", False), ({"AWS": "*"}, False), (EC2 | {"AWS": "*"}, False), ({"Service": ["x", EC2["Service"]]}, False)])
def test_nobody_beyond_a_principal(principal, only):
    trust = without(allow(Action="sts:AssumeRole", Principal=principal), "Resource")
    assert allows_only([policy(trust)], [Request("sts:AssumeRole", principal=EC2)]) is only
    nobody_named = without(allow(Action="sts:AssumeRole"), "Resource")
    assert not allows_only([policy(nobody_named)], [Request("sts:AssumeRole", principal=EC2)])


def test_a_hostile_pattern_takes_no_time():
    pattern = "*a" * 3000 + "b"
    assert not allows([policy(allow(Resource=pattern))], GET, "a" * 100)
