"""What a trainer actor is made from, and where the ranks of a world meet."""

from dataclasses import dataclass

from offbeat.config.run import RunConfig
from offbeat.rendezvous.frames import StoreAddress
from offbeat.run_files.sharing import Sharing


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Picklable, and complete: the actor reads nothing else."""

    config: RunConfig
    model_path: str
    run_dir: str
    rank: int = 0
    ranks: int = 1
    sharing: Sharing | None = None  # None: there is one machine


@dataclass(frozen=True, slots=True)
class WorldRendezvous:
    """Where the ranks of one world meet. The first rank holds the store there."""

    world: str  # names this world; no other one has the name
    store: StoreAddress
    size: int
    timeout_s: float  # that one collective may take
