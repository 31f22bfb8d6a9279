"""Encoder ranks beside megatron-core where something fails: every rank ends the call, nothing is left."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_grid_cases import on_grid
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut
from world import World

from tests.support.image_text_models import picture_groups

ONE, TENSOR, PIPELINE, DATA = Cut(), Cut(tensor=2), Cut(pipeline=2), Cut(data=2)
SEQUENCE = Cut(tensor=2, sequence=True)
SHARDED = replace(DATA, updates="ShardedAdamW")


def random_step() -> JobStep:
    """A step with pictures in each lane of two, in each chunk of two."""
    groups, rng = picture_groups((1, 1, 1, 1, 2, 0, 1, 1)), np.random.default_rng(1)
    return JobStep.of(Step(groups, [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups]), TOKENS)


def on_ranks(
    world: World, job: str, model: Path, cut: Cut, encoders: int, site: str, on: Sequence[int]
) -> list[Any]:
    given = {"path": model, "step": random_step(), "site": site, "on": on}
    return on_grid(world, f"megatron_grid_fault_jobs:{job}", cut, encoders, **given)


@pytest.mark.parametrize(
    ("cut", "site", "on", "own"),
    [
        (ONE, "loss", 0, "Injected"),
        (SEQUENCE, "tower", 2, "Injected"),
        (DATA, "tower", 2, "Injected"),
        (PIPELINE, "tower", 2, "Injected"),
        (TENSOR, "tower's backward", 2, "Injected"),
        (DATA, "tower's backward", 2, "Injected"),
        (PIPELINE, "tower's backward", 2, "Injected"),
        (SEQUENCE, "features of another step", 0, "BridgeMismatch"),
        (DATA, "features of another step", 0, "BridgeMismatch"),
        (PIPELINE, "features of another step", 0, "BridgeMismatch"),
        (SEQUENCE, "gradients of other pictures", 2, "BridgeMismatch"),
        (DATA, "gradients of other pictures", 2, "BridgeMismatch"),
        (PIPELINE, "gradients of other pictures", 2, "BridgeMismatch"),
    ],
    ids=[
        "loss",
        *(f"tower, {cut}" for cut in ("tp2", "dp2", "pp2")),
        *(f"backward of the tower, {cut}" for cut in ("tp2", "dp2", "pp2")),
        *(f"features of another step, {cut}" for cut in ("tp2", "dp2", "pp2")),
        *(f"gradients of other pictures, {cut}" for cut in ("tp2", "dp2", "pp2")),
    ],
)
def test_an_error_of_one_rank_ends_the_call_on_all_and_the_retry_is_the_step_undisturbed(
    world: World, model: Path, cut: Cut, site: str, on: int, own: str
) -> None:
    """A wrong message fails where it is received: ``on`` is that rank, and the fault is its sender's."""
    of_sender = {"features of another step": (cut.ranks,), "gradients of other pictures": (0,)}
    want = on_ranks(world, "failed_then_retried", model, cut, 1, "", ())
    assert {raised for raised, _, _ in want} == {""}
    got = on_ranks(world, "failed_then_retried", model, cut, 1, site, of_sender.get(site, (on,)))
    assert [raised for raised, _, _ in got] == [
        own if rank == on else "PeerFailed" for rank in range(cut.ranks + 1)
    ]
    assert not any(left for _, left, _ in got)
    assert {digest for *_, digest in got} == {want[0][-1]}


@pytest.mark.parametrize(
    ("cut", "encoders", "site", "on", "own"),
    [
        (DATA, 2, "tower", 2, "Injected of Injected"),
        (DATA, 2, "tower's backward", 3, "Injected of Injected"),
        (DATA, 1, "loss", 1, "Injected of Injected"),
        (SEQUENCE, 1, "loss", 1, "Injected of Injected"),
        (PIPELINE, 1, "loss", 1, "WorldBroken of Injected"),  # stages may have sent to each other
    ],
    ids=["tower", "backward of the tower", "loss, dp2", "loss, tp2", "loss, pp2"],
)
def test_a_rank_that_fails_while_its_side_computes_together_raises_its_own_error(
    world: World, model: Path, cut: Cut, encoders: int, site: str, on: int, own: str
) -> None:
    """The others of its side wait for it in a collective, and would not answer a report."""
    answers = on_ranks(world, "raised", model, cut, encoders, site, (on,))
    assert answers.pop(on) == own
    assert set(answers) == {"lost"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("cut", "encoders", "site", "on", "reason"),
    [
        (SEQUENCE, 1, "nan in a gradient", 1, "gradient norm is nan"),
        (SEQUENCE, 1, "nan in a gradient", 2, "gradient norm is nan"),
        (DATA, 2, "inf in a gradient", 1, "gradient norm is inf"),
        (DATA, 2, "inf in a gradient", 3, "gradient norm is inf"),
        (PIPELINE, 1, "nan in a gradient", 1, "gradient norm is nan"),
        (PIPELINE, 1, "inf in a gradient", 2, "gradient norm is inf"),
        (SEQUENCE, 1, "NaN in the features", 2, "loss is nan"),
        (PIPELINE, 1, "NaN in the features", 2, "loss is nan"),
    ],
    ids=[
        "language NaN, tp2",
        "tower NaN, tp2",
        "language infinite, dp2",
        "tower infinite, dp2",
        "language NaN, pp2",
        "tower infinite, pp2",
        "features, tp2",
        "features, pp2",
    ],
)
def test_what_is_not_finite_on_one_side_is_refused_by_all_ranks_and_changes_neither(
    world: World,
    model: Path,
    dtype: str,
    cut: Cut,
    encoders: int,
    site: str,
    on: int,
    reason: str,
) -> None:
    """Weights, float32 masters, moments and numbers of updates, bit for bit."""
    at = replace(cut, dtype=dtype)
    for outcomes, changed in on_ranks(world, "refused", model, at, encoders, site, (on,)):
        assert outcomes == [(True, ""), (False, reason), (True, "")]
        assert changed == []


@pytest.mark.parametrize(("site", "on"), [("nan in a gradient", 1), ("inf in a gradient", 2)])
def test_language_ranks_that_share_an_optimizer_refuse_a_step_with_the_tower_too(
    world: World, model: Path, site: str, on: int
) -> None:
    at = replace(SHARDED, dtype="bfloat16")
    for outcomes, changed in on_ranks(world, "refused", model, at, 1, site, (on,)):
        assert [applied for applied, _ in outcomes] == [True, False, True]
        assert changed == []
