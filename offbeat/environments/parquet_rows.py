"""Reads the rows of a Parquet file, a few at a time."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false
# pyarrow has no types.

import base64
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from offbeat.environments.prompt_files import PromptFileError

_BATCH_ROWS: Final = 256
"""Rows decoded at once. A row group may have a million rows."""

_BUFFER_BYTES: Final = 2**20
"""Bytes of a column read at once. Without a limit, a row group's whole column would be read."""


def parquet_rows(
    path: Path, file: BinaryIO, columns: Sequence[str], media: Container[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open file as plain values, in the file's order.

    Only ``columns`` are read, or all columns if none are named. A null becomes None. In the columns
    ``media``, a value may be the bytes of a file, directly or as field ``bytes``. These bytes
    become ``{"bytes": text in base64}``.

    Raises:
        PromptFileError: The file is damaged or changes meanwhile, lacks a column, or has a column
            that JSON cannot hold.
    """
    before = _version(file)
    try:
        parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        names = list(dict.fromkeys(columns)) or cast("list[str]", parquet.schema_arrow.names)
        if problem := _problem_of_columns(parquet.schema_arrow, names, media):
            raise PromptFileError(str(path), 0, problem)
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            for row in batch.to_pylist():
                yield {key: _file(value) if key in media else value for key, value in row.items()}
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"is not a readable Parquet file: {error}"
        raise PromptFileError(str(path), 0, problem) from error
    if _version(file) != before:
        raise PromptFileError(str(path), 0, "was changed while it was read")


def _problem_of_columns(
    schema: pa.Schema, wanted: Sequence[str], media: Container[str]
) -> str | None:
    names = cast("list[str]", schema.names)
    columns = f"(columns: {', '.join(names)})"
    kinds_by_name = {name: _find_type(schema, name) for name in wanted}
    if missing := [name for name, kind in kinds_by_name.items() if kind is None]:
        return f"has no column {missing[0]!r} {columns}"
    for name, kind in kinds_by_name.items():
        if (count := names.count(name)) > 1:
            return f"has column {name!r} {count} times {columns}; give each a different name"
        if not (_is_plain(kind) or (name in media and _is_file(kind))):
            fix = "name the columns that are needed in data.columns"
            return f"has column {name!r} of type {kind}, which no prompt can hold; {fix}"
    return None


def _find_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a column, or of the field with a dotted name, or None if missing."""
    if name in schema.names:
        return schema.field(schema.names.index(name)).type
    top, *inner = name.split(".")
    kind = schema.field(top).type if top in schema.names else None
    for part in inner:
        place = kind.get_field_index(part) if kind is not None and kinds.is_struct(kind) else -1
        kind = kind.field(place).type if kind is not None and place >= 0 else None
    return kind


def _is_file(kind: pa.DataType) -> bool:
    """Return whether values are bytes, structs of ``bytes`` and plain fields, or lists of these."""
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _is_file(kind.value_type)
    if kinds.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return all(
            _is_bytes(each.type) if each.name == "bytes" else _is_plain(each.type)
            for each in fields
        )
    return _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind)


def _file(value: Any) -> Any:  # noqa: ANN401 - what names a file, or a list of it
    if isinstance(value, list):
        return [_file(each) for each in cast("list[Any]", value)]
    content = cast("dict[str, Any]", value).get("bytes") if isinstance(value, dict) else value
    if isinstance(content, bytes):
        return {"bytes": base64.b64encode(content).decode()}
    return cast("dict[str, Any]", value).get("path") if isinstance(value, dict) else value


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether JSON can hold such values, at any depth."""
    if kinds.is_struct(kind):
        return all(_is_plain(kind.field(place).type) for place in range(kind.num_fields))
    is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
    if is_list or kinds.is_dictionary(kind):
        return _is_plain(kind.value_type)
    text = kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
    number = kinds.is_integer(kind) or kinds.is_floating(kind)
    return text or number or kinds.is_boolean(kind) or kinds.is_null(kind)


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - a plain value of any kind
    """Return the value without null fields of objects, at any depth."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: without_nulls(child) for key, child in fields.items() if child is not None}
    if isinstance(value, list):
        return [without_nulls(child) for child in cast("list[Any]", value)]
    return value


def _version(file: BinaryIO) -> tuple[int, int]:
    seen = os.fstat(file.fileno())
    return seen.st_size, seen.st_mtime_ns
