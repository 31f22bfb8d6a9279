"""Spec of a trainer rank, and the rendezvous of several ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.config.by_value import PackedValue
from offbeat.config.run import RunConfig
from offbeat.run_files.sharing import Sharing
from offbeat.weight_sync.rendezvous.frames import StoreAddress


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Settings of a trainer rank. Picklable. The rank reads no other settings."""

    config: RunConfig
    run_dir: str
    rank: int = 0
    ranks: int = 1
    sharing: Sharing | None = None  # None: only one machine exists
    working_dir: str = ""  # searched first for the user's loss
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])  # digests the run began with
    values: tuple[PackedValue, ...] = ()  # a loss that the user gave by value

    @property
    def process(self) -> str:
        """Name of the rank's process in the run."""
        return f"trainer-rank{self.rank}"


@dataclass(frozen=True, slots=True)
class WorldRendezvous:
    """Address of the store through which the ranks of a world find each other. Rank 0 runs it."""

    world: str  # unique name of this world
    store: StoreAddress
    size: int
    timeout_s: float  # timeout of one collective
