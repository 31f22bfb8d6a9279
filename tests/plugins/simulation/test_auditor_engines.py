"""The auditor on engines, and on how a run ends: each rule broken by hand once."""

from typing import Any

import pytest
from audit_history import ENGINE, broken, killed, run_config, started, whole_run

from offbeat.controller.events import Dispatched, Released, Served
from offbeat.plugins.simulation.records import (
    ControllerEnd,
    Ended,
    EngineComputesOther,
    EngineServes,
    Fault,
    FenceObeyed,
    Generated,
    ReleasePublished,
    Scored,
)
from tests.support.counted_calls import calls_of

# --- engines ---------------------------------------------------------------------------------------


def test_work_for_an_engine_that_acked_nothing_is_found() -> None:
    history = started()
    history.open()
    history.dispatch(history.admit())
    assert broken(killed(history)) == {"I6"}


def test_work_for_an_engine_that_did_not_resync_after_a_rewind_is_found() -> None:
    history = started()
    history.rewind(0)
    history.dispatch(history.admit())
    assert broken(killed(history)) == {"I6"}


def test_a_dispatch_stamped_by_belief_is_found() -> None:
    history = started()
    history.step()
    history.dispatch(history.admit())
    history.change(Dispatched, version=0)
    assert broken(killed(history)) == {"I6"}


def test_tokens_older_than_the_ack_are_found() -> None:
    history = started()
    history.step()
    history.serving = 0
    history.ready(1)
    history.change(Dispatched, version=1)
    assert broken(killed(history)) == {"I6"}


def test_a_receipt_that_no_worker_sent_is_found() -> None:
    history = started()
    history.ready(1)
    history.remove(Generated)
    assert broken(killed(history)) == {"I6"}


def test_a_receipt_of_an_engine_incarnation_that_acked_nothing_is_found() -> None:
    history = started()
    history.engine_incarnation = f"{ENGINE}/2"
    history.records.append(EngineServes(0.0, ENGINE, history.engine_incarnation, 1, 0, "w0"))
    history.ready(1)
    assert broken(killed(history)) == {"I6"}


def test_tokens_of_a_version_the_engine_never_served_are_found() -> None:
    history = started()
    history.step()
    history.ready(1)
    history.remove(EngineServes)
    assert broken(killed(history)) == {"I6"}


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        pytest.param(Served, {"epoch": 5}, id="an ack that the engine did not give"),
        pytest.param(Released, {"digest": "other"}, id="an ack of other weights than released"),
        pytest.param(EngineServes, {"digest": "torn"}, id="weights that nobody published"),
    ],
)
def test_an_account_of_weights_that_the_others_contradict_is_found(
    kind: type[Any], other: dict[str, Any]
) -> None:
    history = started()
    history.step()
    history.change(kind, **other)
    assert broken(killed(history)) == {"I6"}


def test_an_engine_that_computes_other_weights_than_it_acked_is_found() -> None:
    """In its ack, which is counted on, and in every group that comes of it."""
    history = started()
    history.step()
    other = EngineComputesOther(
        0.0, ENGINE, history.engine_incarnation, history.epoch, history.version
    )
    history.records.append(other)
    history.ready(1)
    assert broken(killed(history)) == {"I6"}


def test_the_same_release_taken_as_it_is_makes_up_for_it() -> None:
    history = started()
    other = EngineComputesOther(0.0, ENGINE, history.engine_incarnation, history.epoch + 1, 0)
    history.records.append(other)
    history.epoch += 1
    history.sync()
    history.ready(1)
    assert broken(killed(history)) == set()


def test_a_publication_of_other_weights_than_the_trainers_is_found() -> None:
    history = started()
    history.step()
    history.change(ReleasePublished, digest="torn")
    history.change(Released, digest="torn")
    history.change(EngineServes, digest="torn")
    history.change(Served, digest="torn")
    assert broken(killed(history)) == {"I6"}


def test_an_evaluation_of_two_versions_is_found_unless_a_fault_explains_it() -> None:
    history = whole_run()
    mixed = (((0, 2), (1, 3)),)
    history.records.insert(0, Scored(0.0, 0, 1, ENGINE, history.engine_incarnation, mixed))
    assert broken(history) == {"I6"}

    history.records.insert(0, Fault(0.0, "engine_killed", ENGINE))
    assert broken(history) == set()


# --- ends ------------------------------------------------------------------------------------------


def test_an_actor_that_obeys_a_replaced_controller_is_found() -> None:
    history = whole_run()
    history.records.append(FenceObeyed(0.0, "trainer", 1, 2))
    assert broken(history) == {"I13"}


@pytest.mark.parametrize(
    ("end", "found"),
    [
        pytest.param({"telemetry_lost": 1}, "I14", id="metrics lost without a fault"),
        pytest.param({"unclosed": ("trainer",)}, "I15", id="an actor nobody closed"),
        pytest.param({"running": 1}, "I8", id="a rollout that outlives the run"),
        pytest.param({"outcome": "deadlock"}, "I9", id="a deadlock"),
        pytest.param({"outcome": "out_of_budget"}, "I9", id="no end by itself"),
    ],
)
def test_an_end_that_is_none_is_found(end: dict[str, Any], found: str) -> None:
    history = whole_run()
    history.change(Ended, **end)
    assert broken(history) == {found}


def test_metrics_of_a_step_that_a_later_incarnation_adopted_are_excused() -> None:
    history = whole_run()
    history.change(Ended, telemetry_lost=1)
    history.records.insert(0, ControllerEnd(0.0, 1, "killed"))
    assert history.audit() == []


def test_an_episode_without_an_end_is_found() -> None:
    history = whole_run()
    history.remove(Ended)
    assert broken(history) == {"I9"}


TYPED = "run failed at step 1, trainer version 0: BudgetSpent: more than 0 dropped prompt groups"


def test_a_typed_failure_that_says_where_is_a_legal_end() -> None:
    history = started()
    history.end("failed", TYPED, "BudgetSpent")
    assert history.audit() == []


@pytest.mark.parametrize(
    "error",
    ["", "BudgetSpent: too many", TYPED.replace("BudgetSpent", "an error")],
)
def test_a_failure_that_does_not_say_where_and_what_is_found(error: str) -> None:
    history = started()
    history.end("failed", error, "BudgetSpent")
    assert broken(history) == {"I16"}


@pytest.mark.parametrize("cause", ["KeyError", "IllegalMove", "AssertionError"])
def test_a_failure_by_a_mistake_of_our_own_is_found(cause: str) -> None:
    history = started()
    history.end("failed", TYPED.replace("BudgetSpent", cause), cause)
    assert broken(history) == {"I9"}


def test_a_stall_is_legal_only_while_there_are_faults() -> None:
    stalled = "run failed at step 1, trainer version 0: RunStalled: nothing moved for 300 s"
    history = started()
    history.end("failed", stalled, "RunStalled")
    assert broken(history) == {"I9"}

    history.records.insert(0, Fault(0.0, "engine_hangs", ENGINE))
    assert broken(history) == set()
    history.change(ControllerEnd, at=10_000.0)
    assert broken(history) == {"I9"}


def test_a_deadlock_is_never_excused_by_faults() -> None:
    deadlock = "run failed at step 1, trainer version 0: RunStalled: nothing moved for 10.5 s"
    history = started()
    history.records.insert(0, Fault(0.0, "engine_hangs", ENGINE))
    history.end("failed", deadlock, "RunStalled")
    assert broken(history) == {"I9"}


def test_a_run_that_was_asked_to_stop_may_end_early() -> None:
    history = started()
    history.step()
    history.end()
    history.records.insert(0, Fault(0.0, "stop", "controller"))
    assert history.audit() == []


# --- cost ------------------------------------------------------------------------------------------


def test_an_audit_of_ten_times_the_steps_makes_ten_times_the_calls() -> None:
    short, long = (whole_run(run_config(steps=steps)) for steps in (20, 200))
    assert calls_of(long.audit) < 11 * calls_of(short.audit)
    assert long.audit() == []
