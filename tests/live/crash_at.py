"""Runs ``offbeat train`` in one process that ends at a failpoint of the controller, as if killed.

python -m tests.live.crash_at POINT NTH RUN_DIR RECIPE [KEY=VALUE]...
"""

import os
import sys
from functools import partial
from pathlib import Path

from offbeat.config.loader import load_recipe
from offbeat.controller.failpoints import Failpoint
from offbeat.launch.session import Runtime, drive
from offbeat.local.parts import Makers
from offbeat.local.run import run_local

CRASHED = 77


def main() -> int:
    """Run until the point is reached for the nth time; exit with ``CRASHED`` there."""
    point, nth, run_dir, recipe, *overrides = sys.argv[1:]
    left = int(nth)

    def crash(reached: Failpoint) -> None:
        nonlocal left
        left -= reached == Failpoint(point)
        if not left:
            os._exit(CRASHED)

    runtime = Runtime(partial(run_local, Makers(failpoints=crash)))
    return drive(runtime, load_recipe(recipe, overrides), Path(run_dir), dry_run=False).code


if __name__ == "__main__":
    sys.exit(main())
