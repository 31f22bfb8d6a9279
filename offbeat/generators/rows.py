"""Generator of a run without engines. Its groups come from rows of a file.

The controller is the same as in other runs. It dispatches groups to a generator, and requires that
every version of the weights is served. Here the only generator is always healthy and serves every
version immediately, because rows do not depend on weights. The trainer's releases are empty.
"""

from typing import Final

from offbeat.messages.fences import Fence
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck

ROWS: Final = "rows"
"""Name of the generator that represents the file. Its only incarnation has the same name."""


class RowGenerator:
    """Generator port without a process. Its samples do not depend on weights."""

    def __init__(self) -> None:
        self.name = ROWS
        self._version: int | None = None
        self._digest: str | None = None

    async def state(self, fence: Fence) -> EngineState:
        del fence
        return EngineState(
            name=ROWS,
            incarnation=ROWS,
            version=self._version,
            digest=self._digest,
            running=0,
            waiting=0,
            busy_s=0.0,
            tokens=0,
        )

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        del fence
        self._version, self._digest = release.version, release.digest
        return WeightsAck(
            engine=ROWS,
            incarnation=ROWS,
            epoch=epoch,
            version=release.version,
            digest=release.digest,
            transfer_s=0.0,
            pause_s=0.0,
        )

    async def restart(self) -> None: ...

    async def retire(self) -> None: ...

    async def close(self) -> None: ...


def make_empty_release(version: int) -> WeightRelease:
    """Return a release that names the version and holds no weights."""
    return WeightRelease(version, f"none-{version}", manifest=None, chunks=(), nbytes=0)
