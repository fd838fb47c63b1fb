"""The guessing game: find a hidden integer from higher/lower answers. Several turns, partial feedback."""

from __future__ import annotations

import random
import re

from grpolab.env.calculator import action_text
from grpolab.env.protocol import InvalidAction, StepResult, check_counts, whole

_GUESS = re.compile(r"[0-9]{1,4000}")  # Python reads no longer number


class GuessEnv:
    """A number from 1 to `highest`, drawn from `seed` or given as `task` {"secret": 42}; `max_turns` guesses.

    The last number in the text is the guess. Reward 1.0 when it is found, less `price` for each guess before that one,
    and 0.0 when the turns are used up; paid once. With `notes` an answer also says which numbers are still possible
    ("higher: 51 to 100"), so that the last answer is all that a player has to read.
    """

    def __init__(self, *, highest: int = 100, max_turns: int = 7, price: float = 0.0, notes: bool = False):
        check_counts(highest=highest, max_turns=max_turns)
        if not 0 <= price * (max_turns - 1) < 1:
            raise ValueError(f"price={price}: with max_turns={max_turns} it lies between 0 and 1 / {max_turns - 1}, so that "
                             "finding the number late is still better than not finding it")
        self.highest, self.max_turns, self.price, self.notes = highest, max_turns, price, notes
        self._possible = (1, highest)
        self._secret = 0
        self._turn = 0
        self._done = True

    def reset(self, seed: int | None = None, task: dict | None = None) -> StepResult:
        self._secret = random.Random(seed).randint(1, self.highest) if task is None else self._read(task)
        self._turn, self._done, self._possible = 0, False, (1, self.highest)
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
        answer = self._compare(int(guesses[-1])) if guesses else "write a number"
        right = answer == "correct"
        if self.notes and not right:
            answer = f"{answer}: {self._note(answer, int(guesses[-1]) if guesses else 0)}"
        self._done = right or self._turn >= self.max_turns
        reward = 1.0 - self.price * (self._turn - 1) if right else 0.0
        return StepResult({"text": answer}, reward if self._done else None, self._done)

    def _compare(self, guess: int) -> str:
        return "correct" if guess == self._secret else "higher" if guess < self._secret else "lower"

    def _note(self, answer: str, guess: int) -> str:
        """What is still possible after an answer."""
        low, high = self._possible
        low = max(low, guess + 1) if answer == "higher" else low
        high = min(high, guess - 1) if answer == "lower" else high
        self._possible = low, high
        return f"{low} to {high}"

    def state(self) -> dict:
        return {"turn": self._turn, "max_turns": self.max_turns, "highest": self.highest, "done": self._done}

    def close(self) -> None: ...


def fewest_guesses(n: int) -> int:
    """The guesses that the best strategy needs for n numbers, summed over all n secrets: the depths in a balanced tree."""
    if n < 0:
        raise ValueError(f"n={n} numbers to guess from: give 0 or more")
    return sum(i.bit_length() for i in range(1, n + 1))


def best_first_guesses(highest: int) -> list[int]:
    """The first guesses from which `fewest_guesses(highest)` can be reached; the middle is always one of them."""
    best = fewest_guesses(highest) - highest
    return [k for k in range(1, highest + 1) if fewest_guesses(k - 1) + fewest_guesses(highest - k) == best]
