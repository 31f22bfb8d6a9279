"""What a shell sees: exit codes, what goes to standard error, and what is not loaded on the way."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from offbeat.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
HEAVY = ("torch", "ray", "transformers", "numpy", "tensordict", "wandb", "pandas")

BAD = "steps: 0\nmodel: {path: x}\nsampler: {name: in_order, max_stalenes: 1}\n"


def offbeat(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def modules_loaded_by(*args: str) -> tuple[int, list[str]]:
    """Exit code of a command, and the heavy modules its process had loaded at the end."""
    program = (
        "import sys\n"
        f"sys.argv = ['offbeat', *{args!r}]\n"
        "from offbeat.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"print('LOADED', code, *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    _, code, *loaded = done.stdout.splitlines()[-1].split()
    return int(code), loaded


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
        ("check", "--help"),
    ],
)
def test_looking_around_loads_nothing_heavy(args: tuple[str, ...]) -> None:
    assert modules_loaded_by(*args) == (0, [])


@pytest.mark.parametrize("command", ["train", "dry-run", "check", "submit"])
def test_a_bad_recipe_is_refused_before_anything_heavy_is_loaded(
    command: str, bad_recipe: str
) -> None:
    assert modules_loaded_by(command, bad_recipe) == (2, [])


# --- commands ------------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    text = offbeat("--help").output
    assert all(command in text for command in ("train", "dry-run", "check", "submit", "config"))


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


def test_resuming_is_refused_with_the_reason() -> None:
    result = offbeat("train", QUICKSTART, "--resume", "runs/old")
    assert result.exit_code == 2
    assert "--resume runs/old: this version writes a journal but cannot resume" in result.stderr


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
    assert "integer, at least 1; required" in offbeat("config", "explain", "steps").stdout


def test_explaining_an_unknown_key_is_bad_usage() -> None:
    result = offbeat("config", "explain", "step")
    assert result.exit_code == 2
    assert "step: unknown key. Did you mean `steps`?" in result.stderr
