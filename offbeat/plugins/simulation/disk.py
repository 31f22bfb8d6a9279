"""The run directory, which survives every process and the whole cluster.

Defines the payload that a worker packs and a trainer reads. The controller only passes it on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from offbeat.messages.groups import Spooled
from offbeat.plugins.simulation.machines import FIRST_MEMORY, MachineMemory
from offbeat.plugins.simulation.records import CheckpointLatest, CheckpointWritten


@dataclass(frozen=True, slots=True)
class SimulatedPayload:
    """Columns of one group. They are lost with the controller that owns them, or their machine."""

    prompt_index: int
    attempt: int
    incarnation: int  # incarnation of the controller that owns it
    seed: int
    oldest: int
    newest: int
    poison: str
    memory: MachineMemory = FIRST_MEMORY  # memory that stores it
    masked: tuple[int, ...] = ()  # samples whose loss mask is False throughout
    branches: tuple[int, ...] = ()  # rows of each sample
    media_bytes: int = 0  # of the pictures of the prompt


INITIAL_DIGEST: Final = "untrained"


class SavedModel(msgspec.Struct, frozen=True):
    """Complete state of a trainer, from which it can continue."""

    version: int
    digest: str
    step: int
    attempt: int


UNTRAINED: Final = SavedModel(0, INITIAL_DIGEST, 0, 0)


class SimulatedDisk:
    """Complete checkpoints, the name in LATEST, and spooled payloads."""

    def __init__(self, record: Callable[..., None], keep: int) -> None:
        """``record`` writes a record of a class with these fields."""
        self._record, self._keep = record, keep
        self._checkpoints: dict[int, SavedModel] = {}
        self._latest = 0
        self.spooled: dict[Spooled, SimulatedPayload] = {}
        self.evaluations: set[int] = set()  # versions whose evaluation is on disk

    def spool(self, payload: SimulatedPayload) -> Spooled:
        """Write the columns of a group and return the place that its receipt names.

        Each write has a separate place, because receipts of two rollouts may be equal.
        """
        place = Spooled("simulated", len(self.spooled), 1, b"")
        self.spooled[place] = payload
        return place

    def write(self, model: SavedModel) -> None:
        """Rename a checkpoint into place. It is complete from now on."""
        self._checkpoints[model.version] = model
        self._record(CheckpointWritten, model.version, model.digest)

    def move_latest(self, version: int) -> None:
        """Point LATEST to the checkpoint and remove the oldest ones beyond ``keep``."""
        self._latest = version
        for old in sorted(self._checkpoints)[: -self._keep]:
            if old != version:
                del self._checkpoints[old]
        self._record_latest()

    def newest(self, at_most: int) -> SavedModel | None:
        """Return the newest checkpoint of this version or older."""
        versions = [version for version in self._checkpoints if version <= at_most]
        return self._checkpoints[max(versions)] if versions else None

    def abandon_after(self, version: int) -> None:
        """Set newer checkpoints aside.

        Their lineage is abandoned, and their numbers will be reused.
        """
        newer = [each for each in self._checkpoints if each > version]
        if self._latest > version and version in self._checkpoints:
            self._latest = version
            self._record_latest()
        for each in newer:
            del self._checkpoints[each]

    def _record_latest(self) -> None:
        named = self._checkpoints.get(self._latest)
        self._record(CheckpointLatest, self._latest, named is not None)
