"""Generator of a run without engines, whose groups are rows of a file.

The controller is the same: it dispatches a group to a generator, and has each version of the weights
served. Here the one generator is always well and serves every version at once, because a row does
not depend on weights. The trainer's releases are empty.
"""

from typing import Final

from offbeat.messages.fences import Fence
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck

ROWS: Final = "rows"
"""Name of the generator that represents the file; also the name of its only incarnation."""


class RowGenerator:
    """Port of a generator whose samples do not depend on weights. It has no process."""

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
