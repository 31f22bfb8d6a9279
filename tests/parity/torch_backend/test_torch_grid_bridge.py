"""What crosses between lanes and encoder ranks: activations once each way, and what must not be taken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_checks import BOTH_SIDES, EQUAL, MIXED, TEXT, TOWER, WHOLE, Grid, random_step
from parity_cases import Cut, Step, chunked
from world import World

from offbeat.messages.finding import size
from offbeat.plugins.encoder_ranks.checks import check_encoder
from tests.support.grid_steps import HEADER_NBYTES, Families, bridge_nbytes
from tests.support.image_text_models import PLACEHOLDER, picture_groups
from tests.support.recipes import make_config

FULL = (2, 2, 2, 2)


def same_pictures() -> Step:
    """A step whose groups all have the pictures of the first."""
    step = random_step(EQUAL)
    for group in step.groups[1:]:
        group["media_values"] = step.groups[0]["media_values"]
    return step


def moved(world: World, path: Path, grid: Grid, step: Step, **given: Any) -> list[float]:
    """``train/bridge_bytes`` on each rank."""
    seen = grid.run(world, "stepped", path=path, step=step, **given)
    return [each["result"].metrics["train/bridge_bytes"] for each in seen]


@pytest.mark.parametrize("grid", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("freeze", [(), TOWER], ids=["trained", "frozen"])
@pytest.mark.parametrize("counts", [MIXED, TEXT], ids=["mixed", "text"])
def test_a_step_moves_its_features_there_and_their_gradients_back_once_and_nothing_else(
    world: World,
    families: Families,
    grid: Grid,
    chunks: int,
    freeze: tuple[str, ...],
    counts: tuple[int, ...],
) -> None:
    """An attempt that was aborted before is not counted; a frozen tower gets nothing back."""
    step, parts = random_step(counts), chunked(len(counts), chunks)
    want = bridge_nbytes(step.groups, grid.lanes, parts, back=0 if freeze else 8)
    assert (want == 0) == (counts is TEXT)
    given = {"chunks": (4, chunks), "freeze": freeze}
    got = moved(world, families("idefics3"), grid, step, **given)
    assert got == [want] * grid.ranks


def test_pictures_that_several_groups_of_a_lane_have_are_moved_once_for_each_lane(
    world: World, families: Families
) -> None:
    step = same_pictures()
    for lanes in (1, 2):
        want = bridge_nbytes(step.groups, lanes, chunked(4, 1))
        assert want == lanes * 2 * (4 * 32 * 8 + 72)
        got = moved(world, families("idefics3"), Grid(lanes, 1), step, chunks=(1,))
        assert got == [want] * (lanes + 1)


@pytest.mark.parametrize(
    ("family", "cut", "given"),
    [
        ("qwen3_vl", Cut(), {"blocks": 2}),
        ("idefics3", Cut(dtype="bfloat16"), {"there": 2, "back": 4}),
        ("idefics3", BOTH_SIDES, {}),
    ],
    ids=["deeper features", "bfloat16", "both sides divided"],
)
def test_deeper_features_are_moved_too_gradients_in_float32_and_nothing_per_tensor_rank(
    world: World, families: Families, family: str, cut: Cut, given: dict[str, int]
) -> None:
    step = random_step(MIXED, family)
    want = bridge_nbytes(step.groups, 1, chunked(len(MIXED), 2), **given)
    got = moved(world, families(family), Grid(1, 1, cut), step, chunks=(2,))
    assert set(got) == {want}


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_says_before_the_run_what_the_messages_of_a_chunk_take(
    world: World, families: Families, family: str, dtype: Any
) -> None:
    """A frozen tower gets no gradients, so that what a trained one gets more are they, and their header."""
    path, step = families(family), random_step(FULL, family)
    frozen = ("model.visual.*",) if family == "qwen3_vl" else TOWER
    tokens = sum(int((each["prompt_ids"] == PLACEHOLDER).sum()) for each in step.groups)

    def seen(freeze: tuple[str, ...]) -> tuple[float, str]:
        grid = Grid(1, 1, Cut(dtype=dtype))
        nbytes, _ = moved(world, path, grid, step, chunks=(1,), freeze=freeze)
        return nbytes, messages_said(path, dtype, freeze)

    (there, untrained), (both_ways, trained) = seen(frozen), seen(())
    features, gradients = there - HEADER_NBYTES, both_ways - there - HEADER_NBYTES
    per_1000 = [size(each * 1000 / tokens) for each in (features, gradients)]
    assert f": features of {per_1000[0]} and no gradients per 1,000 tokens of pictures" in untrained
    assert f": features of {per_1000[0]} and gradients of {per_1000[1]} per 1,000 tokens" in trained
    assert f"of which it has {tokens} at most" in trained
    assert trained.endswith(f": features of {size(features)} and gradients of {size(gradients)}")


def messages_said(path: Path, dtype: str, freeze: tuple[str, ...]) -> str:
    """What ``offbeat check`` says of as many groups, of prompts with two pictures of four tokens at most."""
    config = make_config(
        groups_per_step=len(FULL),
        model={"path": str(path), "dtype": dtype},
        environment={"name": "digits", "images": {"max_mib": 0.025}},
        trainer={"encoder": {"data_parallel": 1}, "freeze": freeze},
    )
    _, tower = check_encoder(config, None)
    return tower.message.partition("messages of a chunk")[2]


# --- mistakes, planted ----------------------------------------------------------------------------


def test_a_message_of_an_earlier_exchange_changes_nothing_unless_its_key_is_not_compared(
    world: World, families: Families
) -> None:
    given: dict[str, Any] = {"path": families("idefics3"), "step": random_step(EQUAL)}

    def weights(encoder: str, language: str) -> tuple[str, dict[str, Any]]:
        kinds = {"encoder": encoder, "language": language}
        first, second = world.run(2, "grid_bugs:stepped_by", **given, **kinds)
        assert first[0] == second[0]
        return first

    digest, want = weights("ExactEncoder", "ExactLanguage")
    assert weights("RepeatsItself", "ExactLanguage")[0] == digest
    _, wrong = weights("RepeatsItself", "TrustsTheNextMessage")
    assert max(np.abs(wrong[name] - want[name]).max() for name in want) > 1e-6


@pytest.mark.parametrize(
    ("family", "error"), [("idefics3", "SchemaError"), ("qwen2_5_vl", "RuntimeError")]
)
def test_pictures_merged_by_shape_end_the_step_where_all_are_of_one_shape_and_only_there(
    world: World, families: Families, family: str, error: str
) -> None:
    """What infers axes from shapes takes equal lanes for one: sizes of the first, values of all."""

    def ended(groups: list[dict[str, Any]], encoder: str) -> list[tuple[str, bool]]:
        step = Step(groups, [(1.0, -0.5, -0.5)] * len(groups))
        given = {"path": families(family), "step": step, "encoder": encoder}
        return world.run(3, "grid_bugs:ended", **given)

    equal, unequal = picture_groups(EQUAL, family=family), picture_groups((1, 2), family=family)
    undisturbed = [("", True)] * 3
    assert ended(equal, "ExactEncoder") == ended(unequal, "ExactEncoder") == undisturbed
    assert ended(unequal, "MergesByShape") == undisturbed
    assert ended(equal, "MergesByShape") == [
        ("PeerFailed", True),
        ("PeerFailed", True),
        (error, True),
    ]
