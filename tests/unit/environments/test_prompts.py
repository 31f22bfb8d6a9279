import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.prompts import ArithmeticPrompts, permute


@given(rows=st.integers(1, 700), seed=st.integers(), epoch=st.integers(0, 1000))
def test_every_row_has_exactly_one_place(rows: int, seed: int, epoch: int) -> None:
    places = [permute(place, rows, seed, epoch) for place in range(rows)]
    assert sorted(places) == list(range(rows))


@given(rows=st.integers(10**9, 10**18), seed=st.integers(), data=st.data())
def test_a_huge_set_is_permuted_without_a_table(rows: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, rows - 1), min_size=2, max_size=20))
    chosen = [permute(place, rows, seed, epoch=0) for place in places]
    assert all(0 <= row < rows for row in chosen)
    assert len(set(chosen)) == len(places)


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_over_many_epochs_every_row_comes_first_about_equally_often(rows: int) -> None:
    epochs = 3000
    first = Counter(permute(0, rows, 1, epoch) for epoch in range(epochs))
    assert all(abs(first[row] - epochs / rows) < 5 * (epochs / rows) ** 0.5 for row in range(rows))


def test_epochs_are_ordered_differently_and_seeds_too() -> None:
    orders = {
        tuple(permute(place, 50, seed, epoch) for place in range(50))
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


def test_each_epoch_has_every_row_in_an_order_of_its_own() -> None:
    source = ArithmeticPrompts(0, 5, seed=4)
    prompts = [source.prompt(prompt_index) for prompt_index in range(75)]
    rows = [prompt.row for prompt in prompts if prompt]
    epochs = [tuple(rows[first : first + 25]) for first in (0, 25, 50)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(25))] * 3
    assert len(set(epochs)) == 3


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


def test_neither_prompts_nor_environments_load_a_foreign_library() -> None:
    code = (
        "import sys, offbeat.environments.factory, offbeat.environments.reward_child\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
