"""Prepares the model directory that a run begins with. Derives start deadlines from its size."""

from pathlib import Path
from typing import Final

from offbeat.config.generator_kinds import GeneratorConfig
from offbeat.config.limits import start_deadline_s
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TrainerConfig

INITIAL_MODEL: Final = "initial_model"
_CONFIG: Final = "config.json"


def with_initial_model(config: RunConfig, run_dir: Path) -> RunConfig:
    """Write ``model.weights`` into the run's directory, and return the recipe with it as the model.

    So trainer, reference and engines of every backend read one directory. A resumed run reads the
    directory that it began with, even if the checkpoint no longer exists.

    Raises:
        OffbeatError: The checkpoint does not fit the model, or is damaged.
        OSError: The disk failed.
    """
    weights = config.model.weights
    if weights is None:
        return config
    target = run_dir / INITIAL_MODEL
    if not (target / _CONFIG).is_file():
        from offbeat.trainers.warm_start import (  # noqa: PLC0415 -- torch: other runs need none here
            write_initial_model,
        )

        write_initial_model(Path(weights), Path(config.model.path), target)
    model = config.model.model_copy(update={"path": str(target), "weights": None})
    return config.model_copy(update={"model": model})


def with_start_deadlines(config: RunConfig) -> RunConfig:
    """Return the recipe with start deadlines that follow from the size of its model's files.

    Raises:
        OSError: The disk failed.
    """
    files = Path(config.model.path).glob("*.safetensors")  # none if this machine cannot see them
    nbytes = sum(each.stat().st_size for each in files)
    sections: dict[str, GeneratorConfig | TrainerConfig] = {"trainer": config.trainer}
    if config.generator.has_engines:
        sections["generator"] = config.generator
    return config.model_copy(
        update={
            name: each.model_copy(update={"start_deadline_s": start_deadline_s(each, nbytes)})
            for name, each in sections.items()
        }
    )
