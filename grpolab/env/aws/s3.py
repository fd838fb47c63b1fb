"""`aws s3 ls | mb | rb | rm`, written by hand: the CLI's own commands transfer files and dial the real service."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from grpolab.env.aws.clients import AccountGone, OutsideRequest, said
from grpolab.env.aws.words import Refused, take_globals

_FLAGS = {"ls": {"--recursive"}, "mb": set(), "rb": {"--force"}, "rm": {"--recursive"}}


def run(words: list[str], client: Callable[..., Any]) -> str:
    """What `aws s3 WORDS...` prints. `client(service, region)` gives a botocore client. Raises Refused, AccountGone."""
    from botocore import exceptions

    words, chosen = take_globals(words)
    verb, *rest = words or [""]
    if verb not in _FLAGS:
        raise Refused(f"aws s3 {verb:.20}: not available; there are: aws s3 ls, mb, rb, rm (s3://... only), and aws s3api")
    flags = {word for word in rest if word.startswith("-")}
    if flags - _FLAGS[verb]:
        raise Refused(f"Unknown options: {', '.join(sorted(flags - _FLAGS[verb]))}")
    targets = [word for word in rest if not word.startswith("-")]
    if len(targets) > 1 or (not targets and verb != "ls"):
        raise Refused(f"aws s3 {verb} takes one s3://bucket, got {len(targets)}")
    bucket, key = _location(targets[0], verb) if targets else ("", "")
    try:
        return globals()[f"_{verb}"](client("s3", chosen.region), bucket, key, bool(flags))
    except (exceptions.HTTPClientError, exceptions.ResponseStreamingError) as fault:
        raise AccountGone(f"the account does not answer: {fault}") from fault
    except (exceptions.ClientError, exceptions.BotoCoreError, OutsideRequest) as fault:
        failed = {"mb": "make_bucket", "rb": "remove_bucket", "rm": "delete"}.get(verb)
        raise Refused(f"{failed} failed: {targets[0]} {said(fault)}" if failed else said(fault)) from fault


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


def _ls(client: Any, bucket: str, key: str, recursive: bool) -> str:
    if not bucket:
        return "".join(f"{b['CreationDate']:%Y-%m-%d %H:%M:%S} {b['Name']}\n" for b in client.list_buckets().get("Buckets", []))
    lines = []
    asked = {"Bucket": bucket, "Prefix": key} | ({} if recursive else {"Delimiter": "/"})
    for page in client.get_paginator("list_objects_v2").paginate(**asked):
        lines += [f"{'PRE':>30} {_shown(p['Prefix'], key)}\n" for p in page.get("CommonPrefixes", [])]
        lines += [f"{o['LastModified']:%Y-%m-%d %H:%M:%S} {o['Size']:>10} {o['Key'] if recursive else _shown(o['Key'], key)}\n"
                  for o in page.get("Contents", [])]
    if not lines and key:
        raise Refused(f"nothing is under s3://{bucket}/{key}")
    return "".join(lines)


def _shown(name: str, prefix: str) -> str:
    """A key without the folders of the prefix that was asked for."""
    return name[prefix.rfind("/") + 1:]


def _mb(client: Any, bucket: str, key: str, _: bool) -> str:
    region = client.meta.region_name
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    client.create_bucket(Bucket=bucket, **where)
    return f"make_bucket: {bucket}\n"


def _rb(client: Any, bucket: str, key: str, force: bool) -> str:
    gone = _rm(client, bucket, "", True) if force else ""
    client.delete_bucket(Bucket=bucket)
    return f"{gone}remove_bucket: {bucket}\n"


def _rm(client: Any, bucket: str, key: str, recursive: bool) -> str:
    keys = [key]
    if recursive:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
        keys = [found["Key"] for page in pages for found in page.get("Contents", [])]
    elif not key:
        raise Refused(f"aws s3 rm s3://{bucket} needs a key, or --recursive")
    for name in keys:
        client.delete_object(Bucket=bucket, Key=name)
    return "".join(f"delete: s3://{bucket}/{name}\n" for name in keys)
