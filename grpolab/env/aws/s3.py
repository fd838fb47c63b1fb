"""`aws s3 ls | mb | rb | rm`, written by hand: the CLI's own commands transfer files and connect to AWS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from botocore import exceptions

from grpolab.env.aws.clients import CONNECTION_ERRORS, AccountGone, OutsideRequest, error_text
from grpolab.env.aws.command_parser import CommandRefused

# verb -> its option, the operation that it comes down to, and what the CLI calls its failure
_VERBS = {"ls": ("--recursive", "ListObjectsV2", ""), "mb": ("", "CreateBucket", "make_bucket"),
          "rb": ("--force", "DeleteBucket", "remove_bucket"), "rm": ("--recursive", "DeleteObject", "delete")}


@dataclass(frozen=True)
class S3Command:
    """One such command. `all` is --recursive or --force; without a bucket, `ls` lists the buckets."""

    verb: str
    bucket: str
    key: str
    all: bool

    @property
    def operation(self) -> str:
        return _VERBS[self.verb][1]


def parse(words: list[str]) -> S3Command:
    """The command in the words after `aws s3`; raises CommandRefused."""
    verb, *rest = words or [""]
    if verb not in _VERBS:
        raise CommandRefused(f"aws s3 {verb:.20}: not available; use aws s3 ls, mb, rb, rm (s3://... only) or aws s3api")
    options = {word for word in rest if word.startswith("-")}
    if unknown := sorted(options - {_VERBS[verb][0]}):
        raise CommandRefused(f"Unknown options: {', '.join(unknown):.100}")
    targets = [word for word in rest if word not in options]
    if len(targets) > 1 or (not targets and verb != "ls"):
        raise CommandRefused(f"aws s3 {verb} takes one s3://bucket, got {len(targets)}")
    target = targets[0] if targets else ""
    if verb != "ls" and not target.startswith("s3://"):
        raise CommandRefused(f"{target:.60}: local paths are not available here; write s3://bucket")
    bucket, _, key = target.removeprefix("s3://").partition("/")
    if targets and not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        raise CommandRefused(f"{target:.60}: write s3://bucket, the name in letters, digits, dots and hyphens")
    if key and verb in ("mb", "rb"):
        raise CommandRefused(f"{target:.60}: aws s3 {verb} takes a bucket without a key")
    return S3Command(verb, bucket, key, bool(options))


def run(command: S3Command, client: Any) -> str:
    """What the command prints, carried out with a botocore client of S3. Raises CommandRefused, AccountGone."""
    try:
        return {"ls": _ls, "mb": _mb, "rb": _rb, "rm": _rm}[command.verb](client, command)
    except CONNECTION_ERRORS as error:
        raise AccountGone(f"the account does not answer: {error}") from error
    except (exceptions.ClientError, exceptions.BotoCoreError, OutsideRequest) as error:
        failed, target = _VERBS[command.verb][2], f"s3://{command.bucket}/{command.key}".removesuffix("/")
        raise CommandRefused(f"{failed} failed: {target} {error_text(error)}" if failed else error_text(error)) from error


def _ls(client: Any, command: S3Command) -> str:
    if not command.bucket:
        return "".join(f"{b['CreationDate']:%Y-%m-%d %H:%M:%S} {b['Name']}\n" for b in client.list_buckets().get("Buckets", []))
    folder = "" if command.all else command.key[:command.key.rfind("/") + 1]  # left out of what is shown
    lines = []
    request = {"Bucket": command.bucket, "Prefix": command.key} | ({} if command.all else {"Delimiter": "/"})
    for page in client.get_paginator("list_objects_v2").paginate(**request):
        lines += [f"{'PRE':>30} {p['Prefix'].removeprefix(folder)}\n" for p in page.get("CommonPrefixes", [])]
        lines += [f"{o['LastModified']:%Y-%m-%d %H:%M:%S} {o['Size']:>10} {o['Key'].removeprefix(folder)}\n"
                  for o in page.get("Contents", [])]
    if not lines and command.key:
        raise CommandRefused(f"nothing is under s3://{command.bucket}/{command.key:.100}")
    return "".join(lines)


def _mb(client: Any, command: S3Command) -> str:
    region = client.meta.region_name
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    client.create_bucket(Bucket=command.bucket, **where)
    return f"make_bucket: {command.bucket}\n"


def _rb(client: Any, command: S3Command) -> str:
    deleted = _rm(client, command) if command.all else ""
    client.delete_bucket(Bucket=command.bucket)
    return f"{deleted}remove_bucket: {command.bucket}\n"


def _rm(client: Any, command: S3Command) -> str:
    keys = [command.key]
    if command.all:  # below a folder: to the CLI, app is app/, and apple is no part of it
        folder = f"{command.key}/" if command.key and not command.key.endswith("/") else command.key
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=command.bucket, Prefix=folder)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    elif not command.key:
        raise CommandRefused(f"aws s3 rm s3://{command.bucket} needs a key, or --recursive")
    for key in keys:
        client.delete_object(Bucket=command.bucket, Key=key)
    return "".join(f"delete: s3://{command.bucket}/{key}\n" for key in keys)
