# pyright: basic
# pyarrow has no types.
"""Reads Parquet files of a run in batches, with limited memory.

A limit is needed because the size in a file's table of contents does not count how often a
dictionary's text is repeated.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.run_files.limits import ROLLOUT_FILE_BYTES, FileTooLarge, regular_bytes

_ROWS: Final = 2_000_000  # of a file
_BATCH_ROWS: Final = 4096
_SKIPPED: Final = 16
"""Rows that are not kept may need this many times the limit."""


def read_parquet(
    path: Path,
    columns: Iterable[str] | None = None,
    keep: Callable[[Any], Any] | None = None,
    limit: int = ROLLOUT_FILE_BYTES,
) -> Any:  # noqa: ANN401 -- a pyarrow.Table
    """Return rows of a file.

    Args:
        path: The file.
        columns: Columns to read; names that the file lacks are left out. None reads all.
        keep: Returns a mask of the rows to keep in a batch. None keeps all rows.
        limit: Bytes that may be kept.

    Raises:
        OSError: The file cannot be read.
        NoRegularFile: The file is a pipe, a socket, a device or a directory.
        FileTooLarge: The file has more rows or bytes than any file that a run writes.
        pyarrow.ArrowException: The file is damaged.
    """
    regular_bytes(path)
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        names = [name for name in schema.names if columns is None or name in set(columns)]
        rows = _count_batch_rows(file.metadata, path, limit)
        kept, kept_bytes, read_bytes = list[Any](), 0, 0
        for batch in file.iter_batches(batch_size=rows, columns=names):
            part = batch if keep is None else batch.filter(keep(batch))
            kept_bytes, read_bytes = kept_bytes + part.nbytes, read_bytes + batch.nbytes
            if kept_bytes > limit or read_bytes > _SKIPPED * limit:
                raise FileTooLarge(str(path), max(kept_bytes, read_bytes), limit)
            if part.num_rows:
                kept.append(part)
        empty = schema.empty_table().select(names).schema
        return pa.Table.from_batches(kept, schema=kept[0].schema if kept else empty)


def _count_batch_rows(contents: Any, path: Path, limit: int) -> int:  # noqa: ANN401 -- of pyarrow
    """Return how many rows a batch may have to fit into the limit, even if values are repeated.

    Raises:
        FileTooLarge: The table of contents announces more than the limit.
    """
    largest = nbytes = 0
    for part in map(contents.row_group, range(contents.num_row_groups)):
        for column in map(part.column, range(part.num_columns)):
            width = 4 if column.physical_type == "BYTE_ARRAY" else 8
            stored = max(column.total_uncompressed_size, 1)
            nbytes += max(stored, width * column.num_values)
            largest = max(largest, stored)
    if nbytes > limit or contents.num_rows > _ROWS:
        raise FileTooLarge(str(path), nbytes, limit)
    return max(1, min(_BATCH_ROWS, limit // (largest or 1)))
