import mmap
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_payloads import all_same, bits, example, payloads, same
from hypothesis import given
from numpy.typing import NDArray

from offbeat.transfer_queue.codec import (
    BFLOAT16,
    Column,
    Ragged,
    UnusableBuffer,
    digest_of,
    pack,
    pack_into,
    packed_size,
    unpack,
)
from offbeat.transfer_queue.codec.dtypes import WIRE


def arrays_of(columns: dict[str, Column]) -> list[NDArray[Any]]:
    ragged = [column for column in columns.values() if isinstance(column, Ragged)]
    dense = [column for column in columns.values() if isinstance(column, np.ndarray)]
    return [*dense, *(each.values for each in ragged), *(each.offsets for each in ragged)]


def address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


@given(payloads())
def test_columns_come_back_from_one_buffer_as_they_went_in(columns: dict[str, Column]) -> None:
    buffer = pack(columns)
    assert all_same(unpack(buffer), columns)
    assert all_same(unpack(buffer, verify=False), columns)
    assert packed_size(columns) == len(buffer)


@given(payloads())
def test_equal_columns_make_equal_bytes_however_they_lie_in_memory(
    columns: dict[str, Column],
) -> None:
    assert pack(columns).tobytes() == pack(unpack(pack(columns))).tobytes()


@pytest.mark.parametrize("name", sorted(WIRE))
def test_every_type_comes_back_native_and_little_endian(name: str) -> None:
    values = bits(3, (5, 2), WIRE[name])
    again = unpack(pack({"x": values.astype(values.dtype.newbyteorder(">"))}))["x"]
    assert isinstance(again, np.ndarray) and again.dtype == WIRE[name] and same(again, values)


def test_another_librarys_bfloat16_is_known_by_its_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    again = unpack(pack({"x": values}))["x"]
    assert same(again, values.view(BFLOAT16))


def test_views_are_of_the_buffer_and_read_only_if_it_is() -> None:
    buffer = pack(example())
    for array in arrays_of(unpack(buffer)):
        assert np.shares_memory(array, buffer) and array.flags.writeable
    for array in arrays_of(unpack(buffer.tobytes())):
        assert not array.flags.writeable


def test_arrays_lie_on_cache_lines() -> None:
    assert all(address(array) % 64 == 0 for array in arrays_of(unpack(pack(example()))))


def test_offsets_that_were_shared_are_written_once_and_shared_again() -> None:
    columns = unpack(pack(example()))
    ragged = [column for column in columns.values() if isinstance(column, Ragged)]
    assert len({id(column.offsets) for column in ragged}) == 1
    alone = {"a": Ragged(np.arange(6), np.array([0, 6]))}
    twice = {**alone, "b": Ragged(np.arange(6), alone["a"].offsets)}
    thrice = {**alone, "b": Ragged(np.arange(6), np.array([0, 6]))}
    assert packed_size(twice) < packed_size(thrice)


def test_no_rows_and_no_columns_are_columns_too() -> None:
    nothing: dict[str, Column] = {
        "ragged": Ragged(np.zeros((0, 3), np.float32), np.zeros(1, np.int64)),
        "dense": np.zeros((0, 7), np.int32),
        "list": [],
    }
    no_columns: dict[str, Column] = {}
    for columns in (no_columns, nothing):
        assert all_same(unpack(pack(columns)), columns)


def test_rows_of_a_ragged_column_are_its_values_between_offsets() -> None:
    column = Ragged(np.arange(5), np.array([0, 2, 2, 5]))
    assert [column.row(index).tolist() for index in range(len(column))] == [[0, 1], [], [2, 3, 4]]


def test_a_buffer_is_packed_into_and_read_from_where_it_is(tmp_path: Path) -> None:
    columns = example()
    size = packed_size(columns)
    path = tmp_path / "payload"
    path.write_bytes(b"\xff" * (size + 1000))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        assert pack_into(memory, columns) == size
        assert memory[size:] == b"\xff" * 1000
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    again = unpack(mapped)
    assert all_same(again, columns)
    assert not any(array.flags.writeable for array in arrays_of(again))


def test_a_used_buffer_packs_to_the_same_bytes_as_a_new_one() -> None:
    columns = example()
    used = bytearray(b"\xff" * packed_size(columns))
    pack_into(used, columns)
    assert used == pack(columns).tobytes()


def test_blocks_and_strides_of_large_columns_make_the_same_digest() -> None:
    values = np.arange(1_000_003)
    gaps = np.repeat(values, 2)[::2]
    assert all_same(unpack(pack({"x": values, "y": gaps})), {"x": values, "y": values})
    assert digest_of(pack({"x": values})) == digest_of(pack({"x": gaps}))


def test_memory_that_cannot_be_used_is_refused_before_anything_is_written() -> None:
    columns = example()
    size = packed_size(columns)
    with pytest.raises(UnusableBuffer, match="ask packed_size"):
        pack_into(bytearray(size - 1), columns)
    with pytest.raises(UnusableBuffer, match="read-only"):
        pack_into(bytes(size), columns)
    with pytest.raises(UnusableBuffer, match="contiguous"):
        unpack(np.zeros(200, np.uint8)[::2])
    with pytest.raises(UnusableBuffer, match="3 bytes off"):
        unpack(pack(columns)[3:])


def test_the_errors_arrive_whole_from_another_process() -> None:
    error = UnusableBuffer("read-only", "memory that may be written")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is UnusableBuffer and str(again) == str(error)


def test_the_host_is_little_endian_or_its_views_say_otherwise() -> None:
    values = unpack(pack({"x": np.array([1], np.int32)}))["x"]
    assert isinstance(values, np.ndarray) and values.tolist() == [1]
    assert values.dtype.isnative == (sys.byteorder == "little")
