"""A run whose trainer has two ranks, each of which sends engines what it holds."""

import random

import psutil
import pytest

from offbeat.controller.events import Rewound
from offbeat.controller.journal import recover
from tests.support.live_run import LiveRun, offbeat, until
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, STUB, Start

DETERMINISTIC = ROOT / "recipes" / "deterministic.yaml"
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
SMALL = ("groups_per_step=4", "samples_per_group=4", "trainer.data_parallel=2")
RESHARD = ("sync.transport=reshard", "sync.chunk_mib=0.1", "sync.canary_interval=1")


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


def _told(records: RunRecords) -> list[tuple[float, float]]:
    return [(line["train/loss"], line["train/grad_norm"]) for line in records.metrics]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_weights_that_each_rank_sent_are_those_that_rank_0_gathered_and_sent(start: Start) -> None:
    """Losses and gradients of a deterministic run, to the last bit, whoever sends."""
    with start("gathered", DETERMINISTIC, *SMALL, "steps=5") as run:
        gathered = _told(_finished(run))
    with start("reshard", DETERMINISTIC, *SMALL, *RESHARD, "steps=5") as run:
        records = _finished(run)
    assert all(norm for _, norm in gathered), "gradients that are zero prove nothing"
    assert _told(records) == gathered
    assert records.summary.restarts == 0, (
        "a canary that fails makes an engine sync anew, or restart"
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_whose_second_rank_is_killed_sends_on_from_the_next_processes(start: Start) -> None:
    settings = ("steps=24", "checkpoint.interval=4")
    with start("killed", QUICKSTART, *SMALL, *RESHARD, *settings) as run:
        run.logged("trainer.ready", within_s=600)
        run.trained_steps(random.Random(3).randrange(7, 11))
        run.holding("trainer-rank1.log").kill()
        records = _finished(run)
    assert records.summary.trainer_version == 24
    assert len([event for event in records.events if isinstance(event, Rewound)]) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_engine_that_is_killed_comes_back_and_the_other_serves_on(start: Start) -> None:
    with start("engines", STUB, "steps=48", "generator.engines=2", *RESHARD) as run:
        run.trained_steps(4)
        _kill(run.actor("StubEngineActor"))
        records = _finished(run)
    assert records.summary.restarts >= 1
    assert records.summary.trainer_version == 48


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_trainer_that_is_killed_sends_again_from_its_next_incarnation(start: Start) -> None:
    settings = ("steps=40", "generator.engines=2", "checkpoint.interval=4")
    with start("trainer", STUB, *settings, *RESHARD) as run:
        run.trained_steps(7)
        _kill(run.actor("StubTrainerActor"))
        records = _finished(run)
    assert len([event for event in records.events if isinstance(event, Rewound)]) == 1
    assert records.summary.trainer_version == 40


@pytest.mark.long
@pytest.mark.timeout(600)
def test_weights_of_a_paused_run_are_equal_on_every_leg_and_those_of_another_model_are_not(
    start: Start,
) -> None:
    """Checkpoints of two ranks, engines that took regions: by the command, beside the run."""
    with start("verified", QUICKSTART, *SMALL, *RESHARD, "checkpoint.interval=1") as run:
        run.logged("trainer.ready", within_s=600)
        run.trained_steps(4, within_s=600)
        assert offbeat("control", run.run_dir, "pause")[0] == 0
        version = run.until("engines serve the last step", lambda: _verified(run), within_s=600)
        assert version >= 4
        untrained = ROOT / "models" / "tiny-addition"
        code, text = offbeat("verify-weights", run.run_dir, "--engine", "--against", untrained)
        assert code == 1, text
        differing, *equal = sorted(text.splitlines(), key=lambda line: "DIFFERS" not in line)
        assert differing.startswith("export") and f"state_{version} and {untrained}" in differing
        assert equal == _equal_legs(version), "the engine serves what was trained"

        assert offbeat("control", run.run_dir, "resume")[0] == 0
        run.trains_on(2, within_s=600)
        run.stop()
        records = _finished(run)
    assert records.summary.trainer_version > version
    code, text = offbeat("verify-weights", run.run_dir)
    assert code == 0, text
    assert text.startswith("export") and f"state_{records.summary.trainer_version} and" in text


def _verified(run: LiveRun) -> int | None:
    """The version of the last step, once engine and checkpoint of it are equal on both legs."""
    version = recover(run.run_dir / "journal").trainer_version
    code, text = offbeat("verify-weights", run.run_dir, "--engine")
    assert code != 1, f"a weight differs\n{text}"
    legs = [line for line in text.splitlines() if not line.startswith("export")]
    return version if legs == _equal_legs(version) else None


def _equal_legs(version: int) -> list[str]:
    return [f"{leg:8}generator-0, version {version}: equal" for leg in ("wire", "load")]
