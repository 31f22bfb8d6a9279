"""The page of a run with 24,000 groups: time to make, size, time until a browser has drawn it.

    python -m benchmarks.report_page                 # 1,500 steps of 16 groups
    python -m benchmarks.report_page --run runs/mine --browser

Times are of one process that has imported what it needs; ``--browser`` wants playwright and
Chromium (``make test-browser``).
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from offbeat.plugins.report.document import write_report
from tests.support.shown_run import finished

GROUPS_PER_STEP = 16


def main() -> None:
    """Make the page some times, and open it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--run", type=Path, help="an existing run instead of a made one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--browser", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = given.run or finished(
            Path(directory) / "run", given.steps, groups_per_step=GROUPS_PER_STEP
        )
        output = Path(directory) / "report.html"
        for _ in range(given.rounds):
            wall, cpu = time.perf_counter(), time.process_time()
            written = write_report([run], output)
            wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
            print(f"made in {wall_s:.2f} s ({cpu_s:.2f} s of CPU), {written.nbytes / 1e3:.0f} kB")
        if given.browser:
            open_in_browser(output, given.rounds)


def open_in_browser(page: Path, rounds: int) -> None:
    """Print how long headless Chromium needs until the page has drawn itself."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # pyright: ignore[reportMissingImports] -- an extra

    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(rounds):
            tab = chromium.new_page(viewport={"width": 1320, "height": 900})
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready='1']")
            ready_ms = tab.evaluate("Number(document.body.dataset.readyMs)")
            print(f"ready {ready_ms / 1e3:.2f} s after the page was opened")
            tab.close()
        chromium.close()


if __name__ == "__main__":
    main()
