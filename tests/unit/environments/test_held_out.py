"""Rows that are held out for evaluations are not trained on."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.held_out import HeldOutTrained, check_held_out, check_one_split
from offbeat.environments.prompt_files import PromptFileError
from offbeat.launch.checks.report import find
from offbeat.launch.evaluate import evaluation_only

Rows = Sequence[Mapping[str, Any]]
FUNCTION = {"name": "function", "target": "mine:reward"}


def rows(count: int, first: int = 0) -> Rows:
    return [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(first, first + count)]


def written(file: Path, content: Rows) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(file)


def config(
    data: str,
    environment: Mapping[str, Any] = FUNCTION,
    *,
    allow_splits: bool = False,
    **scored: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": "m"},
            "environment": environment,
            "data": {"path": data, "allow_splits": allow_splits},
            "eval": {"interval": 1, **scored},
        }
    )


def refused(recipe: RunConfig) -> list[str]:
    """What the start of a run says; what ``check`` says is the same."""
    told = [
        finding.message
        for finding in find(recipe, None, {})
        if finding.subject == "held-out prompts"
    ]
    with pytest.raises(HeldOutTrained) if told else nullcontext() as raised:
        check_held_out(recipe, make_prompts(recipe), make_evaluation_sets(recipe))
    assert raised is None or raised.value.problem == told[0]
    return told


def test_without_an_interval_the_overlap_is_a_warning_because_nothing_is_scored(
    tmp_path: Path,
) -> None:
    train = written(tmp_path / "rows.jsonl", rows(25))
    recipe = config(train, path=train, interval=0)
    told = [each for each in find(recipe, None, {}) if each.subject == "held-out prompts"]
    assert [(each.level, "rows 0, 1, 2" in each.message) for each in told] == [("warning", True)]
    check_held_out(recipe, make_prompts(recipe), make_evaluation_sets(recipe))


def test_rows_that_are_trained_on_and_evaluated_are_refused_with_their_count(
    tmp_path: Path,
) -> None:
    train = written(tmp_path / "train.jsonl", rows(25))
    test = written(tmp_path / "test.jsonl", [*rows(3, first=90), *rows(6, first=4)])
    (told,) = refused(config(train, path=test))
    assert told == (
        "6 of the 9 rows in eval.path are prompts that data.path trains on: rows 3, 4, 5, 6, 7, 8, "
        "counted from 0; the first is row 4 of data.path"
    )
    assert refused(config(train, path=test, allow_overlap=True)) == []
    assert refused(evaluation_only(config(train, path=test))) == [], "it trains nothing"
    assert refused(config(train, path=written(tmp_path / "far.jsonl", rows(9, first=25)))) == []


def test_every_set_is_compared(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", rows(5))
    near, far = rows(2, first=4), rows(2, first=9)
    sets = {
        "far": {"path": written(tmp_path / "far.jsonl", far)},
        "near": {"path": written(tmp_path / "near.jsonl", near)},
        "same": {"path": train},
        "first": {},  # named as such: the first prompts that the run trains on
    }
    told = refused(config(train, sets=sets))
    assert [each.partition(" are ")[0] for each in told] == [
        "1 of the 2 rows in eval.sets.near.path",
        "5 of the 5 rows in eval.sets.same.path",
    ]


def test_each_of_several_environments_is_compared_with_the_rows_of_all(tmp_path: Path) -> None:
    one = {"data": {"path": written(tmp_path / "one.jsonl", rows(5))}, "environment": FUNCTION}
    held = written(tmp_path / "held.jsonl", rows(3, first=2))
    other = {
        "data": {"path": written(tmp_path / "other.jsonl", rows(5, first=50))},
        "environment": FUNCTION,
        "eval": {"path": held},
    }
    recipe: dict[str, Any] = {"steps": 1, "model": {"path": "m"}, "eval": {"interval": 1}}
    recipe["environments"] = {"one": one, "other": other}
    (told,) = refused(RunConfig.model_validate(recipe))
    assert told.startswith(
        "3 of the 3 rows in environments.other.eval.path are prompts that "
        "environments.one.data.path trains on"
    )
    recipe["eval"]["allow_overlap"] = True
    assert refused(RunConfig.model_validate(recipe)) == []


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("one", "another", "is_same"),
    [
        ({"prompt": "1+1=", "answer": 2, "id": 1}, {"id": 7, "prompt": "1+1="}, True),
        ({"prompt": "1+1="}, {"prompt": "1+1= "}, False),
        ({"messages": CHAT}, {"messages": [{"content": "hi", "role": "user", "name": None}]}, True),
        (
            {"messages": CHAT},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            True,
        ),
        ({"messages": CHAT}, {"messages": CHAT, "tools": [{"name": "f"}]}, False),
        ({"messages": CHAT}, {"messages": CHAT, "tools": []}, True),
        ({"messages": CHAT, "tools": [{}]}, {"messages": CHAT, "tools": "[{ }]"}, True),
    ],
)
def test_rows_are_compared_by_what_the_model_reads(
    tmp_path: Path, one: Mapping[str, Any], another: Mapping[str, Any], *, is_same: bool
) -> None:
    data = written(tmp_path / "one.jsonl", [one])
    told = refused(config(data, path=written(tmp_path / "another.jsonl", [another])))
    assert len(told) == is_same


@pytest.mark.plugins
def test_pictures_of_a_row_belong_to_its_prompt(tmp_path: Path) -> None:
    environment = {**FUNCTION, "images": {}}
    seven = [{"prompt": "<image>?", "image": "7.png"}]
    data = written(tmp_path / "one" / "rows.jsonl", seven)
    other = written(tmp_path / "other" / "rows.jsonl", seven)
    assert refused(config(data, environment, path=other)) == [], "two files of one name"
    beside = written(tmp_path / "one" / "held.jsonl", [{**seven[0], "answer": 7}])
    assert len(refused(config(data, environment, path=beside))) == 1


def test_a_question_is_compared_whatever_else_its_row_has(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "#### 2"}
    data = written(tmp_path / "one.jsonl", [{**row, "messages": CHAT}])
    assert len(refused(config(data, {"name": "gsm8k"}, path=written(tmp_path / "b", [row])))) == 1


@pytest.mark.plugins
def test_the_task_of_an_agent_is_its_whole_row(tmp_path: Path) -> None:
    agent = {"name": "agent", "target": "mine:run"}
    data = written(tmp_path / "one.jsonl", [{"prompt": "Play", "seed": 1}])
    other = written(tmp_path / "other.jsonl", [{"prompt": "Play", "seed": 2}])
    assert refused(config(data, agent, path=other)) == []
    assert len(refused(config(data, agent, path=data))) == 1


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train-00000-of-00001", "test-00000-of-00001"), "test .*, train "),
        (("train", "validation"), "train .*, validation "),
        (("tasks", "held_out"), "test .*, without a name of a split "),
        (("gsm8k_train", "gsm8k_eval"), "test .*, train "),
        (("train-00000-of-00002", "train-00001-of-00002"), ""),
        (("train_eval", "train"), "test .*, train "),
        (("a", "contest", "latest", "training"), ""),
        (("test-1", "test-2"), ""),
    ],
)
def test_a_directory_of_several_splits_is_not_read_as_one(
    tmp_path: Path, names: Sequence[str], splits: str
) -> None:
    for number, name in enumerate(names):
        written(tmp_path / f"{name}.jsonl", rows(1, first=number))
    if not splits:
        assert make_prompts(config(str(tmp_path))).rows == len(names)
        return
    with pytest.raises(PromptFileError, match=f"holds files of several splits: {splits}"):
        make_prompts(config(str(tmp_path)))
    assert make_prompts(config(str(tmp_path), allow_splits=True)).rows == len(names)
    assert make_prompts(config(str(tmp_path / f"{names[0][:7]}*.jsonl"))).rows == 1


def test_splits_are_found_in_the_folders_of_a_pattern_of_the_hub_too() -> None:
    cache = Path("/cache/test/snapshots/0123")
    files = [cache / "default" / split / "0000.parquet" for split in ("test", "train")]
    with pytest.raises(PromptFileError, match=r"test \(test/0000\.parquet\), train "):
        check_one_split(config("hf://x"), "hf://x", files)
    check_one_split(config("hf://x"), "hf://x", [cache / "train" / f"{n}.parquet" for n in "01"])


def test_a_pattern_that_no_file_matches_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"/train-\*\.parquet: cannot be read"):
        make_prompts(config(str(tmp_path / "train-*.parquet")))
