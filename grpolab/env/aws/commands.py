"""An `aws` command line run in process: parsed by awscli's own parser, sent through botocore to one endpoint, printed as the
CLI prints.

    account = Account("http://127.0.0.1:4566")
    account.run("aws s3api create-bucket --bucket logs")     # Output(ok=True, stdout='{\\n    "Location": "/logs"\\n}\\n', ...)

The parser reads files (file://, --body), fetches addresses and knows commands that never come back here, so what it may see
is checked first: the words of the line, the (service, operation) against `allowed.OPERATIONS`, every option by its full name.
No awscli session is initialised, so its handlers for file:// and http:// values are not even registered.
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

from grpolab.env.aws import s3
from grpolab.env.aws.allowed import OPERATIONS
from grpolab.env.aws.clients import (
    AccountGone,
    broken,
    check_region,
    isolated_session,
    make_client,
    missing,
    said,
)
from grpolab.env.aws.command_parser import Refused, check_writable, split, take_globals

BODY_CHARACTERS = 65_536  # of an object that get-object prints
MESSAGE_WAIT = 1  # s that receive-message waits at most: nobody else sends to the account meanwhile
# Options of every operation that read files, or print what is no result of it.
UNAVAILABLE = ("--cli-input-json", "--cli-input-yaml", "--generate-cli-skeleton")

_FILES = re.compile(r"fileb?:/|@=", re.IGNORECASE)
_parsing = threading.Lock()  # awscli's argument tables are shared, and its handlers change them


@dataclass(frozen=True)
class Call:
    """A parsed command: the operation as botocore names it, its parameters, and how the result is printed."""

    service: str
    operation: str
    parameters: dict
    region: str | None = None
    output: str = "json"
    query: Any = None
    paginate: bool = True
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
        check_region(self.region)

    def client(self, service: str, region: str | None = None) -> Any:
        """The account's botocore client of a service ("s3", "dynamodb"), made once for each region."""
        key = service, region or self.region
        if key not in self._clients:
            self._clients[key] = make_client(service, self.endpoint, key[1])
        return self._clients[key]

    def run(self, line: str) -> Output:
        """Carry out one command line. A command that is refused or fails gives Output(ok=False); raises AccountGone when
        the account does not answer."""
        call = None
        try:
            words, chosen = take_globals(checked(split(line)))
            if words[:1] == ["s3"]:
                asked = s3.parse(words[1:])
                call = Call("s3", asked.operation, {"Bucket": asked.bucket}, chosen.region)
                return Output(True, s3.run(asked, self.client("s3", chosen.region)), "", call)
            if "help" in words[:3]:
                return Output(True, usage(words), "")
            call = parse(words, chosen)
            return Output(True, self.call(call), "", call)
        except Refused as refusal:
            return Output(False, "", f"{refusal}\n", call)

    def close(self) -> None:
        """Close the clients' connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def call(self, call: Call) -> str:
        """Send a parsed command and print its result. Raises Refused with the service's error, AccountGone."""
        from awscli.formatter import get_formatter
        from botocore import xform_name

        printed, parameters = io.StringIO(), call.parameters
        if call.operation == "ReceiveMessage":  # given always, since a queue may have a longer wait of its own
            parameters = parameters | {"WaitTimeSeconds": min(parameters.get("WaitTimeSeconds", 0), MESSAGE_WAIT)}
        try:
            client = self.client(call.service, call.region)
            name = xform_name(call.operation)
            if call.paginate and client.can_paginate(name):
                result = client.get_paginator(name).paginate(**parameters)
            else:
                result = getattr(client, name)(**parameters)
            if call.payload is not None and call.payload in result:
                printed.write(result.pop(call.payload).read(BODY_CHARACTERS).decode("utf-8", "replace"))
            shape = Namespace(query=call.query, output=call.output, color="off")
            get_formatter(call.output, shape)(call.operation, result, printed)
        except broken() as fault:
            raise AccountGone(f"the account at {self.endpoint} does not answer: {fault}") from fault
        except Exception as fault:  # noqa: BLE001  a made-up token or query ends paginators and formatters in many ways
            raise Refused(said(fault)) from fault
        return printed.getvalue().encode("utf-8", "replace").decode()  # a query can write half of a surrogate pair


def checked(words: list[str]) -> list[str]:
    """The words after `aws`; raises Refused for what may not reach the parser."""
    if not words or words[0] != "aws":
        raise Refused("a command here starts with aws, for example: aws s3api list-buckets")
    for word in words:
        if _FILES.search(word):
            raise Refused(f"{word:.60}: files are not available here; write the value itself")
    return words[1:]


def parse(words: list[str], chosen: Namespace) -> Call:
    """The call that the words after `aws` ask for, by awscli's own parser; raises Refused with what is wrong. `chosen` are
    the global options (`words.take_globals`)."""
    service, operation = _named(words)
    chosen.command = service
    with _parsing:
        return _parse(service, operation, words[2:], chosen)


def _named(words: list[str]) -> tuple[str, str]:
    """The service and the operation, if they may be used."""
    service = words[0] if words else ""
    if service not in OPERATIONS:
        raise Refused(f"argument command: {service!r:.40} is not available; there are: s3, {', '.join(OPERATIONS)}")
    operation = words[1] if len(words) > 1 else ""
    if operation not in OPERATIONS[service]:
        near = [name for name in sorted(OPERATIONS[service]) if operation and name.startswith(operation.split("-")[0] + "-")]
        raise Refused(f"argument operation: {operation!r:.60} is not available in {service}; "
                      f"there are: {', '.join(near or sorted(OPERATIONS[service]))}")
    return service, operation


def _parse(service: str, operation: str, words: list[str], chosen: Namespace) -> Call:
    command, model = commands_of(service)[operation]
    session, quiet = _parser()
    table = command.arg_table
    _check_options(words, table)
    try:
        # The events and steps are those of awscli.clidriver.ServiceOperation, which would end in a call of its own client.
        session.emit(f"before-building-argument-table-parser.{service}.{operation}", argument_table=table, args=words,
                     session=session, parsed_globals=chosen)
        found, extra = quiet(table).parse_known_args(words)
        if extra:
            raise Refused(f"Unknown options: {', '.join(extra)}")
        session.emit(f"operation-args-parsed.{service}.{operation}", parsed_args=found, parsed_globals=chosen)
        parameters: dict = {}
        for argument in table.values():
            if argument.py_name != "outfile" and hasattr(found, argument.py_name):
                argument.add_to_params(parameters, getattr(found, argument.py_name))
        check_writable(parameters)
        if where := parameters.get("CreateBucketConfiguration", {}).get("LocationConstraint"):
            check_region(where)  # botocore asks a bucket where it lies, so of another one nothing could be read
    except Refused:
        raise
    except Exception as fault:  # noqa: BLE001  shorthand, JSON and its customisations raise whatever they meet
        raise Refused(str(fault) or type(fault).__name__) from fault
    payload = model.output_shape.serialization["payload"] if model.has_streaming_output else None
    return Call(model.service_model.service_name, model.name, parameters, chosen.region, chosen.output, chosen.query,
                chosen.paginate, payload)


def _check_options(words: list[str], table: dict) -> None:
    """Raise Refused for an option that is not one of the operation's by its full name, or that would read or write a file."""
    known = {argument.cli_name: argument for argument in table.values()}
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        if name in UNAVAILABLE or name not in known:
            raise Refused(f"Unknown options: {word:.60} (abbreviations, files and other endpoints are not available here)")
        model = known[name].argument_model
        if model is not None and model.type_name == "blob" and model.serialization.get("streaming"):
            raise Refused(f"{name} reads a local file, and there are none here: leave it out for empty content")
    if "outfile" in table and words[-1:] != ["/dev/stdout"]:
        raise Refused("an object is written to /dev/stdout alone here: end the command with it")


def usage(words: list[str]) -> str:
    """What can be used: services, the operations of one, or the options of an operation; in place of the CLI's manual."""
    names = [word for word in words if word != "help"]
    if not names:
        return f"aws SERVICE OPERATION [--option value ...]\nservices: s3, {', '.join(OPERATIONS)}\n"
    if len(names) == 1:
        if names[0] not in OPERATIONS:
            _named(names)
        return f"aws {names[0]} OPERATION [--option value ...]\noperations: {', '.join(sorted(OPERATIONS[names[0]]))}\n"
    service, operation = _named(names)
    with _parsing:
        table = commands_of(service)[operation][0].arg_table
        options = [argument.cli_name if argument.required else f"[{argument.cli_name}]" for argument in table.values()
                   if argument.cli_name not in UNAVAILABLE]
    return f"aws {service} {operation} {' '.join(options)}\n"


@cache
def _parser() -> tuple[Any, Any]:
    """awscli's session with its customisations, and its parser of arguments, made to raise instead of to print and exit."""
    try:
        from awscli.argparser import ArgTableArgParser
        from awscli.plugin import load_plugins
    except ModuleNotFoundError as fault:
        raise missing(fault) from fault

    class Quiet(ArgTableArgParser):
        def error(self, message: str) -> None:
            raise Refused(message)

    session = isolated_session()
    load_plugins({}, event_hooks=session.get_component("event_emitter"))
    return session, Quiet


@cache
def commands_of(service: str) -> dict[str, tuple[Any, Any]]:
    """{operation: (awscli's command, botocore's model)} of an allowed service."""
    from awscli.clidriver import ServiceCommand, ServiceOperation
    from botocore import xform_name

    known = ServiceCommand(service, _parser()[0], "s3" if service == "s3api" else service)
    models = {xform_name(name, "-"): known.service_model.operation_model(name) for name in known.service_model.operation_names}
    found = known.create_help_command().command_table
    return {name: (found[name], models[name]) for name in OPERATIONS[service] if isinstance(found.get(name), ServiceOperation)}


def read_json(output: Output) -> Any:
    """The JSON that a command printed, None for nothing; raises ValueError with its error if it failed."""
    if not output.ok:
        raise ValueError(output.stderr.strip())
    return json.loads(output.stdout) if output.stdout.strip() else None
