"""Steps on pictures that language ranks of megatron-core and encoder ranks take, and what is right."""

from pathlib import Path
from typing import Any

import numpy as np
from megatron_cases import Told, told
from parity_cases import TOKENS, Cut, MegatronCut, Outcome, Step
from world import World

from tests.support.grid_steps import pictured


def step_of(counts: tuple[int, ...], family: str = "idefics3") -> Step:
    """A step on groups with so many pictures each."""
    return Step(*pictured(counts, family, least_id=1))


def of_torch(world: World, path: Path, step: Step, cut: Cut | None = None) -> Told:
    """What the torch trainer makes of a step in one process that holds tower and decoder."""
    (outcome,) = world.run(
        1,
        "torch_backend.torch_jobs:split",
        path=path,
        cut=cut or Cut(),
        step=step,
        loss=TOKENS,
        chunks=(1,),
        kind="ExactPictures",
    )
    whole = Outcome(outcome.result, outcome.gradients, outcome.weights, outcome.digest)
    return told(whole, TOKENS)


def on_ranks(world: World, ranks: int, name: str, **arguments: Any) -> list[dict[str, Any]]:
    return world.run(ranks, "megatron_grid_jobs:run", name=name, arguments=arguments)


def on_grid(
    world: World, name: str, cut: MegatronCut, encoders: int, **arguments: Any
) -> list[dict[str, Any]]:
    ranks = cut.ranks + encoders * cut.encoder_tensor
    return on_ranks(world, ranks, name, cut=cut, encoders=encoders, **arguments)


def worst(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The largest difference of any tensor, over the largest value of all: some gradients are zero."""
    largest = max(np.abs(each).max() for each in want.values())
    return max(float(np.abs(got[n] - want[n]).max() / largest) for n in want)


def gradient_error(seen: dict[str, Any], want: Told) -> float:
    zeros = {n: np.zeros(1) for n in want.weights.keys() - want.gradients.keys()}
    assert seen["gradients"].keys() == want.weights.keys()
    return worst(seen["gradients"], want.gradients | zeros)
