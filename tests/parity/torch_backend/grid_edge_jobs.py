"""Steps of a grid that meet what is rare: a refused step, limits of time and disk. Runs in workers only."""

from pathlib import Path
from typing import Any

import torch
from parity_cases import TOKENS, Cut, Step
from torch_backend.grid_jobs import feed, make
from torch_jobs import as_arrays

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers


def limits(peers: Peers, path: Path, cut: Cut, *, lanes: int, encoders: int) -> tuple[int, float]:
    """Bytes of a state, and how long the collectives of this rank's side wait."""
    trainer = make(peers, path, cut, (), lanes, encoders)
    if not encoders:
        return trainer.state_nbytes, peers.timeout_s
    # torch says how long a group waits in no public place.
    group: Any = trainer.axes.data.get_group()
    backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001 -- as above
    return trainer.state_nbytes, backend.options._timeout.total_seconds()  # noqa: SLF001 -- as above


def trained(
    peers: Peers,
    path: Path,
    cut: Cut,
    steps: list[Step],
    *,
    lanes: int,
    encoders: int,
    freeze: tuple[str, ...] = (),
    loss: LossSpec = TOKENS,
) -> dict[str, Any]:
    """Attempt each step in two chunks; results, and the weights in the end."""
    trainer: Any = make(peers, path, cut, freeze, lanes, encoders)
    results = list[Any]()
    for attempt, step in enumerate(steps, start=1):
        key = StepKey(trainer.steps_applied + 1, attempt, 0)
        end = feed(trainer, step, loss, 2, key)
        results.append(trainer.finish_train_step(end))
    digest, weights = trainer.weights_digest(), dict(trainer.iterate_weights())
    return {
        "results": results,
        "digest": digest,
        "weights": as_arrays(weights) if trainer.is_first else {},
    }
