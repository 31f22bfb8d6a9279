"""Reads prompts from files: JSON Lines or Parquet, one prompt per row.

The process that hands out prompts reads and checks every row once, at the start. Rows are kept as
JSON: in memory up to a bound, then in a temporary file (``RowStore``).
"""

import codecs
import hashlib
import heapq
import json
import os
import shlex
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from tempfile import SpooledTemporaryFile
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from offbeat.config.hub_path import FORM, is_on_hub
from offbeat.environments.hub_files import NO_COMMITS, hub_files, resolve_commit
from offbeat.environments.media_prompts import find_media
from offbeat.environments.prompt_row import OF_MESSAGES, read_column, row_problem
from offbeat.environments.prompts import RowPrompts
from offbeat.messages.bad_json import DEEPEST, ENDS_EARLY, json_problem, nesting_depth
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Prompt

MEMORY_BYTES: Final = 64 * 2**20
"""Bytes of rows that are kept in memory. Larger sets of rows go to an unnamed temporary file."""


class RowStore:
    """Sequence of rows that keeps at most ``memory_bytes`` of them in memory.

    Each row needs 8 more bytes of memory. The temporary file is in ``TMPDIR`` and is deleted with
    the object.

    Raises:
        OSError: The rows do not fit on the disk.
    """

    def __init__(self, rows: Iterable[bytes], memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = SpooledTemporaryFile(max_size=memory_bytes, prefix="offbeat-rows-")  # noqa: SIM115 - read until the end
        weakref.finalize(self, self._file.close)
        self._ends = array("Q", [0])
        for row in rows:
            self._file.write(row)
            self._ends.append(self._ends[-1] + len(row))
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> bytes:
        start, end = self._ends[row], self._ends[row + 1]
        self._file.seek(start)
        return self._file.read(end - start)

    def longest(self, count: int) -> list[int]:
        """Return the numbers of the longest rows, longest first."""
        ends = self._ends
        return heapq.nlargest(count, range(len(self)), key=lambda row: ends[row + 1] - ends[row])


RowCheck = Callable[[Mapping[str, object]], str | None]
"""Returns why a row of a prompt file cannot be used, or None if it can."""

ShownPart = Callable[[Mapping[str, object]], object]
"""Returns the part of a row from which the prompt is made."""

_LONGEST_ROW_BYTES: Final = 16 * 2**20
"""Maximum bytes of a row, because a prompt is sent to a worker in one message."""

_TOO_DEEP: Final = f"is nested more than {DEEPEST} deep; make it flatter, or put it in a string"
_TOO_LONG: Final = f"has more than {_LONGEST_ROW_BYTES >> 20} MiB; a prompt travels in one message"
_PARQUET_MAGIC: Final = b"PAR1"
_HEAD_BYTES: Final = 4096
_COMPRESSED: Final = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""First bytes of compressed files, their formats, and the programs that unpack them."""
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst", ".zip")
_OTHERS: Final = {
    b"version https://git-lfs": ("is a Git LFS pointer, not the file", "Run `git lfs pull`"),
    b"<": ("is HTML or XML, as an error page of a server is", "Download the file again"),
    b"ARROW1": ("is an Arrow file", "Write it as Parquet"),
    b"\xff\xff\xff\xff": ("is a stream of Arrow", "Write it as Parquet"),
}
"""First bytes of other unusable files, their description, and the fix."""
_SAVED: Final = {"state.json": "", "dataset_dict.json": "[SPLIT]"}
"""Files in the folders that ``save_to_disk`` of datasets writes, and the index of the rows."""
_EITHER: Final = ("prompt", "messages")
"""Keys of which a row has only one. So a Parquet file with both columns has a null in each row."""
_RENDERED: Final = ("messages", *OF_MESSAGES)
"""Keys whose values the chat template reads. The template may test whether a field exists."""
_NO_COLUMNS: Final[Mapping[str, str]] = MappingProxyType({})


class PromptFileError(OffbeatError):
    """A prompt file cannot be used as it is.

    ``line`` is a line of JSON Lines, or a row of Parquet, counted from 1. 0 means the whole file.

    Fix: fix the named row, or name the columns in ``data.columns``.
    """

    path: str
    line: int
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.problem}. {self.fix}" if self.fix else f"{place}: {self.problem}"


class FilePrompts(RowPrompts):
    """Rows of JSON Lines or Parquet files, one file after another. Blank lines are skipped.

    Each row must be an object in which ``problem_of`` finds no problem. Unless the environment
    defines a different form, a row has ``prompt`` (a string, tokenised unchanged) or ``messages``
    (a list of ``{"role": ..., "content": ...}``, rendered by the chat template). All other keys
    belong to the environment. ``columns`` maps keys to columns of the file. If it is set, a row has
    only these keys. A null becomes None. There are two exceptions for Parquet, where every row has
    all columns and fields. A null ``prompt`` or ``messages`` counts as a missing key. So does a
    null field inside of messages, or of values that are rendered with them.

    Raises:
        PromptFileError: A row cannot be used. The error names the line, the problem and the
            expected form.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        shuffle: bool,
        seed: int,
        epochs: int | None,
        columns: Mapping[str, str] = _NO_COLUMNS,
        problem_of: RowCheck | None = None,
        shown_of: ShownPart = dict,
    ) -> None:
        reader = _Reader(columns, problem_of or row_problem, shown_of)
        self._store = reader.store_rows(files)
        self.digest = reader.digest
        """Digest of the files' bytes."""
        self.digests = reader.digests
        """Digests of the prompts, in the order of the rows."""
        if reader.names_media:
            self._folder = str(files[0].parent.absolute())  # all files are in one folder
        super().__init__(len(self._store), shuffle=shuffle, seed=seed, epochs=epochs)

    def longest(self, count: int) -> Iterator[Prompt]:
        """Yield the prompts of the longest rows by bytes, longest first."""
        for row in self._store.longest(count):
            yield Prompt(row, 0, row, self._data(row), folder=self._folder)

    def _data(self, row: int) -> dict[str, Any]:
        return msgspec.json.decode(self._store[row], type=dict[str, Any])


def prompt_files(path: str, commits: Mapping[str, str] = NO_COMMITS) -> list[Path]:
    """Return the files of ``data.path``: the path itself, or the files of a directory by name.

    A directory gives its ``*.parquet`` files, or else its ``*.jsonl`` files. If it has neither, the
    result is the directory itself, which cannot be read. In a file name ``*`` matches any
    characters. Files on the hub are downloaded, at the path's commit in ``commits``.

    Raises:
        HubFilesError: Files on the hub cannot be fetched.
    """
    if is_on_hub(path):
        return hub_files(path, commits.get(path) or resolve_commit(path))
    whole = Path(path)
    if "*" in whole.name and not whole.exists():
        return sorted(whole.parent.glob(whole.name)) or [whole]
    return sorted(whole.glob("*.parquet")) or sorted(whole.glob("*.jsonl")) or [whole]


def refuse_packed_files(path: str) -> None:
    """Check that a directory has no compressed prompt files, because they would be left out.

    Raises:
        PromptFileError: It has some.
    """
    for kind in ("jsonl", "parquet"):
        for packed in sorted(Path(path).glob(f"*.{kind}.*")):
            if packed.suffix in _PACKED:
                problem = f"is compressed, so {path} would be read without it"
                fix = f"Unpack it, or name the files, as in {path}/*.{kind}"
                raise PromptFileError(str(packed), 0, problem, fix)


def files_digest(files: Sequence[Path]) -> str:
    """Return the digest that ``FilePrompts`` computes for these files.

    Raises:
        OSError: A file cannot be read.
    """
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


class _Reader:
    """Reads and checks the rows of files, and computes the digest of the bytes that it reads."""

    def __init__(
        self, columns: Mapping[str, str], problem_of: RowCheck, shown_of: ShownPart
    ) -> None:
        self._columns, self._problem_of, self._shown_of = columns, problem_of, shown_of
        self._digest = hashlib.sha256()
        self.digests = array("Q")
        self._media = find_media()
        self.names_media = False
        """Whether any row names media."""

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def store_rows(self, files: Sequence[Path]) -> RowStore:
        shown = str(files[0] if len(files) == 1 else files[0].parent)
        try:
            store = RowStore(row for path in files for row in self._rows(path))
        except OSError as error:  # of the store: errors of the file are caught where it is read
            problem = f"cannot be kept in a temporary file: {error.strerror}. Set TMPDIR"
            raise PromptFileError(shown, 0, problem) from error
        if not len(store):
            raise PromptFileError(shown, 0, "holds no rows, so there are no prompts")
        return store

    def _rows(self, path: Path) -> Iterator[bytes]:
        if path.exists() and not (path.is_file() or path.is_dir()):
            problem = "is not a regular file, but several processes read it. Write its rows to one"
            raise PromptFileError(str(path), 0, problem)  # opening a pipe would wait for its writer
        try:
            with path.open("rb") as file:
                head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
                if problem := _problem_of_format(path, head):
                    raise PromptFileError(str(path), 0, *problem)
                is_parquet = head.startswith(_PARQUET_MAGIC)
                yield from (self._parquet if is_parquet else self._json_lines)(path, file)
        except IsADirectoryError as error:
            raise PromptFileError(str(path), 0, *_problem_of_directory(path)) from error
        except FileNotFoundError as error:
            problem = f"cannot be read: {error.strerror}. Files of the Hugging Face Hub are {FORM}"
            raise PromptFileError(str(path), 0, problem) from error
        except OSError as error:
            raise PromptFileError(str(path), 0, f"cannot be read: {error.strerror}") from error

    def _json_lines(self, path: Path, file: BufferedReader) -> Iterator[bytes]:
        digest, number = hashlib.sha256(), 0
        while line := file.readline(_LONGEST_ROW_BYTES + 1):
            digest.update(line)
            number += 1
            if len(line) > _LONGEST_ROW_BYTES:
                raise PromptFileError(str(path), number, _TOO_LONG)
            if row := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                fields = self._map_row(path, number, _decode_row(path, number, row))
                self._check_row(path, number, fields)
                yield msgspec.json.encode(fields) if self._columns else row
        self._digest.update(digest.digest())

    def _parquet(self, path: Path, file: BufferedReader) -> Iterator[bytes]:
        # Imported late: most runs read JSON Lines, or have an environment that makes its prompts
        from offbeat.environments.parquet_rows import parquet_rows, without_nulls  # noqa: PLC0415

        self._digest.update(hashlib.file_digest(file, "sha256").digest())
        named = {self._columns.get(key, key) for key in self._media.ROW_KEYS}
        rows = parquet_rows(path, file, tuple(self._columns.values()), named)
        for number, fields in enumerate(rows, start=1):
            mapped = self._map_row(path, number, fields)
            if not self._columns:
                mapped = {k: v for k, v in mapped.items() if v is not None or k not in _EITHER}
            rendered = {k: without_nulls(mapped[k]) for k in _RENDERED if k in mapped}
            checked = {**mapped, **rendered}
            self._check_row(path, number, checked)
            try:
                row = json.dumps(checked, ensure_ascii=False, allow_nan=False).encode()
            except ValueError as error:
                key = next(key for key, value in checked.items() if not _is_finite(value))
                problem = f"{key!r} holds a number that is not finite; write null instead"
                raise PromptFileError(str(path), number, problem) from error
            if len(row) > _LONGEST_ROW_BYTES:
                raise PromptFileError(str(path), number, _TOO_LONG)
            yield row

    def _map_row(self, path: Path, number: int, row: Mapping[str, object]) -> Mapping[str, object]:
        """Return the row with the keys that the environment reads."""
        mapped = dict[str, object]() if self._columns else dict(row)
        for key, column in self._columns.items():
            try:
                mapped[key] = read_column(row, column)
            except KeyError as missing:
                problem = f"has no {column!r}, which columns.{key} names (keys: {', '.join(row)})"
                raise PromptFileError(str(path), number, problem) from missing
        return mapped

    def _check_row(self, path: Path, number: int, mapped: Mapping[str, object]) -> None:
        """Raise if the row cannot be used. Otherwise record the digest of its prompt."""
        if problem := self._problem_of(mapped):
            raise PromptFileError(str(path), number, problem)
        shown = msgspec.json.encode(self._shown_of(mapped), order="deterministic")
        if self._media.names_media(mapped):
            self.names_media = True
            shown += os.fsencode(path.parent.absolute())  # the names of media are relative to it
        digest = hashlib.blake2b(shown, digest_size=self.digests.itemsize).digest()
        self.digests.frombytes(digest)


def _is_finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _problem_of_directory(path: Path) -> tuple[str, str]:
    """Return why a directory without rows cannot be read, and the fix, if one is known."""
    for name, rows in _SAVED.items():
        if (path / name).is_file():
            load = f"datasets.load_from_disk({str(path)!r}){rows}"
            return (
                "was written by save_to_disk",
                f'Write Parquet: {load}.to_parquet("rows.parquet")',
            )
    return "holds no *.parquet and no *.jsonl; folders inside it are not searched", ""


def _problem_of_format(path: Path, head: bytes) -> tuple[str, str] | None:
    """Return what format a file has that is neither Parquet nor JSON Lines, and the fix."""
    for magic, (form, program) in _COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed ({form})", f"Unpack it: `{program} {shlex.quote(path.name)}`"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or head[:2].count(0) == 1:
        return "is UTF-16 text", "Write it as UTF-8: `iconv -f UTF-16 -t UTF-8`"
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        here, there = shlex.quote(path.name), shlex.quote(f"{path.stem}.rows.jsonl")
        return "is a JSON array", f"Write one object a line: `jq -c '.[]' {here} > {there}`"
    for beginning, named in _OTHERS.items():
        if text.startswith(beginning):
            return named
    if path.suffix in (".csv", ".tsv") and not text.startswith(b"{"):
        fix = "Write it as Parquet: pandas.read_csv(...).to_parquet(...), or as JSON Lines"
        return f"is {path.suffix[1:].upper()}", fix
    return None


def _decode_row(path: Path, number: int, line: bytes) -> dict[str, object]:
    """Return the row in a line.

    Raises:
        PromptFileError: The line holds no row.
    """
    row: object = None
    problem = ""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = json_problem(line)
        if problem == ENDS_EARLY:
            problem += "; a row is a whole object in one line, as `jq -c .` writes it"
    except RecursionError:
        problem = _TOO_DEEP
    if line.count(b"[") + line.count(b"{") > DEEPEST and nesting_depth(row) > DEEPEST:
        problem = _TOO_DEEP
    if not (problem or isinstance(row, dict)):
        problem = f"is a JSON {type(row).__name__}; a row must be an object, one per line"
    if problem:
        raise PromptFileError(str(path), number, problem)
    return cast("dict[str, object]", row)
