"""Encoder ranks where something is rare: nothing to train, a refused step, a part of the tower frozen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_checks import Grid, random_step
from parity_cases import SEVERAL, Cut, Step
from world import COLLECTIVE_S, World

from tests.support.grid_steps import pictured

CLIPPED = Cut(optimizer={"learning_rate": 1e-2, "eps": 1.0, "max_grad_norm": 0.01})


def partly_masked() -> Step:
    """A step of which some groups, most with pictures, have no token to train."""
    step = random_step((1, 2, 0, 1, 1, 2))
    for place in (0, 2, 3):
        step.groups[place]["loss_mask"][:] = False
    return step


def scaled(step: Step, factor: float) -> Step:
    return replace(
        step, advantages=[tuple(factor * each for each in given) for given in step.advantages]
    )


def same_as_one_process(world: World, cut: Cut, **given: Any) -> list[Any]:
    (one,) = Grid(cut=cut).run(world, "grid_edge_jobs:trained", **given)
    ranks = Grid(2, 1, cut).run(world, "grid_edge_jobs:trained", **given)
    assert len({each["digest"] for each in ranks}) == 1
    for name, weight in one["weights"].items():
        np.testing.assert_allclose(ranks[0]["weights"][name], weight, atol=1e-9, rtol=0)
    for each in ranks:
        for got, want in zip(each["results"], one["results"], strict=True):
            assert (got.applied, got.tokens, got.reason) == (
                want.applied,
                want.tokens,
                want.reason,
            )
            if want.applied:
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-7)
    return one["results"]


@pytest.mark.parametrize(
    ("cut", "given"),
    [
        (Cut(max_tokens=60), {}),
        (CLIPPED, {"loss": SEVERAL}),
        (Cut(), {"freeze": ("model.connector.*",)}),
        (Cut(recompute=True), {"freeze": ("model.vision_model.*",)}),
    ],
    ids=["small microbatches", "two epochs, clipped", "frozen projector", "frozen vision model"],
)
def test_groups_without_a_token_to_train_are_left_out_on_both_sides(
    world: World, model: Path, cut: Cut, given: dict[str, Any]
) -> None:
    results = same_as_one_process(world, path=model, cut=cut, steps=[partly_masked()] * 2, **given)
    assert all(each.applied for each in results)


def test_the_step_after_one_that_no_rank_applies_is_that_of_one_process(
    world: World, model: Path
) -> None:
    step = partly_masked()
    steps = [step, scaled(step, 1e200), step]
    results = same_as_one_process(world, path=model, cut=CLIPPED, steps=steps)
    assert [each.applied for each in results] == [True, False, True]


def with_pictures(*counts: int) -> Step:
    """A step of groups with so many pictures each."""
    return Step(*pictured(counts, seed=sum(counts)))


DECAYED = Cut(optimizer={"learning_rate": 1e-2, "eps": 1.0, "weight_decay": 0.1})


def test_lanes_may_have_unequal_pictures_or_none_for_several_steps(
    world: World, model: Path
) -> None:
    steps = [
        with_pictures(*counts) for counts in ((3, 0, 0, 0), (1, 0), (0, 0, 0), (2, 1, 3, 0), (0, 0))
    ]
    results = same_as_one_process(world, path=model, cut=DECAYED, steps=steps)
    assert all(each.applied for each in results)


def test_a_step_of_text_moves_no_tower_of_encoder_ranks_and_that_of_ranks_with_both_sides(
    world: World, model: Path
) -> None:
    given = {"path": model, "steps": [with_pictures(1, 1), with_pictures(0, 0)]}
    sides = Grid(2, 1, DECAYED).run(world, "grid_edge_jobs:trained", **given)[0]["weights"]
    # Not two ranks: torch would find the mesh of these lanes, whose process group is gone.
    both = Grid(4, 0, DECAYED).run(world, "grid_edge_jobs:trained", **given)[0]["weights"]
    gap = {name: float(np.abs(both[name] - each).max()) for name, each in sides.items()}
    is_tower = {name: ".vision_model." in name or ".connector." in name for name in gap}
    assert max(each for name, each in gap.items() if not is_tower[name]) < 1e-9
    assert max(each for name, each in gap.items() if is_tower[name]) > 1e-6


def test_every_rank_knows_the_room_of_the_whole_state_and_waits_as_long_as_the_world(
    world: World, model: Path
) -> None:
    ((nbytes, _),) = Grid().run(world, "grid_edge_jobs:limits", path=model)
    ranks = Grid(2, 1).run(world, "grid_edge_jobs:limits", path=model)
    assert ranks == [(nbytes, COLLECTIVE_S)] * 3
