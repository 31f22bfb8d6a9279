"""Real runs whose weights are broadcast over gloo: the same controller, another transport."""

import psutil

from offbeat.controller.events import Released, Rewound
from tests.ray.conftest import ROOT, STUB, Start
from tests.support.live_run import LiveRun, until
from tests.support.run_records import RunRecords

DETERMINISTIC = ROOT / "recipes" / "deterministic.yaml"
SMALL = ("steps=5", "groups_per_step=4", "samples_per_group=4")
IN_16_BITS = ("model.dtype=bfloat16", "trainer.optimizer.learning_rate=1e-5")  # few values change
GLOO = ("sync.transport=gloo", "sync.slack_s=20", "sync.deadline_s=100")


def _kill(process: psutil.Process) -> None:
    process.kill()
    until("the process is gone", lambda: not process.is_running(), within_s=10)


def _finished(run: LiveRun) -> RunRecords:
    assert run.exit_code() == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    run.nothing_is_left()
    return records


def _told(records: RunRecords) -> tuple[list[str], list[float]]:
    released = [event.digest for event in records.events if isinstance(event, Released)]
    return released, [line["train/loss"] for line in records.metrics]


def test_weights_that_came_over_gloo_are_those_that_came_through_the_object_store(
    start: Start,
) -> None:
    """Samples, losses and weights of a deterministic run, to the last bit, by deltas over gloo."""
    with start("store", DETERMINISTIC, *SMALL, *IN_16_BITS) as run:
        through_store = _told(_finished(run))
    with start("gloo", DETERMINISTIC, *SMALL, *IN_16_BITS, *GLOO, "sync.delta=true") as run:
        records = _finished(run)
    assert any(through_store[1]), "losses that are all zero prove nothing"
    assert _told(records) == through_store
    assert sum(line["sync/full_releases"] for line in records.metrics) == 1, "the first one alone"
    assert records.metrics[-1]["sync/sent_bytes"] < records.metrics[-1]["sync/bytes"] / 2


def test_an_engine_that_is_killed_comes_back_and_the_other_serves_on(start: Start) -> None:
    with start("engines", STUB, "steps=48", "generator.engines=2", *GLOO) as run:
        run.trained_steps(4)
        _kill(run.actor("StubEngineActor"))
        records = _finished(run)
    assert records.summary.restarts >= 1
    assert records.summary.trainer_version == 48


def test_a_trainer_that_is_killed_sends_again_from_its_next_incarnation(start: Start) -> None:
    settings = ("steps=40", "generator.engines=2", "checkpoint.interval=4")
    with start("trainer", STUB, *settings, *GLOO) as run:
        run.trained_steps(7)
        _kill(run.actor("StubTrainerActor"))
        records = _finished(run)
    assert len([event for event in records.events if isinstance(event, Rewound)]) == 1
    assert records.summary.trainer_version == 40
