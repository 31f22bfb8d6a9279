import enum
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from codec_payloads import all_same, example, payloads
from hypothesis import given
from hypothesis import strategies as st

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.codec import (
    Column,
    Ragged,
    concat,
    pack,
    rows_of,
    unpack,
)


class Reason(enum.StrEnum):
    STOP = "stop"


def cyclic() -> list[Any]:
    rows: list[Any] = []
    rows.append(rows)
    return rows


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([None]), "dtype object"),
    "strings": (np.array(["a"]), "dtype <U1"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
    "complex": (np.zeros(2, complex), "complex128"),
    "structured": (np.zeros(2, [("x", "<u2")]), "dtype"),
    "long doubles": (np.zeros(2, np.longdouble), "dtype"),
    "a scalar array": (np.array(1.0), "0 dimensions"),
    "a masked array": (np.ma.MaskedArray([1], [True]), "MaskedArray"),
    "bools of other bytes": (np.full(3, 7, np.uint8).view(np.bool_), "byte of 7"),
    "a tuple": ((1, 2), "a tuple"),
    "nothing": (None, "a NoneType"),
    "text": ("abc", "a str"),
    "offsets that do not end with the values": (Ragged(np.zeros(3), np.array([0, 2])), "3 values"),
    "offsets that fall": (Ragged(np.zeros(1), np.array([0, 2, 1])), "fall at 2"),
    "offsets that start late": (Ragged(np.zeros(2), np.array([1, 2])), "start at 1"),
    "no offsets": (Ragged(np.zeros(0), np.zeros(0, np.int64)), r"shape \(0,\)"),
    "offsets in two dimensions": (Ragged(np.zeros(0), np.zeros((1, 1), np.int64)), "shape"),
    "offsets of floats": (
        Ragged(np.zeros(0), np.zeros(1)),  # pyright: ignore[reportArgumentType]
        "float64",
    ),
    "ragged lists": (Ragged([1], np.array([0, 1])), "a list"),  # pyright: ignore[reportArgumentType]
    "a tuple in a list": ([(1, 2)], "builtins.tuple"),
    "an enum in a list": ([Reason.STOP], "Reason"),
    "a date in a list": ([datetime(2020, 1, 1, tzinfo=UTC)], "datetime"),
    "a numpy number in a list": ([np.float64(1)], "numpy.float64"),
    "an int key": ([{1: 2}], "key 1"),
    "a huge int": ([2**64], "64 bits"),
    "text that is not UTF-8": (["\ud800"], "UTF-8"),
    "a list in itself": (cyclic(), "deeper than 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_come_back_is_refused_by_the_columns_name(case: str) -> None:
    column, why = REFUSED[case]
    with pytest.raises(SchemaError, match=rf"'odd'.*{why}"):
        pack({"fine": np.zeros(2), "odd": column})


@pytest.mark.parametrize("name", [1, None, b"x", "\ud800"])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(SchemaError, match="named by"):
        pack({name: np.zeros(1)})


def test_offsets_of_any_integer_type_become_int64() -> None:
    column = Ragged(np.arange(3), np.array([0, 1, 3], np.int32))  # pyright: ignore[reportArgumentType]
    again = unpack(pack({"x": column}))["x"]
    assert isinstance(again, Ragged) and again.offsets.dtype == np.int64
    assert again.offsets.tolist() == [0, 1, 3]


def rows_between(column: Column, start: int, stop: int) -> Column:
    if not isinstance(column, Ragged):
        return column[start:stop]
    offsets = column.offsets[start : stop + 1]
    return Ragged(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])


@given(payloads(), st.data())
def test_rows_that_were_cut_apart_and_joined_again_are_the_rows(
    columns: dict[str, Column], data: st.DataObject
) -> None:
    rows = rows_of(columns)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    bounds = zip([0, *cuts], [*cuts, rows], strict=True)
    pieces = [
        {name: rows_between(column, start, stop) for name, column in columns.items()}
        for start, stop in bounds
    ]
    assert all_same(concat(pieces), columns)


def test_a_single_payload_is_joined_without_a_copy_and_shared_offsets_stay_shared() -> None:
    columns = example()
    assert all(
        one is other
        for one, other in zip(concat([columns]).values(), columns.values(), strict=True)
    )
    joined = concat([columns, example(2, 3)])
    ids, mask = joined["input_ids"], joined["loss_mask"]
    assert isinstance(ids, Ragged) and isinstance(mask, Ragged) and ids.offsets is mask.offsets
    assert rows_of(joined) == 6


def test_payloads_that_do_not_fit_together_are_refused_by_the_columns_name() -> None:
    one: dict[str, Column] = {"x": np.zeros(2), "y": [1, 2]}
    others: dict[str, dict[str, Column]] = {
        "'y'.*missing": {"x": np.zeros(2)},
        "'z'.*extra": {**one, "z": [1, 2]},
        "'x'.*a list in one": {**one, "x": [1, 2]},
        "'x'.*int64 with rows": {**one, "x": np.zeros(2, np.int64)},
        r"'x'.*rows \(3,\)": {**one, "x": np.zeros((2, 3))},
    }
    for why, other in others.items():
        with pytest.raises(SchemaError, match=why):
            concat([one, other])
    with pytest.raises(SchemaError, match="at least one"):
        concat([])
    with pytest.raises(SchemaError, match=r"'y'.*1 rows.*2 rows, as 'x' has"):
        rows_of({"x": np.zeros(2), "y": [1]})
