"""An AWS account to be administered: a task, `aws` command lines, and a reward for the state that the account ends up in.

    async with serve(AwsEnv, max_sessions=8, backends=accounts(8)) as server: ...
    python -m grpolab serve aws --max-sessions 8

Reward, paid once: 1.0 for the task done, less for each hint taken, 0.0 when the turns are used up. What is typed earns nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Mapping
from typing import Any

from grpolab.env.aws.backend import inventory, leftovers, wipe
from grpolab.env.aws.chaos import undoing
from grpolab.env.aws.commands import Account, Output
from grpolab.env.aws.grader import Grade, grade
from grpolab.env.aws.tasks import TIERS, Task, load_tasks, pick_drifts, play, templates
from grpolab.env.calculator import check_counts
from grpolab.env.protocol import InvalidAction, StepResult

HINT = "aws hint"  # the action that asks for one, where hints are on
HINT_FACTOR = 0.85  # of the reward, for each hint taken


class SetupError(RuntimeError):
    """The account could not be brought to where the task begins; the episode has not started."""


class AwsEnv:
    """One task an episode, in an account of its own. `account` is its endpoint, as a `backend.Simulator` hands it over.

    An action is {"command": "aws ..."}, or {"text": ...} of which the first line that starts with aws is taken. The
    observation is {"text": ..., "ok": whether the command went well}; its text is the output without JSON's indentation, cut
    to `observation_characters` in its middle. The task is given to `reset` as its id (or {"id": ...}), or drawn from the seed,
    of one tier if `tier` is set.

    `hints`: the action `aws hint` tells a task's next hint for a turn and HINT_FACTOR of the reward. `chaos`: the chance after
    each turn that something which the agent has made is destroyed, unannounced. `drift`: tasks of that tier begin with some of
    what they ask for spoilt; False leaves those as they were set up. Both draw from seeds of their own, `chaos_seed` and
    `drift_seed`, or else from the episode's seed.

    `shaping` w pays w * (gamma * P(s') - P(s)) each turn, with P the share of the criteria that hold, and 0 in the state after
    the last turn, so that which policies are best stays as it is (Ng, Harada and Russell, 1999): with gamma 1 an episode's sum
    is the terminal reward less w * P(s0), whatever was done in between, and stalling earns nothing.
    """

    def __init__(self, account: str | Mapping[str, Any] | None = None, *, max_turns: int = 8, tier: str | None = None,
                 hints: bool = False, chaos: float = 0.0, drift: bool = True, shaping: float = 0.0, gamma: float = 1.0,
                 chaos_seed: int | None = None, drift_seed: int | None = None, observation_characters: int = 800):
        if isinstance(account, Mapping):
            options = dict(account)
            self.__init__(options.pop("account", None), **options)
            return
        if account is None:
            raise ValueError("AwsEnv needs an account: serve(AwsEnv, max_sessions=8, backends=accounts(8)), with accounts from "
                             "grpolab.env.aws.backend, or python -m grpolab serve aws")
        check_counts(max_turns=max_turns, observation_characters=observation_characters)
        if tier is not None and tier not in TIERS:
            raise ValueError(f"tier={tier!r}: there are {', '.join(TIERS)}")
        if not 0 <= chaos <= 1:
            raise ValueError(f"chaos={chaos}: a probability, from 0 to 1")
        if not 0 <= shaping <= 1 or not 0 < gamma <= 1:
            raise ValueError(f"shaping={shaping}, gamma={gamma}: shaping is from 0 to 1, gamma above 0 and at most 1")
        self.account, self.max_turns, self.tier = Account(account), max_turns, tier
        self.hints, self.chaos, self.drift, self.shaping, self.gamma = hints, chaos, drift, shaping, gamma
        self.chaos_seed, self.drift_seed, self.observation_characters = chaos_seed, drift_seed, observation_characters
        self._task: Task | None = None
        self._begin(0)

    def _begin(self, seed: int) -> None:
        self._turn = self._hinted = 0
        self._done, self._achieved, self._progress = True, False, 0.0
        self._given: set[str] = set()  # commands that would destroy what the task has set up
        self._made: list[str] = []  # commands that destroy what the agent has made
        self._destroyed: list[str] = []
        self._drifts: tuple[int, ...] = ()
        self._luck = random.Random(f"chaos:{seed if self.chaos_seed is None else self.chaos_seed}")

    def reset(self, seed: int | None = None, task: Any = None) -> StepResult:
        """Start an episode in an account that holds the task's set-up and nothing else. Raises SetupError, AccountGone."""
        seed = random.Random().randrange(2**32) if seed is None else seed
        chosen = draw_task(seed, self.tier) if task is None else read_task(task)
        self._task = None
        self._begin(seed)
        wipe(self.account.endpoint)
        if left := leftovers(self.account.endpoint):
            raise SetupError(f"the account is not empty after it was wiped: {', '.join(left)}")
        self._prepare(chosen, chosen.setup)
        if self.drift and chosen.drifts:
            self._drifts = pick_drifts(chosen, seed if self.drift_seed is None else self.drift_seed)
            self._prepare(chosen, tuple(chosen.drifts[i] for i in self._drifts))
        self._task = chosen
        self._progress = self._grade().progress
        self._done = False
        return StepResult({"text": chosen.description, "ok": True}, metadata={"task": chosen.shown()})

    def _prepare(self, task: Task, lines: tuple[str, ...]) -> None:
        for line, output in play(lines, self.account.run):
            if not output.ok:
                raise SetupError(f"task {task.id}: {line!r:.200} failed: {output.stderr.strip():.200}")
            if undo := undoing(output.call):
                self._given.add(undo)

    def step(self, action: dict) -> StepResult:
        """Carry out one command. Raises InvalidAction, and AccountGone where the account does not answer: then the episode
        is lost, and no reward is made up."""
        command = read_command(action)
        if self._done:
            raise RuntimeError("the episode is over: reset before the next step")
        self._turn += 1
        before = self._progress
        output = self._hint() if command == HINT else self.account.run(command)
        self._after(output)
        self._done = self._achieved or self._turn >= self.max_turns
        reward = self._terminal() if self._done else 0.0 if self.shaping else None
        if self.shaping:
            reward += self.shaping * (self.gamma * (0.0 if self._done else self._progress) - before)
        shown = {"text": shorten(output, self.observation_characters), "ok": output.ok}
        return StepResult(shown, reward, self._done, {"achieved": self._achieved, "progress": self._progress,
                                                      "hints": self._hinted, "chaos": len(self._destroyed)})

    def _after(self, output: Output) -> None:
        """Grade the account, and let chaos at what is not done yet."""
        if output.call is not None:
            grade = self._grade()
            self._achieved, self._progress = grade.achieved, grade.progress
            undo = undoing(output.call) if output.ok else None
            if undo is not None and undo not in self._given:
                self._made.append(undo)
        if not self._achieved and self._turn < self.max_turns and self._made and self._luck.random() < self.chaos:
            command = self._made.pop(self._luck.randrange(len(self._made)))
            if self.account.run(command).ok:
                self._destroyed.append(command)
                self._progress = self._grade().progress

    def _terminal(self) -> float:
        return HINT_FACTOR**self._hinted if self._achieved else 0.0

    def _grade(self) -> Grade:
        return grade(self._task, self.account.client)

    def _hint(self) -> Output:
        if not self.hints:
            return Output(False, "", "there are no hints here\n")
        if self._hinted >= len(self._task.hints):
            return Output(False, "", "there are no more hints\n")
        self._hinted += 1
        return Output(True, self._task.hints[self._hinted - 1] + "\n", "")

    def state(self) -> dict:
        """What anybody may know of the episode, what its account holds included: neither its criteria nor its solution."""
        shown = None if self._task is None else self._task.shown()
        account = {} if self._task is None else inventory(self.account.endpoint)
        return {"task": shown, "account": account, "turn": self._turn, "max_turns": self.max_turns, "hints": self._hinted,
                "chaos": len(self._destroyed), "progress": self._progress, "achieved": self._achieved, "done": self._done}

    def close(self) -> None:
        self.account.close()


def read_command(action: dict) -> str:
    """The command line of an action; raises InvalidAction for what is none."""
    keys = set(action) - {"metadata"}
    if keys == {"command"} and isinstance(action["command"], str):
        return action["command"].strip()
    if keys == {"text"} and isinstance(action["text"], str):
        lines = (line.lstrip(" \t`$>").rstrip(" \t`") for line in re.split(r"[\r\n]+", action["text"]))
        return next((line for line in lines if line.startswith(("aws ", "aws\t"))), action["text"].strip())
    raise InvalidAction(f'an action here is {{"command": "aws ..."}} or {{"text": "..."}}, got the keys {sorted(keys)}')


def draw_task(seed: int, tier: str | None) -> Task:
    """A task of a tier, or of any, the same for the same seed."""
    return random.Random(f"task:{seed}").choice(load_tasks(tier))


def read_task(task: Any) -> Task:
    """The task of an id, or of {"id": ...}: a template's own, or `template/value,value` with values for its slots.

    Raises InvalidAction for anything else."""
    name = task.get("id") if isinstance(task, Mapping) else task
    if not isinstance(name, str):
        raise InvalidAction(f"a task here is its id, or {{\"id\": ...}}, got {task!r:.100}")
    template, slash, values = name.partition("/")
    for known in templates():
        if known.id == template:
            filled = values.split(",") if slash else [value for _, value in known.slots.values()]
            if len(filled) != len(known.slots):
                raise InvalidAction(f"task {name!r:.100}: {template} has {len(known.slots)} slots, got {len(filled)} values")
            return known.task(dict(zip(known.slots, filled)), None if slash else template)
    raise InvalidAction(f"there is no task {name!r:.100}; grpolab.env.aws.tasks.load_tasks() lists them")


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
    cut = f" ... {len(text) - characters} characters ... "
    kept = max(characters - len(cut), 2)
    return (text[:kept - kept // 3] + cut + text[-(kept // 3):])[:characters]
