"""A run that goes on under other grids, to none, and what is computed inside of a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activations import first_apart, gaps
from parity_cases import Cut, Step
from world import World

from tests.support.image_text_models import make, picture_groups

COSINE = Cut(
    optimizer={
        "learning_rate": 2e-4,
        "min_learning_rate": 2e-6,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
)
INSIDE = ("model.vision_model", "model.connector", "model.text_model.layers.?", "lm_head")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idefics3")
    make("idefics3").save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def random_step() -> Step:
    groups, rng = picture_groups((1, 2, 0, 1, 1, 0)), np.random.default_rng(1)
    return Step(groups, [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups])


def test_a_run_goes_on_in_a_larger_grid_and_in_none_with_the_rates_that_are_due(
    world: World, model: Path, tmp_path: Path
) -> None:
    """Bit for bit where the grid is the same, and to rounding under another."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def take(
        lanes: int, encoders: int, count: int, load: str = "", save: str = ""
    ) -> tuple[list[float], list[str], dict[str, Any]]:
        given: dict[str, Any] = {"path": model, "cut": COSINE, "step": random_step()}
        places = {
            "load": (load and tmp_path / load) or None,
            "save": (save and tmp_path / save) or None,
        }
        shape = {"lanes": lanes, "encoders": encoders, "count": count}
        answers = world.run(lanes + encoders, "grid_jobs:taken", **given, **shape, **places)
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
    ("lanes", "encoders", "cut"),
    [
        (2, 1, Cut()),
        (2, 2, Cut()),
        (1, 1, Cut(tensor=2, encoder_tensor=2)),
        (2, 1, Cut(dtype="bfloat16")),
    ],
    ids=["2 + 1", "2 + 2", "2 + 2, both sides divided", "2 + 1 in bfloat16"],
)
def test_a_run_that_is_cut_goes_on_in_the_same_grid_bit_for_bit(
    world: World, model: Path, tmp_path: Path, lanes: int, encoders: int, cut: Cut
) -> None:
    """Two further steps: moments and float32 masters that were lost would show in the weights."""
    given: dict[str, Any] = {"path": model, "cut": cut, "step": random_step()}
    given |= {"lanes": lanes, "encoders": encoders}

    def digests(count: int, load: Path | None = None, save: Path | None = None) -> list[str]:
        places = {"count": count, "load": load, "save": save}
        ranks = lanes * cut.tensor + encoders * cut.encoder_tensor
        answers = world.run(ranks, "grid_jobs:taken", **given, **places)
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
    given = {"path": model, "cut": Cut(max_tokens=1000), "step": random_step(), "names": INSIDE}
    (want,) = world.run(1, "grid_jobs:seen_inside", lanes=1, encoders=0, **given)
    assert [name.removeprefix("model.") for name in want] == [
        "vision_model",
        "connector",
        "text_model.layers.0",
        "text_model.layers.1",
        "lm_head",
    ]

    def inside(kind: str) -> dict[str, Any]:
        given_kind = {**given, "kind": kind}
        lane, encoder = world.run(2, "grid_jobs:seen_inside", lanes=1, encoders=1, **given_kind)
        assert not lane.keys() & encoder.keys()
        return gaps(encoder | lane, want)

    right = inside("ExactEncoder")
    assert first_apart(right, 1e-12) == ""
    assert min(each.cosine for each in right.values()) == pytest.approx(1, abs=1e-12)
    rounded = inside("RoundsFeatures")
    assert first_apart(rounded, 1e-12) == "model.text_model.layers.0"
    assert rounded["model.text_model.layers.1"].cosine < 1 - 1e-9
