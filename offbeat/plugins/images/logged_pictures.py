# pyright: basic
# pyarrow has no types.
"""Reads the pictures of one group's prompt from the rollout files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable
from offbeat.plugins.images.rows import name_pictures

_COLUMNS: Final = ("prompt_index", "attempt", "row", "prompt_row", "pictures", "picture_sizes")
_NAMED: Final = 8  # maximum pictures listed by name


class LoggedPictures(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures of a prompt in one attempt of its group."""

    attempt: int
    row: int  # of the data file, from 0
    sizes: list[tuple[int, int]]  # height and width for the model; empty: an older file
    names: list[str]  # first names from the row; empty: unknown
    copies: int  # pictures with a small copy
    file: str  # file with the copies, relative to the run directory

    def __str__(self) -> str:
        sides = dict.fromkeys(f"{width} x {height}" for height, width in self.sizes)
        of = f" of {', '.join(sides)} pixels as the model reads them" if sides else ""
        named = f"; row {self.row} names {', '.join(self.names)}" if self.names else ""
        count = len(self.sizes) or self.copies
        return (
            f"pictures of attempt {self.attempt}: {count}{of}{named}; small copies of {self.copies} in "
            f"{self.file}, and in the page of offbeat report"
        )


def read_logged_pictures(run_dir: Path, prompt_index: int) -> list[LoggedPictures]:
    """Return the logged pictures of a group, one entry per attempt that is in a file.

    A file that cannot be read is skipped, because it may still be written.
    """
    found = list[LoggedPictures]()
    for path in sorted((run_dir / "rollouts").glob("*.parquet")):
        found += _in_file(run_dir, path, prompt_index)
    return sorted(found, key=lambda each: each.attempt)


def _in_file(run_dir: Path, path: Path, prompt_index: int) -> Iterator[LoggedPictures]:
    # Loaded here, because the history of a group without pictures needs no pyarrow
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    from offbeat.run_files.limited_parquet import read_parquet  # noqa: PLC0415

    def is_wanted(batch: Any) -> Any:  # noqa: ANN401 -- of pyarrow
        return pc.call_function("equal", [batch["prompt_index"], prompt_index])

    try:
        rows = read_parquet(path, _COLUMNS, is_wanted).to_pylist()
    except (OSError, KeyError, OffbeatError, pa.ArrowException):
        return
    for row in rows:
        if copies := row.get("pictures"):
            yield LoggedPictures(
                attempt=row["attempt"],
                row=row["row"],
                sizes=[(each["height"], each["width"]) for each in row.get("picture_sizes") or ()],
                names=_names(row.get("prompt_row")),
                copies=len(copies),
                file=str(path.relative_to(run_dir)),
            )


def _names(rest_of_row: str | None) -> list[str]:
    try:
        row: Any = json.loads(rest_of_row or "{}")
    except (ValueError, RecursionError):  # truncated when it was logged
        return []
    if not isinstance(row, Mapping):
        return []
    return [printable(each) for each in name_pictures(row)[:_NAMED]]
