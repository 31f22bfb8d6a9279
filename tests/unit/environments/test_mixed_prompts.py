"""Prompts of several environments: their shares, their order, and what each of them knows of it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.inputs import InputChanged
from offbeat.environments.prompts import MixedPrompts, StubPrompts
from offbeat.runs.inputs import input_digests

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1)


def mixed(
    weights: dict[str, int], *, rows: int = 7, seed: int = 0, epochs: int | None = None
) -> Any:
    sources = {name: StubPrompts(rows, shuffle=True, seed=seed, epochs=epochs) for name in weights}
    return MixedPrompts(sources, weights, seed)


@given(weights=WEIGHTS, seed=st.integers(0, 9), cycle=st.integers(0, 50))
def test_each_cycle_holds_as_many_prompts_of_each_environment_as_its_weight(
    weights: dict[str, int], seed: int, cycle: int
) -> None:
    source, long = mixed(weights, seed=seed), sum(weights.values())
    prompts = [source.prompt(index) for index in range(cycle * long, (cycle + 1) * long)]
    assert Counter(prompt.environment for prompt in prompts) == weights


@given(weights=WEIGHTS, seed=st.integers(0, 9))
def test_each_row_of_each_environment_comes_once_in_each_of_its_epochs(
    weights: dict[str, int], seed: int
) -> None:
    source, rows = mixed(weights, seed=seed), 7
    cycles = 2 * rows  # whole epochs of every environment
    seen = Counter[tuple[str, int, int]]()
    for index in range(cycles * sum(weights.values())):
        prompt = source.prompt(index)
        seen[prompt.environment, prompt.epoch, prompt.row] += 1
    expected = {
        (name, epoch, row)
        for name, weight in weights.items()
        for epoch in range(2 * weight)
        for row in range(rows)
    }
    assert seen == Counter(expected)


def test_a_prompt_depends_on_the_seed_and_its_index_alone() -> None:
    weights = {"a": 1, "b": 3}
    forwards = [mixed(weights).prompt(index) for index in range(40)]
    again = mixed(weights)
    assert [again.prompt(index) for index in reversed(range(40))] == forwards[::-1]
    assert [prompt.prompt_index for prompt in forwards] == list(range(40))
    other = [mixed(weights, seed=1).prompt(index) for index in range(40)]
    assert [p.environment for p in other] != [p.environment for p in forwards]


def test_the_source_ends_where_one_environment_does() -> None:
    source = mixed({"a": 1, "b": 1}, rows=3, epochs=1)
    assert all(source.prompt(index) for index in range(6))
    assert source.prompt(6) is None and source.prompt(7) is None


def mix(folder: Path, **changes: Any) -> RunConfig:
    function = {"name": "function", "target": "math_verify"}
    environments = {
        "sums": {"weight": 2, "eval": {"prompts": 3}},
        "text": {
            "environment": function,
            "data": {"path": str(folder / "rows.jsonl")},
            "eval": {"path": str(folder / "held_out.jsonl")},
        },
    }
    recipe = {"steps": 1, "model": {"path": "m"}, "eval": {"interval": 1}}
    return RunConfig.model_validate({**recipe, "environments": environments, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "z", "answer": "1"}\n')
    return tmp_path


def test_a_recipe_mixes_environments_that_make_prompts_with_those_that_read_files(
    folder: Path,
) -> None:
    source = make_prompts(mix(folder))
    prompts = [source.prompt(index) for index in range(9)]
    by_name = Counter(prompt.environment for prompt in prompts if prompt)
    assert by_name == {"sums": 6, "text": 3}
    texts = {prompt.data["prompt"] for prompt in prompts if prompt and prompt.environment == "text"}
    assert texts == {"a"}


def test_each_environment_is_scored_as_a_set_of_its_own(folder: Path) -> None:
    sets = make_evaluation_sets(mix(folder))
    first = {name: source.prompt(0) for name, source in sets.items()}
    assert {name: prompt.environment for name, prompt in first.items() if prompt} == {
        "sums": "sums",
        "text": "text",
    }
    assert first["text"] and first["text"].data["prompt"] == "z"


def test_the_files_of_each_environment_are_held_to_what_the_run_began_with(folder: Path) -> None:
    config = mix(folder)
    began_with = input_digests(config, folder)
    assert {"environments.text.data.path", "environments.text.eval.path"} <= began_with.keys()
    assert make_prompts(config, began_with).rows == 10001
    (folder / "rows.jsonl").write_text('{"prompt": "b", "answer": "1"}\n')
    with pytest.raises(InputChanged, match=r"rows\.jsonl changed after the run began"):
        make_prompts(config, began_with)
