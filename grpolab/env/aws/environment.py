"""An AWS account to be administered: a task, `aws` command lines, and a reward for the state that the account ends up in.

    async with serve(AwsEnv, max_sessions=8) as server: ...
    python -m grpolab serve aws --max-sessions 8

Reward, paid once: 1.0 for the task done, 0.0 when the turns are used up. What is typed earns nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Mapping
from typing import Any

from grpolab.env.aws.backend import Simulator, wipe
from grpolab.env.aws.commands import MOVES, Account, Output
from grpolab.env.aws.grader import Grade, grade
from grpolab.env.aws.options import AwsOptions
from grpolab.env.aws.tasks import Task, load_tasks, pick_drifts, play, templates
from grpolab.env.protocol import InvalidAction, StepResult

UNGRADED = Grade(False, 0.0, ())  # before an episode has begun


class SetupError(RuntimeError):
    """The account could not be brought to where the task begins; the episode has not started."""


class AwsEnv:
    """One task an episode, in an account of its own, or in the one at the address `account`, whose next episode then wipes it.
    The options are those of `AwsOptions`.

    An action is {"command": "aws ..."}, or {"text": ...} of which the first line that starts with aws is taken. The
    observation is {"text": ..., "ok": whether the command went well}; its text is the output without JSON's indentation. The
    task is given to `reset` as its id (or {"id": ...}), or drawn.
    """

    def __init__(self, account: str | None = None, **options: Any):
        self.options = AwsOptions(**options)
        self._simulator = Simulator() if account is None else None
        self.account = Account(account or self._simulator.address)
        self._grader = Account(self.account.endpoint)  # with clients of its own, which nothing that is typed can change
        self._task: Task | None = None
        self._turn, self._done, self._grade = 0, True, UNGRADED

    def reset(self, seed: int | None = None, task: Any = None) -> StepResult:
        """Start an episode in an account that holds the task's set-up and nothing else. Raises SetupError, AccountGone."""
        seed = random.Random().randrange(2**32) if seed is None else seed
        if task is None:
            chosen = random.Random(f"task:{seed}").choice(load_tasks(self.options.tier))
        else:
            chosen = read_task(task)
        self._task, self._turn, self._done, self._grade = None, 0, True, UNGRADED
        wipe(self.account.endpoint)
        self.account.close("s3")  # which may remember buckets that are gone
        self._grader.close("s3")
        self._prepare(chosen, chosen.setup)
        self._prepare(chosen, tuple(chosen.drifts[i] for i in pick_drifts(chosen, seed)))
        self._task, self._grade = chosen, grade(chosen, self._grader.client)
        self._done = False
        return StepResult({"text": chosen.description, "ok": True}, metadata={"task": chosen.shown()})

    def _prepare(self, task: Task, lines: tuple[str, ...]) -> None:
        for line, output in play(lines, self._run):
            if not output.ok:
                raise SetupError(f"task {task.id}: {line!r:.200} failed: {output.stderr.strip():.200}")

    def step(self, action: dict) -> StepResult:
        """Carry out one command. Raises InvalidAction, and AccountGone where the account does not answer: then the episode
        is lost, and no reward is made up."""
        command = read_command(action)
        if self._done:
            raise RuntimeError("the episode is over: reset before the next step")
        self._turn += 1
        options, before = self.options, self._grade.progress
        output = self._run(command)
        if output.call is not None:  # something was sent to the account
            self._grade = grade(self._task, self._grader.client)
        achieved, progress = self._grade.achieved, self._grade.progress
        self._done = achieved or self._turn >= options.max_turns
        reward = float(achieved) if self._done else 0.0 if options.shaping else None
        if options.shaping:
            reward += options.shaping * ((0.0 if self._done else progress) - before)
        observation = {"text": shorten(output, options.observation_characters), "ok": output.ok}
        return StepResult(observation, reward, self._done, {"achieved": achieved, "progress": progress})

    def _run(self, command: str) -> Output:
        output = self.account.run(command)
        if output.call is not None and output.call.operation in MOVES:
            self._grader.close("s3")
        return output

    def state(self) -> dict:
        """What anybody may know of the episode: neither its criteria nor its solution."""
        return {"task": self._task and self._task.shown(), "turn": self._turn, "max_turns": self.options.max_turns,
                "progress": self._grade.progress, "achieved": self._grade.achieved, "done": self._done}

    def close(self) -> None:
        self.account.close()
        self._grader.close()
        if self._simulator is not None:
            self._simulator.close()


def read_command(action: dict) -> str:
    """The command line of an action; raises InvalidAction for what is none."""
    keys = set(action) - {"metadata"}
    if keys == {"command"} and isinstance(action["command"], str):
        return action["command"].strip()
    if keys == {"text"} and isinstance(action["text"], str):
        text = action["text"].replace("\\\r\n", "\\\n")  # a \ at the end of a line continues it
        lines = (line.lstrip(" \t`$>").rstrip(" \t`") for line in re.split(r"(?<!\\)[\r\n]+", text))
        return next((line for line in lines if line.startswith(("aws ", "aws\t"))), action["text"].strip())
    raise InvalidAction(f'an action here is {{"command": "aws ..."}} or {{"text": "..."}}, got the keys {sorted(keys)}')


def read_task(task: Any) -> Task:
    """The task of an id, or of {"id": ...}: a template's own, or `template/value,value` with values for its slots.

    Raises InvalidAction for anything else."""
    name = task.get("id") if isinstance(task, Mapping) else task
    if not isinstance(name, str):
        raise InvalidAction(f"a task here is its id, or {{\"id\": ...}}, got {task!r:.100}")
    id, slash, text = name.partition("/")
    template = next((template for template in templates() if template.id == id), None)
    if template is None:
        raise InvalidAction(f"there is no task {name!r:.100}; grpolab.env.aws.tasks.load_tasks() lists them")
    if not slash:
        return template.own_task()
    values = text.split(",")
    if len(values) != len(template.slots):
        raise InvalidAction(f"task {name!r:.100}: {id} has {len(template.slots)} slots, got {len(values)} values")
    return template.task(dict(zip(template.slots, values)))


def shorten(output: Output, characters: int) -> str:
    """What a command printed, for a small model: JSON on one line, "ok" for nothing, and no more than `characters`, of which
    a middle that is left out is counted."""
    text = output.stdout if output.ok else output.stderr
    if text.startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    text = text.strip()
    if not text:
        return "ok" if output.ok else "failed"
    if len(text) <= characters:
        return text
    shown = max(characters - len(f" ... {len(text)} characters ... "), 2)
    cut = f" ... {len(text) - shown} characters ... "
    return (text[:shown - shown // 3] + cut + text[-(shown // 3):])[:characters]
