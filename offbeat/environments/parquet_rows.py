"""Reads the rows of a Parquet file, a few at a time."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false
# pyarrow has no types.

import base64
import os
from collections.abc import Container, Iterator, Sequence
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from offbeat.messages.failures import OffbeatError

_BATCH_ROWS: Final = 256
"""Rows decoded at once: a row group may have a million."""

_BUFFER_BYTES: Final = 2**20
"""Bytes of a column read at once; without a bound a column of a row group is read whole."""


class UnreadableParquet(OffbeatError):
    """A Parquet file, or one of its columns, cannot be read as prompts."""

    problem: str

    def __str__(self) -> str:
        return self.problem


def parquet_rows(
    file: BinaryIO, columns: Sequence[str] = (), media: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open file as plain values, in its order.

    Only ``columns`` are read, all if none are named. A null is no key: a Parquet row has a place
    for every column, and a struct for every field. In the columns ``media`` a value may be the
    bytes of a file, alone or as field ``bytes``; they become ``{"bytes": text in base64}``.

    Raises:
        UnreadableParquet: The file is damaged or changes meanwhile, lacks a column, or has one that
            JSON cannot hold.
    """
    before = _version(file)
    try:
        parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        names = _checked_columns(parquet.schema_arrow, columns, media)
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            for row in batch.to_pylist():
                yield {
                    key: _file(value) if key in media else value
                    for key, value in _without_nulls(row).items()
                }
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnreadableParquet(f"is no readable Parquet file: {error}") from error
    if _version(file) != before:
        raise UnreadableParquet("was changed while it was read")


def _checked_columns(schema: pa.Schema, columns: Sequence[str], media: Container[str]) -> list[str]:
    names = cast("list[str]", schema.names)
    kinds_by_name = {name: _kind_of(schema, name) for name in columns or names}
    if missing := [name for name, kind in kinds_by_name.items() if kind is None]:
        raise UnreadableParquet(f"has no column {missing[0]!r} (columns: {', '.join(names)})")
    for name, kind in kinds_by_name.items():
        if names.count(name) > 1:
            raise UnreadableParquet(
                f"has column {name!r} {names.count(name)} times (columns: {', '.join(names)}); "
                "give each a name of its own"
            )
        if not (_is_plain(kind) or (name in media and _is_file(kind))):
            raise UnreadableParquet(
                f"has column {name!r} of type {kind}, which no prompt can hold; "
                "name the columns that are needed"
            )
    return list(dict.fromkeys(columns)) or names


def _kind_of(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a column, or of a field that a dotted name reaches; None without one."""
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
    """Return whether JSON has such values, at any depth."""
    if kinds.is_struct(kind):
        return all(_is_plain(kind.field(place).type) for place in range(kind.num_fields))
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if kinds.is_dictionary(kind):
        return _is_plain(kind.value_type)
    text = kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
    number = kinds.is_integer(kind) or kinds.is_floating(kind)
    return text or number or kinds.is_boolean(kind) or kinds.is_null(kind)


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - a plain value of any kind
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: _without_nulls(child) for key, child in fields.items() if child is not None}
    if isinstance(value, list):
        return [_without_nulls(child) for child in cast("list[Any]", value)]
    return value


def _version(file: BinaryIO) -> tuple[int, int]:
    seen = os.fstat(file.fileno())
    return seen.st_size, seen.st_mtime_ns
