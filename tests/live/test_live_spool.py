"""Finished groups outlive their controller: they are trained without being rolled out again."""

from pathlib import Path

import pytest

from offbeat.controller.events import Dispatched, Opened, Returned
from offbeat.controller.journal import recover
from offbeat.controller.ledger import Ledger
from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

STEPS = 12
SETTINGS = (
    f"steps={STEPS}",
    "stub.step_s=0.8",
    "stub.median_rollout_s=0.02",
    "sampler.max_staleness=2",
    "checkpoint.interval=1",
)
"""Rollouts are fast and steps slow: a batch or two wait whenever the trainer works."""


def _groups_wait(run: LiveRun) -> None:
    """Wait until a whole batch is ready while a step goes on; the version before it is saved."""

    def look() -> bool:
        known = recover(run.run_dir / "journal")
        return known.trainer_version in known.checkpoints and len(known.ready) >= 4

    run.until("ready groups", look)


def _kept(records: RunRecords) -> int:
    """Groups that were ready or in training as the second incarnation began; none was dispatched again."""
    second = next(
        at
        for at, event in enumerate(records.events)
        if isinstance(event, Opened) and event.incarnation == 2
    )
    before = Ledger.fold(records.events[:second])
    held = before.ready.keys() | before.training.keys()
    for event in records.events[second:]:
        if isinstance(event, Dispatched):
            assert event.prompt_index not in held
        assert not (isinstance(event, Returned) and event.reason == "payload_lost")
    return len(held)


def _finished(run_dir: Path) -> RunRecords:
    records = RunRecords.read(run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.trained == records.summary.groups.drawn == 4 * STEPS
    assert not (run_dir / "spool").exists(), "a run at its end needs no spool"
    return records


@pytest.mark.only_ray
def test_a_new_controller_trains_the_groups_that_the_killed_one_had_ready(start: Start) -> None:
    with start("replaced", STUB, *SETTINGS) as run:
        run.trained_steps(1)
        _groups_wait(run)
        run.actor("ControllerActor").kill()
        assert run.exit_code() == 0
        run.nothing_is_left()
        run.talks_to_people()
    assert _kept(_finished(run.run_dir)) >= 4


def test_a_resumed_run_trains_the_groups_that_were_ready_when_everything_died(
    start: Start,
) -> None:
    """What is ready was sampled from a version that the trainer still has: its last checkpoint."""
    with start("resumed-spool", STUB, *SETTINGS) as run:
        run.trained_steps(1)
        _groups_wait(run)
        run.kill_everything()
    with start("resumed-spool", None, "--resume", str(run.run_dir)) as again:
        assert again.exit_code() == 0
    assert _kept(_finished(run.run_dir)) >= 4
