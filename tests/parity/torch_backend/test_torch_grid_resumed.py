"""A run that goes on under other grids, to none, and what is computed inside of a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activations import first_apart, gaps
from grid_checks import BOTH_SIDES, Grid, random_step
from parity_cases import Cut
from world import World

COSINE = Cut(
    optimizer={
        "learning_rate": 2e-4,
        "min_learning_rate": 2e-6,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
)
INSIDE = ("model.vision_model", "model.connector", "model.text_model.layers.?", "lm_head")


STEP = random_step((1, 2, 0, 1, 1, 0))


def test_a_run_goes_on_in_a_larger_grid_and_in_none_with_the_rates_that_are_due(
    world: World, model: Path, tmp_path: Path
) -> None:
    """Bit for bit where the grid is the same, and to rounding under another."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def take(
        lanes: int, encoders: int, count: int, load: str = "", save: str = ""
    ) -> tuple[list[float], list[str], dict[str, Any]]:
        places = {
            "load": (load and tmp_path / load) or None,
            "save": (save and tmp_path / save) or None,
        }
        grid = Grid(lanes, encoders, COSINE)
        answers = grid.run(world, "taken", path=model, step=STEP, count=count, **places)
        for rates, digests, _ in answers:
            assert (rates, digests) == answers[0][:2]
        return answers[0]

    undisturbed_rates, undisturbed, _ = take(1, 1, 5)
    first, begun, _ = take(1, 1, 4, save="first")
    assert begun == undisturbed[:5]
    assert take(1, 1, 1, load="first")[1] == undisturbed[4:]
    larger, moved, _ = take(2, 1, 1, load="first", save="second")
    assert moved[0] == undisturbed[4]
    none, alone, got = take(1, 0, 1, load="second")
    assert alone[0] == moved[1]
    assert [f"{rate:.2e}" for rate in (first[-1], *larger, *none)] == [
        "1.59e-04",
        "1.32e-04",
        "1.01e-04",
    ]
    rates, _, want = take(1, 0, 6)
    assert rates == [*first, *larger, *none]
    assert undisturbed_rates == rates[:5]
    for name, weight in want.items():
        np.testing.assert_allclose(got[name], weight, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "grid",
    [Grid(2, 1), Grid(2, 2), Grid(1, 1, BOTH_SIDES), Grid(2, 1).with_cut(dtype="bfloat16")],
    ids=["2 + 1", "2 + 2", "2 + 2, both sides divided", "2 + 1 in bfloat16"],
)
def test_a_run_that_is_cut_goes_on_in_the_same_grid_bit_for_bit(
    world: World, model: Path, tmp_path: Path, grid: Grid
) -> None:
    """Two further steps: moments and float32 masters that were lost would show in the weights."""

    def digests(count: int, load: Path | None = None, save: Path | None = None) -> list[str]:
        given: dict[str, Any] = {"path": model, "step": STEP, "load": load, "save": save}
        answers = grid.run(world, "taken", count=count, **given)
        assert {tuple(each) for _, each, _ in answers} == {tuple(answers[0][1])}
        return answers[0][1]

    undisturbed, saved = digests(4), tmp_path / "state"
    assert len(set(undisturbed)) == 5
    saved.mkdir()
    assert digests(2, save=saved) == undisturbed[:3]
    assert digests(2, load=saved) == undisturbed[2:]


def test_each_activation_inside_of_a_step_is_that_of_one_process_and_a_fault_is_found_where_it_is(
    world: World, model: Path
) -> None:
    given = {"path": model, "step": STEP, "names": INSIDE}
    cut = Cut(max_tokens=1000)
    (want,) = Grid(cut=cut).run(world, "seen_inside", **given)
    assert [name.removeprefix("model.") for name in want] == [
        "vision_model",
        "connector",
        "text_model.layers.0",
        "text_model.layers.1",
        "lm_head",
    ]

    def inside(kind: str) -> dict[str, Any]:
        lane, encoder = Grid(1, 1, cut).run(world, "seen_inside", kind=kind, **given)
        assert not lane.keys() & encoder.keys()
        return gaps(encoder | lane, want)

    right = inside("ExactEncoder")
    assert first_apart(right, 1e-12) == ""
    assert min(each.cosine for each in right.values()) == pytest.approx(1, abs=1e-12)
    rounded = inside("RoundsFeatures")
    assert first_apart(rounded, 1e-12) == "model.text_model.layers.0"
    assert rounded["model.text_model.layers.1"].cosine < 1 - 1e-9
