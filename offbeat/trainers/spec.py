"""Constructor arguments of a trainer actor, and the rendezvous of its ranks."""

from dataclasses import dataclass

from offbeat.config.run import RunConfig
from offbeat.run_files.sharing import Sharing
from offbeat.weight_sync.rendezvous.frames import StoreAddress


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Complete arguments of a trainer actor. Picklable; the actor reads nothing else."""

    config: RunConfig
    run_dir: str
    rank: int = 0
    ranks: int = 1
    sharing: Sharing | None = None  # None: there is only one machine


@dataclass(frozen=True, slots=True)
class WorldRendezvous:
    """Address of the store at which the ranks of one world meet. Rank 0 runs the store."""

    world: str  # unique name of this world
    store: StoreAddress
    size: int
    timeout_s: float  # timeout of one collective
