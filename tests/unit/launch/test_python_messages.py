"""Texts for a caller in Python: calls in the place of commands, and no error that is printed too."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from offbeat.config.run import RunConfig
from offbeat.launch.checks.files import check_run_dir
from offbeat.launch.screen import next_commands
from offbeat.launch.session import Session, compose_resume_call
from offbeat.messages.finding import Level
from offbeat.runs.directory import (
    SUMMARY,
    RunDirUnusable,
    lock_directory,
    make_run_dir,
    reopen_run_dir,
)
from offbeat.telemetry.summary import GroupCounts, Summary

COMMANDS = ("--", "offbeat train")


@pytest.fixture
def recipe() -> RunConfig:
    return RunConfig.model_validate({"steps": 3, "model": {"path": "nowhere"}})


def test_a_refusal_is_returned_to_python_and_printed_on_the_command_line(
    tmp_path: Path, recipe: RunConfig
) -> None:
    make_run_dir(recipe, tmp_path)
    with pytest.raises(RunDirUnusable) as refused:
        make_run_dir(recipe, tmp_path)
    printed = io.StringIO()
    python = Session(errors=Console(file=printed), in_python=True).refuse(refused.value)
    assert printed.getvalue() == ""
    assert python.problems[0].endswith(
        f"Name another one with run_dir=..., or resume it: offbeat.resume({str(tmp_path)!r})"
    )
    Session(errors=Console(file=printed)).refuse(refused.value)
    assert "offbeat train --resume" in printed.getvalue()


def test_a_finished_run_names_the_call_that_asks_for_more_steps(
    tmp_path: Path, recipe: RunConfig
) -> None:
    run = make_run_dir(recipe, tmp_path)
    (run / SUMMARY).write_text('{"outcome": "finished", "steps": 3}')
    with pytest.raises(RunDirUnusable) as refused:
        reopen_run_dir(recipe, run)
    assert refused.value.in_python().endswith(
        f"Ask for more: offbeat.resume({str(run)!r}, steps=6)"
    )


def test_changed_code_names_the_argument_that_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graders.py").write_text("def f(row, response): ...\n")
    environment = {"name": "function", "target": "graders:f"}
    recipe = RunConfig.model_validate(
        {"steps": 3, "model": {"path": "nowhere"}, "environment": environment,
         "data": {"path": "rows.jsonl"}}
    )  # fmt: skip
    run = make_run_dir(recipe, tmp_path / "run")
    (tmp_path / "graders.py").write_text("def f(row, response): return 1.0\n")
    with pytest.raises(RunDirUnusable) as refused:
        reopen_run_dir(recipe, run)
    assert "pass changed_code=True" in refused.value.in_python()
    assert not any(command in refused.value.in_python() for command in COMMANDS)


def test_a_live_run_and_a_used_directory_name_calls(tmp_path: Path, recipe: RunConfig) -> None:
    run = make_run_dir(recipe, tmp_path)
    with lock_directory(run), pytest.raises(RunDirUnusable) as refused, lock_directory(run):
        pytest.fail("two hold it")
    assert "stop() of the run that start() returned" in refused.value.in_python()
    found = check_run_dir(run, None, requested=True)
    (used,) = (each for each in found if each.level is Level.ERROR)
    assert f"offbeat.resume({str(run)!r})" in used.in_python()
    assert not any(command in used.in_python() for command in COMMANDS)


def test_the_end_of_a_run_offers_calls(recipe: RunConfig) -> None:
    summary = Summary(
        run_id="run-1", name="mine", outcome="aborted", steps=5, trainer_version=5,
        groups=GroupCounts(), wall_s=1.0,
    )  # fmt: skip
    run = Path("runs/it's")
    go_on = compose_resume_call(run, recipe)
    offered = next_commands(run, summary, go_on, in_python=True)
    assert """offbeat.open_run("runs/it's").report()""" in offered
    assert offered.endswith("""resume     offbeat.resume("runs/it's")""")
    finished = msgspec.structs.replace(summary, outcome="finished")
    assert "resume" not in next_commands(run, finished, go_on, in_python=True)
