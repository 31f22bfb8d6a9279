"""An environment worker that is lost is in the journal once, with its reason, until it is back."""

from offbeat.controller.events import AnyEvent, Event, Joined, Opened, WorkerLost
from offbeat.controller.group_table import GroupTable
from offbeat.controller.run_stats import RunStats, summarize
from offbeat.controller.state import RunState
from offbeat.messages.failures import Component
from offbeat.telemetry.summary import Summary
from tests.support.fakes import FakeRollouts
from tests.support.scenarios import play, use_rollouts
from tests.support.virtual_time import run
from tests.support.world import World

WORKER = "environment-0"


def joined(process: str) -> Joined:
    return Joined(Component.WORKER, WORKER, process)


def recorded(*reports: tuple[str, str]) -> list[AnyEvent]:
    """What a controller writes of a worker that joins or is lost, in this order."""
    world = World()

    async def story() -> None:
        state: RunState = world.controller().state
        for what, of in reports:
            if what == "joined":
                state.joined(Component.WORKER, WORKER, of)
            else:
                state.worker_lost(WORKER, of)

    run(story())
    return [each for each in world.journal.events if isinstance(each, Joined | WorkerLost)]


def test_a_loss_is_recorded_once_however_many_calls_report_it() -> None:
    reports = ("joined", "a"), ("lost", "killed"), ("lost", "killed"), ("joined", "b")
    assert recorded(*reports) == [joined("a"), WorkerLost(WORKER, "killed"), joined("b")]


def test_the_process_that_comes_back_by_itself_is_recorded_as_back() -> None:
    reports = ("joined", "a"), ("lost", "unreachable"), ("joined", "a"), ("joined", "a")
    assert recorded(*reports) == [joined("a"), WorkerLost(WORKER, "unreachable"), joined("a")]


def test_a_worker_that_was_replaced_while_nobody_called_it_was_lost_too() -> None:
    lost = WorkerLost(WORKER, "another process answers under its name")
    assert recorded(("joined", "a"), ("joined", "b")) == [joined("a"), lost, joined("b")]


def summary_of(*events: Event) -> Summary:
    totals = RunStats.fold(events).totals
    names = {"run_id": "run-1", "name": "tiny", "steps_asked": 1}
    return summarize(GroupTable(), totals, **names, outcome="failed", error=None)  # type: ignore[arg-type]


OPENED, RESUMED = Opened("run-1", 1, "a"), Opened("run-1", 2, "b")


def test_a_summary_counts_losses_and_names_the_workers_that_are_not_back() -> None:
    gone = WorkerLost(WORKER, "killed"), WorkerLost("environment-1", "killed")
    summary = summary_of(OPENED, joined("a"), *gone, joined("b"))
    found = summary.worker_losses, summary.worker_restarts, summary.workers_lost
    assert found == (2, 1, ["environment-1"])


def test_the_workers_of_a_resumed_run_are_new_and_none_of_them_is_lost() -> None:
    summary = summary_of(OPENED, joined("a"), WorkerLost(WORKER, "killed"), RESUMED, joined("b"))
    found = summary.worker_losses, summary.worker_restarts, summary.workers_lost
    assert found == (1, 0, [])


def test_the_status_names_a_worker_while_all_workers_are_lost() -> None:
    world, seen = World({"environment": {"workers": 2}, "steps": 1}), list[str]()
    use_rollouts(world, FakeRollouts(world.generators, rollout_s=60.0))
    status = lambda: seen.append(world.built.progress.status().waiting_for)  # noqa: E731
    play(
        world,
        (10.0, lambda: world.built.state.worker_lost(WORKER, "killed")),
        (11.0, status),
        (12.0, lambda: world.built.state.worker_lost("environment-1", "killed")),
        (13.0, status),
        (14.0, lambda: world.built.state.joined(Component.WORKER, WORKER, "b")),
        (15.0, status),
    )
    ready = "ready groups (train pump)"
    assert seen == [ready, "a new process of environment-0 (all workers are lost)", ready]
