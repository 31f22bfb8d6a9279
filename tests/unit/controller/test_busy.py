"""Time accounting: the categories sum to the wall time, whatever happens in whatever order."""

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.controller.engine_record import EngineRecord, Health
from offbeat.controller.observer import TimeAttribution
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

T, G = TrainerTime, GeneratorTime


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """Busy on a clock that only moves when told, with engines that may be anything."""

    def __init__(self, engines: int = 1) -> None:
        self.clock = Clock()
        self.engines = [EngineRecord(f"generator-{number}") for number in range(engines)]
        self.busy = TimeAttribution(self.clock, {engine.name: engine for engine in self.engines})

    def passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def becomes(self, number: int = 0, **facts: Any) -> None:
        for name, value in facts.items():
            setattr(self.engines[number], name, value)
        self.busy.engine_changed(self.engines[number])

    @property
    def trainer(self) -> dict[str, float]:
        return {name: value for name, value in self.busy.trainer_seconds().items() if value}

    @property
    def fleet(self) -> dict[str, float]:
        return {name: value for name, value in self.busy.engine_seconds().items() if value}


def serving(engines: int = 1) -> Run:
    run = Run(engines)
    for number in range(engines):
        run.becomes(number, health=Health.HEALTHY, version=0)
    run.busy.trainer_waits(T.WAITING_GROUPS)
    return run


# --- the trainer ---------------------------------------------------------------------------------


def test_the_time_of_calls_is_compute_as_far_as_the_trainer_says_so() -> None:
    run = serving()
    run.passes(2)
    run.busy.trainer_waits(T.CONTROLLER)
    run.passes(1)
    with run.busy.trainer_in(T.COMPUTE):
        run.passes(5)
    run.busy.add_computing(4)
    assert run.trainer == {T.WAITING_GROUPS: 2, T.CONTROLLER: 1, T.COMPUTE: 4, T.CALLS: 1}


def test_before_the_first_wait_it_is_starting_whatever_is_called() -> None:
    run = Run()
    with run.busy.trainer_in(T.COMPUTE), run.busy.trainer_in(T.SYNC):
        run.passes(3)
    assert run.trainer == {T.STARTING: 3}
    with run.busy.trainer_in(T.INCIDENT):
        run.passes(1)
    assert run.trainer == {T.STARTING: 3, T.INCIDENT: 1}


def test_an_incident_outweighs_a_checkpoint_that_outweighs_a_snapshot_that_outweighs_calls() -> (
    None
):
    run = serving()
    with ExitStack() as stack:
        for work in (T.COMPUTE, T.SYNC, T.CHECKPOINT, T.INCIDENT):
            stack.enter_context(run.busy.trainer_in(work))
            run.passes(1)
    assert run.trainer == {T.CALLS: 1, T.SYNC: 1, T.CHECKPOINT: 1, T.INCIDENT: 1}


def test_two_blocks_may_end_in_the_order_they_began() -> None:
    run = serving()
    first, second = run.busy.trainer_in(T.INCIDENT), run.busy.trainer_in(T.CHECKPOINT)
    first.__enter__()
    second.__enter__()
    run.passes(1)
    first.__exit__(None, None, None)
    run.passes(2)
    second.__exit__(None, None, None)
    run.passes(4)
    assert run.trainer == {T.INCIDENT: 1, T.CHECKPOINT: 2, T.WAITING_GROUPS: 4}


def test_a_block_that_raises_ends_too() -> None:
    run = serving()
    with pytest.raises(ValueError, match="x"), run.busy.trainer_in(T.INCIDENT):
        raise ValueError("x")
    run.passes(1)
    assert run.trainer == {T.WAITING_GROUPS: 1}


# --- engines -------------------------------------------------------------------------------------


def test_an_engine_is_starting_until_it_has_served() -> None:
    run = Run()
    run.passes(1)
    run.becomes(health=Health.STALE)
    run.passes(2)
    run.becomes(health=Health.HEALTHY)
    run.passes(4)
    assert run.fleet == {G.STARTING: 3, G.WAITING_GATE: 4}


def test_an_engine_that_dies_is_an_incident_until_it_waits_for_weights() -> None:
    run = serving()
    for health in (Health.SUSPECT, Health.DEAD, Health.RESTARTING, Health.STALE):
        run.becomes(health=health, outstanding=0)
        run.passes(1)
    with run.busy.syncing(run.engines[0]):
        run.passes(1)
        run.becomes(health=Health.HEALTHY)
    run.passes(1)
    assert run.fleet == {G.INCIDENT: 3, G.WAITING_WEIGHTS: 1, G.SYNC: 1, G.WAITING_GATE: 1}


def test_time_with_groups_out_is_compute_as_far_as_the_engine_says_so() -> None:
    run = serving()
    run.becomes(outstanding=2)
    run.passes(8)
    run.becomes(outstanding=1, busy_s=5.0)
    assert run.fleet == {G.COMPUTE: 5, G.EPISODES: 3}
    run.becomes(outstanding=0, busy_s=100.0)
    assert run.fleet == {G.COMPUTE: 8}, "never more than there was"


def test_a_pause_is_taken_out_of_the_time_of_its_sync_only() -> None:
    run = serving()
    run.becomes(outstanding=1)
    run.passes(4)
    with run.busy.syncing(run.engines[0]):
        run.passes(2)
        run.busy.paused(0.5)
    run.passes(2)
    assert run.fleet == {G.EPISODES: 7.5, G.SYNC: 0.5}
    run.becomes(outstanding=0)
    with run.busy.syncing(run.engines[0]):
        run.passes(1)
        run.busy.paused(1.0)
    assert run.fleet[G.SYNC] <= 0.5 + 1 + 1
    assert sum(run.fleet.values()) == 9


def test_a_pinned_engine_evaluates_and_its_decoding_is_no_training_compute() -> None:
    run = serving()
    run.becomes(outstanding=1)
    run.passes(6)
    run.becomes(outstanding=0, pinned=True)
    run.passes(2)
    run.becomes(pinned=False, health=Health.STALE)
    run.passes(1)
    run.becomes(health=Health.HEALTHY, busy_s=4.0)  # one report over both
    assert run.fleet == {G.COMPUTE: 3, G.EPISODES: 3, G.EVALUATION: 2, G.WAITING_WEIGHTS: 1}


def test_while_a_sync_drains_the_fleet_engines_without_work_wait_for_weights() -> None:
    run = serving(3)
    run.becomes(2, outstanding=1)
    run.passes(1)
    run.busy.engines_wait(G.WAITING_WEIGHTS)
    run.passes(2)
    run.becomes(2, outstanding=0)
    run.becomes(1, health=Health.SUSPECT)
    run.passes(4)
    run.busy.engines_wait(G.WAITING_GATE)
    run.passes(8)
    assert run.fleet == {
        G.WAITING_GATE: 2 * 1 + 2 * 8,
        G.WAITING_WEIGHTS: 2 * 2 + 2 * 4,
        G.EPISODES: 1 + 2,
        G.INCIDENT: 4 + 8,
    }


def test_an_engine_that_joins_later_counts_from_then_on() -> None:
    run = serving()
    run.passes(5)
    run.busy.engine_changed(EngineRecord("generator-9", Health.HEALTHY))
    run.passes(1)
    assert run.fleet == {G.WAITING_GATE: 7}


# --- whatever happens ----------------------------------------------------------------------------

ticks_s = st.integers(0, 4096).map(lambda ticks: ticks / 1024)  # sums are exact


trainer_moves = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([*T])),
    st.tuples(st.just("block"), st.sampled_from([T.INCIDENT, T.CHECKPOINT, T.SYNC, T.COMPUTE])),
    st.tuples(st.just("lap"), st.none()),
    st.tuples(st.just("computed"), ticks_s),
)


@given(st.lists(st.tuples(trainer_moves, ticks_s), max_size=40))
def test_the_trainers_categories_sum_to_the_wall_time(
    story: list[tuple[tuple[str, Any], float]],
) -> None:
    run, open_, laps = Run(), list[Any](), list[dict[str, float]]()
    for (move, fact), duration_s in story:
        match move:
            case "wait":
                run.busy.trainer_waits(fact)
            case "computed":
                run.busy.add_computing(fact)
            case "lap":
                laps.append(run.busy.lap()[0])
            case "block":
                block = run.busy.trainer_in(fact)
                block.__enter__()
                open_.append(block)
            case _:
                pass
        if len(open_) > 2:
            open_.pop(0).__exit__(None, None, None)  # the oldest first
        run.passes(duration_s)
    laps.append(run.busy.lap()[0])
    elapsed_s = run.clock.now_s - 100.0
    assert sum(run.busy.trainer_seconds().values()) == elapsed_s
    assert all(value >= 0 for value in run.busy.trainer_seconds().values())
    assert all(value >= 0 for lap in laps for value in lap.values())
    assert sum(sum(lap.values()) for lap in laps) == elapsed_s


engine_moves = st.one_of(
    st.tuples(st.just("health"), st.sampled_from([*Health])),
    st.tuples(st.just("outstanding"), st.integers(0, 2)),
    st.tuples(st.just("pinned"), st.booleans()),
    st.tuples(st.sampled_from(["busy", "paused"]), ticks_s),
    st.tuples(st.sampled_from(["sync", "lap"]), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([*G])),
)


@given(st.lists(st.tuples(st.integers(0, 2), engine_moves, ticks_s), max_size=40))
def test_the_fleets_categories_sum_to_the_wall_time_of_all_engines(
    story: list[tuple[int, tuple[str, Any], float]],
) -> None:
    run, syncs, laps = Run(3), list[Any](), list[dict[str, float]]()
    for number, (move, fact), duration_s in story:
        engine = run.engines[number]
        match move:
            case "busy":
                run.becomes(number, busy_s=engine.busy_s + fact)
            case "paused":
                run.busy.paused(fact)
            case "lap":
                laps.append(run.busy.lap()[1])
            case "wait":
                run.busy.engines_wait(fact)
            case "sync":
                sync = run.busy.syncing(engine)
                sync.__enter__()
                syncs.append(sync)
            case _:
                run.becomes(number, **{move: fact})
        if len(syncs) > 2:
            syncs.pop(0).__exit__(None, None, None)
        run.passes(duration_s)
    laps.append(run.busy.lap()[1])
    elapsed_s = 3 * (run.clock.now_s - 100.0)
    assert sum(run.busy.engine_seconds().values()) == pytest.approx(elapsed_s)
    assert all(value >= 0 for value in run.busy.engine_seconds().values())
    assert all(value >= 0 for lap in laps for value in lap.values())
    assert sum(sum(lap.values()) for lap in laps) == pytest.approx(elapsed_s)


def test_a_late_report_is_credited_to_the_next_lap() -> None:
    run = serving()
    run.busy.lap()
    run.becomes(outstanding=1)
    run.passes(10)
    assert run.busy.lap()[1][G.EPISODES] == 10
    run.becomes(busy_s=8.0)
    run.passes(1)
    second = run.busy.lap()[1]
    assert (second[G.COMPUTE], second[G.EPISODES]) == (1, 0)
    run.passes(10)
    third = run.busy.lap()[1]
    assert (third[G.COMPUTE], third[G.EPISODES]) == (7, 3)


def test_shares_leave_the_start_out_and_sum_to_one() -> None:
    run = Run()
    run.passes(100)
    run.becomes(health=Health.HEALTHY)
    run.busy.trainer_waits(T.WAITING_GROUPS)
    run.becomes(outstanding=1)
    run.passes(4)
    assert run.busy.shares() == ({T.WAITING_GROUPS: 1.0}, {G.EPISODES: 1.0})
