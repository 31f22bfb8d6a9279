"""A ``Run`` whose directory is gone, whose packages are absent, or that is not live."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.launch.run import Run
from offbeat.runs.past_run import NotARun


@pytest.mark.parametrize(
    "read",
    [
        Run.metrics,
        Run.evaluations,
        Run.failures,
        Run.samples,
        Run.plot,
        Run.report,
        lambda run: run.summary,
        lambda run: run.config,
        lambda run: run.model_path,
    ],
)
def test_a_run_whose_directory_was_deleted_is_no_run(
    tmp_path: Path, read: Callable[[Run], Any]
) -> None:
    with pytest.raises(NotARun, match="no such directory"):
        read(Run(tmp_path / "deleted"))


@pytest.mark.parametrize("name", ["wait", "stop", "is_alive"])
def test_a_run_of_a_directory_says_who_can_wait_and_stop(tmp_path: Path, name: str) -> None:
    with pytest.raises(AttributeError, match=r"the Run that offbeat\.start\(\) returned"):
        getattr(Run(tmp_path), name)
    assert not hasattr(Run(tmp_path), "loss")


@pytest.mark.parametrize(("absent", "call"), [("matplotlib", "plot()"), ("transformers", "load()")])
def test_a_result_that_misses_its_package_names_it(tmp_path: Path, absent: str, call: str) -> None:
    program = f"""
import sys
sys.modules[{absent!r}] = None  # a module that is None cannot be imported
from pathlib import Path
from offbeat.launch.run import Run
from offbeat.messages.missing_package import PackageMissing
try:
    Run(Path({str(tmp_path)!r})).{call}
except PackageMissing as error:
    print(error.package)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{absent}\n"
