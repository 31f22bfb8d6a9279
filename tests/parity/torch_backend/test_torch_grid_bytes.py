"""What the ranks of a grid hold after a step, beside what a plan of a sync and ``offbeat check`` say."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_checks import BOTH_SIDES, GRIDS, WHOLE, Grid
from parity_cases import TOKENS, Step
from world import World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.checks import largest_of_side
from offbeat.plugins.encoder_ranks.layout import Grid as RankGrid
from offbeat.plugins.encoder_ranks.sides import make_inventory
from offbeat.plugins.encoder_ranks.tower_plan import make_plans
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.model import frozen_parameters
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.grid import ModelGrid
from tests.support.grid_steps import Families
from tests.support.image_text_models import picture_groups

EMBEDDINGS = "model.vision_model.embeddings.*"


def held(
    world: World, grid: Grid, path: Path, family: str, **given: Any
) -> list[tuple[dict[str, Any], RankBytes]]:
    """The regions and bytes of each rank after a step on pictures for every lane."""
    groups = picture_groups((1, 2, 1, 1), family=family)
    step = Step(groups, [(1.0, -0.5, -0.5)] * len(groups))
    given = {"freeze": (), "reference": False, "loss": TOKENS, **given}
    return grid.run(world, "held", path=path, step=step, **given)


def rank_grid_of(grid: Grid) -> RankGrid:
    tensor = grid.cut.tensor
    return RankGrid(
        grid.lanes,
        tensor,
        encoders=grid.encoders,
        encoder_tensor=grid.cut.encoder_tensor,
        dtensor_ranks=tensor,
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *product(["idefics3"], GRIDS),
        *product(["qwen2_5_vl"], WHOLE),
        ("qwen2_5_vl", "2 + 2, both sides divided"),
    ],
)
def test_ranks_hold_the_regions_that_a_plan_declares_and_the_bytes_that_check_says(
    world: World, families: Families, family: str, layout: str
) -> None:
    grid, path = GRIDS[layout].with_cut(dtype="float32"), families(family)
    seen = held(world, grid, path, family)
    tensor = grid.cut.tensor
    tensors, sizes = model_tensors(path, WirePolicy(), tensor_ranks=tensor, holds_tower=False)
    declared = ModelGrid(
        shards=grid.lanes,
        tensor=tensor,
        own_plan=int(tensor > 1),
        encoders=grid.encoders,
        encoder_tensor=grid.cut.encoder_tensor,
    )
    for rank, (regions, _) in enumerate(seen):
        placed = {each.name: placement(each, sizes, declared).at(rank) for each in tensors}
        assert {name: [region] for name, region in regions.items() if region.elements} == {
            name: found for name, found in placed.items() if found
        }
    model, ranks = model_without_memory(path, trust_remote_code=False), rank_grid_of(grid)
    inventory, plans = make_inventory(model), make_plans(model, ranks)
    for side in Side:
        largest = max(
            (seen[rank][1] for rank in ranks.list_ranks(side)), key=lambda each: each.total
        )
        said = largest_of_side(inventory, ranks, side, torch.float32, plan=plans[side])
        assert said == largest


@pytest.mark.parametrize(
    ("grid", "frozen", "reference"),
    [
        (Grid(1, 1), (EMBEDDINGS,), False),
        (Grid(1, 1), (EMBEDDINGS,), True),
        (Grid(1, 1, BOTH_SIDES), (EMBEDDINGS, "*.fc1.*"), True),
    ],
    ids=["alone", "with a reference", "divided, with a reference"],
)
def test_weights_of_16_bits_have_wide_masters_unless_they_are_frozen(
    world: World, model: Path, grid: Grid, frozen: tuple[str, ...], reference: bool
) -> None:
    grid = grid.with_cut(dtype="bfloat16")
    seen = held(world, grid, model, "idefics3", freeze=frozen, reference=reference)
    bare = model_without_memory(model, trust_remote_code=False)
    for each in frozen_parameters(bare, frozen):
        each.requires_grad = False
    ranks, inventory = rank_grid_of(grid), make_inventory(bare)
    plans, references = make_plans(bare, ranks), int(reference)
    for side in Side:
        said = largest_of_side(
            inventory, ranks, side, torch.bfloat16, references=references, plan=plans[side]
        )
        assert {said} == {seen[rank][1] for rank in ranks.list_ranks(side)}
