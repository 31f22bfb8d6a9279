"""Answers questions about the weights that the engines of a local run serve."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from offbeat.launch.weight_requests import answer, take_questions
from offbeat.local.ports import LocalGenerator
from offbeat.local.threads import LoopThread
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import first_line
from offbeat.weight_sync.served import ServedWeights

log = structlog.stdlib.get_logger()
_DEADLINE_S: Final = 50.0  # less than ``offbeat verify-weights`` waits


class LocalReadBacks:
    """Questions about the served weights, which all engines answer without holding up the run."""

    def __init__(
        self, run_dir: Path, generators: Mapping[str, LocalGenerator], loop: LoopThread
    ) -> None:
        self._run_dir, self._generators, self._loop = run_dir, generators, loop

    def poll(self) -> None:
        """Have the engines answer new questions."""
        for name in take_questions(self._run_dir):
            asyncio.run_coroutine_threadsafe(self._answer(name), self._loop.loop)

    async def _answer(self, question: str) -> None:
        served = await asyncio.gather(*map(_read_back, self._generators.values()))
        try:
            answer(self._run_dir, question, served)
        except OSError as error:
            log.warning("verify_weights.unanswered", error=str(error))


async def _read_back(generator: LocalGenerator) -> ServedWeights:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await generator.served_weights()
    except TimeoutError:
        return ServedWeights(generator.name, None, problem=f"no answer in {_DEADLINE_S:g} s")
    except OffbeatError as error:
        return ServedWeights(generator.name, None, problem=first_line(error))
