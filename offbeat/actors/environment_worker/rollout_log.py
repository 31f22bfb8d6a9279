"""Every finished group on disk, for people: prompt, responses, rewards, weight versions.

Parquet files of a few hundred groups each, written whole beside the loop and moved into place, so
that a reader never sees a torn one. A worker that is killed takes its unfinished file with it. A
disk that fails costs the log, never a rollout.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.transfer_queue.schema import PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, Columns

log = structlog.stdlib.get_logger()
GROUPS_PER_FILE: Final = 512

_Row = tuple[RolloutTask, Receipt, Columns]


class RolloutLog:
    """Appends groups; all methods belong to one event loop."""

    def __init__(
        self, directory: Path, life: str, *, groups_per_file: int = GROUPS_PER_FILE
    ) -> None:
        """``life`` names this process and no other, in a resumed run either: files begin with it."""
        self._directory, self._life = directory, life
        self._groups_per_file = groups_per_file
        self._rows = list[_Row]()
        self._files = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._writing = list[asyncio.Future[None]]()

    def add(self, task: RolloutTask, receipt: Receipt, columns: Columns) -> None:
        """Take a group; a full file is written in the background."""
        self._rows.append((task, receipt, columns))
        if len(self._rows) >= self._groups_per_file:
            self._start_writing()

    async def close(self) -> None:
        """Write what there is."""
        if self._rows:
            self._start_writing()
        for written in self._writing:
            await written
        self._writer.shutdown()

    def _start_writing(self) -> None:
        rows, self._rows = self._rows, []
        name = f"{self._life}-{self._files:05d}.parquet"
        self._files += 1
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._writer, _write, self._directory / name, rows)
        self._writing = [*(each for each in self._writing if not each.done()), written]


def _write(path: Path, rows: list[_Row]) -> None:
    beside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(rows), beside)
        beside.replace(path)
    except (OSError, pa.ArrowException) as error:
        log.warning("rollouts.not_logged", path=str(path), groups=len(rows), error=str(error))
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def table(rows: list[_Row]) -> pa.Table:
    """One row a sample. ``response_ids`` are tokens; the prompt is text where the row has text."""
    columns: dict[str, list[Any]] = {name: [] for name in _FIELDS}
    for task, receipt, packed in rows:
        offsets = packed[RESPONSE_OFFSETS].tolist()
        responses = packed[RESPONSE_IDS]
        for sample in range(receipt.samples):
            spans = receipt.version_spans[sample]
            values = (
                receipt.ordinal,
                receipt.attempt,
                sample,
                receipt.engine,
                task.prompt.epoch,
                task.prompt.row,
                task.prompt.data.get("prompt"),
                packed[PROMPT_IDS],
                responses[offsets[sample] : offsets[sample + 1]],
                receipt.rewards[sample],
                receipt.finish_reasons[sample],
                min(version for version, _ in spans),
                max(version for version, _ in spans),
                receipt.kept_kv[sample] if receipt.kept_kv else 0,
            )
            for name, value in zip(_FIELDS, values, strict=True):
                columns[name].append(value)
    return pa.table(columns, schema=pa.schema(list(_FIELDS.items())))


_FIELDS: Final = {
    "ordinal": pa.int64(),
    "attempt": pa.int32(),
    "sample": pa.int32(),
    "engine": pa.string(),
    "epoch": pa.int32(),
    "row": pa.int64(),
    "prompt": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "response_ids": pa.list_(pa.int32()),
    "reward": pa.float64(),
    "finish_reason": pa.string(),
    "oldest_version": pa.int64(),
    "newest_version": pa.int64(),
    "kept_kv": pa.int32(),
}
