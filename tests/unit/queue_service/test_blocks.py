"""Columns in one block: what is remembered of a shape never stands in for what has to be looked at."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core import ColumnSpec
from offbeat.queue_service.storage.blocks import Blocks
from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import Column, Columns, CorruptPayload, Ragged

DTYPES = st.sampled_from(["bool", "int8", "<i8", ">i4", "<f4", "float64", "uint16"])


def dense(rows: int) -> st.SearchStrategy[NDArray[Any]]:
    inner = st.lists(st.integers(0, 5), max_size=2)
    return DTYPES.flatmap(
        lambda dtype: inner.flatmap(lambda more: st_np.arrays(dtype, (rows, *more)))
    )


def ragged(rows: int) -> st.SearchStrategy[Ragged]:
    def of(lengths: list[int]) -> Ragged:
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return Ragged(np.arange(offsets[-1], dtype=np.float32), offsets)

    return st.lists(st.integers(0, 9), min_size=rows, max_size=rows).map(of)


def column(rows: int) -> st.SearchStrategy[Column]:
    lists: st.SearchStrategy[Column] = st.just([{"row": row} for row in range(rows)])
    return st.one_of(dense(rows), ragged(rows), lists)


GROUPS = st.integers(1, 4).flatmap(
    lambda rows: st.dictionaries(st.text("abc", min_size=1), column(rows), min_size=1, max_size=5)
)


def same(got: Column, want: Column) -> bool:
    if isinstance(want, Ragged):
        assert isinstance(got, Ragged)
        return same(got.offsets, want.offsets) and same(got.values, want.values)
    if isinstance(want, list):
        return got == want
    return (
        isinstance(got, np.ndarray)
        and got.dtype == want.dtype.newbyteorder("<")
        and got.shape == want.shape
        and got.tobytes() == want.astype(got.dtype).tobytes()
    )


def moved(columns: Columns, blocks: Blocks) -> dict[str, Column]:
    block = blocks.of(columns)
    memory = np.full(block.shape.nbytes, 255, np.uint8)
    block.write(memory)
    return blocks.columns_in(block.shape.header, memory)


@given(st.lists(GROUPS, min_size=1, max_size=4))
def test_groups_come_out_as_they_went_in_however_often_a_shape_is_seen(
    groups: list[dict[str, Column]],
) -> None:
    blocks = Blocks()
    for columns in (*groups, *groups):
        got = moved(columns, blocks)
        assert list(got) == list(columns)
        assert all(same(got[name], columns[name]) for name in columns)


@given(GROUPS)
def test_a_block_says_what_it_has(columns: dict[str, Column]) -> None:
    shape = Blocks().of(columns).shape
    assert shape.rows == codec.rows_of(columns)
    specs = msgspec.msgpack.decode(shape.specs, type=list[ColumnSpec])
    assert [spec.name for spec in specs] == list(columns)
    assert [spec.ragged for spec in specs] == [
        isinstance(column, Ragged) for column in columns.values()
    ]


def test_the_same_shape_with_other_values_is_written_anew() -> None:
    blocks = Blocks()
    for value in range(3):
        columns = {"x": np.full((2, 3), value), "y": np.full(2, value, ">f4")}
        got = moved(columns, blocks)
        assert all(same(got[name], columns[name]) for name in columns)


def test_a_view_with_gaps_is_written_as_its_values() -> None:
    blocks = Blocks()
    whole = np.arange(24).reshape(4, 6)
    for columns in ({"x": whole[:, ::2]}, {"x": np.ascontiguousarray(whole[:, ::2])}):
        assert same(moved(columns, blocks)["x"], columns["x"])


def test_bools_are_looked_at_each_time() -> None:
    blocks = Blocks()
    sound, unsound = np.array([True, False]), np.array([1, 2], np.uint8).view(np.bool_)
    moved({"mask": sound}, blocks)
    with pytest.raises(SchemaError, match="mask"):
        blocks.of({"mask": unsound})
    header = blocks.of({"mask": sound}).shape.header
    with pytest.raises(CorruptPayload, match="mask"):
        blocks.columns_in(header, np.array([1, 2], np.uint8))


def test_columns_of_different_lengths_are_refused_each_time() -> None:
    blocks = Blocks()
    for _ in range(2):
        with pytest.raises(SchemaError, match="rows"):
            blocks.of({"x": np.zeros(2), "y": np.zeros(3)})


def test_a_block_of_another_size_is_refused_though_its_header_is_known() -> None:
    blocks = Blocks()
    moved({"x": np.zeros(4)}, blocks)
    header = blocks.of({"x": np.zeros(4)}).shape.header
    with pytest.raises(CorruptPayload):
        blocks.columns_in(header, np.zeros(40, np.uint8))


def test_views_of_a_read_only_block_are_read_only() -> None:
    blocks = Blocks()
    block = blocks.of({"x": np.arange(4)})
    memory = np.zeros(block.shape.nbytes, np.uint8)
    block.write(memory)
    memory.flags.writeable = False
    for _ in range(2):
        got = blocks.columns_in(block.shape.header, memory)["x"]
        assert isinstance(got, np.ndarray)
        assert not got.flags.writeable
