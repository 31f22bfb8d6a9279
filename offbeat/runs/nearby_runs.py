"""Finds the run around a path that is no run, or those below it, so that a message can name them."""

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from offbeat.runs.directory import JOURNAL

_LISTED: Final = 2  # runs below a directory that a message names
_LOOKED_AT: Final = 200  # entries of a directory, so that a message about / comes at once


def run_around(path: Path) -> Path | None:
    """Return the run that a file or a folder lies in; None: it lies in none."""
    with contextlib.suppress(OSError):
        return next((each for each in path.resolve().parents if (each / JOURNAL).is_dir()), None)
    return None


def runs_below(directory: Path) -> list[Path]:
    """Return some runs that are folders of a directory; if there is none, some one level below."""
    children = list(_folders(directory))
    levels = children, (each for child in children for each in _folders(child))
    for level in levels:
        runs = (each for each in level if (each / JOURNAL).is_dir())
        if found := list(islice(runs, _LISTED)):
            return found
    return []


def what_to_name(path: Path) -> str:
    """Return a sentence on what a reader of runs takes in place of ``path``."""
    around = run_around(path)
    if around is not None:
        return f"Name the run that it lies in, {around}"
    below = runs_below(path) if path.is_dir() else []
    if below:
        return f"Name a run, as in {' or '.join(map(str, below))}"
    return "Name a run directory, which holds config.yaml and journal once the run began, as in runs/gsm8k"


def _folders(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # somebody else's
        for child in islice(sorted(directory.iterdir()), _LOOKED_AT):
            if child.is_dir() and not child.is_symlink():
                yield child
