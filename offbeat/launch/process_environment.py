"""Sets default environment variables for all processes of a run, and hides progress bars."""

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from offbeat.launch.ray_token import client_environment

ENVIRONMENT: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Hide the raylet's messages on dead workers in our terminal: the driver reports them.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
"""Variables set for this process and its actors before they are read. Existing values stay."""

PRIVATE: Final = {
    # Ray's name for "a private cluster binds to loopback only", on Linux too.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Additional variables for a private cluster."""

_WARNING: Final = "IProgress not found"


def set_environment(variables: Mapping[str, str]) -> None:
    """Set a recipe's variables for this process, and defaults for variables that are not set.

    Ray reads its variables when it is imported, so call this before that import.
    """
    joins = bool(os.environ.get("RAY_ADDRESS"))
    of_cluster = client_environment(os.environ, Path.home()) if joins else PRIVATE
    os.environ.update(variables)
    for name, value in (ENVIRONMENT | of_cluster).items():
        os.environ.setdefault(name, value)
    _hide_bars_of_imported()


def _hide_bars_of_imported() -> None:
    """Hide the bars of transformers if it was imported, and has read the variables, before."""
    library = sys.modules.get("transformers.utils.logging")
    if library is not None and os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1":
        library.disable_progress_bar()


def import_progress_bars() -> None:
    """Import tqdm as transformers does, and drop its warning that a notebook has no ipywidgets.

    tqdm warns once, when it is imported in a notebook, and then prints bars as text. offbeat shows
    no such bar. Other warnings, and the program's filters, do not change.
    """
    if "ipykernel" not in sys.modules:
        return
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.filterwarnings("ignore", message=_WARNING)
        import tqdm.auto  # noqa: F401, PLC0415  # pyright: ignore[reportMissingModuleSource, reportUnusedImport] -- only in a notebook
