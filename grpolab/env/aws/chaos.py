"""Chaos: the command that destroys what a command has made."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpolab.env.aws.commands import Call

# What made it -> the command that destroys it, with the call's own parameters in the slots.
_UNDO = {
    ("s3", "CreateBucket"): "aws s3 rb s3://{Bucket} --force",
    ("s3", "PutObject"): "aws s3api delete-object --bucket {Bucket} --key {Key}",
    ("dynamodb", "CreateTable"): "aws dynamodb delete-table --table-name {TableName}",
    ("sqs", "CreateQueue"): "aws sqs delete-queue --queue-url http://localhost:4566/000000000000/{QueueName}",
    ("sns", "CreateTopic"): "aws sns delete-topic --topic-arn arn:aws:sns:us-east-1:000000000000:{Name}",
    ("iam", "CreateUser"): "aws iam delete-user --user-name {UserName}",
    ("iam", "CreateGroup"): "aws iam delete-group --group-name {GroupName}",
    ("iam", "CreateRole"): "aws iam delete-role --role-name {RoleName}",
    ("ssm", "PutParameter"): "aws ssm delete-parameter --name {Name}",
    ("secretsmanager", "CreateSecret"): "aws secretsmanager delete-secret --secret-id {Name} --force-delete-without-recovery",
    ("logs", "CreateLogGroup"): "aws logs delete-log-group --log-group-name {logGroupName}",
    ("events", "PutRule"): "aws events delete-rule --name {Name}",
    ("cloudwatch", "PutMetricAlarm"): "aws cloudwatch delete-alarms --alarm-names {AlarmName}",
}


def undoing(call: Call) -> str | None:
    """The command that destroys what this call has made; None for one that makes nothing of its own."""
    command = _UNDO.get((call.service, call.operation))
    if command is None:
        return None
    words = {name: shlex.quote(str(value)) for name, value in call.parameters.items()}
    try:
        command = command.format_map(words)
    except KeyError:
        return None
    return f"{command} --region {call.region}" if call.region else command
