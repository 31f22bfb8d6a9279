# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The extra tensorboard may not be installed, and its protocol buffers have no types.
"""TensorBoard sink: an event file in a directory, next to ``metrics.jsonl`` or from an export."""

import io
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any, Final

from offbeat.telemetry.records import MetricRecord, is_evaluation
from offbeat.telemetry.tracker import not_installed

_FORMAT: Final = "brain.Event:2"
"""First version in which TensorBoard discards records that a restarted writer repeats."""


class TensorBoardSink:
    """Writes the metrics of each step as scalars, under their names.

    A file, and each stretch after a rewind, begins with a mark of its first step. TensorBoard then
    discards the records of earlier files from that step on. An evaluation ends steps later, but its
    scores are written at the scored version. A record is either complete in the file or missing.
    """

    def __init__(self, folder: Path, *, per_version: int = 1) -> None:
        """``per_version`` is the length of a step on the x axis: 1, or the samples of a step."""
        self._folder, self._per_version = folder, per_version
        self._file: FileIO | None = None
        self._end = 0  # offset of the end of the last whole record
        self._last_version: int | None = None

    @property
    def name(self) -> str:
        return "tensorboard"

    def open(self) -> None:
        """Begin a file.

        Raises:
            SinkUnusable: tensorboard is not installed.
        """
        try:
            from tensorboard.compat.proto import event_pb2  # noqa: PLC0415  an optional extra
        except ImportError as error:
            raise not_installed("tensorboard", error) from error
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        path = self._folder / f"events.out.tfevents.{time.time_ns()}.offbeat"
        self._file = FileIO(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "r+"
        )
        self._end, self._last_version = 0, None
        self._append([event_pb2.Event(wall_time=time.time(), file_version=_FORMAT)])

    def write(self, record: MetricRecord) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415  open has

        x = record.version * self._per_version
        events, is_step = list[Any](), not is_evaluation(record)
        if is_step and (self._last_version is None or record.version <= self._last_version):
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append(event_pb2.Event(wall_time=record.time_s, step=x, session_log=start))
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in record.metrics.items()
        ]
        summary = summary_pb2.Summary(value=values)
        events.append(event_pb2.Event(wall_time=record.time_s, step=x, summary=summary))
        self._append(events)
        if is_step:
            self._last_version = record.version

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, events: list[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  an extra

        if self._file is None:
            raise ValueError(f"no file is open in {self._folder}")
        framed = io.BytesIO()
        records = RecordWriter(framed)
        for event in events:
            records.write(event.SerializeToString())
        content = memoryview(framed.getvalue())
        self._file.truncate(self._end)  # remove the torn record of a write that raised
        self._file.seek(self._end)
        written = 0
        while written < len(content):
            written += self._file.write(content[written:]) or 0
        self._end += written
