"""Layout of a vLLM engine. Its workers record it once, and it is kept as long as they live."""

import asyncio

import structlog

from offbeat.plugins.vllm.calls import CallRefused, Calls
from offbeat.plugins.vllm.coverage import Coverage
from offbeat.plugins.vllm.engine import VllmEngine
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.region import Region

log = structlog.stdlib.get_logger()


class RecordedLayout:
    """Regions of a model's files that the loaders of an engine's workers read."""

    def __init__(self, engine: VllmEngine, coverage: Coverage, call: Calls) -> None:
        self._engine, self._coverage, self._call = engine, coverage, call
        self._layout: EngineLayout | None = None
        self.problem = ""
        """Why the layout is missing; empty before the recording."""
        self._one_at_a_time = asyncio.Lock()

    async def get(self) -> EngineLayout | None:
        """Return the regions that each worker needs, or None (see ``problem``).

        Raises:
            DeadlineExceeded: The workers did not answer in time. The next call asks them again.
            EngineUnavailable: The engine's processes have ended.
        """
        async with self._one_at_a_time:
            if self._layout is None and not self.problem:
                await self._record()
        return self._layout

    def give_up(self, problem: str) -> None:
        """Discard the layout for good because of ``problem``."""
        self._layout, self.problem = None, problem

    async def _record(self) -> None:
        tensors = [(n, list(shape), dtype) for n, (shape, dtype) in self._coverage.tensors.items()]
        asked = self._engine.llm.collective_rpc("ws_record", args=(tensors,))
        try:
            answers = await self._call("record", asked)
        except CallRefused as refused:
            self.give_up(str(refused))
            return
        refusals = [each for each in answers if isinstance(each, str)]
        if refusals:
            self.give_up(refusals[0])
            return
        ranks = tuple(
            tuple((name, Region(tuple(start), tuple(stop))) for name, start, stop in regions)
            for regions in answers
        )
        self._layout = EngineLayout(tuple(self._coverage.tensors), ranks)
        count = sum(map(len, ranks))
        log.info(
            "weights.layout_recorded", engine=self._engine.name, regions=count, ranks=len(ranks)
        )
