"""Matrices of a grid divided on either side: the step of one process that holds both sides whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grid_checks import both, gradient_error, random_step, same_outcome
from parity_cases import TOKENS, Cut, Step
from world import WorkerFailed, World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.rank_bytes import largest_of_side
from offbeat.plugins.encoder_ranks.sides import inventory_of
from offbeat.plugins.encoder_ranks.tower_plan import plans_of
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.freezing import frozen_parameters
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.grid import ModelGrid
from tests.support.image_text_models import make, picture_groups

FAMILIES = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
TOWER = ("model.vision_model.*", "model.connector.*")
MIXED, TEXT, FIRST = (1, 2, 0, 1, 1, 0, 2), (0, 0, 0, 0), (1, 0, 0, 0)
BOTH, ENCODERS = Cut(tensor=2, encoder_tensor=2), Cut(encoder_tensor=2)
WORLDS = {  # lanes, encoders, and who divides what
    "1 + 2, the tower divided": (1, 1, ENCODERS),
    "2 + 2, both sides divided": (1, 1, BOTH),
    "2 + 2, the tower divided for two lanes": (2, 1, ENCODERS),
    "2 + 1, the language model divided": (1, 1, Cut(tensor=2)),
    "2 + 4, two divided towers": (2, 2, ENCODERS),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = dict[str, Path]()
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        make(family).save_pretrained(paths[family])
        (paths[family] / "tokenizer.json").write_text("{}")
    return paths


def ranks_of(lanes: int, encoders: int, cut: Cut) -> int:
    return lanes * cut.tensor + encoders * cut.encoder_tensor


@pytest.mark.parametrize(
    ("layout", "freeze"),
    [*((layout, ()) for layout in WORLDS), ("2 + 2, both sides divided", TOWER)],
    ids=[*WORLDS, "2 + 2, both sides divided, the tower frozen"],
)
def test_a_step_on_pictures_and_text_is_that_of_one_process(
    world: World, models: dict[str, Path], layout: str, freeze: tuple[str, ...]
) -> None:
    lanes, encoders, cut = WORLDS[layout]
    given = {"path": models["idefics3"], "step": random_step(MIXED), "freeze": freeze, "cut": cut}
    one, ranks = both(world, lanes, encoders, **given)
    assert gradient_error(one, ranks, lanes * cut.tensor) <= 1e-10
    same_outcome(one, ranks)


@pytest.mark.parametrize("freeze", [(), TOWER], ids=["trained", "frozen"])
@pytest.mark.parametrize("counts", [TEXT, FIRST], ids=["text", "one group alone"])
def test_a_step_may_have_no_pictures_or_few(
    world: World, models: dict[str, Path], counts: tuple[int, ...], freeze: tuple[str, ...]
) -> None:
    given = {"path": models["idefics3"], "step": random_step(counts), "freeze": freeze}
    one, ranks = both(world, 1, 1, cut=BOTH, **given)
    assert gradient_error(one, ranks, 2) <= 1e-10
    same_outcome(one, ranks)


def test_a_divided_tower_computes_some_pictures_at_a_time(
    world: World, models: dict[str, Path]
) -> None:
    given = {"path": models["idefics3"], "step": random_step(MIXED), "chunks": (1, 2)}
    one, ranks = both(world, 1, 1, cut=replace(BOTH, picture_tokens=8), **given)
    assert gradient_error(one, ranks, 2) <= 1e-10
    same_outcome(one, ranks)


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        ("smolvlm", BOTH),
        ("qwen2_vl", BOTH),
        ("qwen2_5_vl", BOTH),
        ("qwen3_vl", ENCODERS),  # whose language model has no plan
        ("gemma3", BOTH),
    ],
)
def test_towers_of_other_families_are_divided_too(
    world: World, models: dict[str, Path], family: str, cut: Cut
) -> None:
    given = {"path": models[family], "step": random_step(MIXED, family), "chunks": (1, 2)}
    one, ranks = both(world, 1, 1, cut=cut, **given)
    assert gradient_error(one, ranks, cut.tensor) <= 1e-10
    same_outcome(one, ranks)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((1, 1, BOTH), (1, 0, Cut())),
        ((1, 0, Cut()), (2, 1, ENCODERS)),
        ((1, 1, ENCODERS), (1, 1, BOTH)),
    ],
    ids=["divided, then one process", "one process, then divided", "another grid"],
)
def test_a_checkpoint_is_taken_up_under_another_grid(
    world: World, models: dict[str, Path], tmp_path: Path, wrote: Any, reads: Any
) -> None:
    given: dict[str, Any] = {"path": models["idefics3"], "step": random_step(MIXED)}

    def step(grid: Any, load: Path | None, save: Path | None) -> list[dict[str, Any]]:
        if save is not None:
            save.mkdir()
        lanes, encoders, cut = grid
        further = {"lanes": lanes, "encoders": encoders, "cut": cut, "load": load, "save": save}
        ranks = ranks_of(*grid) if encoders else 1
        return world.run(ranks, "grid_jobs:continued", **given, **further)

    first = step(wrote, None, tmp_path / "first")
    want = step(wrote, tmp_path / "first", None)[0]["weights"]
    for seen in step(reads, tmp_path / "first", None):
        assert seen["loaded"] == first[0]["saved"]
        for name, weight in seen["weights"].items():
            np.testing.assert_allclose(weight, want[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("layout", WORLDS)
def test_each_rank_sends_what_it_holds_and_sharded_receivers_get_the_whole_model(
    world: World, models: dict[str, Path], layout: str
) -> None:
    lanes, encoders, cut = WORLDS[layout]
    cut = Cut(dtype="float32", tensor=cut.tensor, encoder_tensor=cut.encoder_tensor)
    given = {"path": models["idefics3"], "cut": cut, "lanes": lanes, "encoders": encoders}
    ranks = ranks_of(lanes, encoders, cut)
    answers = world.run(ranks, "grid_jobs:sent", **given)
    assert [same for same, _, _ in answers] == [True] * ranks


# --- what ranks hold ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("idefics3", layout) for layout in WORLDS), ("qwen2_5_vl", "2 + 2, both sides divided")],
)
def test_ranks_hold_the_regions_that_a_plan_declares_and_the_bytes_that_check_says(
    world: World, models: dict[str, Path], family: str, layout: str
) -> None:
    lanes, encoders, cut = WORLDS[layout]
    path, grid = models[family], grid_of(*WORLDS[layout])
    cut = Cut(dtype="float32", tensor=cut.tensor, encoder_tensor=cut.encoder_tensor)
    seen = held(world, path, family, lanes, encoders, cut)
    tensors, sizes = model_tensors(path, WirePolicy(), tensor_ranks=cut.tensor, holds_tower=False)
    declared = ModelGrid(
        shards=lanes,
        tensor=cut.tensor,
        own_plan=int(cut.tensor > 1),
        encoders=encoders,
        encoder_tensor=cut.encoder_tensor,
    )
    for rank, (regions, _) in enumerate(seen):
        placed = {each.name: placement(each, sizes, declared).at(rank) for each in tensors}
        assert {name: [region] for name, region in regions.items() if region.elements} == {
            name: found for name, found in placed.items() if found
        }
    model = model_without_memory(path, trust_remote_code=False)
    inventory, plans = inventory_of(model), plans_of(model, grid)
    for side in Side:
        largest = max((seen[rank][1] for rank in grid.ranks_of(side)), key=lambda each: each.total)
        said = largest_of_side(inventory, grid, side, torch.float32, plan=plans[side])
        assert said == largest


def test_masters_of_16_bits_a_reference_and_frozen_weights_are_divided_too(
    world: World, models: dict[str, Path]
) -> None:
    frozen, path = ("model.vision_model.embeddings.*", "*.fc1.*"), models["idefics3"]
    cut = Cut(dtype="bfloat16", tensor=2, encoder_tensor=2)
    seen = held(world, path, "idefics3", 1, 1, cut, freeze=frozen, reference=True)
    model = model_without_memory(path, trust_remote_code=False)
    for each in frozen_parameters(model, frozen):
        each.requires_grad = False
    grid, inventory = grid_of(1, 1, cut), inventory_of(model)
    plans = plans_of(model, grid)
    for side in Side:
        said = largest_of_side(
            inventory, grid, side, torch.bfloat16, references=1, plan=plans[side]
        )
        assert {said} == {seen[rank][1] for rank in grid.ranks_of(side)}


def grid_of(lanes: int, encoders: int, cut: Cut) -> Grid:
    return Grid(
        lanes,
        cut.tensor,
        encoders=encoders,
        encoder_tensor=cut.encoder_tensor,
        dtensor_ranks=cut.tensor,
    )


def held(
    world: World, path: Path, family: str, lanes: int, encoders: int, cut: Cut, **given: Any
) -> list[Any]:
    """The regions and bytes of each rank after a step on pictures for every lane."""
    groups = picture_groups((1, 2, 1, 1), family=family)
    step = Step(groups, [(1.0, -0.5, -0.5)] * len(groups))
    given = {"freeze": (), "reference": False, "loss": TOKENS, **given}
    sides = {"lanes": lanes, "encoders": encoders, "cut": cut}
    ranks = ranks_of(lanes, encoders, cut)
    return world.run(ranks, "grid_jobs:held", path=path, step=step, **sides, **given)


# --- mistakes, planted ----------------------------------------------------------------------------


def test_a_gradient_that_ranks_with_shares_of_a_matrix_do_not_sum_is_refused_at_the_start(
    world: World, models: dict[str, Path]
) -> None:
    given = {"path": models["idefics3"], "step": random_step(MIXED), "kind": "KeepsParts"}
    with pytest.raises(
        WorkerFailed, match=r"tensor ranks other gradients of model\.vision_model\."
    ):
        world.run(3, "grid_jobs:stepped", lanes=1, encoders=1, cut=ENCODERS, **given)


def test_pictures_dealt_to_ranks_of_one_encoder_as_if_they_were_lanes_are_refused(
    world: World, models: dict[str, Path]
) -> None:
    given = {"path": models["idefics3"], "step": random_step(MIXED), "kind": "DealsAsLanes"}
    seen = world.run(4, "grid_jobs:refusal", lanes=2, encoders=1, cut=ENCODERS, **given)
    assert seen == ["PeerFailed", "PeerFailed", "ProvenanceMismatch", "ProvenanceMismatch"]
