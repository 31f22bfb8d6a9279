"""Prompts from files: JSON Lines and Parquet, their columns, and what is refused."""

import gzip
import json
import os
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.prompt_files import (
    FilePrompts,
    PromptFileError,
    RowStore,
    files_digest,
    prompt_files,
)


def jsonl(folder: Path, text: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text(text)
    return file


def parquet(folder: Path, columns: Mapping[str, Any], name: str = "prompts.parquet") -> Path:
    """A Parquet file with these columns, in row groups of two rows."""
    pq.write_table(pa.table(dict(columns)), folder / name, row_group_size=2)
    return folder / name


def prompts(
    *files: Path, shuffle: bool = True, columns: Mapping[str, str] | None = None
) -> FilePrompts:
    return FilePrompts(files, shuffle=shuffle, seed=0, epochs=2, columns=columns or {})


def rows_of(*files: Path, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The rows in the order of the files."""
    source = prompts(*files, shuffle=False, columns=columns)
    found = [source.prompt(prompt_index) for prompt_index in range(source.rows)]
    return [prompt.data for prompt in found if prompt is not None]


def test_a_file_without_shuffling_is_read_in_its_own_order(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '\ufeff{"prompt": "a", "n": 1}\n\n{"prompt": "b"}\r\n')
    source = prompts(file, shuffle=False)
    rows = [source.prompt(prompt_index) for prompt_index in range(3)]
    assert [prompt.data for prompt in rows if prompt] == [
        {"prompt": "a", "n": 1},
        {"prompt": "b"},
        {"prompt": "a", "n": 1},
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "is not JSON: it ends too early; a row is a whole object in one line"),
        ("{", "is not JSON: it ends too early; a row is a whole object in one line"),
        ('{"prompt": }', r"is not JSON: Expecting value \(character 11\)"),
        ('{"prompt": NaN}', "holds NaN, which JSON does not have; write null"),
        ('{"prompt": "a", "n": -Infinity}', "holds -Infinity, which JSON does not have"),
        ('{"prompt": "a", "n": 1e999}', "holds a number that is too large"),
        ('{"prompt": "a", "n": "\\ud83d"}', r"holds \\ud83d, a lone surrogate"),
        ('"a"', "is a JSON str; a row must be an object"),
        (
            '{"text": "a"}',
            r"neither of 'prompt' and 'messages' \(keys: text\); give one, or .* columns",
        ),
        ('{"prompt": "a", "messages": []}', "both of 'prompt' and 'messages'"),
        ('{"prompt": 3}', "'prompt' is 3; it must be a string"),
        ('{"prompt": ""}', "'prompt' is empty"),
        (
            '{"prompt": [{"role": "user", "content": "?"}]}',
            "as in {messages: prompt, answer: answer}",
        ),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["hi"]}', r"messages\[0\] is 'hi'"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] .* needs 'role' and 'content'"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, problem: str) -> None:
    file = jsonl(tmp_path, f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(PromptFileError, match=rf"prompts\.jsonl:2: .*{problem}"):
        prompts(file)


@pytest.mark.parametrize("depth", [101, 5000, 100_000])
def test_a_row_that_is_nested_deep_is_named(tmp_path: Path, depth: int) -> None:
    brackets = "[" * (depth - 1) + "]" * (depth - 1)
    file = jsonl(tmp_path, f'{{"prompt": "?", "tree": {brackets}}}\n')
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:1: is nested more than 100 deep"):
        prompts(file)


def test_a_row_with_many_lists_is_not_deep(tmp_path: Path) -> None:
    file = jsonl(tmp_path, f'{{"prompt": "?", "many": [{",".join(["[]"] * 500)}]}}\n')
    assert prompts(file).rows == 1


def test_text_that_is_not_utf8_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:1: is not UTF-8: byte 12 is 0xff"):
        prompts(file)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="holds no rows"):
        prompts(jsonl(tmp_path, "\n  \n"))
    with pytest.raises(PromptFileError, match=r"No such file.*hf://datasets/OWNER/NAME"):
        prompts(tmp_path / "absent.jsonl")


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PromptFileError, match="is not a regular file"):
        prompts(tmp_path / "pipe")


def test_a_directory_of_nothing_but_folders_is_refused_with_what_it_should_hold(
    tmp_path: Path,
) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(PromptFileError, match=r"no \*\.parquet and no \*\.jsonl; folders inside"):
        FilePrompts(prompt_files(str(tmp_path)), shuffle=False, seed=0, epochs=None)


@pytest.mark.parametrize(
    ("name", "rows"), [("state.json", ""), ("dataset_dict.json", r"\[SPLIT\]")]
)
def test_a_folder_that_datasets_wrote_is_named_with_the_call_that_makes_parquet(
    tmp_path: Path, name: str, rows: str
) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(PromptFileError, match=rf"save_to_disk\. .*\('.*'\){rows}\.to_parquet\("):
        FilePrompts(prompt_files(str(tmp_path)), shuffle=False, seed=0, epochs=None)


def test_a_parquet_file_gives_the_prompts_that_the_same_rows_give_as_json(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, "level": n / 2} for n in range(9)]
    as_json = jsonl(tmp_path, "\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    one, other = prompts(as_json), prompts(tmp_path / "rows.parquet")
    drawn = [one.prompt(prompt_index) for prompt_index in range(10)]
    assert [other.prompt(prompt_index) for prompt_index in range(10)] == drawn
    assert [prompt.data for prompt in one.longest(2)] == [
        prompt.data for prompt in other.longest(2)
    ]


def test_a_null_of_parquet_is_none_as_in_json(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+2=", "answer": 3.0, "bounds": {"a": 1, "b": None}, "tags": ["x"]},
        {"prompt": "3+4=", "answer": None, "bounds": {"a": None, "b": 2}, "tags": None},
    ]
    as_json = jsonl(tmp_path, "\n".join(map(json.dumps, rows)))
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert rows_of(file) == rows_of(as_json) == rows
    assert prompts(file).digests == prompts(as_json).digests
    columns = {"prompt": "prompt", "answer": "answer", "least": "bounds.a"}
    assert rows_of(file, columns=columns) == rows_of(as_json, columns=columns)
    assert rows_of(file, columns=columns)[1] == {"prompt": "3+4=", "answer": None, "least": None}


def test_a_null_in_the_column_of_the_prompt_is_named(tmp_path: Path) -> None:
    file = parquet(tmp_path, {"question": ["1+1=", None]})
    with pytest.raises(PromptFileError, match="parquet:2: 'prompt' is None; it must be a string"):
        rows_of(file, columns={"prompt": "question"})


def test_a_null_that_parquet_needs_for_a_prompt_is_no_key(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "2+3?", "name": None}], None]
    kind = pa.list_(pa.struct({name: pa.string() for name in ("role", "content", "name")}))
    tools = [[{"name": "add", "strict": None}], None]
    columns = {"prompt": [None, "a"], "messages": pa.array(messages, kind), "tools": tools}
    assert rows_of(parquet(tmp_path, columns)) == [
        {"messages": [{"role": "user", "content": "2+3?"}], "tools": [{"name": "add"}]},
        {"prompt": "a", "tools": None},
    ]


def test_the_files_of_a_directory_are_one_source_in_the_order_of_their_names(
    tmp_path: Path,
) -> None:
    parquet(tmp_path, {"prompt": ["c"]}, "train-00001.parquet")
    parquet(tmp_path, {"prompt": ["a", "b"]}, "train-00000.parquet")
    (tmp_path / "README.md").write_text("no prompts")
    files = prompt_files(str(tmp_path))
    assert [row["prompt"] for row in rows_of(*files)] == ["a", "b", "c"]
    assert prompts(*files).digest == files_digest(files) != files_digest(files[:1])


@pytest.mark.parametrize("is_parquet", [True, False])
def test_a_row_has_the_keys_that_columns_names_and_no_others(
    tmp_path: Path, is_parquet: bool
) -> None:
    rows = {"problem": ["2+3="], "solution": ["5"], "prompt": ["not this one"]}
    lines = json.dumps({name: values[0] for name, values in rows.items()})
    file = parquet(tmp_path, rows) if is_parquet else jsonl(tmp_path, lines)
    assert rows_of(file, columns={"prompt": "problem", "answer": "solution"}) == [
        {"prompt": "2+3=", "answer": "5"}
    ]


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    columns = {"prompt": "question"}
    with pytest.raises(PromptFileError, match=r"no column 'question' \(columns: a, b\)"):
        prompts(parquet(tmp_path, {"a": ["x"], "b": [1]}), columns=columns)
    lines = jsonl(tmp_path, '{"question": "x"}\n{"a": 1, "b": 2}')
    expected = r"jsonl:2: has no 'question', which columns\.prompt names \(keys: a, b\)"
    with pytest.raises(PromptFileError, match=expected):
        prompts(lines, columns=columns)


TWICE = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"text": ["a"]}, r"parquet:1: .*neither of 'prompt' and 'messages' \(keys: text\)"),
        ({"prompt": ["a", None]}, r"parquet:2: .*neither of 'prompt' and 'messages'"),
        ({"prompt": ["a"], "x": [float("nan")]}, "parquet:1: 'x' holds a number .* not finite"),
        ({"prompt": ["a"], "x": TWICE}, "not a readable Parquet file: .*duplicate field names"),
        ({"prompt": ["a"], "blob": [b"png"]}, r"'blob' of type binary, .* needed in data\.columns"),
        ({"prompt": ["a"], "when": [[date(2020, 1, 1)]]}, "column 'when' of type list"),
        ({"prompt": pa.array([], pa.string())}, "holds no rows"),
        ({"prompt": ["a" * (17 * 2**20)]}, "parquet:1: has more than 16 MiB"),
    ],
)
def test_a_bad_row_or_column_of_parquet_is_named(
    tmp_path: Path, columns: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PromptFileError, match=problem):
        prompts(parquet(tmp_path, columns))


def test_a_column_that_no_prompt_can_hold_is_no_problem_where_it_is_not_read(
    tmp_path: Path,
) -> None:
    file = parquet(tmp_path, {"prompt": ["a"], "image": [b"png"]})
    assert rows_of(file, columns={"prompt": "prompt"}) == [{"prompt": "a"}]


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    file = tmp_path / "twice.parquet"
    pq.write_table(table, file)
    with pytest.raises(PromptFileError, match=r"column 'prompt' 2 times \(columns: prompt, prompt"):
        prompts(file)


@pytest.mark.parametrize("damage", [slice(0, 40), slice(0, -9)])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, damage: slice) -> None:
    file = parquet(tmp_path, {"prompt": ["a", "b"]})
    file.write_bytes(file.read_bytes()[damage])
    with pytest.raises(PromptFileError, match=r"prompts\.parquet: is not a readable Parquet file"):
        prompts(file)


def test_a_line_that_never_ends_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    with file.open("wb") as lines:
        lines.truncate(2**33)  # a hole of 8 GiB
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:1: has more than 16 MiB"):
        prompts(file)


@given(rows=st.lists(st.binary()), memory_bytes=st.integers(1, 40))
def test_rows_are_the_same_in_memory_and_on_disk(rows: list[bytes], memory_bytes: int) -> None:
    store = RowStore(rows, memory_bytes)
    assert [store[row] for row in range(len(store))] == rows
    assert [len(rows[row]) for row in store.longest(3)] == sorted(map(len, rows))[::-1][:3]


NESTED = {"prompt": "1+1=", "reward_model": {"ground_truth": "2", "style": "rule"}}
DOTTED = {"prompt": "prompt", "answer": "reward_model.ground_truth"}


def test_a_dotted_name_of_a_column_reaches_into_an_object(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}]
    assert rows_of(jsonl(tmp_path, json.dumps(NESTED)), columns=DOTTED) == rows
    dated = {**NESTED["reward_model"], "at": date(2026, 1, 1)}
    file = parquet(tmp_path, {"prompt": ["1+1="], "reward_model": [dated]})
    assert rows_of(file, columns=DOTTED) == rows, "other fields are not read"
    flat = {"prompt": "1+1=", "reward_model.ground_truth": "3", **NESTED}
    assert rows_of(jsonl(tmp_path, json.dumps(flat)), columns=DOTTED)[0]["answer"] == "3"


def test_a_dotted_name_that_reaches_nothing_is_named(tmp_path: Path) -> None:
    columns = {**DOTTED, "answer": "reward_model.truth"}
    with pytest.raises(PromptFileError, match=r":1: has no 'reward_model\.truth', which columns"):
        rows_of(jsonl(tmp_path, json.dumps(NESTED)), columns=columns)
    file = parquet(tmp_path, {key: [value] for key, value in NESTED.items()})
    for name in ("reward_model.truth", "prompt.truth", "none.truth"):
        with pytest.raises(PromptFileError, match=f"has no column '{name}'"):
            rows_of(file, columns={**columns, "answer": name})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.json", b'[\n {"prompt": "a"}\n]', r"is a JSON array\. .*: `jq -c '\.\[\]' rows\.json > rows\.rows\.jsonl`"),
        ("rows.jsonl", b'[{"prompt": "a"}]', r"jq -c '\.\[\]' rows\.jsonl > rows\.rows\.jsonl`"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("rows.jsonl", b"<html>", "is HTML or XML"),
        ("rows.jsonl", b"ARROW1\0\0", "is an Arrow file"),
        ("data.arrow", b"\xff\xff\xff\xff\xe8\0", "is a stream of Arrow"),
        ("rows.jsonl", '{"prompt": "a"}'.encode("utf-16"), r"is UTF-16 text\. Write it as UTF-8"),
        ("rows.jsonl", '{"prompt": "a"}'.encode("utf-16-le"), "is UTF-16 text"),
        ("rows.jsonl.gz", gzip.compress(b'{"prompt": "a"}'), r"compressed \(gzip\)\. .*: `gunzip rows"),
        ("rows.csv", b"prompt,answer\n1+1=,2\n", "is CSV. Write it as Parquet"),
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_named(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptFileError, match=problem):
        prompts(tmp_path / name)
