"""Ray's memory monitor ends the processes of a run, because its machine is short of memory.

The monitor looks at the whole machine, so this process takes the memory and gives it back.
"""

import psutil
import pytest

from tests.support.live_run import LiveRun, until
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

_MIB = 2**20
_MARGIN = 3 * 1024 * _MIB
"""What the machine may use beyond what it uses now: the run itself needs a good part of it."""
_PIECE = 64 * _MIB

pytestmark = pytest.mark.long


def _used() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def _take_memory_until_the_controller_is_gone(run: LiveRun) -> None:
    controller, taken = run.actor("ControllerActor"), list[bytes]()

    def is_gone() -> bool:
        if controller.is_running():
            taken.append(b"\1" * _PIECE)
            assert len(taken) * _PIECE < 2 * _MARGIN, "the monitor ended nobody"
        return not controller.is_running()

    until("the monitor ends the controller", is_gone, within_s=180)


def test_a_run_whose_processes_the_memory_monitor_ends_goes_on_with_others(start: Start) -> None:
    """The monitor ends as many processes at once as it takes: here the controller and others."""
    memory = psutil.virtual_memory()
    if memory.available < 3 * _MARGIN:
        pytest.skip(f"{memory.available / _MIB:.0f} MiB are available")
    monitor = {
        "RAY_memory_usage_threshold": f"{(_used() + _MARGIN) / memory.total:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    budgets = ("supervision.controller_restart_budget=10", "trainer.restart_budget=10")
    with start("no-memory", STUB, "steps=150", *budgets, environment=monitor) as run:
        run.trained_steps(3)
        _take_memory_until_the_controller_is_gone(run)
        assert run.exit_code() == 0
        records = RunRecords.read(run.run_dir)
    records.agree()
    assert records.summary.outcome == "finished"
    assert records.summary.trainer_version == 150
    assert records.summary.controller_incarnations >= 2
    lost = (run.run_dir / "logs" / "driver.log").read_text()
    assert "Ray's memory monitor ended its process" in lost
    assert "RAY_memory_usage_threshold" in lost
