"""Finds the steps of an ended run that are in no checkpoint."""

from pathlib import Path
from typing import Final

_LATEST: Final = Path("checkpoints/LATEST")


def unsaved_steps(run_dir: Path, version: int) -> str:
    """Return a sentence on the steps up to ``version`` that no checkpoint has.

    Empty if all have.
    """
    try:
        name = (run_dir / _LATEST).read_text(errors="replace").strip()
    except OSError:
        name = ""
    number = name.removeprefix("state_")
    kept = int(number) if number.isdecimal() else 0
    if kept >= version:
        return ""
    goes_on = f"the checkpoint of version {kept}" if kept else "the initial model, for want of one"
    return (
        f"no checkpoint of version {version} was written; a resume goes on from "
        f"{goes_on}, and trains the steps since then again"
    )
