"""What a shell sees: exit codes, what goes to standard error, and what is not loaded on the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from offbeat.config.loader import load_recipe
from offbeat.launch.commands.main import app
from offbeat.runs.directory import make_run_dir
from tests.support import shown_run
from tests.support.loaded_modules import modules_loaded_by

ROOT = Path(__file__).resolve().parents[4]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
STUB = str(ROOT / "tests" / "support" / "stub.yaml")

COMMANDS = ("train", "dry-run", "check", "submit", "control", "replay", "why", "config")
BAD = "steps: 0\nmodel: {path: x}\nsampler: {name: in_order, max_stalenes: 1}\n"


def offbeat(*args: str) -> Result:
    return CliRunner().invoke(app, args)


@pytest.mark.parametrize("command", [("train",), ("check",), ("config", "show"), ("dry-run",)])
@pytest.mark.parametrize(
    ("written", "setting"),
    [
        (["--steps", "10"], "steps=10"),
        (["--sampler.max-staleness=2"], "sampler.max_staleness=2"),
        (["--seed"], "seed=VALUE"),
        (["--wandb.api-key", "s3cret"], "wandb.api_key=VALUE"),
        (["--num-generations", "8"], "num_generations=8"),
        (["--no-such-key", "8"], "KEY=VALUE"),
        (["--steps", "\x1b[2J"], r"steps=\x1b[2J"),
    ],
)
def test_a_setting_that_is_written_as_an_option_is_shown_as_it_is_written_here(
    command: tuple[str, ...], written: list[str], setting: str
) -> None:
    refused = offbeat(*command, QUICKSTART, *written)
    assert refused.exit_code == 2
    assert f"without dashes: {setting}. Options: " in refused.stderr


def test_a_misspelt_option_is_named_with_the_nearest() -> None:
    refused = offbeat("train", QUICKSTART, "--resum", "runs/mine")
    assert (refused.exit_code, "--resume" in refused.stderr) == (2, True)


@pytest.mark.plugins
def test_a_command_prints_to_a_stream_that_has_fewer_characters_than_its_text(
    tmp_path: Path,
) -> None:
    run_dir = shown_run.finished(tmp_path / "sums-\N{GREEK CAPITAL LETTER SIGMA}", 2)
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "report", str(run_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"sums-?" in done.stdout


@pytest.mark.plugins
def test_a_tilde_that_the_shell_leaves_is_the_home_directory(tmp_path: Path) -> None:
    shown_run.finished(tmp_path / "run", 2)
    subprocess.run(
        [sys.executable, "-m", "offbeat", "report", "~/run", "--output=~/page.html"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html"}


@pytest.fixture
def bad_recipe(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    return str(path)


# --- nothing heavy -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("train", "--help"),
        ("config", "explain", "sampler"),
        ("config", "show", QUICKSTART),
    ],
)
def test_looking_around_loads_nothing_heavy(args: tuple[str, ...]) -> None:
    assert modules_loaded_by(*args) == (0, [])


def test_a_machine_that_lacks_something_is_told_before_torch_is_loaded() -> None:
    code, loaded = modules_loaded_by("train", QUICKSTART, "model.path=absent")
    assert (code, set(loaded) & {"torch", "transformers"}) == (2, set())


@pytest.mark.parametrize("command", ["train", "dry-run", "check", "submit"])
def test_a_bad_recipe_is_refused_before_anything_heavy_is_loaded(
    command: str, bad_recipe: str
) -> None:
    assert modules_loaded_by(command, bad_recipe) == (2, [])


# --- commands ------------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    text = offbeat("--help").output
    assert all(command in text for command in COMMANDS)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("offbeat 0.")


@pytest.mark.parametrize("command", ["train", "dry-run", "check", "submit"])
def test_a_bad_recipe_is_reported_on_standard_error_without_a_traceback(
    command: str, bad_recipe: str
) -> None:
    result = offbeat(command, bad_recipe, "foo")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("3 problems in the configuration\n")
    assert "steps = 0: has to be: integer, at least 1" in result.stderr
    assert "Did you mean `max_staleness`?" in result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr, "no colours off a terminal"


def test_a_recipe_that_does_not_exist_is_bad_usage() -> None:
    result = offbeat("train", "recipes/nothing.yaml")
    assert result.exit_code == 2
    assert "recipes/nothing.yaml cannot be read" in result.stderr


@pytest.mark.parametrize("args", [("train",), ("train", QUICKSTART, "--steps=3"), ("fly",)])
def test_bad_usage_exits_with_2(args: tuple[str, ...]) -> None:
    assert offbeat(*args).exit_code == 2


# --- resuming ------------------------------------------------------------------------------------


@pytest.fixture
def ended_run(tmp_path: Path) -> Path:
    """The directory of a stub run that has begun and was cut off."""
    made = make_run_dir(load_recipe(STUB).config, tmp_path / "old")
    (made / "journal").mkdir()
    return made


def test_a_run_without_its_config_cannot_be_resumed_by_its_name_alone() -> None:
    result = offbeat("train", "--resume", "runs/nothing")
    assert result.exit_code == 2
    assert "runs/nothing has no run to resume" in result.stderr


def test_resuming_into_another_directory_is_bad_usage() -> None:
    result = offbeat("train", "--resume", "runs/old", "--run-dir", "runs/new")
    assert result.exit_code == 2
    assert "--resume runs/old and --run-dir runs/new: give one of them" in result.stderr


@pytest.mark.parametrize("other", ["runtime=ray", "runtime.backend=locl"])
@pytest.mark.parametrize("command", ["train", "check", "dry-run"])
def test_two_runtimes_are_bad_usage(command: str, other: str) -> None:
    result = offbeat(command, QUICKSTART, "--local", other)
    assert result.exit_code == 2
    assert f"--local is runtime.backend=local, but {other} is given too" in result.stderr


def test_training_needs_a_recipe_or_a_run() -> None:
    assert "Name a RECIPE" in offbeat("train").stderr


@pytest.mark.plugins
@pytest.mark.parametrize("recipe", [(), (STUB,)], ids=["its own config", "a recipe"])
def test_an_override_of_what_a_run_is_made_of_is_refused_with_key_values_and_fix(
    ended_run: Path, recipe: tuple[str, ...]
) -> None:
    result = offbeat("train", *recipe, "seed=5", "--resume", str(ended_run))
    assert result.exit_code == 2
    assert result.stderr == (
        f"run directory {ended_run}: seed is 5, the run has 0. Keep these as they were "
        "(offbeat train --resume RUN without settings does), or start a new run\n"
    )


@pytest.mark.plugins
def test_an_override_that_is_wrong_is_reported_as_one(ended_run: Path) -> None:
    result = offbeat("train", "steps=many", "--resume", str(ended_run))
    assert result.exit_code == 2
    assert "steps = 'many': has to be: integer, at least 1" in result.stderr


# --- config --------------------------------------------------------------------------------------


def test_show_writes_the_whole_configuration_as_a_recipe() -> None:
    result = offbeat("config", "show", QUICKSTART, "steps=3")
    shown = yaml.safe_load(result.stdout)
    assert (shown["steps"], shown["sync"]["interval"]) == (3, 1)


def test_show_can_say_where_each_value_came_from() -> None:
    text = offbeat("config", "show", QUICKSTART, "steps=3", "--origins").stdout
    assert "steps: override 'steps=3'\n" in text
    assert "quickstart.yaml:3\n" in text
    assert "sync.interval" not in text


def test_explain_prints_a_key() -> None:
    assert (
        "integer, at least 1, at most 1000000000; required"
        in offbeat("config", "explain", "steps").stdout
    )


def test_explaining_an_unknown_key_is_bad_usage() -> None:
    result = offbeat("config", "explain", "step")
    assert result.exit_code == 2
    assert "step: unknown key. Did you mean `steps`?" in result.stderr


def test_an_overlong_name_is_refused_on_lines_that_can_be_read() -> None:
    result = offbeat("check", QUICKSTART, f"name={'a' * 300}")
    assert result.exit_code == 2
    assert "of at most 100 letters" in result.stderr
    assert max(map(len, result.stderr.splitlines())) < 300


@pytest.mark.plugins
def test_a_resumed_run_has_one_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run_dir(load_recipe(STUB).config, run)
    result = offbeat("train", "--resume", str(run), "steps=3", f"run_dir={tmp_path / 'other'}")
    assert result.exit_code == 2
    assert f"--resume {run} continues in that directory, but run_dir=" in result.stderr


def test_a_check_prints_nothing_but_its_report() -> None:
    program = f"import sys; sys.argv = ['offbeat', 'check', {QUICKSTART!r}]\n"
    program += "from offbeat.launch.commands.main import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
