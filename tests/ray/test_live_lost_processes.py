"""``kill -9`` of each process of a run, at moments drawn from a seed."""

import random
import re

import psutil

from offbeat.controller.events import Opened, Rewound
from tests.ray.conftest import ROOT, STUB, Start
from tests.support.live_run import LiveRun, until
from tests.support.run_records import RunRecords

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def _kill(process: psutil.Process) -> None:
    process.kill()
    until("the process is gone", lambda: not process.is_running(), within_s=10)


def _finished_with_its_books_in_order(run: LiveRun, steps: int) -> RunRecords:
    assert run.exit_code() == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert records.summary.trainer_version == steps
    assert records.summary.max_staleness_trained <= 1
    run.nothing_is_left()
    run.talks_to_people()
    return records


def test_engines_and_environment_workers_come_back(start: Start) -> None:
    """Twice the only engine and once the only worker; every group in flight is sent out again."""
    early, middle, late = (random.Random(11).randrange(low, low + 8) for low in (3, 14, 25))
    with start("come-back", STUB, "steps=36") as run:
        run.trained_steps(early)
        _kill(run.actor("StubEngineActor"))
        run.trained_steps(middle)
        _kill(run.actor("EnvironmentActor"))
        run.trained_steps(late)
        _kill(run.actor("StubEngineActor"))
        records = _finished_with_its_books_in_order(run, 36)
    assert records.summary.restarts >= 2
    assert records.summary.groups.dropped == {}
    assert "environment-0 was lost" in (run.run_dir / "logs" / "controller.log").read_text()


def test_an_engine_killed_while_it_takes_weights_is_left_behind_and_comes_back(
    start: Start,
) -> None:
    with start("mid-sync", STUB, "steps=7", "stub.sync_s=1") as run:
        run.trained_steps(random.Random(12).randrange(2, 5))
        _kill(run.actor("StubEngineActor"))  # a step was just trained: a second of sync begins
        run.logged("sync.engine_left_behind")
        records = _finished_with_its_books_in_order(run, 7)
    assert records.summary.restarts >= 1


def test_a_run_goes_on_without_an_engine_that_may_not_be_restarted_any_more(start: Start) -> None:
    """A worker that is started anew afterwards finds the engine that is left."""
    limits = ("generator.engines=2", "generator.restart_budget=0", "generator.probe_deadline_s=1")
    with start("retired", STUB, "steps=150", *limits) as run:
        run.trained_steps(3)
        _kill(run.actor("StubEngineActor"))
        run.logged("engine.retired")
        _kill(run.actor("EnvironmentActor"))
        records = _finished_with_its_books_in_order(run, 150)
    assert len(records.summary.engines_retired) == 1
    assert records.summary.groups.dropped == {}


def test_an_engine_that_hangs_is_replaced(start: Start) -> None:
    """It answers no probe: the controller has it killed, and its groups are sent out again."""
    with start("hang", STUB, "steps=12") as run:
        run.trained_steps(3)
        run.actor("StubEngineActor").suspend()
        run.logged("engine.lost")
        records = _finished_with_its_books_in_order(run, 12)
    assert records.summary.restarts >= 1


def test_an_environment_worker_that_hangs_is_replaced(start: Start) -> None:
    """It lets its groups' deadline pass and answers nothing: the controller has it killed."""
    with start("hung-worker", STUB, "steps=60", "rollout.deadline_s=3") as run:
        run.trained_steps(3)
        run.actor("EnvironmentActor").suspend()
        run.logged("worker.lost")
        records = _finished_with_its_books_in_order(run, 60)
    assert records.summary.groups.dropped == {}


def test_a_killed_worker_that_had_very_many_groups_costs_none_of_them(start: Start) -> None:
    with start(
        "many-groups", STUB, "steps=8", "groups_per_step=24", "rollout.consecutive_failures=8"
    ) as run:
        run.trained_steps(3)
        _kill(run.actor("EnvironmentActor"))
        records = _finished_with_its_books_in_order(run, 8)
    assert records.summary.groups.dropped == {}


def test_a_run_whose_raylet_is_gone_ends_and_says_so(start: Start) -> None:
    """No process can be started any more: no controller after the one that dies with it, either."""
    with start("no-raylet", STUB, "steps=10000") as run:
        run.trained_steps(3)
        run.process("raylet/raylet ").kill()
        assert run.exit_code(within_s=100) == 1
        assert "ClusterLost: this machine is no part of the Ray cluster any more" in run.err
        run.nothing_is_left()


def test_a_run_whose_control_service_is_gone_ends_with_a_summary(start: Start) -> None:
    """Ray would end the driver after a minute, without a word."""
    with start("no-gcs", STUB, "steps=10000") as run:
        run.trained_steps(3)
        run.process("gcs_server").kill()
        assert run.exit_code(within_s=50) == 1
        assert "GcsLost: Ray's control service (GCS) at 127.0.0.1:" in run.err
        summary = RunRecords.read(run.run_dir).summary
        assert (summary.outcome, summary.trainer_version >= 3) == ("failed", True)
        run.nothing_is_left()


def test_an_embedded_engine_that_was_killed_takes_the_current_weights_again(start: Start) -> None:
    with start("embedded", QUICKSTART, "steps=60", "groups_per_step=8") as run:
        run.trained_steps(random.Random(13).randrange(5, 15))
        _kill(run.actor("EmbeddedEngineActor"))
        records = _finished_with_its_books_in_order(run, 60)
    assert records.summary.restarts >= 1


def test_a_trainer_that_was_killed_goes_back_to_its_checkpoint_and_the_run_goes_on(
    start: Start,
) -> None:
    with start("trainer-back", STUB, "steps=20", "checkpoint.interval=4") as run:
        run.trained_steps(random.Random(14).randrange(6, 12))
        _kill(run.actor("StubTrainerActor"))
        records = _finished_with_its_books_in_order(run, 20)
    rewound = [event for event in records.events if isinstance(event, Rewound)]
    assert len(rewound) == 1 and rewound[0].to_version % 4 == 0 < rewound[0].to_version
    assert records.summary.groups.trained == records.summary.groups.drawn == 80


def test_a_trainer_that_hangs_is_replaced_at_its_deadline(start: Start) -> None:
    calls = ("trainer.step_deadline_s", "checkpoint.deadline_s", "sync.deadline_s")
    limits = (*(f"{call}=3" for call in calls), "checkpoint.interval=2")
    with start("trainer-hangs", STUB, "steps=12", *limits) as run:
        run.trained_steps(5)
        run.actor("StubTrainerActor").suspend()
        run.logged("run.rewound")
        records = _finished_with_its_books_in_order(run, 12)
    assert records.summary.groups.trained == records.summary.groups.drawn == 48


def test_a_run_without_a_budget_for_trainers_fails_at_once_and_says_so(start: Start) -> None:
    with start("no-trainer", STUB, "trainer.restart_budget=0") as run:
        run.trained_steps(3)
        trainer = run.actor("StubTrainerActor")
        _kill(trainer)
        assert run.exit_code(within_s=20) == 1
        line = run.err.splitlines()[0]
        assert "trainer rank 0 was lost" in line and "trainer.restart_budget" in line
        assert re.search(r"at step ([4-9]|1\d)\b", line)
        assert re.search(r"its process (\d+ )?was killed or crashed", line)
        run.talks_to_people()
        records = RunRecords.read(run.run_dir)
        records.agree()
        assert records.summary.outcome == "failed"
        run.nothing_is_left()


def test_a_controller_that_was_killed_is_replaced_and_goes_on_with_the_living_trainer(
    start: Start,
) -> None:
    """Twice; no step is lost or doubled, and trainer and engine are the same processes as before."""
    with start("controller-back", STUB, "steps=80") as run:
        run.trained_steps(random.Random(15).randrange(4, 9))
        trainer, engine = run.actor("StubTrainerActor"), run.actor("StubEngineActor")
        for _ in range(2):
            _kill(run.actor("ControllerActor"))
            run.trained_steps(run.steps_so_far + 6)  # more than the dead one had asked for
        assert trainer.is_running() and engine.is_running()
        records = _finished_with_its_books_in_order(run, 80)
    lives = [event.incarnation for event in records.events if isinstance(event, Opened)]
    assert lives == [1, 2, 3]
    assert records.summary.groups.trained == records.summary.groups.drawn == 320
    assert not any(isinstance(event, Rewound) for event in records.events)
    assert sum(records.summary.staleness_histogram.values()) == 320 * 4


def test_a_run_without_a_budget_for_controllers_fails_at_once_and_says_so(start: Start) -> None:
    """The driver takes everything down; what the journal knew is in its summary."""
    with start("no-controller", STUB, "supervision.controller_restart_budget=0") as run:
        run.trained_steps(5)
        _kill(run.actor("ControllerActor"))
        assert run.exit_code(within_s=20) == 1
        assert "ActorLost: controller was lost during the run" in run.err.splitlines()[0]
        run.talks_to_people()
        summary = RunRecords.read(run.run_dir).summary
        assert summary.outcome == "failed"
        assert summary.trainer_version >= 4
        run.nothing_is_left()


def test_a_run_whose_driver_was_killed_is_resumed_from_its_directory_alone(start: Start) -> None:
    """Every process dies; one command goes on from the last checkpoint, and no prompt is lost."""
    with start("resumed", STUB, "steps=30", "checkpoint.interval=4") as run:
        run.trained_steps(random.Random(16).randrange(9, 14))
        run.kill_everything()
        run_dir = run.run_dir
    with start("resumed", None, "--resume", str(run_dir)) as run:
        assert run.exit_code() == 0
        records = RunRecords.read(run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.trained == records.summary.groups.drawn == 120
    rewound = [event for event in records.events if isinstance(event, Rewound)]
    assert [event.to_version % 4 for event in rewound] == [0] and rewound[0].to_version >= 8
