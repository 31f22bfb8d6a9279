"""kill -9 of a run in one process on the device, and its resume."""

import time
from pathlib import Path
from typing import Final

from offbeat.controller.events import Rewound
from tests.gpu.conftest import Measured
from tests.gpu.local_run import QUICKSTART, resume, start
from tests.support.run_records import RunRecords

STEPS: Final = 40
KILLED_AFTER: Final = 12


def test_a_run_that_is_killed_continues_from_its_checkpoint(
    run_root: Path, device: str, measured: Measured
) -> None:
    run_dir = run_root / "killed"
    with start(QUICKSTART, run_dir, device, f"steps={STEPS}", "checkpoint.interval=5") as run:
        run.trained_steps(KILLED_AFTER, within_s=120)
    killed_at = time.monotonic()
    with resume(run_dir) as run:
        at = run.steps_so_far
        run.trained_steps(at + 1, within_s=120)
        resumed_s = time.monotonic() - killed_at
        assert run.exit_code(within_s=120) == 0
        run.nothing_is_left()
    records = RunRecords.read(run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.trainer_version == STEPS
    assert any(isinstance(event, Rewound) for event in records.events)
    how = f"quickstart, one process, killed after {KILLED_AFTER} steps"
    measured("kill -9, until the resumed run has trained a step", resumed_s, "s", how)
