"""Ctrl-C and SIGTERM: the run ends in order, soon, and takes everything with it."""

import signal
from pathlib import Path

import pytest

from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

ENDLESS = """
import time
from pathlib import Path

Path("imported").touch()
time.sleep(1e6)

class Policy: ...
"""
ENDLESS_ONCE_CHECKED = """
import time
from pathlib import Path

if Path("checked").exists():
    Path("imported").touch()
    time.sleep(1e6)
Path("checked").touch()

class Policy: ...
"""
pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.mark.both_runtimes
@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        pytest.param(signal.SIGINT, False, 130, marks=pytest.mark.long),
        (signal.SIGINT, True, 130),  # as a terminal does it
        # as timeout and schedulers do it
        pytest.param(signal.SIGTERM, True, 143, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_run_in_order(
    start: Start, number: signal.Signals, *, whole_group: bool, code: int
) -> None:
    with start(f"{number.name}-{whole_group}", STUB, is_warm=False) as run:
        run.trained_steps(3)
        run.interrupt(number, whole_group=whole_group)
        assert run.exit_code(within_s=60) == code
        records = RunRecords.read(run.run_dir)
        records.agree()
        assert records.summary.outcome == "aborted"
        assert records.summary.error is not None and number.name in records.summary.error
        kept = run.run_dir / "checkpoints" / f"state_{records.summary.trainer_version}"
        assert kept.exists(), "nothing that was trained is trained again"
        written = (run.run_dir / "summary.json").stat().st_mtime_ns
        assert written <= kept.stat().st_mtime_ns, "the summary does not wait for a checkpoint"
        run.talks_to_people()
        run.nothing_is_left()


@pytest.mark.long
def test_a_run_whose_processes_all_get_a_signal_ends_soon_with_a_summary(start: Start) -> None:
    """As systemd and Slurm send it: the actors die, and Ray's control service with them."""
    with start("everybody", STUB, is_warm=False) as run:
        run.trained_steps(3)
        for process in reversed(run.processes()):
            process.send_signal(signal.SIGTERM)
        assert run.exit_code(within_s=120) == 143
        records = RunRecords.read(run.run_dir)
        assert records.summary.outcome == "aborted"
        assert records.summary.error is not None and "SIGTERM" in records.summary.error
        run.talks_to_people()
        run.nothing_is_left()


@pytest.mark.only_ray
def test_an_interrupt_while_ray_starts_leaves_nothing(start: Start) -> None:
    with start("early", STUB, is_warm=False) as run:
        run.process("gcs_server")
        run.interrupt(signal.SIGINT, whole_group=True)
        assert run.exit_code(within_s=60) == 130
        assert "SIGINT before an orderly end" in run.out
        run.talks_to_people()
        run.nothing_is_left()
    resume = ("--resume", str(run.run_dir), "steps=3", "runtime=local")
    with start("early", None, *resume, is_warm=False) as again:
        assert again.exit_code() == 0, "a directory without a record is not a dead end"


def test_an_interrupt_while_user_code_is_checked_waits_for_nobody(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    policy = ["sampler.name=custom", "sampler.target=endless:Policy"]
    with start("checked", STUB, *policy, cwd=tmp_path, is_warm=False) as run:
        run.until("the policy is imported", (tmp_path / "imported").exists)
        run.interrupt(signal.SIGINT, whole_group=True)
        assert run.exit_code(within_s=60) == 130
        run.nothing_is_left()


@pytest.mark.both_runtimes
def test_an_interrupt_before_the_run_has_begun_waits_for_nobody(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS_ONCE_CHECKED)
    policy = ["sampler.name=custom", "sampler.target=endless:Policy"]
    patience = "supervision.signal_grace_s=300"
    with start("starting", STUB, *policy, patience, cwd=tmp_path, is_warm=False) as run:
        run.until("the policy is imported", (tmp_path / "imported").exists)
        run.interrupt(signal.SIGINT, whole_group=True)
        assert run.exit_code(within_s=60) == 130
        assert "SIGINT before an orderly end" in run.out
        run.nothing_is_left()
