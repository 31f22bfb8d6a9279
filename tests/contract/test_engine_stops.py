"""The engines of this package keep the contract about stop strings; vLLM's does in its own folder."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from stop_string_contract import (
    PlayStops,
    StopBench,
    StopStory,
    StopStringContract,
    samples_of,
)

from offbeat.config.sections.generator import StubConfig
from offbeat.fakes.engine import StubEngine, stub_text
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.generators.embedded.start import Detokenizer
from offbeat.generators.engine_loop import EngineLoop
from offbeat.messages.failures import InvalidRequest
from offbeat.messages.generation import STOPPED_AT_STRING, GenerateRequest, GenerateResult

TINY = Path(__file__).parents[2] / "models" / "tiny-addition"


async def no_time(_: float) -> None:
    return


class StubBench(StopBench):
    def __init__(self) -> None:
        self._engine = StubEngine(
            StubConfig(), name="stub-0", incarnation="first", seed=0, sleep=no_time
        )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._engine.generate(request)

    def text(self, token_ids: Sequence[int]) -> str:
        return stub_text(token_ids)


class EmbeddedBench(StopBench):
    def __init__(self, tokenizer: Path = TINY) -> None:
        self._decode = Detokenizer(str(tokenizer), trust_remote_code=False)
        engine = EmbeddedEngine(
            load_model(str(TINY), torch.float32, "cpu", trust_remote_code=False),
            name="engine-0",
            incarnation="first",
            eos_token_ids=(),
            max_sequences=16,
            max_model_len=128,
            deterministic=False,
            seed=0,
            device="cpu",
            decode=self._decode,
        )
        self.loop = EngineLoop(engine)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self.loop.generate(request)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)


def play_on_embedded(story: StopStory) -> None:
    async def main() -> None:
        bench = EmbeddedBench()
        try:
            await story(bench)
        finally:
            await bench.loop.close()

    asyncio.run(main())


def play_on_stub(story: StopStory) -> None:
    async def main() -> None:
        await story(StubBench())

    asyncio.run(main())


class TestStopStrings(StopStringContract):
    @pytest.fixture(params=["stub", "embedded"])
    def play_stops(self, request: pytest.FixtureRequest) -> PlayStops:
        return play_on_stub if request.param == "stub" else play_on_embedded


def test_a_stop_string_may_have_a_special_token() -> None:
    async def story(on: StopBench) -> None:
        for ids, _, reason in samples_of(await on.ask("<eos>")):
            assert (reason == STOPPED_AT_STRING) == ("<eos>" in on.text(ids))
            assert reason == STOPPED_AT_STRING, "the model ends each answer so"

    play_on_embedded(story)


def test_stop_strings_are_refused_where_no_tokenizer_is_and_other_requests_go_on(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        bench = EmbeddedBench(tokenizer=tmp_path)
        with pytest.raises(InvalidRequest, match="the model has no tokenizer"):
            await bench.ask("x")
        assert (await bench.ask()).token_ids.size
        await bench.loop.close()

    asyncio.run(main())
