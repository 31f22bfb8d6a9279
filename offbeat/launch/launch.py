"""From a checked recipe to an exit code: sets the process up, then hands over to the driver."""

import os
from pathlib import Path
from typing import Final

from offbeat.config.loader import LoadedRecipe
from offbeat.launch.ray_token import client_environment

ENVIRONMENT: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The raylet's news of dead workers, which Ray prints into our terminal: we name them ourselves.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""Set for this process and its actors before anything reads them; what is set already stays."""

PRIVATE: Final = {
    # Ray's name for "a private cluster binds to loopback only", on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Set as well for a cluster that the run has alone."""


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
