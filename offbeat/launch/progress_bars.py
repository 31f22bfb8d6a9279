"""Imports the progress bars of libraries without their warning about widgets."""

import sys
import warnings
from contextlib import suppress
from typing import Final

_WARNING: Final = "IProgress not found"


def import_progress_bars() -> None:
    """Import tqdm as transformers does, and drop its warning that a notebook has no ipywidgets.

    tqdm warns once, when it is imported in a notebook, and then prints bars as text. Nothing here
    shows such a bar. Other warnings, and the filters of the program, stay as they are.
    """
    if "ipykernel" not in sys.modules:
        return
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.filterwarnings("ignore", message=_WARNING)
        import tqdm.auto  # noqa: F401, PLC0415  # pyright: ignore[reportMissingModuleSource, reportUnusedImport] -- only in a notebook
