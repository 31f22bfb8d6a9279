"""Logs every finished group to disk: prompt, responses, rewards, weight versions.

A Parquet file holds a few hundred groups, some megabytes, or the groups of half a minute. It is
written in the background and renamed into place, so that readers never see a partial file. The
unfinished file of a killed worker is lost. If the disk fails, or is slower than the rollouts, log
records are lost, but never a rollout, and memory stays bounded. Groups that are not logged are
counted in the worker's log.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import structlog

from offbeat.environments.media_prompts import find_media
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.media import get_media
from offbeat.run_files.files import Files
from offbeat.transfer_queue.schema import PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, Columns

log = structlog.stdlib.get_logger()
GROUPS_PER_FILE: Final = 512
# Tokens and text before compression. A file also ends at its number of groups
FILE_BYTES: Final = 64 * 2**20
# A group waits this long for its file to fill. A reader of a running run sees it by then, and a
# killed worker loses no more. In between, the wait is a hundredth of the worker's age: a run of
# weeks has some thousands of files, not a hundred thousand.
FILE_WAITS_S: Final = (30.0, 600.0)
_WAIT_OF_AGE: Final = 0.01
# Groups in memory, written or not. Above this limit groups are not logged
HELD_BYTES: Final = 256 * 2**20
_LOGGED: Final = (PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS)


_NO_MEDIA: Final[Mapping[str, Any]] = MappingProxyType({})


class LoggedGroup(NamedTuple):
    """A group with its logged columns, and the logged data about its prompt's media."""

    task: RolloutTask
    receipt: Receipt
    columns: Columns
    media: Mapping[str, Any] = _NO_MEDIA  # by column
    texts: Sequence[str] = ()  # of each branch; empty: no tokenizer
    advantages: Sequence[float] = ()  # of each sample; empty: the rewards yield none


class RolloutLog:
    """Writes groups to Parquet files. All methods belong to one event loop."""

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
        """Create the log.

        ``incarnation`` is unique to this process, even in a resumed run. File names begin with it.
        With ``files``, the log's files are transferred to the run directory on another machine, and
        none of them stays on this machine.
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
        """Groups that will never be in a file, because the disk was too slow or failed."""
        self._reported = 0  # number of those that the worker's log has reported
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._writing = list[asyncio.Future[None]]()

    def add(
        self,
        task: RolloutTask,
        receipt: Receipt,
        columns: Columns,
        *,
        texts: Sequence[str] = (),
        advantages: Sequence[float] = (),
    ) -> None:
        """Add a group, unless the disk is too far behind.

        A full file is written in the background. ``LoggedGroup`` describes ``texts`` and
        ``advantages``.
        """
        media, media_bytes = find_media().log_values(get_media(columns))
        nbytes = _count_bytes(task, receipt, columns) + media_bytes + sum(map(len, texts))
        if self.held_bytes and self.held_bytes + nbytes > self._held_limit:
            self.not_logged += 1
            if not self._reported:
                self._report_not_logged()
            return
        logged = {name: _copy_view(columns[name]) for name in _LOGGED}
        self._rows.append(LoggedGroup(task, receipt, logged, media, texts, advantages))
        self._rows_bytes += nbytes
        self.held_bytes += nbytes
        if len(self._rows) >= self._groups_per_file or self._rows_bytes >= self._file_bytes:
            self._start_writing()
        elif self._due is None:
            self._due = self._schedule()

    def _schedule(self) -> asyncio.TimerHandle:
        """Schedule the write of the file that was just begun."""
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
        written = asyncio.ensure_future(self._write(self._directory / name, rows, nbytes))
        self._writing = [*(each for each in self._writing if not each.done()), written]

    async def _write(self, path: Path, rows: list[LoggedGroup], nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        write = await loop.run_in_executor(self._writer, _load_writer)
        lost = await loop.run_in_executor(self._writer, write, path, rows, self._files_of_run)
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
    """Return how long a file may collect groups, by the age of the log when the file begins."""
    least_s, most_s = waits_s
    return min(max(least_s, _WAIT_OF_AGE * age_s), most_s)


def _count_bytes(task: RolloutTask, receipt: Receipt, columns: Columns) -> int:
    """Return the bytes of a group's rows in a table. Each branch has a copy of the prompt."""
    prompt = columns[PROMPT_IDS].nbytes + len(str(task.prompt.data.get("prompt") or ""))
    return sum(receipt.branches or (1,) * receipt.samples) * prompt + columns[RESPONSE_IDS].nbytes


def _copy_view(column: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a copy of the column if it is a view of a larger buffer."""
    return column if column.base is None else column.copy()


def _load_writer() -> Callable[[Path, list[LoggedGroup], Files | None], int]:
    """Import pyarrow in the thread that writes, so that no step waits for the import."""
    from offbeat.rollouts.log_table import write_groups  # noqa: PLC0415

    return write_groups
