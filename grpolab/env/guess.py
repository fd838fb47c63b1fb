"""The guessing game: find a hidden integer from higher/lower answers. Several turns, partial feedback."""

from __future__ import annotations

import random
import re

from grpolab.env.calculator import action_text, check_counts
from grpolab.env.protocol import InvalidAction, StepResult, whole

_GUESS = re.compile(r"[0-9]{1,9}")


class GuessEnv:
    """A number from 1 to `highest`, drawn from `seed` or given as `task` {"secret": 42}; `max_turns` guesses.

    The last number in the text is the guess. Reward 1.0 when it is found, 0.0 when the turns are used up; paid once.
    """

    def __init__(self, *, highest: int = 100, max_turns: int = 7):
        check_counts(highest=highest, max_turns=max_turns)
        self.highest, self.max_turns = highest, max_turns
        self._secret = 0
        self._turn = 0
        self._done = True

    def reset(self, seed: int | None = None, task: dict | None = None) -> StepResult:
        self._secret = random.Random(seed).randint(1, self.highest) if task is None else self._read(task)
        self._turn, self._done = 0, False
        return StepResult({"text": f"Guess my number from 1 to {self.highest}."})

    def _read(self, task: dict) -> int:
        secret = whole(task.get("secret")) if isinstance(task, dict) else None
        if secret is None or not 1 <= secret <= self.highest:
            raise InvalidAction(f'a task here is {{"secret": 42}}, a whole number from 1 to {self.highest}')
        return secret

    def step(self, action: dict) -> StepResult:
        guesses = _GUESS.findall(action_text(action))
        if self._done:
            raise RuntimeError("the episode is over: reset before the next step")
        self._turn += 1
        said = self._compare(int(guesses[-1])) if guesses else "write a number"
        found = said == "correct"
        self._done = found or self._turn >= self.max_turns
        return StepResult({"text": said}, float(found) if self._done else None, self._done)

    def _compare(self, guess: int) -> str:
        return "correct" if guess == self._secret else "higher" if guess < self._secret else "lower"

    def state(self) -> dict:
        return {"turn": self._turn, "max_turns": self.max_turns, "highest": self.highest, "done": self._done}

    def close(self) -> None: ...
