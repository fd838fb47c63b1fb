"""`aws s3 ls | mb | rb | rm`, written by hand: the CLI's own commands transfer files and dial the real service."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from grpolab.env.aws.clients import AccountGone, OutsideRequest, broken, said
from grpolab.env.aws.command_parser import Refused

_FLAGS = {"ls": {"--recursive"}, "mb": set(), "rb": {"--force"}, "rm": {"--recursive"}}
_OPERATIONS = {"ls": "ListObjectsV2", "mb": "CreateBucket", "rb": "DeleteBucket", "rm": "DeleteObject"}


@dataclass(frozen=True)
class Asked:
    """One such command. `all` is --recursive or --force; without a bucket, `ls` lists the buckets."""

    verb: str
    bucket: str
    key: str
    all: bool

    @property
    def operation(self) -> str:
        """The operation that it comes down to."""
        return _OPERATIONS[self.verb] if self.bucket else "ListBuckets"


def parse(words: list[str]) -> Asked:
    """The command in the words after `aws s3`; raises Refused."""
    verb, *rest = words or [""]
    if verb not in _FLAGS:
        raise Refused(f"aws s3 {verb:.20}: not available; there are: aws s3 ls, mb, rb, rm (s3://... only), and aws s3api")
    flags = {word for word in rest if word.startswith("-")}
    if flags - _FLAGS[verb]:
        raise Refused(f"Unknown options: {', '.join(sorted(flags - _FLAGS[verb])):.100}")
    targets = [word for word in rest if not word.startswith("-")]
    if len(targets) > 1 or (not targets and verb != "ls"):
        raise Refused(f"aws s3 {verb} takes one s3://bucket, got {len(targets)}")
    bucket, key = _location(targets[0], verb) if targets else ("", "")
    return Asked(verb, bucket, key, bool(flags))


def run(asked: Asked, client: Any) -> str:
    """What the command prints, carried out with a botocore client of S3. Raises Refused, AccountGone."""
    from botocore import exceptions

    try:
        return {"ls": _ls, "mb": _mb, "rb": _rb, "rm": _rm}[asked.verb](client, asked)
    except broken() as fault:
        raise AccountGone(f"the account does not answer: {fault}") from fault
    except (exceptions.ClientError, exceptions.BotoCoreError, OutsideRequest) as fault:
        failed = {"mb": "make_bucket", "rb": "remove_bucket", "rm": "delete"}.get(asked.verb)
        target = f"s3://{asked.bucket}" + (f"/{asked.key}" if asked.key else "")
        raise Refused(f"{failed} failed: {target} {said(fault)}" if failed else said(fault)) from fault


def _location(target: str, verb: str) -> tuple[str, str]:
    """(bucket, key) of s3://bucket/key; `ls` takes it without its s3:// too, as the CLI does."""
    text = target.removeprefix("s3://")
    if text == target and verb != "ls":
        raise Refused(f"{target:.60}: local paths are not available here; write s3://bucket")
    bucket, _, key = text.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        raise Refused(f"{target:.60}: write s3://bucket, the name in letters, digits, dots and hyphens")
    if key and verb in ("mb", "rb"):
        raise Refused(f"{target:.60}: aws s3 {verb} takes a bucket without a key")
    return bucket, key


def _ls(client: Any, asked: Asked) -> str:
    if not asked.bucket:
        return "".join(f"{b['CreationDate']:%Y-%m-%d %H:%M:%S} {b['Name']}\n" for b in client.list_buckets().get("Buckets", []))
    lines = []
    request = {"Bucket": asked.bucket, "Prefix": asked.key} | ({} if asked.all else {"Delimiter": "/"})
    for page in client.get_paginator("list_objects_v2").paginate(**request):
        lines += [f"{'PRE':>30} {_shown(p['Prefix'], asked)}\n" for p in page.get("CommonPrefixes", [])]
        lines += [f"{o['LastModified']:%Y-%m-%d %H:%M:%S} {o['Size']:>10} {_shown(o['Key'], asked)}\n"
                  for o in page.get("Contents", [])]
    if not lines and asked.key:
        raise Refused(f"nothing is under s3://{asked.bucket}/{asked.key:.100}")
    return "".join(lines)


def _shown(name: str, asked: Asked) -> str:
    """A key, without the folders of the prefix that was asked for unless all below it was."""
    return name if asked.all else name[asked.key.rfind("/") + 1:]


def _mb(client: Any, asked: Asked) -> str:
    region = client.meta.region_name
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    client.create_bucket(Bucket=asked.bucket, **where)
    return f"make_bucket: {asked.bucket}\n"


def _rb(client: Any, asked: Asked) -> str:
    gone = _rm(client, asked) if asked.all else ""
    client.delete_bucket(Bucket=asked.bucket)
    return f"{gone}remove_bucket: {asked.bucket}\n"


def _rm(client: Any, asked: Asked) -> str:
    keys = [asked.key]
    if asked.all:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=asked.bucket, Prefix=asked.key)
        keys = [found["Key"] for page in pages for found in page.get("Contents", [])]
    elif not asked.key:
        raise Refused(f"aws s3 rm s3://{asked.bucket} needs a key, or --recursive")
    for key in keys:
        client.delete_object(Bucket=asked.bucket, Key=key)
    return "".join(f"delete: s3://{asked.bucket}/{key}\n" for key in keys)
