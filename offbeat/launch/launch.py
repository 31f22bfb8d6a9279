"""Takes a checked recipe to an exit code: sets the process up, then starts the driver."""

import os
from pathlib import Path

from offbeat.config.loader import LoadedRecipe
from offbeat.launch.process_environment import ENVIRONMENT, PRIVATE
from offbeat.launch.ray_token import client_environment


def launch(
    loaded: LoadedRecipe, *, run_dir: Path | None, dry_run: bool, resume: Path | None = None
) -> int:
    """Run it; the exit code.

    0 finished, 1 failed, 2 bad configuration, 129 hung up, 130 interrupted, 143 terminated.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    of_cluster = client_environment(os.environ, Path.home()) if joins else PRIVATE
    os.environ.update(loaded.config.runtime.env)
    for name, value in (ENVIRONMENT | of_cluster).items():
        os.environ.setdefault(name, value)
    # Ray reads its variables when it is imported.
    from offbeat.launch.driver import drive

    return drive(loaded, run_dir, dry_run=dry_run, resume=resume)
