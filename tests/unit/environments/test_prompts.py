import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.permutation import permuted
from offbeat.environments.prompts import ArithmeticPrompts, JsonlPrompts, PromptFileError


def jsonl(path: Path, text: str) -> Path:
    file = path / "prompts.jsonl"
    file.write_text(text)
    return file


@given(rows=st.integers(1, 700), seed=st.integers(), epoch=st.integers(0, 1000))
def test_every_row_has_exactly_one_place(rows: int, seed: int, epoch: int) -> None:
    places = [permuted(place, rows, seed, epoch) for place in range(rows)]
    assert sorted(places) == list(range(rows))


@given(rows=st.integers(10**9, 10**18), seed=st.integers(), data=st.data())
def test_a_huge_set_is_permuted_without_a_table(rows: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, rows - 1), min_size=2, max_size=20))
    chosen = [permuted(place, rows, seed, epoch=0) for place in places]
    assert all(0 <= row < rows for row in chosen)
    assert len(set(chosen)) == len(places)


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_over_many_epochs_every_row_comes_first_about_equally_often(rows: int) -> None:
    epochs = 3000
    first = Counter(permuted(0, rows, 1, epoch) for epoch in range(epochs))
    assert all(abs(first[row] - epochs / rows) < 5 * (epochs / rows) ** 0.5 for row in range(rows))


def test_epochs_are_ordered_differently_and_seeds_too() -> None:
    orders = {
        tuple(permuted(place, 50, seed, epoch) for place in range(50))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_a_prompt_depends_on_its_prompt_index_alone() -> None:
    source = ArithmeticPrompts(0, 5, seed=4)
    again = ArithmeticPrompts(0, 5, seed=4)
    forwards = [source.prompt(prompt_index) for prompt_index in range(60)]
    assert [again.prompt(prompt_index) for prompt_index in reversed(range(60))] == forwards[::-1]
    assert [prompt.epoch for prompt in forwards if prompt] == [0] * 25 + [1] * 25 + [2] * 10


def test_arithmetic_rows_are_all_pairs() -> None:
    source = ArithmeticPrompts(2, 5, seed=0, epochs=1)
    prompts = [source.prompt(prompt_index) for prompt_index in range(source.rows)]
    assert {prompt.data["prompt"] for prompt in prompts if prompt} == {
        f"{a}+{b}=" for a in (2, 3, 4) for b in (2, 3, 4)
    }
    for prompt in prompts:
        assert prompt is not None
        a, b = prompt.data["prompt"].rstrip("=").split("+")
        assert prompt.data["answer"] == int(a) + int(b)


def test_a_source_ends_after_its_last_epoch() -> None:
    source = ArithmeticPrompts(0, 2, seed=0, epochs=2)
    assert source.prompt(7) is not None
    assert source.prompt(8) is None
    assert ArithmeticPrompts(0, 2, seed=0).prompt(10**12) is not None


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 2), (-1, 2)])
def test_an_empty_range_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"low={low} and high={high}"):
        ArithmeticPrompts(low, high, seed=0)


def test_a_file_without_shuffling_is_read_in_its_own_order(tmp_path: Path) -> None:
    file = jsonl(tmp_path, '\ufeff{"prompt": "a", "n": 1}\n\n{"prompt": "b"}\r\n')
    source = JsonlPrompts(file, shuffle=False, seed=0, epochs=None)
    rows = [source.prompt(prompt_index) for prompt_index in range(3)]
    assert [prompt.data for prompt in rows if prompt] == [
        {"prompt": "a", "n": 1},
        {"prompt": "b"},
        {"prompt": "a", "n": 1},
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "is not JSON"),
        ('{"prompt": NaN}', "is not JSON"),
        ('["a"]', "is a JSON list; a row is an object"),
        ('{"text": "a"}', r"neither of 'prompt' and 'messages' \(keys: text\)"),
        ('{"prompt": "a", "messages": []}', "both of 'prompt' and 'messages'"),
        ('{"prompt": 3}', "'prompt' is 3; it is a string"),
        ('{"prompt": ""}', "'prompt' is empty"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["hi"]}', r"messages\[0\] is 'hi'"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] .* needs 'role' and 'content'"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, problem: str) -> None:
    file = jsonl(tmp_path, f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(PromptFileError, match=rf"prompts\.jsonl:2: .*{problem}"):
        JsonlPrompts(file, shuffle=True, seed=0, epochs=None)


@pytest.mark.parametrize("depth", [101, 5000, 100_000])
def test_a_row_that_is_nested_deep_is_named(tmp_path: Path, depth: int) -> None:
    brackets = "[" * (depth - 1) + "]" * (depth - 1)
    file = jsonl(tmp_path, f'{{"prompt": "?", "tree": {brackets}}}\n')
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:1: is nested more than 100 deep"):
        JsonlPrompts(file, shuffle=True, seed=0, epochs=None)


def test_a_row_with_many_lists_is_not_deep(tmp_path: Path) -> None:
    file = jsonl(tmp_path, f'{{"prompt": "?", "many": [{",".join(["[]"] * 500)}]}}\n')
    assert JsonlPrompts(file, shuffle=True, seed=0, epochs=None).rows == 1


def test_text_that_is_not_utf8_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:1: is not JSON"):
        JsonlPrompts(file, shuffle=True, seed=0, epochs=None)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="holds no prompts"):
        JsonlPrompts(jsonl(tmp_path, "\n  \n"), shuffle=True, seed=0, epochs=None)
    with pytest.raises(PromptFileError, match="No such file"):
        JsonlPrompts(tmp_path / "absent.jsonl", shuffle=True, seed=0, epochs=None)


def test_neither_prompts_nor_environments_load_a_foreign_library() -> None:
    code = (
        "import sys, offbeat.environments.factory, offbeat.environments.reward_child\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
