"""The contract of every engine, kept by vLLM's."""

# pyright: reportMissingImports=false
# The contract is found beside this folder when the tests run (conftest.py).

from pathlib import Path

import msgspec
import pytest
from generator_contract import Bench, GeneratorContract, Play, Story
from in_process import InProcessGenerator
from releases import released, weights
from shared_engine import NAME, Shared

from offbeat.messages.weights import WeightRelease


class VllmBench(Bench):
    generator: InProcessGenerator

    def release(self, version: int) -> WeightRelease:
        """The model of the repository, its last bytes a bit different a version."""
        base = weights(0).release
        chunks = [chunk.copy() for chunk in base.chunks]
        chunks[-1][0] ^= version
        return released(version, base.manifest, chunks)

    def torn(self, version: int) -> WeightRelease:
        whole = self.release(version)
        return msgspec.structs.replace(whole, chunks=whole.chunks[:-1])


class TestVllmGenerator(GeneratorContract):
    @pytest.fixture
    def play(self, shared: Shared, tmp_path: Path) -> Play:
        def play(story: Story) -> None:
            async def told() -> None:
                engine = InProcessGenerator(NAME, shared.actor)
                try:
                    await story(VllmBench(engine))
                finally:
                    await engine.close()

            shared.runner.run(told())

        return play
