"""A text that spells the token of a picture fails its group; a policy that samples one does not."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.protocol import (
    EncodedPrompt,
    Environment,
    Episode,
    MultiTurn,
    Response,
    SingleTurn,
)
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.models.media_rules import MediaTokens
from offbeat.plugins.images.errors import STRAY_TOKEN, UNUSABLE
from offbeat.plugins.images.families import PixelRules
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.group import PromptMedia, run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from tests.support.environment_fakes import SAMPLING, CharTokenizer, answers, task
from tests.support.pictures import pixels

TOKEN = ord("@")
TOKENS = MediaTokens({TOKEN: "<image>"}, PixelRules(TOKEN, (3, 4, 4), 2), STRAY_TOKEN, UNUSABLE)
PICTURE = pixels((3, 4, 4))


class Asks(SingleTurn):
    def __init__(self, encoded: Any) -> None:
        self.encoded = encoded

    def encode(self, prompt: Prompt) -> Any:
        return self.encoded

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        return [1.0] * (len(result.offsets) - 1)


class Talks(MultiTurn):
    """Says one thing after the first answer."""

    def __init__(self, observation: str) -> None:
        self.observation = tuple(map(ord, observation))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (5, 6)

    def begin(self, task: RolloutTask, sample: int) -> Episode:
        return Says(self.observation)


class Says(Episode):
    def __init__(self, observation: tuple[int, ...]) -> None:
        self.left = [observation]

    async def step(self, response: Response) -> tuple[int, ...] | None:
        return self.left.pop() if self.left else None

    async def reward(self) -> float:
        return 1.0


async def samples_the_token(request: GenerateRequest) -> GenerateResult:
    return await answers(*["@"] * request.samples)(request)


def rolled_out(environment: Environment, data: dict[str, Any] | None = None) -> Any:
    group = run_group(
        task(data, samples=1),
        environment,
        samples_the_token,
        SAMPLING,
        max_turns=4,
        max_model_len=64,
        policy=SampleFailurePolicy(),
        media=PromptMedia(max_bytes=1 << 20, tokens=TOKENS),
    )
    return asyncio.run(group)


def demonstrated(prompt: str, completion: str) -> tuple[Receipt, Columns]:
    row = {"prompt": prompt, "completion": completion}
    return rolled_out(Demonstrations(CharTokenizer()), row)


def test_a_prompt_of_text_with_a_token_of_pictures_fails_its_group_and_names_row_and_token() -> (
    None
):
    with pytest.raises(RolloutFailed) as caught:
        rolled_out(Asks((5, TOKEN)))
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, "picture_token")
    told = "row 7, counted from 0: the prompt has the token '<image>' (64) at position 1"
    assert told in caught.value.detail


def test_a_prompt_whose_places_are_not_those_of_its_pictures_fails_its_group() -> None:
    rolled_out(Asks(EncodedPrompt((5, TOKEN, TOKEN), PICTURE)))
    with pytest.raises(
        RolloutFailed, match="has 3 placeholder tokens, but its pictures take 2"
    ) as caught:
        rolled_out(Asks(EncodedPrompt((TOKEN, 5, TOKEN, TOKEN), PICTURE)))
    assert caught.value.reason == "picture_unusable"


def test_an_observation_with_a_token_of_pictures_fails_what_a_sampled_one_does_not() -> None:
    receipt, _ = rolled_out(Talks("and?"))
    assert receipt.turns == (2,)
    with pytest.raises(RolloutFailed, match="an observation has the token '<image>'"):
        rolled_out(Talks("and @?"))


def test_a_demonstration_has_no_token_of_pictures_in_its_prompt_or_its_completion() -> None:
    demonstrated("3+4=", "7")
    with pytest.raises(RolloutFailed, match="the prompt has the token"):
        demonstrated("@=", "7")
    with pytest.raises(RolloutFailed, match="the completion has the token"):
        demonstrated("3+4=", "@")
