"""A simulated account: one MiniStack process, wiped between two episodes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import urllib3

from grpolab.env import child_processes
from grpolab.env.aws import simulator
from grpolab.env.aws.clients import SIMULATED, AccountGone

ANSWER_SECONDS = 10.0  # what a healthy one needs at most, on a busy machine
START_SECONDS = 30.0  # on a busy machine eight start at once


class Simulator:
    """One MiniStack process, which ends with `close` or with this process; `address` is http://127.0.0.1:PORT.

    `with Simulator() as account: AwsEnv(account.address)`. ImportError where MiniStack is not installed.
    """

    def __init__(self):
        if find_spec("ministack") is None:
            raise ImportError("the aws environment needs ministack: pip install 'grpolab[aws]'")
        # -P keeps the folder of simulator.py, whose modules have common names, off the path.
        command = [sys.executable, "-P", simulator.__file__, *SIMULATED]
        self.guard, self.address = child_processes.start_server(command, seconds=START_SECONDS)

    def close(self) -> None:
        child_processes.stop(self.guard)

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wipe(address: str) -> None:
    """Delete everything in the account, in all regions; raises AccountGone where the backend does not say that it did."""
    answer = _ask("POST", f"{address}/_ministack/reset")
    if answer.status != 200 or answer.json() != {"reset": "ok"}:
        raise AccountGone(f"the account at {address} could not be wiped: {answer.status} {answer.data!r:.100}")


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
