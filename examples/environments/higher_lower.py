"""An environment of several turns: guess a number, and be told whether it is higher or lower.

Use it with::

    environment:
      name: custom
      target: higher_lower:HigherLower
      max_turns: 5
      options: {correct: 1.0}
    data:
      path: numbers.jsonl   # {"prompt": "Guess my number from 0 to 9: ", "answer": 7}
"""

from collections.abc import Sequence
from typing import Protocol

from offbeat import Episode, MultiTurn, Prompt, Response, RolloutTask


class Tokenizer(Protocol):
    """What this environment uses of the model's tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class HigherLower(MultiTurn):
    """One object per worker; it makes an episode for each sample."""

    def __init__(self, tokenizer: Tokenizer, *, correct: float = 1.0) -> None:
        self._tokenizer, self._correct = tokenizer, correct

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt.data["prompt"]))

    def begin(self, task: RolloutTask, sample: int) -> Episode:
        del sample  # every sample of a group plays the same game
        return Guesses(self._tokenizer, int(task.prompt.data["answer"]), self._correct)


class Guesses(Episode):
    """One sample: the reward is shared out over the guesses that were needed."""

    def __init__(self, tokenizer: Tokenizer, answer: int, correct: float) -> None:
        self._tokenizer, self._answer, self._correct = tokenizer, answer, correct
        self._guesses, self._is_right = 0, False

    async def step(self, response: Response) -> tuple[int, ...] | None:
        self._guesses += 1
        text = self._tokenizer.decode(response.content_ids).strip()
        if not text.isdecimal():
            return None  # no number: the episode ends, and its reward is 0
        self._is_right = int(text) == self._answer
        if self._is_right:
            return None
        hint = "higher" if int(text) < self._answer else "lower"
        return tuple(self._tokenizer.encode(f"\n{hint}: "))

    async def reward(self) -> float:
        return self._correct / self._guesses if self._is_right else 0.0
