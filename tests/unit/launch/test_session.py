"""What a session makes of a run, whatever executes it: outcome, exit code, last words."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.launch.opened_run import OpenedRun
from offbeat.launch.run_parts import RunSpec
from offbeat.launch.session import Interrupted, Runtime, Signals, drive, summarize_lost_run
from offbeat.messages.failures import ActorLost
from offbeat.run_files.shared_directory import RunDirToken
from offbeat.runs.directory import make_run_dir
from offbeat.telemetry.summary import GroupCounts, Summary
from tests.support.own_logging import own_logging

pytestmark = pytest.mark.usefixtures("logging_of_its_own", "default_signals")
logging_of_its_own = pytest.fixture(own_logging)


class LibraryError(Exception):
    """An error of a library that only one runtime uses."""


def drive_with(
    folder: Path,
    run: Callable[[RunSpec, Signals], Summary],
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Drive a dry run by ``run``; return the exit code."""
    recipe = folder / "recipe.yaml"
    recipe.write_text("steps: 3\nmodel: {path: none}\n")

    def execute(
        spec: RunSpec, token: RunDirToken, console: Console, signals: Signals, opened: OpenedRun
    ) -> Summary:
        assert token.is_in(spec.run_dir) and opened.directory == spec.run_dir
        console.print("it runs")
        return run(spec, signals)

    loaded = load_recipe(recipe, dry_run=True)
    return drive(Runtime(execute, failures), loaded, folder / "run", dry_run=True).code


def finish(spec: RunSpec, signals: Signals) -> Summary:
    del signals
    return Summary(
        run_id=spec.run_id,
        name=spec.config.name,
        outcome="finished",
        steps=3,
        trainer_version=3,
        groups=GroupCounts(),
        wall_s=1.0,
    )


def written_summary(folder: Path) -> Summary:
    return Summary.from_json((folder / "run" / "summary.json").read_bytes())


def test_a_run_that_finishes_is_shown_with_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drive_with(tmp_path, finish) == 0
    shown = capsys.readouterr()
    assert "it runs" in shown.out
    assert f"offbeat report {tmp_path / 'run'}" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    "error", [LibraryError("it broke"), ActorLost("trainer", "start", "it broke"), OSError("broke")]
)
def test_a_failure_of_the_runtime_fails_the_run_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(spec: RunSpec, signals: Signals) -> Summary:
        raise error

    assert drive_with(tmp_path, fail, failures=(LibraryError,)) == 1
    summary = written_summary(tmp_path)
    assert (summary.outcome, summary.steps) == ("failed", 0)
    assert summary.error is not None and summary.error.startswith(f"{type(error).__name__}: ")
    shown = capsys.readouterr()
    assert f"offbeat: {summary.error}" in shown.err
    assert str(tmp_path / "run" / "logs") in shown.err


def test_an_error_that_is_no_failure_of_the_runtime_is_raised(tmp_path: Path) -> None:
    def fail(spec: RunSpec, signals: Signals) -> Summary:
        raise LibraryError("a bug")

    with pytest.raises(LibraryError):
        drive_with(tmp_path, fail)


def test_a_run_that_a_signal_ends_is_aborted_whatever_fails_with_it(tmp_path: Path) -> None:
    def fail(spec: RunSpec, signals: Signals) -> Summary:
        signals.watched = True
        signal.raise_signal(signal.SIGTERM)
        raise LibraryError("it was hit, too")

    assert drive_with(tmp_path, fail, failures=(LibraryError,)) == 143
    error = written_summary(tmp_path).error
    assert error == "SIGTERM before an orderly end: LibraryError: it was hit, too"


def test_a_runtime_that_cannot_end_in_order_leaves_an_aborted_run(tmp_path: Path) -> None:
    def interrupt(spec: RunSpec, signals: Signals) -> Summary:
        signals.watched = True
        signal.raise_signal(signal.SIGINT)
        raise Interrupted(signals)

    assert drive_with(tmp_path, interrupt) == 130
    summary = written_summary(tmp_path)
    assert (summary.outcome, summary.error) == ("aborted", "SIGINT before an orderly end")


def test_a_lost_run_keeps_the_summary_that_its_controller_wrote(tmp_path: Path) -> None:
    def finish_then_die(spec: RunSpec, signals: Signals) -> Summary:
        finish(spec, signals).write(spec.run_dir / "summary.json")
        return summarize_lost_run(spec, "failed", "it was killed")

    assert drive_with(tmp_path, finish_then_die) == 0


# --- a runtime that starts while the model is checked -------------------------------------------

MODEL = Path(__file__).parents[3] / "models" / "tiny-addition"


def drive_with_start(folder: Path, *, stop_token: int, start: Callable[[], None]) -> list[object]:
    """Drive a run of a model by a runtime that starts early; return its calls and the exit code."""
    calls = list[object]()
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"steps: 3\nmodel: {{path: {MODEL}}}\nwandb: {{mode: disabled}}\n"
        f"generator: {{sampling: {{stop_token_ids: [{stop_token}]}}}}\n"
    )

    def begin(config: RunConfig, signals: Signals) -> None:
        calls.append("start")
        start()

    def execute(
        spec: RunSpec, token: RunDirToken, console: Console, signals: Signals, opened: OpenedRun
    ) -> Summary:
        calls.append("run")
        return finish(spec, signals)

    runtime = Runtime(execute, start=begin, stop=lambda: calls.append("stop"))
    return [drive(runtime, load_recipe(recipe), folder / "run", dry_run=False).code, *calls]


def nothing() -> None:
    pass


@pytest.mark.plugins
def test_a_runtime_starts_while_the_model_is_checked(tmp_path: Path) -> None:
    code, *calls = drive_with_start(tmp_path, stop_token=0, start=nothing)
    assert (code, calls) == (0, ["start", "run", "stop"])


@pytest.mark.plugins
def test_a_runtime_is_stopped_where_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, *calls = drive_with_start(tmp_path, stop_token=10**6, start=nothing)
    assert (code, calls) == (2, ["start", "stop"])
    assert "stop_token_ids" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.plugins
def test_a_signal_during_the_start_ends_the_command_before_there_is_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    code, *calls = drive_with_start(tmp_path, stop_token=0, start=interrupt)
    assert (code, calls) == (130, ["start", "stop"])
    assert "SIGINT" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_resume_without_its_modules_is_refused_before_anything_is_checked_or_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    (home / "reward_of_home.py").write_text("def score(row, response): return 1.0\n")
    recipe = home / "recipe.yaml"
    recipe.write_text(
        f"steps: 3\nmodel: {{path: {MODEL}}}\ndata: {{path: rows.jsonl}}\n"
        "environment: {name: function, target: 'reward_of_home:score'}\n"
    )
    loaded = load_recipe(recipe)
    monkeypatch.chdir(home)
    made = make_run_dir(loaded.config, tmp_path / "run")
    monkeypatch.chdir(other)

    def start(config: RunConfig, signals: Signals) -> None:
        pytest.fail("it is started")

    def execute(
        spec: RunSpec, token: RunDirToken, console: Console, signals: Signals, opened: OpenedRun
    ) -> Summary:
        pytest.fail("it runs")

    end = drive(Runtime(execute, start=start), loaded, None, dry_run=False, resume=made)
    assert end.code == 2
    (problem,) = end.problems
    assert problem.endswith(f"Resume from {home}, where the run was started")
