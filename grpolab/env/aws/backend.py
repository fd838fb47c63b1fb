"""Simulated accounts as leased backends: one MiniStack process a session, wiped between two tenants.

    with accounts(8) as pool: ...                                   # a BackendPool; its leases hold http://127.0.0.1:PORT
    async with serve(AwsEnv, max_sessions=8, backends=accounts(8)) as server: ...
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import urllib3

from grpolab.env.aws import simulator
from grpolab.env.aws.clients import SIMULATED, AccountGone
from grpolab.env.backends import BackendPool, ProcessBackend

ANSWER_SECONDS = 10.0  # what a healthy one needs at most, on a busy machine
START_SECONDS = 30.0  # on a busy machine eight start at once


class Simulator(ProcessBackend):
    """One MiniStack process. A lease holds its address, or under `options` the mapping {"account": address, **options} for
    `AwsEnv`."""

    def __init__(self, options: Mapping[str, Any] | None = None):
        # -P keeps the folder of simulator.py, whose modules have common names, off the path.
        super().__init__([sys.executable, "-P", simulator.__file__, *SIMULATED], health=healthy, scrub=wipe,
                         start_timeout=START_SECONDS)
        self.options = options

    def start(self) -> Any:
        address = super().start()
        return address if self.options is None else {"account": address, **self.options}


def accounts(size: int, *, options: Mapping[str, Any] | None = None) -> BackendPool:
    """`size` accounts for `serve(AwsEnv, backends=accounts(size))`; `options` are those of `AwsEnv` for every session.
    Raises ImportError where MiniStack is not installed."""
    if find_spec("ministack") is None:
        raise ImportError("the aws environment needs ministack: pip install 'grpolab[aws]'")
    return BackendPool(lambda _: Simulator(options), size)


def healthy(address: str) -> bool:
    """Whether the process answers within ANSWER_SECONDS."""
    return _ask("GET", f"{address}/_ministack/health").status == 200


def wipe(address: str) -> bool:
    """Delete everything in the account, in all regions; raises AccountGone where the backend does not say that it did."""
    answer = _ask("POST", f"{address}/_ministack/reset")
    if answer.status != 200 or answer.json() != {"reset": "ok"}:
        raise AccountGone(f"the account at {address} could not be wiped: {answer.status} {answer.data!r:.100}")
    return True


def messages(address: str, queue: str) -> list[dict[str, str]]:
    """The messages of a queue in us-east-1, given by its name, those in flight and delayed too, as [{"Body": text, ...}];
    unlike a receive, this changes nothing. Raises AccountGone."""
    answer = _ask("GET", f"{address}/_ministack/sqs/messages", fields={"QueueUrl": queue, "region": "us-east-1"})
    if answer.status != 200:
        raise AccountGone(f"the account at {address} does not show the messages of {queue}: {answer.data!r:.200}")
    return [message for regions in answer.json()["messages"].values() for queues in regions.values()
            for of_queue in queues.values() for message in of_queue]


def _ask(method: str, url: str, **request: Any) -> urllib3.BaseHTTPResponse:
    """The answer to one request; raises AccountGone where there is none within ANSWER_SECONDS."""
    try:
        with urllib3.PoolManager() as pool:  # without `close` the server keeps the connection's file for an hour
            return pool.request(method, url, headers={"Connection": "close"}, timeout=ANSWER_SECONDS, retries=False, **request)
    except urllib3.exceptions.HTTPError as error:
        raise AccountGone(f"the account at {url} does not answer: {error!r}") from error
