"""The model directory that a run begins with, if its recipe names weights of a training checkpoint."""

from pathlib import Path
from typing import Final

from offbeat.config.run import RunConfig

INITIAL_MODEL: Final = "initial_model"
_CONFIG: Final = "config.json"


def with_initial_model(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the recipe with ``model.weights`` written into the run's directory as ``model.path``.

    So trainer, reference and engines of whatever backend read one directory. A resumed run reads
    the one that it began with, whether the checkpoint still exists or not.

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
