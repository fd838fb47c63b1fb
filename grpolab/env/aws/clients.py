"""botocore clients that reach one endpoint and nothing else, from a session that reads no file and no variable."""

from __future__ import annotations

import os
import re
import threading
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

try:
    from botocore import exceptions
    from botocore.config import Config
    from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES
    from botocore.loaders import Loader
    from botocore.session import Session
except ModuleNotFoundError as error:
    raise ImportError(f"the aws environment needs {error.name}: pip install 'grpolab[aws]'") from error

# MiniStack's own names of the services that a command may use: what is not named to it is not even loaded.
SIMULATED = ("s3", "dynamodb", "sqs", "sns", "iam", "sts", "ssm", "secretsmanager", "kms", "logs", "monitoring", "events")
ACCESS_KEY, SECRET_KEY = "testing", "testing"  # what the simulator takes from everybody
HOST = "localhost:4566"  # MiniStack writes it into queue URLs: the same for every account, so that its port stays unknown
CONNECT_TIMEOUT, READ_TIMEOUT = 2.0, 10.0  # s; of one request
# What botocore raises where an endpoint does not answer, or breaks off.
CONNECTION_ERRORS = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.ResponseStreamingError,
                     exceptions.IncompleteReadError)

_creation = threading.Lock()  # botocore makes one client at a time


class AccountGone(ConnectionError):
    """The account's backend does not answer, or broke off: an error of the environment, never a result of a command."""


class OutsideRequest(RuntimeError):
    """botocore was about to send a request to another address than the account's; nothing was sent."""


def isolated_session() -> Session:
    """A botocore session without configuration: no files (~/.aws), no AWS_* variables, models from the package alone."""
    # (name in the config file, environment variable, default, conversion): only the last two stay.
    unread = {name: (None, None, *rest) for name, (_, _, *rest) in BOTOCORE_DEFAUT_SESSION_VARIABLES.items()}
    unread["config_file"] = unread["credentials_file"] = (None, None, os.devnull, None)
    session = Session(session_vars=unread)
    session.register_component("data_loader", Loader(extra_search_paths=[Loader.BUILTIN_DATA_PATH],
                                                     include_default_search_paths=False))
    return session


_shared_session = cache(isolated_session)


def check_region(region: str) -> None:
    """Raise ValueError for what is no region of AWS."""
    if region not in _shared_session().get_available_regions("ec2"):
        raise ValueError(f"region {region!r:.60}: write one as us-east-1 or eu-west-2")


def make_client(service: str, endpoint: str, region: str) -> Any:
    """A botocore client of `service` whose every request goes to `endpoint` (http://127.0.0.1:PORT), or raises
    OutsideRequest before anything is sent."""
    check_region(region)
    # What would change the address stays off: proxies, prefixes of the host, bucket names as host names.
    config = Config(proxies={}, inject_host_prefix=False, ignore_configured_endpoint_urls=True,
                    account_id_endpoint_mode="disabled", s3={"addressing_style": "path", "use_arn_region": False,
                                                            "us_east_1_regional_endpoint": "regional"},
                    retries={"total_max_attempts": 1, "mode": "standard"}, connect_timeout=CONNECT_TIMEOUT,
                    read_timeout=READ_TIMEOUT, request_checksum_calculation="when_required",
                    response_checksum_validation="when_required", disable_request_compression=True)
    with _creation:
        client = _shared_session().create_client(service, region_name=region, endpoint_url=endpoint, config=config,
                                                 aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY)

    def guard(request: Any, **_: Any) -> None:
        if not request.url.startswith((endpoint + "/", endpoint + "?")) and request.url != endpoint:
            raise OutsideRequest(f"{request.url:.100} is not in this account")
        path = unquote(urlsplit(request.url).path)
        if path.startswith("/_") or "/../" in f"{path}/" or "/./" in f"{path}/" or path.startswith("//"):
            raise OutsideRequest(f"{path:.60} is no bucket, or has parts that a path cannot have")
        scope = re.search(r"Credential=[^/]+/[0-9]+/[^/]+/([^/]+)/", str(request.headers.get("Authorization")))
        if scope is None or scope[1] not in SIMULATED:  # MiniStack searches all it knows for such a one, for 16 s
            raise OutsideRequest(f"{scope[1] if scope else 'an unsigned request'} is not simulated here")
        request.headers["Host"] = HOST
        request.headers["Connection"] = "close"  # else the server keeps the file of a closed client's connection for an hour

    client.meta.events.register_first("before-send", guard)
    return client


def error_text(error: Exception) -> str:
    """The text of a service's error as the CLI prints it; our clients, which try once, would add that to it."""
    return str(error).replace(" (reached max retries: 0)", "") or type(error).__name__
