"""Ports that answer at once: what is left is the controller's own work."""
# ruff: noqa: ARG002 - a port takes what it is handed, and these look at little of it

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from offbeat.controller.events import Event
from offbeat.controller.ledger import StepsAfter
from offbeat.controller.run_stats import RunStats
from offbeat.fakes.instant_ports import InstantEngine
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask, VersionSpans

SAMPLES = 8


class NoJournal:
    """Keeps nothing, and nothing has to be waited for."""

    def __init__(self) -> None:
        self.stats = RunStats()

    def append(self, event: Event) -> None:
        self.stats.add(event)

    async def barrier(self) -> None: ...
    async def steps_after(self, version: int) -> StepsAfter:
        return StepsAfter((), ())


class NoopRollouts:
    """Finishes every group within one turn of the event loop.

    The receipts of one version differ only in the task, so that the figures are the controller's.
    """

    def __init__(self, generators: Mapping[str, InstantEngine]) -> None:
        self._generators = generators
        self._receipts = dict[int, Receipt]()  # the newest, by its version
        self.in_flight = self.peak_in_flight = 0

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, None]:
        version = self._generators[task.engine].version
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        first = self._receipts.get(version)
        if first is None:
            first = receipt(task, ((version, 512),))
            self._receipts = {version: first}
        answer = msgspec.structs.replace(
            first, prompt_index=task.prompt_index, attempt=task.attempt, engine=task.engine
        )
        return answer, None

    async def close(self) -> None: ...


class StepClock:
    """Telemetry that calls back at the end of each step, with its metrics."""

    def __init__(self, on_step: Callable[[Mapping[str, float]], None]) -> None:
        self._on_step = on_step

    def emit(
        self, step: int, version: int, metrics: Mapping[str, float], samples: object = None
    ) -> None:
        self._on_step(metrics)


def names(engines: int) -> list[str]:
    """Return the names of so many engines."""
    return [f"generator-{index}" for index in range(engines)]


def receipt(task: RolloutTask, spans: VersionSpans) -> Receipt:
    """A finished group whose samples all have the same response."""
    return make_receipt(
        task.prompt_index,
        task.attempt,
        (spans,) * task.samples,
        engine=task.engine,
        prompt_tokens=(64,) * task.samples,
        columns=("prompt_ids", "response_ids"),
        payload_bytes=40_000,
        sampling=task.sampling,
    )
