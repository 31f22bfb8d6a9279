"""A headless Chromium, and the site; the tests are skipped by name where there is none."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat.plugins.report.document import write_report
from tests.support import shown_run

HOSTILE = (
    "</script></title><img src=x onerror=\"document.title='taken'\"><svg onload=alert(1)>\u2028'"
)
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="directory for the images of docs/report.md")
    parser.addoption("--site", type=Path, help="directory of a built site; default: build one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def program() -> str:
    """The browser's program."""
    pytest.importorskip("playwright.sync_api", reason="the extra browser is not installed")
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")
    return found


@pytest.fixture(scope="session")
def pages(program: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a run of every kind, by its name."""
    directory = tmp_path_factory.mktemp("runs")
    made = {
        "finished": shown_run.finished(directory / "finished"),
        "losses": shown_run.with_losses(directory / "losses", evaluates_at_start=True),
        "running": shown_run.running(directory / "running"),
        "failed": shown_run.failed(directory / "failed"),
        "empty": shown_run.empty(directory / "empty"),
        "no-numbers": shown_run.without_numbers(directory / "no-numbers"),
        "hostile": shown_run.hostile(directory / "hostile", HOSTILE),
    }
    other = shown_run.finished(directory / "seed-1", seed=1, recipe={"seed": 1})
    found = {name: write_report([run], None).path for name, run in made.items()}
    both = [made["finished"], other]
    return found | {"compared": write_report(both, directory / "compared.html").path}


@pytest.fixture(scope="module")  # while it runs, no other test of the process can run a loop
def browser(program: str, pages: dict[str, Path]) -> Iterator[Any]:
    """Chromium. It is started after the runs are written: both want the thread's event loop."""
    with _chromium(program) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the built site."""
    built = request.config.getoption("--site")
    if built is not None:
        return built.resolve()
    pytest.importorskip("material", reason="the extra docs is not installed")
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(directory)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return directory


@pytest.fixture(scope="module")
def site_browser(program: str, site: Path) -> Iterator[Any]:
    """Chromium for the pages of the site, which needs no run."""
    with _chromium(program) as chromium:
        yield chromium


@contextmanager
def _chromium(program: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # pyright: ignore[reportMissingImports] -- an extra

    with sync_playwright() as playwright:
        # In a container nothing runs as another user than root, whom Chromium's sandbox refuses.
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()
