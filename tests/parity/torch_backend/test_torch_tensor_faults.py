"""Failures of one rank or of all, in steps over tensor-parallel ranks, leave nothing of the step."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from parity_cases import Cut, Step
from tensor_fault_jobs import COPIED, DIVIDED
from world import World

Models = Callable[[str], Path]
CUT = Cut(tensor=2)


@pytest.mark.parametrize("ranks", [2, 4], ids=["tp2", "tp2 x dp2"])
@pytest.mark.parametrize("site", ["read", "forward", "loss", "backward", "finish"])
def test_after_a_failure_and_an_abort_the_step_is_taken_as_if_nothing_had_been(
    world: World, models: Models, step: Step, ranks: int, site: str
) -> None:
    given = {"path": models("qwen3"), "cut": CUT, "step": step, "site": site}
    answers = world.run(ranks, "torch_jobs:failed_then_retried", on=range(ranks), **given)
    for raised, left, retried, undisturbed in answers:
        assert (raised, left) == ("Injected", [])
        assert retried.digest == undisturbed.digest
        assert retried.result.metrics == undisturbed.result.metrics


@pytest.mark.parametrize("on", [1, 2])
def test_a_rank_that_cannot_take_part_tells_the_others_before_they_wait(
    world: World, models: Models, step: Step, on: int
) -> None:
    """Those of its own replica, and of the other."""
    given = {"path": models("qwen3"), "cut": CUT, "step": step, "site": "read"}
    answers = world.run(4, "torch_jobs:failed_then_retried", on=(on,), **given)
    assert [raised for raised, *_ in answers] == [
        "Injected" if rank == on else "PeerFailed" for rank in range(4)
    ]
    for _, left, retried, undisturbed in answers:
        assert left == []
        assert retried.digest == undisturbed.digest


@pytest.mark.parametrize("site", ["forward", "loss", "backward"])
@pytest.mark.parametrize("on", [0, 1, 2])
def test_a_rank_that_fails_while_the_others_compute_raises_its_own_error(
    world: World, models: Models, step: Step, site: str, on: int
) -> None:
    """The others wait for it in a collective of its replica, or of its data-parallel ranks."""
    given = {"path": models("qwen3"), "cut": CUT, "step": step, "site": site, "on": (on,)}
    answers = world.run(4, "tensor_fault_jobs:raised", **given)
    assert answers.pop(on) == "Injected"
    assert set(answers) == {"lost"}


def test_logprobs_that_fail_in_the_midst_of_a_step_cost_it_nothing(
    world: World, models: Models, step: Step
) -> None:
    given = {"path": models("qwen3"), "cut": CUT, "step": step}
    for disturbed, undisturbed in world.run(2, "torch_jobs:logprobs_that_fail", **given):
        assert disturbed == undisturbed


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("place", "value", "on", "reason"),
    [
        ("loss", math.nan, 0, "loss is nan"),
        ("loss", math.nan, 1, "gradient norm is nan"),
        (DIVIDED, math.nan, 1, "gradient norm is nan"),
        (DIVIDED, math.inf, 3, "gradient norm is inf"),
        (COPIED, math.nan, 0, "gradient norm is nan"),
        (COPIED, math.inf, 3, "gradient norm is nan"),
    ],
    ids=["loss", "loss of the second", "matrix", "matrix, infinite", "copy", "copy of the second"],
)
def test_what_is_not_finite_on_one_rank_is_refused_by_all_and_changes_nothing(
    world: World,
    models: Models,
    step: Step,
    dtype: str,
    place: str,
    value: float,
    on: int,
    reason: str,
) -> None:
    """Weights, float32 masters, moments and numbers of updates, bit for bit."""
    cut = Cut(tensor=2, dtype=dtype)
    given = {"path": models("qwen3"), "cut": cut, "step": step, "place": place, "value": value}
    seen = world.run(4, "tensor_fault_jobs:refused", on=(on,), **given)
    for outcomes, changed, digest in seen:
        assert outcomes == [(True, ""), (False, reason), (True, "")]
        assert changed == []
        assert digest == seen[0][2]
