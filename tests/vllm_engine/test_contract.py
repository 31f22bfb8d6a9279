"""The contract of every engine, kept by vLLM's."""

# pyright: reportMissingImports=false
# The contract is found beside this folder when the tests run (conftest.py).

from collections.abc import Sequence
from pathlib import Path

import pytest
from generator_contract import GeneratorContract, HoldingBench, Play, Story
from in_process import InProcessGenerator
from releases import TINY, released, weights
from shared_engine import NAME, Shared, TakenOver, serve
from stop_string_contract import PlayStops, StopBench, StopStory, StopStringContract

from offbeat.generators.embedded.start import Detokenizer
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.weights import WeightRelease
from tests.support.holding_engines import HoldingEngine


class HoldingVllm(HoldingEngine, TakenOver): ...


class VllmBench(HoldingBench):
    def release(self, version: int) -> WeightRelease:
        """The model of the repository, its last bytes a bit different a version."""
        base = weights(0).release
        chunks = [chunk.copy() for chunk in base.chunks]
        chunks[-1][0] ^= version
        return released(version, base.manifest, chunks)


class TestVllmGenerator(GeneratorContract):
    @pytest.fixture
    def play(self, shared: Shared, tmp_path: Path) -> Play:
        def play(story: Story) -> None:
            async def told() -> None:
                engine = InProcessGenerator(NAME, lambda: HoldingVllm(shared.spec, shared.started))
                try:
                    await story(VllmBench(engine))
                finally:
                    await engine.close()

            shared.runner.run(told())

        return play


class VllmStopBench(StopBench):
    def __init__(self, actor: TakenOver) -> None:
        self._actor = actor
        self._decode = Detokenizer(str(TINY), trust_remote_code=False)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._actor.generate(request)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)


class TestVllmStopStrings(StopStringContract):
    @pytest.fixture
    def play_stops(self, shared: Shared) -> PlayStops:
        def play(story: StopStory) -> None:
            async def told(actor: TakenOver) -> None:
                await serve(actor, 1, 0)
                await story(VllmStopBench(actor))

            shared.play(told)

        return play
