"""What ranks of a grid beside megatron-core hold and send, and what plans and ``offbeat check`` say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_grid_cases import assert_ranks_hold_what_check_says, on_grid
from numpy.typing import NDArray
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut
from world import World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.sides import make_inventory
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.trainers.sides import Side
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import Region
from tests.support.grid_steps import Families
from tests.support.image_text_models import picture_groups

FAMILIES = ["idefics3", "qwen2_5_vl"]
EXPERTS = "qwen3_vl_moe"
GRIDS = [(Cut(), 1), (Cut(tensor=2, sequence=True), 1), (Cut(pipeline=2), 1), (Cut(data=2), 2)]
NAMES = ["1 + 1", "tp2 + 1", "pp2 + 1", "dp2 + 2"]


def after_a_step(
    world: World,
    path: Path,
    family: str,
    cut: Cut,
    encoders: int,
    *,
    reference: bool = False,
) -> list[tuple[dict[str, list[Region]], RankBytes]]:
    """The regions and bytes of each rank, with pictures for every lane."""
    groups = picture_groups((1, 2, 1, 1), family=family)
    step = JobStep.of(Step(groups, [(1.0, -0.5, -0.5)] * len(groups)), TOKENS)
    given = {"path": path, "step": step, "reference": reference}
    return on_grid(world, "megatron_grid_weight_jobs:held", cut, encoders, **given)


def times_held(shape: tuple[int, ...], regions: Sequence[Region]) -> NDArray[np.int64]:
    """How often each element of a tensor is in one of the regions."""
    counts = np.zeros(shape, np.int64)
    for each in regions:
        counts[each.slices] += 1
    return counts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cut", "encoders"), GRIDS, ids=NAMES)
def test_sharded_receivers_get_the_whole_model_each_tensor_from_the_side_that_holds_it(
    world: World, families: Families, family: str, cut: Cut, encoders: int
) -> None:
    path, cut = families(family), replace(cut, dtype="float32")
    answers = on_grid(world, "megatron_grid_weight_jobs:sent", cut, encoders, path=path)
    assert [same for same, _ in answers] == [True] * (cut.ranks + encoders)
    inventory = make_inventory(model_without_memory(path, trust_remote_code=False))
    tower = {each.name for each in inventory.weights if each.side is Side.TOWER}
    language = {each.name for each in inventory.weights} - tower
    assert set().union(*(held for _, held in answers[: cut.ranks])) == language
    assert set().union(*(held for _, held in answers[cut.ranks :])) == tower


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cut", "encoders"), GRIDS, ids=NAMES)
def test_ranks_hold_the_regions_that_a_plan_declares_and_the_bytes_that_check_says(
    world: World, families: Families, family: str, cut: Cut, encoders: int
) -> None:
    """A plan knows no heads within a matrix: adjacent regions of a rank are one there."""
    path, cut = families(family), replace(cut, dtype="float32")
    seen = after_a_step(world, path, family, cut, encoders)
    declared = ModelGrid(tensor=cut.tensor, pipeline=cut.pipeline, data=cut.data, encoders=encoders)
    check_regions(path, [regions for regions, _ in seen], declared)
    assert_ranks_hold_what_check_says(path, [held for _, held in seen], cut, encoders)


@pytest.mark.parametrize(
    ("cut", "declared"),
    [
        (Cut(data=2, expert=2), ModelGrid(data=2, expert=2, expert_tensor=1, encoders=1)),
        (
            Cut(tensor=2, expert_tensor=2, sequence=True),
            ModelGrid(tensor=2, expert_tensor=2, encoders=1),
        ),
    ],
    ids=["ep2 of dp2 + 1", "tp2 x etp2 + 1"],
)
def test_ranks_with_experts_hold_the_regions_that_a_plan_declares(
    world: World, families: Families, cut: Cut, declared: ModelGrid
) -> None:
    path = families(EXPERTS)
    seen = after_a_step(world, path, EXPERTS, replace(cut, dtype="float32"), 1)
    check_regions(path, [regions for regions, _ in seen], declared)


def check_regions(path: Path, seen: Sequence[dict[str, list[Region]]], declared: ModelGrid) -> None:
    """Every rank holds what a plan of the layout says."""
    tensors, sizes = model_tensors(path, WirePolicy())
    placed = {each.name: placement(each, sizes, declared) for each in tensors}
    for rank, regions in enumerate(seen):
        assert regions.keys() == {name for name, each in placed.items() if each.at(rank)}
        for each in tensors:
            got, want = regions.get(each.name, []), placed[each.name].at(rank)
            assert (times_held(each.shape, got) == times_held(each.shape, want)).all(), each.name


@pytest.mark.parametrize("reference", [False, True], ids=["alone", "with a reference"])
def test_weights_of_16_bits_have_the_masters_that_check_counts(
    world: World, families: Families, reference: bool
) -> None:
    cut, path = Cut(tensor=2, sequence=True, dtype="bfloat16"), families("idefics3")
    seen = after_a_step(world, path, "idefics3", cut, 1, reference=reference)
    held = [each for _, each in seen]
    assert_ranks_hold_what_check_says(path, held, cut, 1, references=int(reference))
