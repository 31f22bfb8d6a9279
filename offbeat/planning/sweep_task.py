"""What passes between a sweep and the ranks of a point; loads no tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from offbeat.config.run import RunConfig
from offbeat.planning.fabricated import LengthLaw
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.spec import WorldRendezvous

HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankTask:
    """What one rank of a point is to do. Picklable."""

    config: RunConfig
    law: LengthLaw
    steps: int  # timed ones
    memory_mib: int | None  # memory that a rank may allocate beyond its libraries; None: no limit
    rank: int
    replicas: Replicas
    at: WorldRendezvous | None  # None: one rank
    log: Path  # what libraries write to standard output and error is appended


class RankResult(msgspec.Struct, frozen=True):
    """Measurements of one rank."""

    parameters: int
    step_s: float  # median of the timed steps
    tokens: int  # of one step over all ranks, prompts counted once per sample
    peak_mib: float  # highest in any phase, beyond what the process held before it loaded
    phases_mib: dict[str, float]  # by phase


class RankFailed(msgspec.Struct, frozen=True):
    """Why a rank could not measure."""

    out_of_memory: bool
    error: str
