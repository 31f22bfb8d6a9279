"""A prompt's pictures go to the engine with its requests, and into the columns once per group."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from offbeat.environments.protocol import (
    EncodedPrompt,
    EnvironmentUnavailable,
    Episode,
    MultiTurn,
    Response,
    SingleTurn,
)
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.messages.media import get_media
from offbeat.plugins.images.encoder import PictureEncoder
from offbeat.plugins.images.errors import BadPicture, StrayPlaceholder, WrongPlaces
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.group import PromptMedia, run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue.schema import payload_bytes
from tests.support.environment_fakes import SAMPLING, answers, task
from tests.support.pictures import pixels

PICTURE = pixels((3, 4, 4))
ROOM = 4 * 48 + 12 + 4  # its values, sides and kind
ENCODED = EncodedPrompt((5, 9, 9, 6), PICTURE)


class Looks(SingleTurn):
    """Its prompt is a picture; a sample whose turn has come in ``failing`` raises once."""

    def __init__(self, encoded: Any = ENCODED, failing: int = 0) -> None:
        self.encoded, self.failing = encoded, failing

    def encode(self, prompt: Prompt) -> Any:
        return self.encoded

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        if self.failing:
            self.failing -= 1
            raise ValueError("flaky")
        return [1.0] * (len(result.offsets) - 1)


class LooksTwice(MultiTurn):
    def encode(self, prompt: Prompt) -> EncodedPrompt:
        return ENCODED

    def begin(self, task: RolloutTask, sample: int) -> Episode:
        return TwoTurns()


class TwoTurns(Episode):
    def __init__(self) -> None:
        self.turns = 0

    async def step(self, response: Response) -> tuple[int, ...] | None:
        self.turns += 1
        return (7,) if self.turns == 1 else None

    async def reward(self) -> float:
        return 1.0


class Engine:
    """Answers each request, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        return await answers(*["7"] * request.samples)(request)


def rolled_out(
    environment: SingleTurn | MultiTurn,
    engine: Engine,
    on_failed: Any = "fail_group",
    room: int = ROOM,
) -> tuple[Receipt, Columns]:
    policy = SampleFailurePolicy(on_failed)
    group = run_group(
        task(),
        environment,
        engine,
        SAMPLING,
        max_turns=4,
        max_model_len=64,
        policy=policy,
        media=PromptMedia(max_bytes=room),
    )
    return asyncio.run(group)


@pytest.mark.parametrize(
    ("environment", "on_failed", "requests"),
    [
        (Looks(), "fail_group", 1),  # of the whole group
        (Looks(failing=2), "retry", 2),  # the group, then the sample that failed
        (LooksTwice(), "fail_group", 4),  # two samples of two turns
    ],
)
def test_each_request_carries_the_pictures_and_the_columns_hold_them_once(
    environment: SingleTurn | MultiTurn, on_failed: str, requests: int
) -> None:
    engine = Engine()
    receipt, columns = rolled_out(environment, engine, on_failed)
    assert len(engine.requests) == requests
    assert all(request.media is PICTURE for request in engine.requests)
    media = get_media(columns)
    assert media is not None
    np.testing.assert_array_equal(media["media_values"], PICTURE["media_values"])
    assert "media_values" in receipt.columns
    assert receipt.payload_bytes == payload_bytes(columns) > PICTURE["media_values"].nbytes
    assert receipt.prompt_tokens == (4, 4)


@pytest.mark.parametrize(
    ("media", "reason", "told"),
    [
        ("a.png", "environment_wrong_type", "the media are str; return a mapping of arrays"),
        ({**PICTURE, "media_values": PICTURE["media_values"][1:]}, "schema", "47 values"),
        ({0: PICTURE["media_values"]}, "schema", "'0' is not declared"),
    ],
)
def test_pictures_that_are_none_fail_their_group_before_an_engine_reads_them(
    media: Any, reason: str, told: str
) -> None:
    engine = Engine()
    with pytest.raises(RolloutFailed) as caught:
        rolled_out(Looks(EncodedPrompt((5,), media)), engine)
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, reason)
    assert told in caught.value.detail
    assert engine.requests == []


def test_pictures_for_which_the_buffer_keeps_no_room_fail_their_group() -> None:
    with pytest.raises(
        RolloutFailed, match=r"have 208 bytes; environment.images.max_mib allows 207"
    ):
        rolled_out(Looks(), Engine(), room=ROOM - 1)


class Pictures:
    """Encodes every prompt the same, or raises."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    async def encode(self, prompt: Prompt) -> EncodedPrompt | None:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def encoded_by(pictures: Pictures, environment: SingleTurn) -> tuple[Receipt, Columns]:
    group = run_group(
        task(),
        environment,
        Engine(),
        SAMPLING,
        max_turns=1,
        max_model_len=64,
        policy=SampleFailurePolicy(),
        media=PromptMedia(cast("PictureEncoder", pictures), ROOM),
    )
    return asyncio.run(group)


def test_a_prompt_that_names_pictures_is_encoded_by_the_models_processor() -> None:
    _, columns = encoded_by(Pictures(ENCODED), Looks((1, 2, 3)))
    assert columns["prompt_ids"].tolist() == [5, 9, 9, 6]
    assert get_media(columns) is not None


def test_a_prompt_without_pictures_is_encoded_by_its_environment() -> None:
    _, columns = encoded_by(Pictures(None), Looks((1, 2, 3)))
    assert columns["prompt_ids"].tolist() == [1, 2, 3]
    assert get_media(columns) is None


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (BadPicture("a.png", "is damaged"), FailureKind.DATA, "picture_unusable"),
        (WrongPlaces(0, 1), FailureKind.DATA, "picture_unusable"),
        (StrayPlaceholder("<|image_pad|>"), FailureKind.DATA, "picture_token"),
        (
            EnvironmentUnavailable("stale handle"),
            FailureKind.INFRASTRUCTURE,
            "environment_unavailable",
        ),
        (ValueError("of the processor"), FailureKind.DATA, "environment_raised"),
    ],
)
def test_a_picture_that_cannot_be_used_fails_its_group_alone(
    error: Exception, kind: FailureKind, reason: str
) -> None:
    with pytest.raises(RolloutFailed) as caught:
        encoded_by(Pictures(error), Looks((1, 2, 3)))
    assert (caught.value.kind, caught.value.reason) == (kind, reason)
    assert str(error) in caught.value.detail
