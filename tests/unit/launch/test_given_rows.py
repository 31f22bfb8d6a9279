"""Rows that are given in Python become a prompt file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from offbeat.launch.given_rows import BadRows, prompt_path

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "ä", "answer": None}]


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


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
        (7, "it is no list of rows"),
        ({"prompt": "a"}, "it is no list of rows"),
        (["a", "b"], "row 0 has the type str: a row is a dict"),
        ([{"prompt": "a"}, {"prompt": "a", "x": object()}], "row 1: .* has the type object"),
        ([{"prompt": "a", "x": float("nan")}], "row 0: "),
    ],
)
def test_what_is_no_row_is_refused_with_its_number(
    tmp_path: Path, prompts: object, problem: str
) -> None:
    with pytest.raises(BadRows, match=problem):
        prompt_path(prompts, tmp_path)
