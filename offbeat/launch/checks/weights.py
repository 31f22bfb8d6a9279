"""Checks that the weights of a training checkpoint fit the model that the run begins with."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, error, ok
from offbeat.messages.failures import OffbeatError

_SUBJECT = "weights"


def check_weights(config: RunConfig) -> Iterator[Finding]:
    """Say what ``model.weights`` holds, or why a run cannot begin with it; nothing without it."""
    path = config.model.weights
    if path is None:
        return
    # torch, which a recipe without such weights need not load here.
    from offbeat.trainers.warm_start import UnfitWeights, found_weights

    try:
        found = found_weights(Path(path), Path(config.model.path))
    except UnfitWeights as refused:
        yield error(_SUBJECT, f"model.weights={path} {refused.problem}", f"{refused.fix}.")
    except (OffbeatError, OSError) as refused:
        yield error(_SUBJECT, str(refused), "Name another checkpoint, checkpoints/state_N.")
    else:
        yield ok(
            _SUBJECT,
            f"{path}: version {found.version} of the {found.backend} trainer, {found.model}; its "
            f"{found.tensors} tensors are those of model.path. Its optimizer state is not read",
        )
