"""Encoder ranks where something fails: every rank ends the call with it, and nothing is left of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_cases import Cut, Step
from world import World

from tests.support.image_text_models import make, picture_groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idefics3")
    make("idefics3").save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def random_step() -> Step:
    """A step with pictures in each lane of two, in each chunk of two."""
    groups, rng = picture_groups((1, 1, 1, 1, 2, 0, 1, 1)), np.random.default_rng(1)
    return Step(groups, [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups])


def on_ranks(world: World, job: str, model: Path, lanes: int, encoders: int, **given: Any) -> Any:
    given = {"cut": Cut(), "step": random_step(), "on": (), **given}
    shape = {"lanes": lanes, "encoders": encoders}
    return world.run(lanes + encoders, f"grid_fault_jobs:{job}", path=model, **shape, **given)


@pytest.mark.parametrize(
    ("lanes", "site", "on", "own"),
    [
        (1, "tower", 1, "Injected"),
        (2, "tower", 2, "Injected"),
        (2, "tower's backward", 2, "Injected"),
        (2, "tower's second backward", 2, "Injected"),
        (1, "loss", 0, "Injected"),
        (2, "features of another step", 0, "BridgeMismatch"),
        (2, "gradients of other pictures", 2, "BridgeMismatch"),
    ],
    ids=lambda each: each.replace(" ", "-") if isinstance(each, str) else None,
)
def test_an_error_of_one_rank_ends_the_call_on_all_and_the_retry_is_the_step_undisturbed(
    world: World, model: Path, lanes: int, site: str, on: int, own: str
) -> None:
    """A wrong message fails where it is received: ``on`` is that rank, and the fault is its sender's."""
    of_sender = {"features of another step": (lanes,), "gradients of other pictures": (0,)}
    at = of_sender.get(site, (on,))
    cut = Cut(picture_tokens=8 if "second" in site else None)
    want = on_ranks(world, "failed_then_retried", model, lanes, 1, site="", cut=cut)
    assert {raised for raised, _, _ in want} == {""}
    got = on_ranks(world, "failed_then_retried", model, lanes, 1, site=site, on=at, cut=cut)
    assert [raised for raised, _, _ in got] == [
        own if rank == on else "PeerFailed" for rank in range(lanes + 1)
    ]
    assert not any(left for _, left, _ in got)
    assert {digest for *_, digest in got} == {want[0][-1]}


@pytest.mark.parametrize(
    ("encoders", "site", "on"),
    [(2, "tower", 2), (2, "tower's backward", 3), (1, "loss", 1)],
    ids=["tower", "backward of the tower", "loss"],
)
def test_a_rank_that_fails_while_its_side_computes_together_raises_its_own_error(
    world: World, model: Path, encoders: int, site: str, on: int
) -> None:
    """The others of its side wait for it in a collective, and would not answer a report."""
    answers = on_ranks(world, "raised", model, 2, encoders, site=site, on=(on,))
    assert answers.pop(on) == "Injected"
    assert set(answers) == {"lost"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("site", "on", "reason"),
    [
        ("nan in a gradient", 0, "gradient norm is nan"),
        ("nan in a gradient", 2, "gradient norm is nan"),
        ("inf in a gradient", 1, "gradient norm is inf"),
        ("inf in a gradient", 2, "gradient norm is inf"),
        ("NaN in the features", 2, "loss is nan"),
    ],
    ids=["language NaN", "tower NaN", "language infinite", "tower infinite", "features"],
)
def test_what_is_not_finite_on_one_side_is_refused_by_all_ranks_and_changes_neither(
    world: World, model: Path, dtype: str, site: str, on: int, reason: str
) -> None:
    """Weights, float32 masters, moments and numbers of updates, bit for bit."""
    given = {"cut": Cut(dtype=dtype), "site": site}
    for outcomes, changed, _ in on_ranks(world, "refused", model, 2, 1, on=(on,), **given):
        assert outcomes == [(True, ""), (False, reason), (True, "")]
        assert changed == []


def test_a_message_of_an_aborted_attempt_that_arrives_late_is_discarded_on_a_real_wire(
    world: World,
) -> None:
    received, _ = world.run(2, "grid_fault_jobs:late_message")
    assert received == [1.0] * 8
