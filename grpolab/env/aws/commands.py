"""An `aws` command line run in process: parsed by awscli's own parser, sent through botocore to one endpoint, printed as the
CLI prints.

    account = Account("http://127.0.0.1:4566")
    account.run("aws s3api create-bucket --bucket logs")     # Output(ok=True, stdout='{\\n    "Location": "/logs"\\n}\\n', ...)

The parser reads files (file://, --body), fetches addresses and knows commands that never come back here, so what it may see
is checked first: the words, the (service, operation) against OPERATIONS, every option by its full name. No awscli session is
initialised, so its handlers for file:// and http:// values are not even registered.
"""

from __future__ import annotations

import io
import json
import re
import threading
from argparse import Namespace
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from awscli.argparser import ArgTableArgParser
from awscli.clidriver import ServiceCommand, ServiceOperation
from awscli.formatter import get_formatter
from awscli.plugin import load_plugins
from botocore import xform_name

from grpolab.env.aws import s3
from grpolab.env.aws.clients import CONNECTION_ERRORS, AccountGone, check_region, error_text, isolated_session, make_client
from grpolab.env.aws.command_parser import CommandRefused, RefusingParser, check_writable, parse_global_options, split
from grpolab.env.aws.differences import adapted
from grpolab.files import data_path

# {service: operations} as `aws SERVICE OPERATION` names them. Nothing that runs code or containers on the host (lambda, ecs,
# codebuild), that calls addresses which a command names (cloudformation, apigateway, firehose, states), or that only a real
# account has (configure, sso, support).
OPERATIONS = {service: frozenset(" ".join(lines).split())
              for service, lines in json.loads(data_path("aws", "operations.json").read_text(encoding="utf-8")).items()}
MOVES = ("CreateBucket", "DeleteBucket")  # after which a client of S3, which remembers a bucket's region, may be wrong
BODY_CHARACTERS = 65_536  # of an object that get-object prints
# Options of every operation that read files, or print what is no result of it.
UNAVAILABLE = ("--cli-input-json", "--cli-input-yaml", "--generate-cli-skeleton")

_FILES = re.compile(r"fileb?:/", re.IGNORECASE)
_parsing = threading.Lock()  # awscli's argument tables are shared, and its handlers change them


class _Parser(RefusingParser, ArgTableArgParser):
    """awscli's parser of an operation's arguments."""


@dataclass(frozen=True)
class Call:
    """A parsed command: the operation as botocore names it, its parameters and the global options."""

    service: str
    operation: str
    parameters: dict
    options: Namespace
    payload: str | None = None  # the member of the result that is a stream


@dataclass(frozen=True)
class Output:
    """What a command printed; `ok` is whether it would have exited with 0. `call` is what was sent, None where nothing was."""

    ok: bool
    stdout: str
    stderr: str
    call: Call | None = None


@dataclass
class Account:
    """One account: its endpoint (http://127.0.0.1:PORT) and default region. Not for several threads at once."""

    endpoint: str
    region: str = "us-east-1"
    _clients: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if not re.fullmatch(r"http://127\.0\.0\.1:[0-9]{1,5}", self.endpoint):
            raise ValueError(f"endpoint={self.endpoint!r}: an account is served at http://127.0.0.1:PORT")

    def client(self, service: str, region: str | None = None) -> Any:
        """The account's botocore client of a service ("s3", "dynamodb") in a region, made once until `close`."""
        key = service, region or self.region
        if key not in self._clients:
            self._clients[key] = make_client(service, self.endpoint, key[1])
        return self._clients[key]

    def close(self, *services: str) -> None:
        """Close the clients of these services, or all; they are made anew when they are next needed."""
        for key in [key for key in self._clients if not services or key[0] in services]:
            self._clients.pop(key).close()

    def run(self, line: str) -> Output:
        """Carry out one command line. A command that is refused or fails gives Output(ok=False); raises AccountGone when
        the account does not answer."""
        call = None
        try:
            words, options = parse_global_options(checked(split(line)))
            if words[:1] == ["s3"]:
                command = s3.parse(words[1:])
                call = Call("s3", command.operation, {"Bucket": command.bucket}, options)
                return Output(True, s3.run(command, self.client("s3", options.region)), "", call)
            if "help" in words[:3]:
                return Output(True, usage(words), "")
            call = parse(words, options)
            return Output(True, self.call(call), "", call)
        except CommandRefused as refusal:
            return Output(False, "", f"{refusal}\n", call)
        finally:
            if call is not None and call.operation in MOVES:
                self.close("s3")

    def call(self, call: Call) -> str:
        """Send a parsed command and print its result. Raises CommandRefused with the service's error, AccountGone."""
        printed, parameters, options = io.StringIO(), adapted(call.operation, call.parameters), call.options
        try:
            client = self.client(call.service, options.region)
            name = xform_name(call.operation)
            if options.paginate and client.can_paginate(name):
                result = client.get_paginator(name).paginate(**parameters)
            else:
                result = getattr(client, name)(**parameters)
            if call.payload is not None and call.payload in result:
                printed.write(result.pop(call.payload).read(BODY_CHARACTERS).decode("utf-8", "replace"))
            get_formatter(options.output, options)(call.operation, result, printed)
        except CONNECTION_ERRORS as error:
            raise AccountGone(f"the account at {self.endpoint} does not answer: {error}") from error
        except Exception as error:  # noqa: BLE001  a made-up token or query ends paginators and formatters in many ways
            raise CommandRefused(error_text(error)) from error
        return printed.getvalue().encode("utf-8", "replace").decode()  # a query can write half of a surrogate pair


def checked(words: list[str]) -> list[str]:
    """The words after `aws`; raises CommandRefused for what may not reach the parser."""
    if not words or words[0] != "aws":
        raise CommandRefused("a command here starts with aws, for example: aws s3api list-buckets")
    for word in words:
        if _FILES.search(word):
            raise CommandRefused(f"{word:.60}: files are not available here; write the value itself")
    return words[1:]


def parse(words: list[str], options: Namespace) -> Call:
    """The call that the words after `aws` ask for, by awscli's own parser; raises CommandRefused with what is wrong. `options`
    are the global ones (`parse_global_options`)."""
    service, operation = _service_and_operation(words)
    options.command = service
    with _parsing:
        return _parse(service, operation, words[2:], options)


def _service_and_operation(words: list[str]) -> tuple[str, str]:
    """The service and the operation, if they may be used."""
    service = words[0] if words else ""
    if service not in OPERATIONS:
        raise CommandRefused(f"argument command: {service!r:.40} is not available; there are: s3, {', '.join(OPERATIONS)}")
    operation = words[1] if len(words) > 1 else ""
    if operation not in OPERATIONS[service]:
        near = [name for name in sorted(OPERATIONS[service]) if operation and name.startswith(operation.split("-")[0] + "-")]
        raise CommandRefused(f"argument operation: {operation!r:.60} is not available in {service}; "
                             f"there are: {', '.join(near or sorted(OPERATIONS[service]))}")
    return service, operation


def _parse(service: str, operation: str, words: list[str], options: Namespace) -> Call:
    command, model = commands_of(service)[operation]
    session = _session()
    table = command.arg_table
    whole = dict(table)
    _check_options(words, table)
    try:
        # The events and steps are those of awscli.clidriver.ServiceOperation, which would end in a call of its own client.
        session.emit(f"before-building-argument-table-parser.{service}.{operation}", argument_table=table, args=words,
                     session=session, parsed_globals=options)
        values, extra = _Parser(table).parse_known_args(words)
        if extra:
            raise CommandRefused(f"Unknown options: {', '.join(extra)}")
        session.emit(f"operation-args-parsed.{service}.{operation}", parsed_args=values, parsed_globals=options)
        parameters: dict = {}
        for argument in table.values():
            if argument.py_name != "outfile" and hasattr(values, argument.py_name):
                argument.add_to_params(parameters, getattr(values, argument.py_name))
        check_writable(parameters)
        if where := parameters.get("CreateBucketConfiguration", {}).get("LocationConstraint"):
            check_region(where)  # botocore asks a bucket where it lies, so of another one nothing could be read
    except CommandRefused:
        raise
    except Exception as error:  # noqa: BLE001  shorthand, JSON and its customisations raise whatever they meet
        raise CommandRefused(error_text(error)) from error
    finally:
        table.update(whole)  # the tables serve all commands, and where pagination is off awscli puts others into this one
    payload = model.output_shape.serialization["payload"] if model.has_streaming_output else None
    return Call(model.service_model.service_name, model.name, parameters, options, payload)


def _check_options(words: list[str], table: dict) -> None:
    """Raise CommandRefused for an option that is none of the operation's by its full name, or would read or write a file."""
    known = {argument.cli_name: argument for argument in table.values()}
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        if name in UNAVAILABLE or name not in known:
            raise CommandRefused(f"Unknown options: {word:.60} (abbreviations, files and other endpoints are not available)")
        model = known[name].argument_model
        if model is not None and model.type_name == "blob" and model.serialization.get("streaming"):
            raise CommandRefused(f"{name} reads a local file, and there are none here: leave it out for empty content")
    if "outfile" in table and words[-1:] != ["/dev/stdout"]:
        raise CommandRefused("an object is written to /dev/stdout alone here: end the command with it")


def usage(words: list[str]) -> str:
    """What can be used: services, the operations of one, or the options of an operation; in place of the CLI's manual."""
    names = [word for word in words if word != "help"]
    if not names:
        return f"aws SERVICE OPERATION [--option value ...]\nservices: s3, {', '.join(OPERATIONS)}\n"
    if len(names) == 1:
        if names[0] not in OPERATIONS:
            _service_and_operation(names)
        return f"aws {names[0]} OPERATION [--option value ...]\noperations: {', '.join(sorted(OPERATIONS[names[0]]))}\n"
    service, operation = _service_and_operation(names)
    with _parsing:
        table = commands_of(service)[operation][0].arg_table
        options = [argument.cli_name if argument.required else f"[{argument.cli_name}]" for argument in table.values()
                   if argument.cli_name not in UNAVAILABLE]
    return f"aws {service} {operation} {' '.join(options)}\n"


@cache
def _session() -> Any:
    """awscli's session with its customisations."""
    session = isolated_session()
    load_plugins({}, event_hooks=session.get_component("event_emitter"))
    return session


@cache
def commands_of(service: str) -> dict[str, tuple[Any, Any]]:
    """{operation: (awscli's command, botocore's model)} of a service in OPERATIONS."""
    command = ServiceCommand(service, _session(), "s3" if service == "s3api" else service)
    model = command.service_model
    models = {xform_name(name, "-"): model.operation_model(name) for name in model.operation_names}
    table = command.create_help_command().command_table
    return {name: (table[name], models[name]) for name in OPERATIONS[service] if isinstance(table.get(name), ServiceOperation)}
