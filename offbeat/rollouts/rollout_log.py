"""Logs every finished group to disk: prompt, responses, rewards, weight versions.

Parquet files of a few hundred groups, some megabytes or half a minute each, written in the
background and renamed into place, so that a reader never sees a torn one. The unfinished file of a
killed worker is lost. A disk that fails, or is slower than the rollouts, costs log records, never a
rollout or memory: groups that are not logged are counted in the worker's log.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false
# pyarrow has no types.

import asyncio
import contextlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from offbeat.environments.media_prompts import media_prompts
from offbeat.messages.groups import Receipt, RolloutTask, SampleFailure, SampleStatus
from offbeat.messages.media import media_of
from offbeat.rollouts.media_log import media_log
from offbeat.run_files.files import Files
from offbeat.run_files.transfer import send
from offbeat.transfer_queue.schema import PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, Columns

log = structlog.stdlib.get_logger()
GROUPS_PER_FILE: Final = 512
# Tokens and text before compression; the number of groups ends a file too
FILE_BYTES: Final = 64 * 2**20
# A group waits so long for its file to fill: a reader of a run that goes on sees it by then, and a
# killed worker loses no more. A hundredth of the worker's age in between: a run of weeks has some
# thousands of files, not a hundred thousand.
FILE_WAITS_S: Final = (30.0, 600.0)
_WAIT_OF_AGE: Final = 0.01
# Groups in memory, written or not; beyond it, groups are not logged
HELD_BYTES: Final = 256 * 2**20
ROW_CHARACTERS: Final = 4096  # of a row's other keys, for each of its samples
_LOGGED: Final = (PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS)


_NO_MEDIA: Final[Mapping[str, Any]] = MappingProxyType({})


class LoggedGroup(NamedTuple):
    """A group with the columns that are logged, and what the log keeps of its prompt's media."""

    task: RolloutTask
    receipt: Receipt
    columns: Columns
    media: Mapping[str, Any] = _NO_MEDIA  # by column


class RolloutLog:
    """Writes groups to Parquet files; all methods belong to one event loop."""

    def __init__(
        self,
        directory: Path,
        incarnation: str,
        *,
        groups_per_file: int = GROUPS_PER_FILE,
        file_bytes: int = FILE_BYTES,
        held_bytes: int = HELD_BYTES,
        file_waits_s: tuple[float, float] = FILE_WAITS_S,
        files: Files | None = None,
    ) -> None:
        """Create the log. ``incarnation`` is unique to this process, also in a resumed run.

        File names begin with it. With ``files``, they are transferred to the run directory of
        another machine, and none stays on this one.
        """
        self._directory, self._incarnation, self._files_of_run = directory, incarnation, files
        self._groups_per_file = groups_per_file
        self._file_bytes, self._held_limit = file_bytes, held_bytes
        self._file_waits_s = file_waits_s
        self._began_s: float | None = None  # of the event loop's clock
        self._due: asyncio.TimerHandle | None = None  # when the file is written, full or not
        self._rows = list[LoggedGroup]()
        self._rows_bytes = 0
        self._files = 0
        self.held_bytes = 0
        """Bytes of the groups that are not written yet."""
        self.not_logged = 0
        """Groups that will never be in a file: the disk was too slow or refused."""
        self._reported = 0  # number of those that the worker's log has reported
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._writing = list[asyncio.Future[None]]()

    def add(self, task: RolloutTask, receipt: Receipt, columns: Columns) -> None:
        """Add a group, unless the disk is too far behind.

        A full file is written in the background.
        """
        media, media_bytes = media_log().log_values(media_of(columns))
        nbytes = _bytes_of(task, receipt, columns) + media_bytes
        if self.held_bytes and self.held_bytes + nbytes > self._held_limit:
            self.not_logged += 1
            if not self._reported:
                self._report_not_logged()
            return
        logged = {name: _owned(columns[name]) for name in _LOGGED}
        self._rows.append(LoggedGroup(task, receipt, logged, media))
        self._rows_bytes += nbytes
        self.held_bytes += nbytes
        if len(self._rows) >= self._groups_per_file or self._rows_bytes >= self._file_bytes:
            self._start_writing()
        elif self._due is None:
            self._due = self._schedule()

    def _schedule(self) -> asyncio.TimerHandle:
        """Have the file that has just been begun written in time."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._began_s is None:
            self._began_s = now_s
        wait_s = file_wait_s(now_s - self._began_s, self._file_waits_s)
        return loop.call_later(wait_s, self._start_writing)

    async def close(self) -> None:
        """Write the remaining groups."""
        if self._rows:
            self._start_writing()
        for written in self._writing:
            await written
        self._writer.shutdown()
        if self.not_logged > self._reported:
            self._report_not_logged()

    def _start_writing(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        rows, self._rows = self._rows, []
        nbytes, self._rows_bytes = self._rows_bytes, 0
        name = f"{self._incarnation}-{self._files:05d}.parquet"
        self._files += 1
        loop = asyncio.get_running_loop()
        path = self._directory / name
        written = loop.run_in_executor(self._writer, _write, path, rows, self._files_of_run)
        ended = asyncio.ensure_future(self._ended(written, nbytes))
        self._writing = [*(each for each in self._writing if not each.done()), ended]

    async def _ended(self, written: asyncio.Future[int], nbytes: int) -> None:
        lost = await written
        self.not_logged += lost
        self.held_bytes -= nbytes
        if self.not_logged > self._reported:
            self._report_not_logged()

    def _report_not_logged(self) -> None:
        self._reported = self.not_logged
        log.warning(
            "rollouts.not_logged",
            groups=self.not_logged,
            held_mib=self.held_bytes >> 20,
            limit_mib=self._held_limit >> 20,
            fix="a faster disk for the run directory, or rollout.log: false",
        )


def file_wait_s(age_s: float, waits_s: tuple[float, float] = FILE_WAITS_S) -> float:
    """Return how long a file may fill that is begun when the log is so old."""
    least_s, most_s = waits_s
    return min(max(least_s, _WAIT_OF_AGE * age_s), most_s)


def _bytes_of(task: RolloutTask, receipt: Receipt, columns: Columns) -> int:
    """Return the bytes of a group's rows in a table: each branch has a copy of the prompt."""
    prompt = columns[PROMPT_IDS].nbytes + len(str(task.prompt.data.get("prompt") or ""))
    return sum(receipt.branches or (1,) * receipt.samples) * prompt + columns[RESPONSE_IDS].nbytes


def _owned(column: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a copy of the column if it is a part of a larger buffer."""
    return column if column.base is None else column.copy()


def _write(path: Path, rows: list[LoggedGroup], files: Files | None) -> int:
    """Write one file; return the number of groups lost because the disk refused."""
    beside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(rows), beside)
        if files is None:
            beside.replace(path)
        else:
            send(files, beside, path.parent.name, path.name)
            beside.unlink()
    except (OSError, pa.ArrowException) as error:
        log.warning("rollouts.not_written", path=str(path), groups=len(rows), error=str(error))
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        return len(rows)
    return 0


def table(rows: list[LoggedGroup]) -> pa.Table:
    """Return a table with one row per branch of a sample: most samples are one.

    ``response_ids`` are the tokens of the branch; the other fields are those of the sample. The
    prompt is text if the row has text, ``prompt_row`` what else the row has, such as the answer.
    """
    media_fields = media_log().log_columns()
    fields = {**_FIELDS, **media_fields}
    columns: dict[str, list[Any]] = {name: [] for name in fields}
    for task, receipt, packed, media in rows:
        offsets = packed[RESPONSE_OFFSETS].tolist()
        responses = packed[RESPONSE_IDS]
        branches = receipt.branches or (1,) * receipt.samples
        rest = rest_of_row(task.prompt.data)
        of_rows = ((sample, at) for sample, count in enumerate(branches) for at in range(count))
        for row, (sample, branch) in enumerate(of_rows):
            spans = receipt.version_spans[sample]
            values = (
                receipt.prompt_index,
                receipt.attempt,
                sample,
                receipt.engine,
                task.prompt.epoch,
                task.prompt.row,
                task.prompt.data.get("prompt"),
                packed[PROMPT_IDS],
                responses[offsets[row] : offsets[row + 1]],
                receipt.rewards[sample],
                receipt.finish_reasons[sample],
                min(version for version, _ in spans),
                max(version for version, _ in spans),
                receipt.kept_kv[sample] if receipt.kept_kv else 0,
                receipt.statuses[sample] if receipt.statuses else SampleStatus.VALID,
                receipt.failures[sample] if receipt.failures else SampleFailure.NONE,
                receipt.retries[sample] if receipt.retries else 0,
                receipt.turns[sample] if receipt.turns else 1,
                [(name, values[sample]) for name, values in receipt.rewards_by_name],
                branch,
                receipt.environment,
                rest,
            )
            for name, value in zip(_FIELDS, values, strict=True):
                columns[name].append(value)
            for name in media_fields:  # only in the first row of a group
                columns[name].append(None if row else media.get(name))
    return pa.table(columns, schema=pa.schema(list(fields.items())))


_FIELDS: Final = {
    "prompt_index": pa.int64(),
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
    "status": pa.string(),
    "failure": pa.string(),
    "retries": pa.int32(),
    "turns": pa.int32(),
    "rewards_by_name": pa.map_(pa.string(), pa.float64()),
    "branch": pa.int32(),  # 0 of the first branch of each sample
    "environment": pa.string(),
    "prompt_row": pa.string(),  # JSON, cut
}


def rest_of_row(data: Mapping[str, Any]) -> str | None:
    """Return the keys of a prompt's row besides its text as JSON, cut to ``ROW_CHARACTERS``."""
    shown = media_prompts().without_content(data).items()
    rest = {key: value for key, value in shown if key not in {"prompt", "messages"}}
    if not rest:
        return None
    text = json.dumps(rest, ensure_ascii=False, default=str)[:ROW_CHARACTERS]
    return text.encode(errors="replace").decode()  # a lone surrogate is no UTF-8
