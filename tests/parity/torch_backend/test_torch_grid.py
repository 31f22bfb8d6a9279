"""A vision tower on ranks of its own, whole or divided: the step of one process that holds both sides."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_checks import (
    BOTH_SIDES,
    ENCODERS,
    EQUAL,
    FIRST,
    GRIDS,
    MIXED,
    TEXT,
    TOWER,
    WHOLE,
    Grid,
    assert_same_outcome,
    assert_step_of_one_process,
    both,
    random_step,
)
from parity_cases import SEVERAL
from world import WorkerFailed, World

from tests.support.grid_steps import Families

ONE, ONE_OF_EACH, TWO_LANES = Grid(), Grid(1, 1), Grid(2, 1)
TOWER_DIVIDED, BOTH_DIVIDED = Grid(1, 1, ENCODERS), Grid(1, 1, BOTH_SIDES)
FAMILIES = ("smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
FROZEN = {**WHOLE, "2 + 2, both sides divided": BOTH_DIVIDED}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_step_on_pictures_and_text_is_that_of_one_process(
    world: World, model: Path, grid: Grid
) -> None:
    assert_step_of_one_process(world, grid, path=model, step=random_step(MIXED))


@pytest.mark.parametrize("grid", FROZEN.values(), ids=FROZEN)
def test_so_is_a_step_of_a_frozen_tower(world: World, model: Path, grid: Grid) -> None:
    assert_step_of_one_process(world, grid, path=model, step=random_step(MIXED), freeze=TOWER)


@pytest.mark.parametrize("grid", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("freeze", [(), TOWER], ids=["trained", "frozen"])
@pytest.mark.parametrize("counts", [TEXT, FIRST, EQUAL], ids=["text", "one lane alone", "equal"])
def test_lanes_may_have_no_pictures_or_as_many_as_all_others(
    world: World, model: Path, counts: tuple[int, ...], freeze: tuple[str, ...], grid: Grid
) -> None:
    given = {"path": model, "step": random_step(counts), "freeze": freeze}
    ranks = assert_step_of_one_process(world, grid, **given)
    for chunks in (1, 2, 8):
        tower = {name for each in ranks[grid.language :] for name in each["gradients"][chunks]}
        assert bool(tower) == (counts is not TEXT and not freeze)  # without pictures there is none


@pytest.mark.parametrize(
    ("family", "grid"),
    [
        *product(FAMILIES, (TWO_LANES, TWO_LANES.with_cut(recompute=True))),
        *((family, BOTH_DIVIDED) for family in FAMILIES if family != "qwen3_vl"),
        ("qwen3_vl", TOWER_DIVIDED),  # whose language model has no plan
    ],
    ids=str,
)
def test_other_families_with_axes_and_deeper_features_do_so_too(
    world: World, families: Families, family: str, grid: Grid
) -> None:
    given = {"path": families(family), "step": random_step(MIXED, family), "chunks": (1, 2)}
    assert_step_of_one_process(world, grid, **given)


@pytest.mark.parametrize(
    ("family", "tokens", "grid"),
    [
        *(
            (family, tokens, grid)
            for family, tokens in (("idefics3", 4), ("idefics3", 9), ("qwen3_vl", 8))
            for grid in WHOLE.values()
        ),
        ("idefics3", 8, BOTH_DIVIDED),
    ],
    ids=str,
)
def test_a_tower_that_computes_some_pictures_at_a_time_has_the_same_gradients(
    world: World, families: Families, family: str, tokens: int, grid: Grid
) -> None:
    """Four tokens are one picture; nine leave some, and encoder ranks have unequal numbers of passes."""
    given = {"path": families(family), "step": random_step(MIXED, family), "chunks": (1, 2)}
    assert_step_of_one_process(world, grid.with_cut(picture_tokens=tokens), **given)


def test_every_minibatch_of_a_step_with_several_updates_is_exchanged_by_itself(
    world: World, model: Path
) -> None:
    given = {"path": model, "step": random_step(MIXED), "chunks": (2,), "loss": SEVERAL}
    assert_same_outcome(*both(world, TWO_LANES, **given))


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        (ONE_OF_EACH, ONE),
        (ONE, ONE_OF_EACH),
        (ONE_OF_EACH, TWO_LANES),
        (ONE_OF_EACH, ONE_OF_EACH),
        (BOTH_DIVIDED, ONE),
        (ONE, Grid(2, 1, ENCODERS)),
        (TOWER_DIVIDED, BOTH_DIVIDED),
    ],
    ids=[
        "grid, then one process",
        "one process, then a grid",
        "another grid",
        "the same grid",
        "divided, then one process",
        "one process, then divided",
        "another divided grid",
    ],
)
def test_a_checkpoint_is_taken_up_under_another_grid(
    world: World, model: Path, tmp_path: Path, wrote: Grid, reads: Grid
) -> None:
    given: dict[str, Any] = {"path": model, "step": random_step(MIXED)}
    state = tmp_path / "state"
    state.mkdir()
    first = wrote.run(world, "continued", **given, load=None, save=state)
    want = wrote.run(world, "continued", **given, load=state, save=None)[0]["weights"]
    for seen in reads.run(world, "continued", **given, load=state, save=None):
        assert seen["loaded"] == first[0]["saved"]
        for name, weight in seen["weights"].items():
            np.testing.assert_allclose(weight, want[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_each_rank_sends_what_it_holds_and_sharded_receivers_get_the_whole_model(
    world: World, model: Path, grid: Grid
) -> None:
    answers = grid.with_cut(dtype="float32").run(world, "sent", path=model)
    assert [same for same, _ in answers] == [True] * grid.ranks
    if grid in WHOLE.values():  # ranks that divide matrices have copies of the others
        ((_, whole),) = ONE.with_cut(dtype="float32").run(world, "sent", path=model)
        assert sum(held for _, held in answers) == whole


# --- mistakes, planted ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SwapsLanes", "AveragesOverTheWorld", "CountsOneLane"])
def test_bugs_that_loops_over_two_modules_had_are_seen(
    world: World, model: Path, kind: str
) -> None:
    given = {"path": model, "step": random_step(EQUAL), "chunks": (2,), "kind": kind}
    one, ranks = both(world, TWO_LANES, **given)
    off = [
        np.abs(ranks[0]["weights"][name] - one["weights"][name]).max() for name in one["weights"]
    ]
    assert max(off) > 1e-6


def test_a_gradient_that_ranks_with_shares_of_a_matrix_do_not_sum_is_refused_at_the_start(
    world: World, model: Path
) -> None:
    given = {"path": model, "step": random_step(MIXED), "kind": "KeepsParts"}
    with pytest.raises(
        WorkerFailed, match=r"tensor ranks different gradients of model\.vision_model\."
    ):
        TOWER_DIVIDED.run(world, "stepped", **given)


def test_pictures_dealt_to_ranks_of_one_encoder_as_if_they_were_lanes_are_refused(
    world: World, model: Path
) -> None:
    given = {"path": model, "step": random_step(MIXED), "kind": "DealsAsLanes"}
    seen = Grid(2, 1, ENCODERS).run(world, "refusal", **given)
    assert seen == ["PeerFailed", "PeerFailed", "ProvenanceMismatch", "ProvenanceMismatch"]
