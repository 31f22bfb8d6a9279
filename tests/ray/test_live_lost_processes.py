"""``kill -9`` of each process of a run, at moments drawn from a seed."""

import random
import re

import psutil

from offbeat.controller.events import Opened, Rewound
from tests.support.live_run import LiveRun, until
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, STUB, Start

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
ENDLESS = "steps=100000"
"""Of a run that is stopped when the test has seen what it waits for, however slow the machine is."""


def _kill(process: psutil.Process) -> None:
    process.kill()
    until("the process is gone", lambda: not process.is_running(), within_s=10)


def _stopped_with_its_ledger_in_order(run: LiveRun) -> RunRecords:
    """Let the run train on, and end it."""
    run.trains_on()
    run.stop()
    assert run.exit_code() == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.dropped == {}
    assert records.summary.max_staleness_trained <= 1
    run.nothing_is_left()
    run.talks_to_people()
    return records


def test_engines_and_environment_workers_come_back(start: Start) -> None:
    """Twice the only engine and once the only worker; every group in flight is sent out again."""
    dice = random.Random(11)
    with start("come-back", STUB, ENDLESS) as run:
        run.trained_steps(dice.randrange(3, 11))
        for actor in ("StubEngineActor", "EnvironmentActor", "StubEngineActor"):
            _kill(run.actor(actor))
            run.trains_on(dice.randrange(4, 11))
        records = _stopped_with_its_ledger_in_order(run)
    assert (records.summary.restarts, records.summary.worker_restarts) == (2, 1)
    assert (records.summary.worker_losses, records.summary.workers_lost) == (1, [])
    assert "environment-0 was lost" in (run.run_dir / "logs" / "controller.log").read_text()


def test_an_engine_killed_while_it_takes_weights_is_left_behind_and_comes_back(
    start: Start,
) -> None:
    with start("mid-sync", STUB, ENDLESS, "stub.sync_s=3") as run:
        engine = run.actor("StubEngineActor")
        run.trained_steps(2)
        _kill(engine)  # a step was just trained: three seconds of sync begin
        run.logged("sync.engine_left_behind")
        records = _stopped_with_its_ledger_in_order(run)
    assert records.summary.restarts == 1


def test_a_run_goes_on_without_an_engine_that_may_not_be_restarted_any_more(start: Start) -> None:
    """A worker that is started anew afterwards finds the engine that is left."""
    limits = ("generator.engines=2", "generator.restart_budget=0", "generator.probe_deadline_s=1")
    with start("retired", STUB, ENDLESS, *limits) as run:
        run.trained_steps(3)
        _kill(run.actor("StubEngineActor"))
        run.logged("engine.retired")
        _kill(run.actor("EnvironmentActor"))
        records = _stopped_with_its_ledger_in_order(run)
    assert len(records.summary.engines_retired) == 1


def test_an_engine_that_hangs_is_replaced(start: Start) -> None:
    """It answers no probe: the controller has it killed, and its groups are sent out again."""
    with start("hang", STUB, ENDLESS) as run:
        run.trained_steps(3)
        run.actor("StubEngineActor").suspend()
        run.logged("engine.lost")
        records = _stopped_with_its_ledger_in_order(run)
    assert records.summary.restarts == 1


def test_an_environment_worker_that_hangs_is_replaced(start: Start) -> None:
    """It lets its groups' deadline pass and answers nothing: the controller has it killed."""
    with start("hung-worker", STUB, ENDLESS, "rollout.deadline_s=3") as run:
        run.trained_steps(3)
        run.actor("EnvironmentActor").suspend()
        run.logged("worker.lost")
        records = _stopped_with_its_ledger_in_order(run)
    assert (records.summary.worker_losses, records.summary.worker_restarts) == (1, 1)


def test_a_killed_worker_that_had_very_many_groups_costs_none_of_them(start: Start) -> None:
    many = ("groups_per_step=24", "rollout.consecutive_failures=8")
    with start("many-groups", STUB, ENDLESS, *many) as run:
        run.trained_steps(3)
        _kill(run.actor("EnvironmentActor"))
        records = _stopped_with_its_ledger_in_order(run)
    assert records.summary.worker_restarts == 1


def test_a_run_whose_raylet_is_gone_ends_and_says_so(start: Start) -> None:
    """No process can be started any more: no controller after the one that dies with it, either."""
    with start("no-raylet", STUB, "steps=10000") as run:
        run.trained_steps(3)
        run.process("raylet/raylet ").kill()
        assert run.exit_code(within_s=300) == 1
        assert "ClusterLost: this machine is no longer part of the Ray cluster" in run.err
        run.nothing_is_left()


def test_a_run_whose_control_service_is_gone_ends_with_a_summary(start: Start) -> None:
    """Ray would end the driver after a minute, without a word."""
    with start("no-gcs", STUB, "steps=10000") as run:
        run.trained_steps(3)
        run.process("gcs_server").kill()
        assert run.exit_code(within_s=150) == 1
        assert "GcsLost: Ray's control service (GCS) at 127.0.0.1:" in run.err
        summary = RunRecords.read(run.run_dir).summary
        assert (summary.outcome, summary.trainer_version >= 3) == ("failed", True)
        run.nothing_is_left()


def test_an_embedded_engine_that_was_killed_takes_the_current_weights_again(start: Start) -> None:
    with start("embedded", QUICKSTART, ENDLESS, "groups_per_step=8") as run:
        run.trained_steps(random.Random(13).randrange(5, 15))
        _kill(run.actor("EmbeddedEngineActor"))
        records = _stopped_with_its_ledger_in_order(run)
    assert records.summary.restarts == 1


def test_a_trainer_that_was_killed_goes_back_to_its_checkpoint_and_the_run_goes_on(
    start: Start,
) -> None:
    with start("trainer-back", STUB, ENDLESS, "checkpoint.interval=4") as run:
        run.trained_steps(random.Random(14).randrange(6, 12))
        _kill(run.actor("StubTrainerActor"))
        run.logged("run.rewound")
        records = _stopped_with_its_ledger_in_order(run)
    rewound = [event for event in records.events if isinstance(event, Rewound)]
    assert len(rewound) == 1 and rewound[0].to_version % 4 == 0 < rewound[0].to_version
    assert records.summary.trainer_restarts == 1


def test_a_trainer_that_hangs_is_replaced_at_its_deadline(start: Start) -> None:
    calls = ("trainer.step_deadline_s", "checkpoint.deadline_s", "sync.deadline_s")
    limits = (*(f"{call}=3" for call in calls), "checkpoint.interval=2")
    with start("trainer-hangs", STUB, ENDLESS, *limits) as run:
        run.trained_steps(5)
        run.actor("StubTrainerActor").suspend()
        run.logged("run.rewound")
        records = _stopped_with_its_ledger_in_order(run)
    assert records.summary.trainer_restarts >= 1, "a busy machine may miss these deadlines again"


def test_a_run_without_a_budget_for_trainers_fails_at_once_and_says_so(start: Start) -> None:
    with start("no-trainer", STUB, "trainer.restart_budget=0") as run:
        run.trained_steps(3)
        trainer = run.actor("StubTrainerActor")
        _kill(trainer)
        assert run.exit_code(within_s=60) == 1
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
    with start("controller-back", STUB, ENDLESS) as run:
        run.trained_steps(random.Random(15).randrange(4, 9))
        trainer, engine = run.actor("StubTrainerActor"), run.actor("StubEngineActor")
        for _ in range(2):
            _kill(run.actor("ControllerActor"))
            run.trains_on(6)  # more than the dead one had asked for
        assert trainer.is_running() and engine.is_running()
        records = _stopped_with_its_ledger_in_order(run)
    incarnations = [event.incarnation for event in records.events if isinstance(event, Opened)]
    assert incarnations == [1, 2, 3]
    assert not any(isinstance(event, Rewound) for event in records.events)
    assert sum(records.summary.staleness_histogram.values()) == records.summary.groups.trained * 4


def test_a_run_without_a_budget_for_controllers_fails_at_once_and_says_so(start: Start) -> None:
    """The driver takes everything down; what the journal knew is in its summary."""
    with start("no-controller", STUB, "supervision.controller_restart_budget=0") as run:
        run.trained_steps(5)
        _kill(run.actor("ControllerActor"))
        assert run.exit_code(within_s=60) == 1
        assert "ActorLost: controller was lost during the run" in run.err.splitlines()[0]
        run.talks_to_people()
        summary = RunRecords.read(run.run_dir).summary
        assert summary.outcome == "failed"
        assert summary.trainer_version >= 4
        run.nothing_is_left()


def test_a_run_whose_driver_was_killed_is_resumed_from_its_directory_alone(start: Start) -> None:
    """Every process dies; one command goes on from the last checkpoint, and no prompt is lost."""
    with start("resumed", STUB, ENDLESS, "checkpoint.interval=4") as run:
        run.trained_steps(random.Random(16).randrange(9, 14))
        run.kill_everything()
        run_dir = run.run_dir
    with start("resumed", None, "--resume", str(run_dir)) as run:
        run.logged("run.recovered")
        records = _stopped_with_its_ledger_in_order(run)
    rewound = [event for event in records.events if isinstance(event, Rewound)]
    # None if every process ended between a checkpoint and the step behind it.
    assert len(rewound) <= 1
    assert all(event.to_version % 4 == 0 and event.to_version >= 8 for event in rewound)
