"""What every runtime needs of a run loads no Ray: neither to start one, nor to check a recipe."""

import subprocess
import sys

import pytest

SHARED = (
    "offbeat.generators.rows",
    "offbeat.launch.checks.report",
    "offbeat.launch.control",
    "offbeat.launch.controller_host",
    "offbeat.launch.dry_run",
    "offbeat.launch.evaluate",
    "offbeat.launch.initial_model",
    "offbeat.launch.opened_run",
    "offbeat.launch.run_parts",
    "offbeat.launch.screen",
    "offbeat.launch.session",
    "offbeat.trainers.no_trainer",
    "offbeat.transfer_queue.spool_reader",
)


def loaded_libraries(*modules: str) -> list[str]:
    """Import modules in a fresh interpreter; return the heavy libraries that this has loaded."""
    script = (
        f"import {', '.join(modules)}, sys\n"
        "print(*sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return told.stdout.split()


def test_what_every_runtime_shares_loads_no_ray() -> None:
    assert loaded_libraries(*SHARED) == []


@pytest.mark.parametrize("module", ["offbeat.launch.driver", "offbeat.actors.ray_ports"])
def test_what_is_of_ray_alone_loads_it(module: str) -> None:
    assert "ray" in loaded_libraries(module)
