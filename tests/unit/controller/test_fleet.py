"""What the fleet promises beside what test_fleet_moves.py finds of any order of news."""

import pytest

from offbeat.controller.engine_record import Health, IllegalHealth
from offbeat.controller.fleet import Fleet
from offbeat.messages.weights import EngineState, WeightsAck

NAMES = ("generator-0", "generator-1", "generator-2")


def state(
    name: str, incarnation_number: int, version: int | None = None, tokens: int = 0
) -> EngineState:
    return EngineState(
        name, f"{name}-incarnation-{incarnation_number}", version, None, 0, 0, tokens / 10, tokens
    )


def ack(name: str, incarnation_number: int, version: int) -> WeightsAck:
    return WeightsAck(
        name, f"{name}-incarnation-{incarnation_number}", 1, version, "digest", 0.1, 0.1
    )


def synced(*versions: int) -> Fleet:
    """As many HEALTHY engines in their first incarnation, serving these."""
    names = [f"generator-{place}" for place in range(len(versions))]
    fleet = Fleet(names)
    for name, version in zip(names, versions, strict=True):
        fleet.probe_answered(state(name, 1))
        assert fleet.acked(ack(name, 1, version))
    return fleet


# --- routing ---------------------------------------------------------------------------------------


def test_an_engine_left_behind_holds_the_others_back_only_while_it_serves() -> None:
    fleet = synced(3, 3)
    fleet.acked(ack("generator-1", 1, 4))
    assert fleet.serving_version == 3
    fleet.stale("generator-0")
    assert fleet.serving_version == 4


def test_a_large_fleet_is_told_of_by_counts_and_the_doubted_ones() -> None:
    fleet = synced(*[0] * 100)
    fleet.suspect("generator-7")
    assert str(fleet) == (
        "0 restarting, 0 stale, 99 healthy, 1 suspect, 0 dead, 0 retired, generator-7 suspect v0 (0 groups)"
    )


# --- health ----------------------------------------------------------------------------------------


def test_a_new_incarnation_is_stale_whatever_it_says_and_counts_as_a_restart() -> None:
    fleet = synced(1)
    fleet.probe_answered(state("generator-0", 2, version=1))
    assert fleet.engines["generator-0"].health is Health.STALE
    assert fleet.restarts == 1
    assert not fleet.acked(ack("generator-0", 1, 2)), (
        "the ack of the incarnation before comes too late"
    )


def test_a_late_answer_of_a_former_incarnation_does_not_bring_it_back() -> None:
    fleet = synced(1)
    fleet.probe_answered(state("generator-0", 2))
    fleet.acked(ack("generator-0", 2, 1))
    assert not fleet.probe_answered(state("generator-0", 1, version=1))
    assert fleet.engines["generator-0"].incarnation == "generator-0-incarnation-2"
    assert fleet.engines["generator-0"].health is Health.HEALTHY


def test_an_engine_given_up_is_not_heard_until_its_next_incarnation() -> None:
    fleet = synced(1)
    fleet.dead("generator-0")
    assert not fleet.probe_answered(state("generator-0", 1, version=1))
    fleet.restarting("generator-0")
    assert not fleet.probe_answered(state("generator-0", 1, version=1)), (
        "the process that was given up"
    )
    assert fleet.probe_answered(state("generator-0", 2))
    assert fleet.engines["generator-0"].health is Health.STALE


def test_a_serving_engine_cannot_be_restarted_unnoticed() -> None:
    fleet = synced(1)
    wanted = "cannot become restarting: it is healthy, next may be dead, stale, suspect"
    with pytest.raises(IllegalHealth, match=wanted):
        fleet.restarting("generator-0")
    assert fleet.pick() is not None


def test_an_ack_of_an_older_version_than_one_acked_before_is_refused() -> None:
    fleet = synced(3)
    assert not fleet.acked(ack("generator-0", 1, 2))
    fleet.stale("generator-0")
    assert not fleet.acked(ack("generator-0", 1, 2))
    assert fleet.acked(ack("generator-0", 1, 3))


def test_what_an_engine_did_adds_up_over_its_incarnations() -> None:
    fleet = Fleet(["generator-0"])
    for incarnation_number, tokens in ((1, 10), (1, 25), (2, 5), (2, 5)):
        fleet.probe_answered(state("generator-0", incarnation_number, tokens=tokens))
    assert fleet.engines["generator-0"].tokens == 30
    assert fleet.engines["generator-0"].busy_s == pytest.approx(3.0)


# --- requests that fail ----------------------------------------------------------------------------


def test_requests_that_fail_in_a_row_cost_an_engine_its_process_though_its_probes_answer() -> None:
    fleet = synced(1)
    for last in (False, False, True):
        assert fleet.request_failed("generator-0") is last
        assert fleet.engines["generator-0"].doubted
        fleet.probe_answered(state("generator-0", 1, version=1))
        assert fleet.pick() is not None, "a probe clears suspicion, and no strike"


def test_requests_that_a_dead_process_took_with_it_are_no_strikes_against_the_next() -> None:
    fleet = synced(1)
    fleet.dead("generator-0")
    assert not any(fleet.request_failed("generator-0") for _ in range(9))
    fleet.restarting("generator-0")
    fleet.probe_answered(state("generator-0", 2))
    fleet.acked(ack("generator-0", 2, 1))
    late = [fleet.request_failed("generator-0", "generator-0-incarnation-1") for _ in range(9)]
    assert not any(late)
    assert fleet.engines["generator-0"].health is Health.HEALTHY


# --- evaluations -----------------------------------------------------------------------------------


def test_a_pinned_engine_is_left_to_its_evaluation() -> None:
    fleet = synced(3, 3)
    assert fleet.pin(3) == "generator-0"
    assert fleet.in_sync_set() == ["generator-1"]
    fleet.acked(ack("generator-1", 1, 4))
    assert fleet.serving_version == 4
    for _ in range(3):
        picked = fleet.pick()
        assert picked is not None and picked.name == "generator-1"
        fleet.took(picked.name)


def test_the_only_serving_engine_takes_groups_pinned_or_not() -> None:
    fleet = synced(3, 5)
    assert fleet.pin(3) == "generator-0"
    fleet.dead("generator-1")
    assert fleet.pick() is fleet.engines["generator-0"]
    assert fleet.serving_version == 3


def test_the_look_for_an_engine_to_pin_pins_none() -> None:
    fleet = synced(3, 3)
    assert fleet.can_pin(3)
    assert fleet.in_sync_set() == ["generator-0", "generator-1"]


def test_an_engine_that_the_syncs_passed_by_while_pinned_has_to_sync() -> None:
    fleet = synced(3, 3)
    assert fleet.pin(3) == "generator-0"
    fleet.acked(ack("generator-1", 1, 4))
    fleet.unpin("generator-0")
    assert fleet.engines["generator-0"].health is Health.STALE
    assert fleet.in_sync_set() == ["generator-0", "generator-1"]


def test_the_only_engine_has_to_sync_after_a_release_that_its_pin_kept_from_it() -> None:
    fleet = synced(3)
    assert fleet.pin(3) == "generator-0"
    fleet.released(4)
    assert fleet.in_sync_set() == []
    fleet.unpin("generator-0")
    assert fleet.in_sync_set() == ["generator-0"]
    assert fleet.engines["generator-0"].health is Health.STALE


def test_an_engine_that_missed_nothing_while_pinned_serves_on() -> None:
    fleet = synced(3, 3)
    assert fleet.pin(3) == "generator-0"
    fleet.unpin("generator-0")
    assert fleet.engines["generator-0"].health is Health.HEALTHY


def test_a_pin_ends_when_a_sync_already_on_its_way_changes_the_version() -> None:
    fleet = synced(3, 3)
    assert fleet.pin(3) == "generator-0"
    assert fleet.acked(ack("generator-0", 1, 3)), "the same release once more"
    assert fleet.engines["generator-0"].pinned
    assert fleet.acked(ack("generator-0", 1, 4))
    assert not fleet.engines["generator-0"].pinned


# --- rewinds ---------------------------------------------------------------------------------------


def test_after_a_rewind_no_engine_serves_until_it_acks_anew() -> None:
    fleet = synced(7, 7, 6)
    fleet.stale("generator-2")
    fleet.rewound(5)
    assert fleet.serving_version == 5
    assert fleet.pick() is None
    assert fleet.in_sync_set() == list(NAMES)
    assert fleet.acked(ack("generator-2", 1, 5)), "lower than it acked before"
    assert fleet.pick() is fleet.engines["generator-2"]


def test_an_engine_that_loads_a_release_is_pinned_only_after_it() -> None:
    fleet = synced(1)
    fleet.load_began("generator-0")
    assert not fleet.can_pin(1) and fleet.pin(1) is None
    fleet.load_ended("generator-0")
    assert fleet.can_pin(1) and fleet.pin(1) == "generator-0"
