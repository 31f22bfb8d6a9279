"""Steps on pictures that language ranks of megatron-core and encoder ranks take, and what is right."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_cases import Told, told
from parity_cases import TOKENS, Cut, MegatronCut, Outcome, Step
from world import World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.checks import largest_of_side
from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.sides import make_inventory
from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.plugins.megatron.checks import largest_rank
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.model import freeze
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.weight_sync.grid import ModelGrid
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


def on_grid(world: World, job: str, cut: MegatronCut, encoders: int, **arguments: Any) -> list[Any]:
    """What each rank answers to a job.

    Args:
        world: Its processes.
        job: Name of a function of ``megatron_grid_jobs``; of another module: ``module:name``.
        cut: The language ranks, and how many ranks divide a tower.
        encoders: Towers on ranks of their own; 0: every language rank of the first stage holds one.
        arguments: Of the job, besides ``cut`` and ``encoders``.
    """
    module, _, name = job.rpartition(":")
    ranks = cut.ranks + encoders * cut.encoder_tensor
    arguments = {"cut": cut, "encoders": encoders, **arguments}
    return world.run(ranks, f"{module or 'megatron_grid_jobs'}:run", name=name, arguments=arguments)


def worst(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The largest difference of any tensor, over the largest value of all: some gradients are zero."""
    largest = max(np.abs(each).max() for each in want.values())
    return max(float(np.abs(got[n] - want[n]).max() / largest) for n in want)


def gradient_error(seen: dict[str, Any], want: Told) -> float:
    zeros = {n: np.zeros(1) for n in want.weights.keys() - want.gradients.keys()}
    assert seen["gradients"].keys() == want.weights.keys()
    return worst(seen["gradients"], want.gradients | zeros)


def assert_ranks_hold_what_check_says(
    path: Path,
    held: Sequence[RankBytes],
    cut: MegatronCut,
    encoders: int,
    *,
    frozen: Sequence[str] = (),
    references: int = 0,
) -> None:
    """The largest rank of each side holds the bytes that ``offbeat check`` says of it."""

    def largest(ranks: Sequence[RankBytes]) -> RankBytes:
        return max(ranks, key=lambda each: each.total)

    model = model_without_memory(path, trust_remote_code=False)
    dtype: Any = cut.dtype
    freeze(model, frozen)
    names = {name for name, each in model.named_parameters() if not each.requires_grad}
    whole = read_architecture(path)
    architecture = replace(whole, tower=()) if encoders else whole
    layout = ModelGrid(tensor=cut.tensor, pipeline=cut.pipeline, data=cut.data)
    language = largest_rank(architecture, layout, dtype, sharded=False, frozen=names)
    assert largest(held[: cut.ranks]) == language
    if encoders:
        grid = Grid(cut.data, cut.tensor, cut.pipeline, encoders=encoders)
        given = make_inventory(model), grid, Side.TOWER, getattr(torch, dtype)
        assert largest(held[cut.ranks :]) == largest_of_side(*given, references=references)
