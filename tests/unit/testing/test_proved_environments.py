"""The proof of an environment accepts one whose reward is a function of the answer, and no other."""

from collections.abc import Sequence

import pytest

from offbeat.environments.built_in import Arithmetic
from offbeat.environments.protocol import SingleTurn
from offbeat.environments.text import Tokenizer, content_ids
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.testing import EnvironmentRefused, prove_environment
from tests.support.environment_fakes import CharTokenizer
from tests.support.guessing import Guessing

ROWS = ({"prompt": "3+4=", "answer": 7}, {"prompt": "1+1=", "answer": 2})
ANSWERS = ("", "7", "2", "no idea")


class Counting(SingleTurn):
    """Rewards samples by the number of calls so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._calls = tokenizer, 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt.data["prompt"]))

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        self._calls += 1
        return [float(self._calls)] * task.samples


class ByPlace(Counting):
    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        return [float(place) for place in range(task.samples)]


class RaisesForNoNumber(Counting):
    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        texts = [self._tokenizer.decode(ids) for ids in content_ids(result)]
        return [float(int(text) == task.prompt.data["answer"]) for text in texts]


def test_an_environment_of_one_turn_is_accepted() -> None:
    prove_environment(Arithmetic, CharTokenizer(), ROWS, answers=ANSWERS)


def test_an_environment_of_several_turns_is_accepted() -> None:
    prove_environment(Guessing, CharTokenizer(), [{"prompt": "?", "secret": 7}], answers=("7", "2"))


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (Counting, "gets 1, and 3 with the samples in the opposite order"),
        (ByPlace, "gets 0, and 3 with the samples in the opposite order"),
        (RaisesForNoNumber, "the group of row 0 fails.*invalid literal for int"),
    ],
)
def test_an_environment_is_refused_with_the_reason(environment: type[Counting], told: str) -> None:
    with pytest.raises(EnvironmentRefused, match=told):
        prove_environment(environment, CharTokenizer(), ROWS, answers=ANSWERS)
