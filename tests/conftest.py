"""What every test runs under: one compute thread, no model hub, property tests without a time limit."""

import asyncio
import gc
import inspect
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from tests.support.virtual_time import run

HERE: Final = Path(__file__).parent
LONG: Final = (
    "parity",
    "live/test_live_determinism.py",
    "ray/test_live_dry_recipes.py",
    "ray/test_live_gang.py",
    "ray/test_live_gang_run.py",
    "ray/test_live_layouts.py",
    "ray/test_live_lost_processes.py",
    "ray/test_live_megatron.py",
    "live/test_live_oracle.py",
    "ray/test_live_random_faults.py",
    "ray/test_live_schedule.py",
    "live/test_live_spool.py",
    "ray_jobs/test_two_machines.py",
)
"""What ``make test-long`` runs and ``make test`` leaves out: whole runs under faults, the long matrices."""


CORE: Final = "not plugins and not ray and not long"
"""Tests that pass with ``offbeat/plugins/`` moved away."""

OF_PLUGINS: Final = "plugins and not ray and not long"
"""The other tests of the folders ``unit`` and ``plugins``."""

IMPORTS_A_PLUGIN: Final = re.compile(r"^(?:from|import) offbeat\.plugins\b", re.MULTILINE)


def is_long(path: Path) -> bool:
    """Return whether all tests of a module or a folder are long."""
    return any(path.is_relative_to(HERE / each) for each in LONG)


OF_ALL_FILES: Final = ("unit/benchmarks", "unit/examples")
"""Tests of files beside the package; those directly in ``unit`` read the whole repository."""


def needs_plugins(path: Path) -> bool:
    """Return whether a test module is about more than the core, or imports a plug-in."""
    if HERE / "plugins" in path.parents:
        return True
    if path.suffix != ".py" or HERE / "unit" not in path.parents:
        return False
    is_of_all = path.parent == HERE / "unit" or any(
        HERE / each in path.parents for each in OF_ALL_FILES
    )
    return is_of_all or bool(IMPORTS_A_PLUGIN.search(path.read_text()))


def may_need_plugins(path: Path) -> bool:
    """Return whether a test of a module, or of a module in a folder, may carry the marker."""
    return path.suffix != ".py" or needs_plugins(path) or "mark.plugins" in path.read_text()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules out of which no test is chosen: to import them takes seconds.

    ``make test-core`` cannot import modules of plug-ins.
    """
    chosen = config.getoption("markexpr") or ""
    left_out = (
        (chosen == CORE and needs_plugins(collection_path))
        or (chosen == OF_PLUGINS and not may_need_plugins(collection_path))
        or ("not long" in chosen and is_long(collection_path))
    )
    return True if left_out else None


@pytest.hookimpl(tryfirst=True)  # a folder of Ray tests sets a shorter timeout where there is none
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_long(item.path):
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(600))
        if needs_plugins(item.path):
            item.add_marker(pytest.mark.plugins)


def pytest_collection(session: pytest.Session) -> None:
    """Stop the collection of garbage while modules are imported: it finds none."""
    del session
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the imported modules, half a million objects, out of every later collection."""
    del session
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is ``async def``: on the virtual clock, or marked ``real_clock``."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    run_test = asyncio.run if pyfuncitem.get_closest_marker("real_clock") else run
    run_test(test(**arguments))
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up before any test imports torch, transformers or Ray.

    Variables that are set already are left alone, so that one run can be made different by hand.
    """
    del config
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Else a call such as `ray.kill` joins any cluster of this machine, and pytest ends with it.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # `make test` draws a few; `make test-properties` looks for the rare ones.
    examples = int(os.environ.get("PROPERTY_EXAMPLES", "25"))
    # A loaded machine makes single examples slow without making them wrong.
    hypothesis.settings.register_profile("offbeat", max_examples=examples, deadline=None)
    # A change is judged by the same examples every time; fresh ones are looked for by hand.
    hypothesis.settings.register_profile(
        "ci", max_examples=examples, deadline=None, derandomize=True, print_blob=True
    )
    hypothesis.settings.load_profile("ci" if "CI" in os.environ else "offbeat")


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Give SIGINT and SIGHUP their default handlers here and in the processes a test starts.

    A background job of a shell script ignores SIGINT, ``nohup`` ignores SIGHUP, and both are inherited.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
