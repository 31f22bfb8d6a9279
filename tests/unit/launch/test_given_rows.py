"""Rows that are given in Python become a prompt file."""

import dataclasses
import json
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from offbeat.launch.given_rows import BadRows, prompt_path

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "ä", "answer": None}]


class Level(IntEnum):
    """A number with a name."""

    EASY = 1


class Topic(StrEnum):
    """A text with a name."""

    SUMS = "sums"


class Shape(Enum):
    """Neither number nor text."""

    ROUND = object()


class Marked(str):
    """A text with marks that its characters do not hold."""

    __slots__ = ()


class Ratio(float):
    """A number that knows its parts."""


@dataclasses.dataclass
class Case:
    """A test case of a program."""

    stdin: str


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 -- of any user


class Column:
    """A split of a ``DatasetDict``."""

    column_names = ("prompt",)


def nested(depth: int) -> list[Any]:
    """Return a list in a list, ``depth`` deep."""
    inner: list[Any] = []
    for _ in range(depth - 1):
        inner = [inner]
    return inner


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def test_a_path_stays_as_it_is(tmp_path: Path) -> None:
    assert prompt_path("hf://owner/name", tmp_path) == "hf://owner/name"
    assert prompt_path(Path("rows.jsonl"), tmp_path) == "rows.jsonl"
    assert list(tmp_path.iterdir()) == []


def test_the_same_rows_are_the_same_file(tmp_path: Path) -> None:
    path = prompt_path(ROWS, tmp_path / "runs")
    assert read(path) == ROWS
    assert prompt_path(iter(ROWS), tmp_path / "runs") == path
    assert prompt_path(ROWS[:1], tmp_path / "runs") != path


def test_a_data_frame_is_read_by_rows_and_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": np.array([1, 2])})
    assert read(prompt_path(frame, tmp_path)) == frame.to_dict("records")
    assert read(prompt_path([{"prompt": "a", "at": np.arange(2)}], tmp_path))[0]["at"] == [0, 1]


def test_a_dataset_is_read_by_rows(tmp_path: Path) -> None:
    class Dataset:
        """As that of the library ``datasets``: ``to_dict`` returns columns, an iterator rows."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(ROWS)

        def to_dict(self) -> dict[str, list[Any]]:
            return {"prompt": ["1+1=", "ä"], "answer": [2, None]}

    assert read(prompt_path(Dataset(), tmp_path)) == ROWS


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ([], "there are none"),
        (7, "it is not a list of rows"),
        ({"prompt": "a"}, "it is not a list of rows"),
        (["a", "b"], r"\[0\] has the type str: a row is a dict"),
        ({"train": Column()}, r"prompts: dict: it is not a list of rows. .*prompts\['train'\]"),
        (pd.Series(["a"]), "Series: it is one column"),
    ],
)
def test_what_is_no_row_is_refused_with_its_number(
    tmp_path: Path, prompts: object, problem: str
) -> None:
    with pytest.raises(BadRows, match=problem):
        prompt_path(prompts, tmp_path)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ([1, [True, None, "ä\u2028"]], [1, [True, None, "ä\u2028"]]),
        (OrderedDict(a={"b": 0.1}), {"a": {"b": 0.1}}),
        (10**30, 10**30),
        (nested(99), nested(99)),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),  # noqa: FBT003 -- of numpy
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([{"a": np.arange(2)}, None]), [{"a": [0, 1]}, None]),
        (torch.tensor([1.5, 2.0]), [1.5, 2.0]),
    ],
)
def test_a_value_comes_back_equal(tmp_path: Path, value: object, kept: object) -> None:
    (row,) = read(prompt_path([{"prompt": "a", "x": value}], tmp_path))
    assert row["x"] == kept
    assert type(row["x"]) is type(kept)


@pytest.mark.parametrize(
    ("value", "problem", "fix"),
    [
        ((1, 2), "x = (1, 2) is a tuple, but would come back as a list", "list(VALUE)"),
        (Pair(1, 2), "is a tuple", "VALUE._asdict()"),
        ({"a": [{"b": (1,)}]}, "x.a[0].b = (1,) is a tuple", "list(VALUE)"),
        ({1: "a"}, "the key 1 of x has the type int, but keys of JSON are text", "such as '1'"),
        ({True: "a"}, "the key true of x has the type bool", "such as 'True'"),
        ({Topic.SUMS: 1}, "of x has the type Topic", "such as 'sums'"),
        ({1, 2}, "has the type set", "sorted(VALUE)"),
        (float("nan"), "x = nan is a missing value", "give None"),
        ([{"y": float("inf")}], "x[0].y = inf is not finite", "Give a finite number"),
        (np.array([1.0, np.nan]), "x[1] = nan is a missing value", "give None"),
        (pd.NA, "x = <NA> is a missing value", "give None"),
        (pd.NaT, "x = NaT is a missing value", "give None"),
        (Level.EASY, "is an Enum (Level)", "VALUE.value"),
        (Topic.SUMS, "is an Enum (Topic)", "VALUE.value"),
        (Shape.ROUND, "is an Enum (Shape)", "VALUE.value"),
        (Marked("a"), "has the type Marked, but would come back as str", "str(VALUE)"),
        (Ratio(0.5), "has the type Ratio, but would come back as float", "float(VALUE)"),
        (Decimal("0.10"), "x = Decimal('0.10') has the type Decimal", "str(VALUE)"),
        (b"a", "has the type bytes", "base64"),
        (datetime(2026, 1, 2, tzinfo=UTC), "has the type datetime", "VALUE.isoformat()"),
        (date(2026, 1, 2), "has the type date", "VALUE.isoformat()"),
        (pd.Timestamp("2026-01-02"), "has the type Timestamp", "VALUE.isoformat()"),
        (timedelta(days=1), "has the type timedelta", "VALUE.total_seconds()"),
        (np.datetime64(1, "ns"), "has the type datetime64[ns]", "str(VALUE)"),
        (np.longdouble(1), "has the type", "str(VALUE)"),
        (np.ma.masked_array([1, 2], [False, True]), "has the type MaskedArray", "tolist()"),
        (Case("1"), "is a dataclass (Case)", "dataclasses.asdict(VALUE)"),
        (Path("a"), "has the type", "str(VALUE)"),
        (range(3), "has the type range", "list(VALUE)"),
        (object(), "has the type object", "Give numbers, text, lists and dicts"),
        ("\ud800", "x = '\\ud800' holds half of a character", "Remove or replace it"),
        (nested(101), "is nested more than 100 deep", "Make it flatter"),
    ],
)  # fmt: skip
def test_a_value_that_would_change_is_refused_with_its_row_its_key_and_the_fix(
    tmp_path: Path, value: object, problem: str, fix: str
) -> None:
    with pytest.raises(BadRows) as refused:
        prompt_path([{"prompt": "a"}, {"prompt": "b", "x": value}], tmp_path)
    assert str(refused.value).startswith("prompts[1]: ")
    assert problem in str(refused.value)
    assert fix in refused.value.fix
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_evaluation_rows_names_their_argument(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match=r"eval_prompts\[0\]: x = "):
        prompt_path([{"prompt": "a", "x": (1,)}], tmp_path, "eval_prompts")


def test_a_missing_value_of_a_frame_is_named_and_the_fix_makes_it_none(tmp_path: Path) -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": [1, None]})
    with pytest.raises(BadRows, match=r"\[1\]: answer = nan is a missing value"):
        prompt_path(frame, tmp_path)
    fixed = frame.convert_dtypes().astype(object).where(frame.notna(), None)
    assert read(prompt_path(fixed, tmp_path))[1] == {"prompt": "b", "answer": None}


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (pd.DataFrame([["a", 1]]), "prompts[0]: the key 0 has the type int"),
        (pd.DataFrame([["a", 1]], columns=["prompt", "prompt"]), "called 'prompt'"),
        (pd.DataFrame({"prompt": ["a"]}, index=pd.Index([3], name="id")), "reset_index()"),
        (pd.DataFrame({"prompt": ["a"]}, index=["q7"]), "the index holds 'q7'"),
    ],
)
def test_a_frame_with_more_than_its_columns_say_is_refused(
    tmp_path: Path, frame: pd.DataFrame, problem: str
) -> None:
    with pytest.raises(BadRows) as refused:
        prompt_path(frame, tmp_path)
    assert problem in str(refused.value)
