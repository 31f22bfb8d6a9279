"""A vision tower on ranks of its own: the step of one process that holds both sides."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_checks import both, gradient_error, random_step, same_outcome
from parity_cases import SEVERAL, Cut
from world import World

from tests.support.image_text_models import make

TOWER = ("model.vision_model.*", "model.connector.*")
WORLDS = [(1, 1), (2, 1), (2, 2)]
NAMES = [f"{lanes} + {encoders}" for lanes, encoders in WORLDS]
FAMILIES = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
MIXED, TEXT, FIRST, EQUAL = (1, 2, 0, 1, 1, 0, 2), (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = dict[str, Path]()
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        make(family).save_pretrained(paths[family])
        (paths[family] / "tokenizer.json").write_text("{}")
    return paths


@pytest.mark.parametrize(("lanes", "encoders"), WORLDS, ids=NAMES)
@pytest.mark.parametrize("freeze", [(), TOWER], ids=["trained", "frozen"])
def test_a_step_on_pictures_and_text_is_that_of_one_process(
    world: World, models: dict[str, Path], lanes: int, encoders: int, freeze: tuple[str, ...]
) -> None:
    step = random_step(MIXED)
    one, ranks = both(world, lanes, encoders, path=models["idefics3"], step=step, freeze=freeze)
    assert gradient_error(one, ranks, lanes) <= 1e-10
    same_outcome(one, ranks)


@pytest.mark.parametrize(("lanes", "encoders"), WORLDS, ids=NAMES)
@pytest.mark.parametrize("freeze", [(), TOWER], ids=["trained", "frozen"])
@pytest.mark.parametrize("counts", [TEXT, FIRST, EQUAL], ids=["text", "one lane alone", "equal"])
def test_lanes_may_have_no_pictures_or_as_many_as_all_others(
    world: World,
    models: dict[str, Path],
    counts: tuple[int, ...],
    freeze: tuple[str, ...],
    lanes: int,
    encoders: int,
) -> None:
    given = {"path": models["idefics3"], "step": random_step(counts), "freeze": freeze}
    one, ranks = both(world, lanes, encoders, **given)
    for chunks in (1, 2, 8):
        tower = {name for each in ranks[lanes:] for name in each["gradients"][chunks]}
        assert bool(tower) == (counts is not TEXT and not freeze)  # without pictures there is none
    assert gradient_error(one, ranks, lanes) <= 1e-10
    same_outcome(one, ranks)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_with_axes_and_deeper_features_do_so_too(
    world: World, models: dict[str, Path], family: str, recompute: bool
) -> None:
    given = {"path": models[family], "step": random_step(MIXED, family), "chunks": (2,)}
    one, ranks = both(world, 2, 1, cut=Cut(recompute=recompute), **given)
    assert gradient_error(one, ranks, 2) <= 1e-10
    same_outcome(one, ranks)


@pytest.mark.parametrize(("lanes", "encoders"), WORLDS, ids=NAMES)
@pytest.mark.parametrize(("family", "tokens"), [("idefics3", 4), ("idefics3", 9), ("qwen3_vl", 8)])
def test_a_tower_that_computes_some_pictures_at_a_time_has_the_same_gradients(
    world: World,
    models: dict[str, Path],
    lanes: int,
    encoders: int,
    family: str,
    tokens: int,
) -> None:
    """Four tokens are one picture; nine leave some, and encoder ranks have unequal numbers of passes."""
    given = {"path": models[family], "step": random_step(MIXED, family), "chunks": (1, 2)}
    one, ranks = both(world, lanes, encoders, cut=Cut(picture_tokens=tokens), **given)
    assert gradient_error(one, ranks, lanes) <= 1e-10
    same_outcome(one, ranks)


def test_every_minibatch_of_a_step_with_several_updates_is_exchanged_by_itself(
    world: World, models: dict[str, Path]
) -> None:
    given = {"path": models["idefics3"], "step": random_step(MIXED), "chunks": (2,)}
    one, ranks = both(world, 2, 1, loss=SEVERAL, **given)
    same_outcome(one, ranks)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [((1, 1), (1, 0)), ((1, 0), (1, 1)), ((1, 1), (2, 1)), ((1, 1), (1, 1))],
    ids=["grid, then one process", "one process, then a grid", "another grid", "the same grid"],
)
def test_a_checkpoint_is_taken_up_under_another_grid(
    world: World,
    models: dict[str, Path],
    tmp_path: Path,
    wrote: tuple[int, int],
    reads: tuple[int, int],
) -> None:
    given: dict[str, Any] = {"path": models["idefics3"], "cut": Cut(), "step": random_step(MIXED)}

    def step(sides: tuple[int, int], load: Path | None, save: Path | None) -> list[dict[str, Any]]:
        if save is not None:
            save.mkdir()
        lanes, encoders = sides
        further = {"lanes": lanes, "encoders": encoders, "load": load, "save": save}
        return world.run(lanes + encoders, "grid_jobs:continued", **given, **further)

    first = step(wrote, None, tmp_path / "first")
    want = step(wrote, tmp_path / "first", None)[0]["weights"]
    for seen in step(reads, tmp_path / "first", None):
        assert seen["loaded"] == first[0]["saved"]
        for name, weight in seen["weights"].items():
            np.testing.assert_allclose(weight, want[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["SwapsLanes", "AveragesOverTheWorld", "CountsOneLane"])
def test_bugs_that_loops_over_two_modules_had_are_seen(
    world: World, models: dict[str, Path], kind: str
) -> None:
    given = {"path": models["idefics3"], "step": random_step(EQUAL), "chunks": (2,)}
    one, ranks = both(world, 2, 1, kind=kind, **given)
    off = [
        np.abs(ranks[0]["weights"][name] - one["weights"][name]).max() for name in one["weights"]
    ]
    assert max(off) > 1e-6


@pytest.mark.parametrize(("lanes", "encoders"), WORLDS, ids=NAMES)
def test_each_side_sends_what_it_holds_and_sharded_receivers_get_the_whole_model(
    world: World, models: dict[str, Path], lanes: int, encoders: int
) -> None:
    given = {"path": models["idefics3"], "cut": Cut(dtype="float32")}
    world_of = {"lanes": lanes, "encoders": encoders}
    answers = world.run(lanes + encoders, "grid_jobs:sent", **given, **world_of)
    assert [same for same, _, _ in answers] == [True] * (lanes + encoders)
    ((_, _, whole),) = world.run(1, "grid_jobs:sent", **given, lanes=1, encoders=0)
    assert sum(held for _, _, held in answers) == whole
