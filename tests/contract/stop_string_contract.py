"""What every engine promises of stop strings."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import pytest

from offbeat.messages.failures import InvalidRequest
from offbeat.messages.generation import (
    STOPPED_AT_STRING,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)

MOST = 40


class StopBench(ABC):
    """An engine that serves, and the text of its tokens."""

    prompt = (2, 5, 14, 8, 17)

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    @abstractmethod
    def text(self, token_ids: Sequence[int]) -> str: ...

    async def ask(self, *stop: str) -> GenerateResult:
        """Always the same seed and the same id: only the stop strings differ."""
        sampling = SamplingParams(max_new_tokens=MOST, seed=3, stop=stop)
        return await self.generate(GenerateRequest("r", self.prompt, 8, sampling))


StopStory = Callable[[StopBench], Awaitable[None]]
PlayStops = Callable[[StopStory], None]


def samples_of(result: GenerateResult) -> list[tuple[list[int], list[float], str]]:
    return [
        (result.token_ids[start:end].tolist(), result.logprobs[start:end].tolist(), reason)
        for (start, end), reason in zip(
            pairwise(result.offsets.tolist()), result.finish_reasons, strict=True
        )
    ]


class StopStringContract:
    def test_a_sample_ends_at_the_token_that_completes_a_stop_string_and_keeps_it(
        self, play_stops: PlayStops
    ) -> None:
        async def story(on: StopBench) -> None:
            whole = samples_of(await on.ask())
            longest = max((ids for ids, _, _ in whole), key=len)
            stop = on.text(longest)[3:5], on.text(longest)[4:6]
            ended = samples_of(await on.ask(*stop))
            reasons = [reason for _, _, reason in ended]
            assert STOPPED_AT_STRING in reasons
            for (ids, logprobs, reason), (drawn, drawn_logprobs, end) in zip(
                ended, whole, strict=True
            ):
                texts = [on.text(drawn[: count + 1]) for count in range(len(drawn))]
                found = [any(each in text for each in stop) for text in texts]
                length = found.index(True) + 1 if True in found else len(drawn)
                assert ids == drawn[:length]
                assert logprobs == pytest.approx(drawn_logprobs[:length], abs=1e-4)
                assert reason == (STOPPED_AT_STRING if True in found else end)

        play_stops(story)

    def test_a_stop_string_that_never_comes_changes_nothing(self, play_stops: PlayStops) -> None:
        async def story(on: StopBench) -> None:
            whole, other = await on.ask(), await on.ask("\0 no token says this")
            assert other.token_ids.tolist() == whole.token_ids.tolist()
            assert other.finish_reasons == whole.finish_reasons

        play_stops(story)

    def test_an_empty_stop_string_is_refused(self, play_stops: PlayStops) -> None:
        async def story(on: StopBench) -> None:
            with pytest.raises(InvalidRequest, match="empty string"):
                await on.ask("")

        play_stops(story)
