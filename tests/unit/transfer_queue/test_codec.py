import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from codec_payloads import all_same, bits, example, payloads
from hypothesis import given
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.codec import DTYPES, pack, read_digest, unpack

Columns = Mapping[str, NDArray[Any]]


def packed(columns: Columns) -> bytearray:
    return bytearray(pack(columns))


@given(payloads)
def test_columns_come_back_from_one_buffer_as_they_went_in(columns: Columns) -> None:
    assert all_same(unpack(packed(columns)), columns)


@given(payloads)
def test_equal_columns_make_equal_bytes_however_they_lie_in_memory(columns: Columns) -> None:
    assert packed(columns) == packed(unpack(packed(columns)))


def test_the_bytes_of_a_payload_stay_those_of_version_1() -> None:
    columns = {
        "prompt_ids": np.arange(7, dtype=np.int32),
        "response_ids": np.arange(41, dtype=">i4"),
        "response_offsets": np.array([0, 20, 41]),
        "loss_mask": np.arange(41) % 3 == 0,
        "generation_logprobs": (np.arange(82, dtype=np.float32) / -8)[::2],
        "rewards": np.array([0.5, 1], np.float32),
        "media_sizes": np.zeros(0, np.int16),
    }
    assert (
        hashlib.sha256(packed(columns)).hexdigest()
        == "4e99aa4770421cac88b819bdeba00298b70da1ea439b946ba2fc760376ca048c"
    )


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back_native_and_little_endian(name: str) -> None:
    values = bits(3, 5, name)
    again = unpack(packed({"x": values.astype(values.dtype.newbyteorder(">"))}))["x"]
    assert again.dtype == np.dtype(name).newbyteorder("<")
    assert all_same({"x": again}, {"x": values})


def test_views_are_of_the_buffer_and_read_only_if_it_is() -> None:
    buffer = packed(example())
    for array in unpack(buffer).values():
        assert np.shares_memory(array, np.frombuffer(buffer, np.uint8)) and array.flags.writeable
    for array in unpack(memoryview(bytes(buffer))).values():
        assert not array.flags.writeable


def test_columns_lie_on_cache_lines_of_the_payload() -> None:
    buffer = packed(example())
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    assert all((each.ctypes.data - start) % 64 == 0 for each in unpack(buffer).values())


def test_no_rows_and_no_columns_are_columns_too() -> None:
    for columns in ({}, {"a": np.zeros(0, np.int32)}, {"a": np.zeros(0), "b": np.ones(1)}):
        assert all_same(unpack(packed(columns)), columns)


def test_memory_that_is_large_enough_is_used_and_gives_the_same_bytes_as_new_memory() -> None:
    columns = example()
    whole = pack(columns)
    used = np.full(whole.nbytes + 1000, 255, np.uint8)
    again = pack(columns, used)
    assert np.shares_memory(again, used) and again.tobytes() == whole.tobytes()
    assert (used[whole.nbytes :] == 255).all()
    assert not np.shares_memory(pack(columns, used[: whole.nbytes - 1]), used)


def test_gaps_in_the_memory_of_a_large_column_make_the_same_digest() -> None:
    values = np.arange(1_000_003)
    gaps = np.repeat(values, 2)[::2]
    assert read_digest(pack({"x": values})) == read_digest(pack({"x": gaps}))


REFUSED: dict[str, tuple[NDArray[Any], str]] = {
    "objects": (np.array([None]), "object"),
    "strings": (np.array(["a"]), "<U1"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
    "complex": (np.zeros(2, complex), "complex128"),
    "structured": (np.zeros(2, [("x", "<u2")]), "x"),
    "long doubles": (np.zeros(2, np.longdouble), "float"),
    "a scalar array": (np.array(1.0), "0 dimensions"),
    "two axes": (np.zeros((2, 2)), "2 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_come_back_is_refused_by_the_columns_name(case: str) -> None:
    column, why = REFUSED[case]
    with pytest.raises(SchemaError, match=rf"'odd'.*{why}"):
        pack({"fine": np.zeros(2), "odd": column})


def test_the_host_is_little_endian_or_its_views_say_otherwise() -> None:
    values = unpack(packed({"x": np.array([1], np.int32)}))["x"]
    assert values.tolist() == [1] and values.dtype.isnative == (sys.byteorder == "little")
