"""What a run does about weights that do not change, and about engines that compute other weights."""

import re
from typing import Any

import pytest
from structlog.testing import capture_logs

from offbeat.algorithms.staleness_buckets import ON_POLICY_GAP, ON_POLICY_TOKENS
from offbeat.controller.errors import EveryCanaryFailed, LogprobGapTooLarge
from offbeat.controller.events import Dispatched
from offbeat.messages.failures import CanaryFailed, WeightsUnmoved
from tests.support.world import World


def test_a_step_that_moved_no_weight_ends_the_run_by_its_name() -> None:
    world = World()
    world.trainer.unmoved_step = 3
    failure = world.fail()
    assert isinstance(failure.causes[0], WeightsUnmoved)
    assert "trainer.optimizer.learning_rate" in str(failure)
    assert world.built.state.ledger.trainer_version == 2


def test_releases_that_did_not_change_are_counted_and_warned_of_at_the_third_in_a_row() -> None:
    """Once, and again whenever twice as many are."""
    world = World({"steps": 12})
    world.trainer.same_release_from = 5  # version 5 differs from 4; 6 to 12 are as 5
    with capture_logs() as told:
        world.run()
    assert [record["sync/unchanged_releases"] for record in world.telemetry.records][-1] == 7
    warned = [each for each in told if each["event"] == "sync.unchanged_releases"]
    assert [(each["version"], each["in_row"]) for each in warned] == [(8, 3), (11, 6)]
    assert "train/grad_norm" in warned[0]["fix"]
    assert "trainer.optimizer.learning_rate" in warned[0]["fix"]


def test_a_run_whose_weights_change_counts_none() -> None:
    world = World()
    world.run()
    assert [record["sync/unchanged_releases"] for record in world.telemetry.records][-1] == 0


def test_after_a_rewind_the_same_weights_in_a_new_release_are_no_finding() -> None:
    world = World({"checkpoint": {"interval": 2}})
    world.trainer.lose_at_step = 4
    world.run()
    assert [record["sync/unchanged_releases"] for record in world.telemetry.records][-1] == 0


def gaps(world: World, **by_step: float) -> None:
    world.trainer.metrics = {
        int(step[1:]): {ON_POLICY_GAP: gap, ON_POLICY_TOKENS: 1000.0}
        for step, gap in by_step.items()
    }


@pytest.mark.parametrize(
    ("dtype", "wire", "warned"),
    [
        ("float32", None, [3, 6]),
        ("bfloat16", None, [6]),
        ("float32", "bfloat16", [6]),
    ],
)
def test_a_gap_of_logprobs_is_warned_of_when_it_begins(
    dtype: str, wire: str | None, warned: list[int]
) -> None:
    world = World({"model": {"path": "none", "dtype": dtype}, "sync": {"wire_dtype": wire}})
    gaps(world, s2=0.019, s3=0.03, s4=0.03, s5=0.001, s6=0.3, s7=0.3)
    with capture_logs() as told:
        world.run()
    got = [each["step"] for each in told if each["event"] == "sync.logprob_gap"]
    assert got == warned


def test_a_gap_over_the_bound_of_the_recipe_ends_the_run_with_both_numbers() -> None:
    world = World({"sync": {"max_logprob_gap": 0.25}})
    gaps(world, s3=0.2, s4=0.31)
    failure = world.fail()
    assert isinstance(failure.causes[0], LogprobGapTooLarge)
    assert "0.31 nats" in str(failure) and "sync.max_logprob_gap=0.25" in str(failure)
    assert world.built.state.ledger.trainer_version == 4


def test_a_few_tokens_of_several_steps_are_taken_together() -> None:
    """As where nearly every sample is trained a version later."""
    world = World({"sync": {"max_logprob_gap": 0.25}})
    world.trainer.metrics = {
        step: {ON_POLICY_GAP: 0.4, ON_POLICY_TOKENS: 8.0 * (step % 2)} for step in range(1, 11)
    }
    failure = world.fail()
    assert isinstance(failure.causes[0], LogprobGapTooLarge)
    assert world.built.state.ledger.trainer_version == 7, "32 tokens by then"


@pytest.mark.parametrize(("tokens", "warned"), [(0.0, [100]), (1.0, []), (None, [])])
def test_a_run_whose_gap_cannot_be_measured_says_so(
    tokens: float | None, warned: list[int]
) -> None:
    world = World({"steps": 120})
    seen = {} if tokens is None else {ON_POLICY_GAP: 0.0, ON_POLICY_TOKENS: tokens}
    world.trainer.metrics = dict.fromkeys(range(1, 121), seen)
    with capture_logs() as told:
        world.run()
    assert [each["step"] for each in told if each["event"] == "sync.logprob_gap_unseen"] == warned


# --- canaries -------------------------------------------------------------------------------------


def with_canaries(engines: int = 2, **overrides: Any) -> World:
    world = World(overrides, engines=engines)
    world.trainer.canaries = True
    return world


def test_an_engine_that_computes_other_weights_once_is_synced_again_and_then_serves() -> None:
    world = with_canaries()
    wrong = world.generators["generator-1"]
    wrong.other_weights = 1
    world.run()
    world.assert_ledger_agrees()
    assert (wrong.restarts, wrong.version) == (0, 10)
    assert wrong.loads[:2] == [0, 0]


def test_an_engine_that_goes_on_computing_other_weights_is_replaced() -> None:
    world = with_canaries()
    wrong = world.generators["generator-1"]
    wrong.other_weights = 2
    world.run()
    world.assert_ledger_agrees()
    assert (wrong.restarts, wrong.version) == (1, 10)


def test_the_only_engine_is_replaced_once_before_the_run_ends() -> None:
    world = with_canaries(engines=1)
    world.generators["generator-0"].other_weights = 2
    world.run()
    assert world.generators["generator-0"].restarts == 1


@pytest.mark.parametrize("engines", [1, 3])
def test_when_every_engine_computes_other_weights_the_run_ends_with_both_numbers(
    engines: int,
) -> None:
    world = with_canaries(engines)
    for each in world.generators.values():
        each.other_weights = 100
    failure = world.fail()
    assert isinstance(failure.causes[0], EveryCanaryFailed)
    assert re.search(r"logprob of token \d+ is -[\d.]+ and the trainer's is -[\d.]+", str(failure))
    assert not world.trained and not world.rollouts.started


def test_no_group_goes_to_an_engine_that_skips_its_canary() -> None:
    world = with_canaries(generator={"restart_budget": 2})
    skips = world.generators["generator-1"]
    skips.skips_canaries = True
    world.run()
    world.assert_ledger_agrees()
    assert world.built.state.fleet.retired == ["generator-1"]
    served = {event.engine for event in world.events(Dispatched)}
    assert served == {"generator-0"}


def test_a_release_without_a_canary_is_served_without_one() -> None:
    world = World()
    world.generators["generator-1"].other_weights = 5
    world.run()
    assert world.generators["generator-1"].restarts == 0


def test_a_failed_canary_tells_its_numbers() -> None:
    failure = CanaryFailed("generator-0", 3, 7, 42, -3.5, -0.25, 3.25, 0.02)
    assert "-3.5" in str(failure) and "-0.25" in str(failure) and "version 7" in str(failure)
