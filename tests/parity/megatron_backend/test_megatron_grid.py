"""A vision tower on ranks of its own beside megatron-core's: the torch trainer's step in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, Told
from megatron_grid_cases import gradient_error, of_torch, on_grid, step_of, worst
from parity_cases import BOUND, TOKENS, chunked
from parity_cases import Cut as TorchCut
from parity_cases import MegatronCut as Cut
from world import World

from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.plugins.megatron.checks import rank_parameters
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.weight_sync.grid import ModelGrid
from tests.support.grid_steps import Families, bridge_nbytes

ONE, TENSOR, PIPELINE, DATA = Cut(), Cut(tensor=2), Cut(pipeline=2), Cut(data=2)
SEQUENCE, CONTEXT = Cut(tensor=2, sequence=True), Cut(context=2)
REPLICAS = Cut(pipeline=2, data=2)  # stages of a lane do not follow each other
TOWER_DIVIDED, BOTH_DIVIDED = Cut(encoder_tensor=2), replace(SEQUENCE, encoder_tensor=2)
EXPERTS, LOSSES = Cut(data=2, expert=2), {"load_balancing_coef": 0.5, "z_loss_coef": 0.1}
MIXED, TEXT, FIRST, EQUAL = (1, 2, 0, 1, 3, 0, 1), (0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1)
GRIDS = [
    (ONE, 1),
    (TENSOR, 1),
    (SEQUENCE, 1),
    (PIPELINE, 1),
    (DATA, 2),
    (TOWER_DIVIDED, 1),
    (BOTH_DIVIDED, 1),
    (replace(DATA, encoder_tensor=2), 1),
    (CONTEXT, 1),
    (REPLICAS, 1),
    (REPLICAS, 2),
]
NAMES = [
    "1 + 1",
    "tp2 + 1",
    "tp2 with sequence parallelism + 1",
    "pp2 + 1",
    "dp2 + 2",
    "1 + tp2",
    "tp2 with sequence parallelism + tp2",
    "dp2 + tp2",
    "cp2 + 1",
    "pp2 x dp2 + 1",
    "pp2 x dp2 + 2",
]


@pytest.fixture(scope="module")
def one_process(world: World, families: Families) -> Callable[..., Told]:
    """What the torch trainer makes of a step in one process that holds tower and decoder."""
    made = dict[tuple[str, tuple[int, ...]], Told]()

    def of(counts: tuple[int, ...], family: str = "idefics3") -> Told:
        if (family, counts) not in made:
            made[family, counts] = of_torch(world, families(family), step_of(counts, family))
        return made[family, counts]

    return of


@pytest.mark.parametrize(("cut", "encoders"), GRIDS, ids=NAMES)
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_a_step_on_pictures_and_text_is_that_of_the_torch_trainer_in_one_process(
    world: World,
    families: Families,
    one_process: Callable[..., Told],
    cut: Cut,
    encoders: int,
    chunks: int,
) -> None:
    step, want = JobStep.of(step_of(MIXED), TOKENS), one_process(MIXED)
    given = {"path": families("idefics3"), "step": step, "chunks": chunks}
    moved = bridge_nbytes(step.groups, cut.data, chunked(len(MIXED), chunks))
    ranks = on_grid(world, "stepped", cut, encoders, **given)
    (whole,) = on_grid(world, "stepped", ONE, 0, **given)
    for seen in ranks:
        assert gradient_error(seen, want) <= BOUND
        assert worst(seen["weights"], want.weights) <= BOUND
        assert seen["result"].applied
        assert seen["result"].tokens == want.result.tokens
        assert seen["result"].loss == pytest.approx(want.result.loss, rel=BOUND)
        assert seen["result"].grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
        assert seen["result"].metrics["train/bridge_bytes"] == moved
        assert seen["digest"] == ranks[0]["digest"]
        assert seen["initial"] == whole["initial"]
        assert (seen["parameters"], seen["identity"]) == (whole["parameters"], whole["identity"])
        assert seen["canary"][0] == whole["canary"][0]
        np.testing.assert_allclose(seen["canary"][1], whole["canary"][1], atol=1e-6)
        for group, columns in seen["logprobs"].items():
            for name, values in columns.items():
                np.testing.assert_allclose(values, whole["logprobs"][group][name], atol=1e-6)
    logprobs = {group for seen in ranks for group in seen["logprobs"]}
    assert logprobs == set(range(len(MIXED)))


@pytest.mark.parametrize("counts", [TEXT, FIRST, EQUAL], ids=["text", "one lane alone", "equal"])
@pytest.mark.parametrize(
    ("cut", "encoders"),
    [
        (ONE, 1),
        (SEQUENCE, 1),
        (PIPELINE, 1),
        (DATA, 1),
        (DATA, 2),
        (BOTH_DIVIDED, 1),
        (CONTEXT, 1),
        (replace(CONTEXT, data=2), 1),
        (REPLICAS, 1),
    ],
    ids=["1", "tp2", "pp2", "dp2", "dp2 + 2", "tp2 + tp2", "cp2", "cp2 x dp2", "pp2 x dp2"],
)
def test_lanes_may_have_no_pictures_or_as_many_as_all_others(
    world: World,
    families: Families,
    one_process: Callable[..., Told],
    counts: tuple[int, ...],
    cut: Cut,
    encoders: int,
) -> None:
    given = {"path": families("idefics3"), "step": JobStep.of(step_of(counts), TOKENS)}
    for seen in on_grid(world, "stepped", cut, encoders, chunks=2, **given):
        assert gradient_error(seen, one_process(counts)) <= BOUND
        assert worst(seen["weights"], one_process(counts).weights) <= BOUND


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        *product(("qwen2_5_vl", "qwen3_vl"), (SEQUENCE, BOTH_DIVIDED, CONTEXT)),
        ("smolvlm", SEQUENCE),
        ("qwen2_vl", SEQUENCE),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each.ranks} + {each.encoder_tensor}",
)
def test_families_with_axes_and_deeper_features_do_so_too(
    world: World,
    families: Families,
    one_process: Callable[..., Told],
    family: str,
    cut: Cut,
) -> None:
    step, want = JobStep.of(step_of(MIXED, family), TOKENS), one_process(MIXED, family)
    given = {"path": families(family), "step": step, "chunks": 2}
    for seen in on_grid(world, "stepped", cut, 1, **given):
        assert gradient_error(seen, want) <= BOUND


@pytest.fixture(scope="module")
def balanced(world: World, families: Families) -> Callable[[], Told]:
    """What the torch trainer makes of a step with losses of its routers in one process."""
    family, cut = "qwen3_vl_moe", TorchCut(moe=LOSSES)
    return cache(lambda: of_torch(world, families(family), step_of(MIXED, family), cut))


def load_of(metrics: dict[str, float]) -> dict[str, float]:
    found = {name: value for name, value in metrics.items() if name.startswith("moe/")}
    assert len(found) == 6
    return found


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    ("cut", "encoders"),
    [
        (EXPERTS, 1),
        (Cut(tensor=2, expert=2, sequence=True), 1),
        (Cut(context=2, expert=2), 1),
        (Cut(tensor=2, expert=2, expert_tensor=1, pipeline=2, sequence=True), 1),
        (Cut(data=4, expert=2), 2),
        (replace(EXPERTS, encoder_tensor=2), 1),
    ],
    ids=[
        "ep2 of dp2",
        "ep2 of tp2",
        "ep2 of cp2",
        "ep2 of tp2 x pp2",
        "ep2 of dp4 + 2",
        "ep2 of dp2 + tp2",
    ],
)
def test_a_step_of_a_language_model_with_experts_is_that_of_one_process(
    world: World,
    families: Families,
    balanced: Callable[[], Told],
    cut: Cut,
    encoders: int,
    chunks: int,
) -> None:
    family, want = "qwen3_vl_moe", balanced()
    step = JobStep.of(step_of(MIXED, family), TOKENS)
    given = {"path": families(family), "step": step, "chunks": chunks}
    (whole,) = on_grid(world, "stepped", ONE, 0, **given)
    ranks = on_grid(world, "stepped", replace(cut, moe=LOSSES), encoders, **given)
    for seen in ranks[: cut.ranks]:
        assert load_of(seen["result"].metrics) == pytest.approx(load_of(want.result.metrics))
    for seen in ranks:
        assert gradient_error(seen, want) <= BOUND
        assert worst(seen["weights"], want.weights) <= BOUND
        assert seen["result"].grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
        assert (seen["initial"], seen["identity"]) == (whole["initial"], whole["identity"])


@pytest.mark.parametrize(
    ("cut", "counts", "bug"),
    [
        (TENSOR, EQUAL, "KeepsItsPart"),
        (SEQUENCE, MIXED, "KeepsItsPart"),  # placeholders among the tokens of both ranks
        (CONTEXT, MIXED, "KeepsItsPart"),
        (DATA, EQUAL, "SwapsLanes"),
        (ONE, EQUAL, "CountsItself"),
    ],
    ids=["an equal share", "own tokens", "part of a row", "another lane", "ranks of both sides"],
)
def test_gradients_that_are_not_those_of_one_process_are_seen(
    world: World,
    families: Families,
    one_process: Callable[..., Told],
    cut: Cut,
    counts: tuple[int, ...],
    bug: str,
) -> None:
    given = {"path": families("idefics3"), "step": JobStep.of(step_of(counts), TOKENS)}
    first, *_ = on_grid(world, "stepped", cut, 1, **given, chunks=1, bug=bug)
    assert worst(first["weights"], one_process(counts).weights) > 1e-6


def test_both_sides_clip_by_one_norm(world: World, families: Families) -> None:
    options = {"learning_rate": 1e-2, "eps": 1.0, "max_grad_norm": 0.01}
    cut, step = replace(ONE, optimizer=options), JobStep.of(step_of(EQUAL), TOKENS)
    given = {"path": families("idefics3"), "step": step, "chunks": 1}
    (want,) = on_grid(world, "stepped", cut, 0, **given)
    assert want["result"].grad_norm > 0.01, "nothing was clipped"
    right, _ = on_grid(world, "stepped", cut, 1, **given)
    wrong, _ = on_grid(world, "stepped", cut, 1, **given, bug="NormOfItsOwn")
    assert worst(right["weights"], want["weights"]) <= BOUND
    assert worst(wrong["weights"], want["weights"]) > BOUND


@pytest.mark.parametrize(
    ("cut", "encoders"),
    [(ONE, 1), (SEQUENCE, 1), (PIPELINE, 1), (DATA, 2)],
    ids=["1 + 1", "tp2 + 1", "pp2 + 1", "dp2 + 2"],
)
def test_language_ranks_may_deal_their_optimizer_as_they_do_on_cuda(
    world: World, families: Callable[[str], Path], cut: Cut, encoders: int
) -> None:
    """Encoder ranks, which have no part of it, need not be there when it is made, measured or applied."""
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-4, "max_grad_norm": 0.01}
    whole = replace(cut, dtype="float32", optimizer=options)
    given = {"path": families("idefics3"), "step": JobStep.of(step_of(MIXED), TOKENS), "chunks": 2}
    want, *_ = on_grid(world, "stepped", whole, encoders, **given)
    assert want["result"].grad_norm > 0.01, "nothing was clipped"
    dealt = replace(whole, updates="ShardedAdamW")
    for seen in on_grid(world, "stepped", dealt, encoders, **given):
        assert seen["result"].applied
        assert seen["result"].grad_norm == pytest.approx(want["result"].grad_norm, rel=2e-5)
        assert worst(seen["weights"], want["weights"]) <= 2e-5


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((ONE, 1), (ONE, 0)),
        ((ONE, 0), (SEQUENCE, 1)),
        ((SEQUENCE, 1), (ONE, 1)),
        ((BOTH_DIVIDED, 1), (ONE, 0)),
        ((ONE, 1), (BOTH_DIVIDED, 1)),
    ],
    ids=[
        "a grid, then one process",
        "one process, then a grid",
        "another grid",
        "a divided tower, then one process",
        "a grid, then a divided tower",
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_checkpoint_is_taken_up_under_another_grid(
    world: World,
    families: Families,
    tmp_path: Path,
    wrote: tuple[Cut, int],
    reads: tuple[Cut, int],
    dtype: str,
) -> None:
    given = {"path": families("idefics3"), "step": JobStep.of(step_of(MIXED), TOKENS)}

    def step(grid: tuple[Cut, int], load: Path | None, save: Path | None) -> list[dict[str, Any]]:
        if save is not None:
            save.mkdir()
        cut, encoders = replace(grid[0], dtype=dtype), grid[1]
        return on_grid(world, "continued", cut, encoders, **given, load=load, save=save)

    first = step(wrote, None, tmp_path / "first")
    want = step(wrote, tmp_path / "first", None)[0]["weights"]
    for seen in step(reads, tmp_path / "first", None):
        assert seen["loaded"] == first[0]["saved"]
        assert seen["reset"]
        if dtype == "float64":
            assert worst(seen["weights"], want) <= 1e-9


def test_language_ranks_hold_no_tower_and_encoder_ranks_nothing_else(
    world: World, families: Families
) -> None:
    given = {"path": families("idefics3"), "step": JobStep.of(step_of(TEXT), TOKENS), "chunks": 1}
    *language, first, second = on_grid(world, "stepped", DATA, 2, **given)
    architecture = read_architecture(families("idefics3"))
    tower = sum(prod(shape) for _, shape in architecture.tower)
    whole = sum(map(prod, rank_parameters(architecture, ParallelLayout(ModelGrid())).values()))
    assert [each["held"] for each in language] == [whole - tower] * 2
    assert first["held"] + second["held"] == tower
