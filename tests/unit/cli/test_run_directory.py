from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from offbeat.cli.run_directory import CONFIG, RunDirUnusable, make_run_dir
from offbeat.config.run import ModelConfig, RunConfig


def config(run_dir: Path | str, name: str = "demo") -> RunConfig:
    return RunConfig(name=name, steps=3, run_dir=str(run_dir), model=ModelConfig(path="m"))


def test_the_directory_holds_the_resolved_config(tmp_path: Path) -> None:
    made = make_run_dir(config(tmp_path / "deep" / "{name}"), None)
    assert made == tmp_path / "deep" / "demo"
    assert yaml.safe_load((made / CONFIG).read_text())["steps"] == 3


def test_the_same_recipe_again_gets_the_next_free_number(tmp_path: Path) -> None:
    made = [make_run_dir(config(tmp_path / "{name}"), None) for _ in range(3)]
    assert [path.name for path in made] == ["demo", "demo-2", "demo-3"]


def test_a_directory_that_was_asked_for_must_be_free(tmp_path: Path) -> None:
    asked = tmp_path / "mine"
    assert make_run_dir(config("unused"), asked) == asked
    before = (asked / CONFIG).read_bytes()
    with pytest.raises(RunDirUnusable, match=r"it holds another run\. Name another one"):
        make_run_dir(config("unused", name="other"), asked)
    assert (asked / CONFIG).read_bytes() == before


def test_a_directory_without_a_run_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert make_run_dir(config("unused"), tmp_path) == tmp_path
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_runs_that_start_at_once_never_share_a_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as starters:
        made = list(
            starters.map(lambda _: make_run_dir(config(tmp_path / "{name}"), None), range(8))
        )
    assert len(set(made)) == 8


def test_a_place_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirUnusable, match=r"file/below: Not a directory\. Name another one"):
        make_run_dir(config("unused"), tmp_path / "file" / "below")


def test_a_file_where_the_directory_should_be_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirUnusable, match="file: "):
        make_run_dir(config("unused"), tmp_path / "file")


def test_a_recipe_whose_directory_is_a_file_takes_the_next_number(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    assert make_run_dir(config(tmp_path / "{name}"), None) == tmp_path / "demo-2"


def test_a_relative_directory_lies_below_the_working_directory(tmp_path: Path) -> None:
    made = make_run_dir(config(tmp_path / ".." / tmp_path.name / "x"), None)
    assert made.is_absolute()


def test_braces_that_mean_nothing_stay_as_they_are(tmp_path: Path) -> None:
    assert make_run_dir(config("unused"), tmp_path / "a{b}").name == "a{b}"
