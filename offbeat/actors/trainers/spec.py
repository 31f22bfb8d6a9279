"""What a trainer actor is made from."""

from dataclasses import dataclass

from offbeat.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Picklable, and complete: the actor reads nothing else."""

    config: RunConfig
    model_path: str
    run_dir: str
    rank: int = 0
