"""Log of the groups that a trainer has trained, independent of the controller's ledger."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from offbeat.messages.fences import StepKey
from offbeat.run_files.line_file import LineFile
from offbeat.run_files.sharing import WriteLocation

log = structlog.stdlib.get_logger()


class TrainedLog:
    """Append-only log of the applied steps and restores of one trainer.

    It has a line ``{"step", "attempt", "version", "prompt_indices"}`` per applied step, and
    ``{"restored": version}`` per rewind: what was trained for later versions before such a line is
    undone. A line that the disk refuses is missing, with a warning: the step has been applied, or
    the trainer restored, nevertheless.
    """

    def __init__(self, append: Callable[[bytes], object], close: Callable[[], None]) -> None:
        self._append, self.close = append, close

    def trained(self, key: StepKey, version: int, prompt_indices: Sequence[int]) -> None:
        """Record an applied step, before its result is returned to the controller."""
        step = {"step": key.step, "attempt": key.attempt, "version": version}
        self._write(step | {"prompt_indices": list(prompt_indices)})

    def restored(self, version: int) -> None:
        """Record that the trainer was restored to ``version``."""
        self._write({"restored": version})

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._append(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            log.warning("trained.not_logged", error=str(error))


def trained_log(place: WriteLocation) -> TrainedLog:
    """Create the log of rank 0. It is in the run directory, wherever this process runs."""
    name, files = "trained-rank0.jsonl", place.files
    if files is None:
        file = LineFile(place.directory / "logs" / name)
        return TrainedLog(file.append, file.close)
    return TrainedLog(lambda line: files.append(f"logs/{name}", line), lambda: None)
