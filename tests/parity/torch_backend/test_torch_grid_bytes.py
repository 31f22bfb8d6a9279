"""What the ranks of a grid hold after a step, beside what a plan of a sync and ``offbeat check`` say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import TOKENS, Cut, Step
from world import World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.rank_bytes import largest_of_side
from offbeat.plugins.encoder_ranks.sides import inventory_of
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.trainers.rank_bytes import RankBytes
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.freezing import frozen_parameters
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.grid import ModelGrid
from tests.support.image_text_models import make, picture_groups

WORLDS = [(1, 1), (2, 1), (2, 2)]
NAMES = [f"{lanes} + {encoders}" for lanes, encoders in WORLDS]
FAMILIES = ["idefics3", "qwen2_5_vl"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = dict[str, Path]()
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        make(family).save_pretrained(paths[family])
        (paths[family] / "tokenizer.json").write_text("{}")
    return paths


def ranks_of(
    world: World, path: Path, family: str, lanes: int, encoders: int, **given: Any
) -> list[tuple[dict[str, Any], RankBytes]]:
    """The regions and bytes of each rank after a step on pictures for every lane."""
    groups = picture_groups((1, 2, 1, 1), family=family)
    step = Step(groups, [(1.0, -0.5, -0.5)] * len(groups))
    sides = {"lanes": lanes, "encoders": encoders, "loss": TOKENS}
    given = {"cut": Cut(dtype="float32"), "freeze": (), "reference": False, **sides, **given}
    return world.run(lanes + encoders, "grid_jobs:held", path=path, step=step, **given)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("lanes", "encoders"), WORLDS, ids=NAMES)
def test_ranks_hold_the_regions_that_a_plan_declares_and_the_bytes_that_check_says(
    world: World, models: dict[str, Path], family: str, lanes: int, encoders: int
) -> None:
    seen = ranks_of(world, models[family], family, lanes, encoders)
    tensors, sizes = model_tensors(models[family], WirePolicy())
    declared = ModelGrid(shards=lanes, encoders=encoders)
    for rank, (regions, _) in enumerate(seen):
        placed = {each.name: placement(each, sizes, declared).at(rank) for each in tensors}
        assert {name: [region] for name, region in regions.items() if region.elements} == {
            name: found for name, found in placed.items() if found
        }
    inventory = inventory_of(model_without_memory(models[family], trust_remote_code=False))
    grid = Grid(lanes, encoders=encoders)
    for side in Side:
        largest = max((seen[rank][1] for rank in grid.ranks_of(side)), key=lambda each: each.total)
        assert largest_of_side(inventory, grid, side, torch.float32) == largest


@pytest.mark.parametrize("reference", [False, True], ids=["alone", "with a reference"])
def test_weights_of_16_bits_have_wide_masters_unless_they_are_frozen(
    world: World, models: dict[str, Path], reference: bool
) -> None:
    frozen, path = ("model.vision_model.embeddings.*",), models["idefics3"]
    cut = Cut(dtype="bfloat16")
    seen = ranks_of(world, path, "idefics3", 1, 1, cut=cut, freeze=frozen, reference=reference)
    model = model_without_memory(path, trust_remote_code=False)
    for each in frozen_parameters(model, frozen):
        each.requires_grad = False
    grid, inventory = Grid(encoders=1), inventory_of(model)
    for side, (_, held) in zip(Side, seen, strict=True):
        said = largest_of_side(inventory, grid, side, torch.bfloat16, references=int(reference))
        assert said == held
