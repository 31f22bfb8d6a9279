"""Samples whose environment or reward failed: row, response and traceback, from ``failures.jsonl``."""

from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.messages.bad_json import decode_json
from offbeat.run_files.files import FAILURES, FAILURES_BYTES
from offbeat.run_files.limits import read_limited

_SHOWN: Final = 20
_CHARACTERS: Final = 2000  # of each text


class FailedSample(msgspec.Struct, frozen=True):
    """A line of the file. Files of other versions may lack fields."""

    group: str = ""
    attempt: int = 0
    sample: int | None = None
    reason: str = ""
    detail: str = ""
    evaluation: bool = False
    row: str = ""
    response: str = ""
    traceback: str = ""


def find_failed_samples(run_dir: Path) -> dict[str, Any] | None:
    """Return the number of failures and the first ones with their texts, or None if none is kept.

    Raises:
        OSError: The file cannot be read.
        FileTooLarge: It is larger than any file that a run writes.
        NoRegularFile: It is a pipe, a socket, a device or a directory.
    """
    if not (run_dir / FAILURES).is_file():
        return None
    found, count = list[FailedSample](), 0
    for line in read_limited(run_dir / FAILURES, 2 * FAILURES_BYTES).splitlines():
        count += 1
        if len(found) < _SHOWN:
            try:
                found.append(decode_json(line, FailedSample))
            except msgspec.DecodeError:
                continue  # torn by a crash
    return {"count": count, "file": FAILURES, "samples": [_cut(each) for each in found]}


def _cut(failed: FailedSample) -> dict[str, Any]:
    fields = msgspec.structs.asdict(failed)
    return {
        name: value[-_CHARACTERS:]
        if name == "traceback"
        else value[:_CHARACTERS]
        if isinstance(value, str)
        else value
        for name, value in fields.items()
    }
