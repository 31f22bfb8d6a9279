"""What a shell sees: exit codes, what goes to standard error, and what is not loaded on the way."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from offbeat.cli.main import app
from offbeat.config.loader import load_recipe
from offbeat.plugins.simulation.schedule import PlannedFault, dump
from offbeat.runs.directory import make_run_dir
from tests.support import shown_run

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
STUB = str(ROOT / "tests" / "support" / "stub.yaml")
HEAVY = ("torch", "ray", "transformers", "numpy", "tensordict", "wandb", "pandas")

COMMANDS = ("train", "dry-run", "check", "submit", "simulate", "control", "replay", "why", "config")
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


@pytest.mark.parametrize("command", ["train", "dry-run", "check", "submit", "simulate"])
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


def test_a_directory_without_a_run_cannot_be_resumed() -> None:
    result = offbeat("train", STUB, "--resume", "runs/nothing")
    assert result.exit_code == 2
    assert "runs/nothing: it holds no run to resume" in result.stderr


def test_a_run_without_its_config_cannot_be_resumed_by_its_name_alone() -> None:
    result = offbeat("train", "--resume", "runs/nothing")
    assert result.exit_code == 2
    assert "runs/nothing holds no run to resume" in result.stderr


def test_resuming_into_another_directory_is_bad_usage() -> None:
    result = offbeat("train", "--resume", "runs/old", "--run-dir", "runs/new")
    assert result.exit_code == 2
    assert "--resume runs/old and --run-dir runs/new: give one of them" in result.stderr


@pytest.mark.parametrize("other", ["runtime=ray", "runtime.backend=locl"])
@pytest.mark.parametrize("command", ["train", "check", "dry-run"])
def test_two_runtimes_are_bad_usage(command: str, other: str) -> None:
    result = offbeat(command, QUICKSTART, "--local", other)
    assert result.exit_code == 2
    assert f"--local is runtime.backend=local, and {other} is given too" in result.stderr


def test_training_needs_a_recipe_or_a_run() -> None:
    assert "Name a RECIPE" in offbeat("train").stderr


@pytest.mark.parametrize("recipe", [(), (STUB,)], ids=["its own config", "a recipe"])
def test_an_override_of_what_a_run_is_made_of_is_refused_with_key_values_and_fix(
    ended_run: Path, recipe: tuple[str, ...]
) -> None:
    result = offbeat("train", *recipe, "seed=5", "--resume", str(ended_run))
    assert result.exit_code == 2
    assert result.stderr == (
        f"run directory {ended_run}: seed is 5, the run has 0. Leave these as they were "
        "(offbeat train --resume RUN alone does), or start a new run\n"
    )


def test_an_override_that_is_wrong_is_reported_as_one(ended_run: Path) -> None:
    result = offbeat("train", "steps=many", "--resume", str(ended_run))
    assert result.exit_code == 2
    assert "steps = 'many': has to be: integer, at least 1" in result.stderr


def test_a_run_whose_weights_travelled_over_gloo_names_what_to_resume_with(
    ended_run: Path, tmp_path: Path
) -> None:
    old = tmp_path / "former"
    shutil.copytree(ended_run, old)
    values = yaml.safe_load((old / "config.yaml").read_text())
    values["sync"] |= {"transport": "gloo", "slack_s": 5.0}
    (old / "config.yaml").write_text(yaml.safe_dump(values))
    result = offbeat("train", "--resume", str(old))
    assert result.exit_code == 2
    assert "sync.transport = 'gloo': has to be: one of object_store, reshard" in result.stderr
    assert "Set sync.transport to reshard, which also sends over TCP" in result.stderr


# --- simulate ------------------------------------------------------------------------------------


def test_a_seed_is_simulated_in_full_and_again_with_the_same_digest() -> None:
    first, again = (offbeat("simulate", STUB, "--seed", "3", "--faults", "none") for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout.startswith("seed 3: finished after ")
    assert "no violation" in first.stdout
    assert first.stdout == again.stdout


def test_a_campaign_tells_its_first_seed_and_what_was_struck() -> None:
    result = offbeat("simulate", STUB, "--seeds", "2", "--base", "7", "--faults", "engines")
    assert result.exit_code == 0
    assert "2 episodes from seed 7, faults: engines" in result.stdout
    assert "violations in 0 episodes" in result.stdout


@pytest.mark.usefixtures("default_signals")
def test_a_campaign_that_is_interrupted_says_how_far_it_came_and_leaves_no_traceback() -> None:
    command = [sys.executable, "-m", "offbeat", "simulate", QUICKSTART, "--seeds", "100000"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as campaign:  # fmt: skip
        assert campaign.stdout is not None
        head = campaign.stdout.readline()
        os.killpg(campaign.pid, signal.SIGINT)  # as a terminal does: its workers get it, too
        rest = campaign.stdout.read()
    assert head.startswith("100000 episodes from seed")
    assert "interrupted after" in rest and "Traceback" not in rest
    assert campaign.returncode == 130


MASK_OF_A_WORKER = """
import signal
from offbeat.plugins.simulation.campaign import _pool
if __name__ == "__main__":
    with _pool(1) as pool:
        print(signal.SIGINT in pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ())))
"""


def test_the_workers_of_a_campaign_start_with_interrupts_blocked(tmp_path: Path) -> None:
    (tmp_path / "mask.py").write_text(MASK_OF_A_WORKER)
    command = [sys.executable, str(tmp_path / "mask.py")]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout == "True\n"


def test_a_schedule_is_played_instead_of_drawn_faults(tmp_path: Path) -> None:
    planned_faults = [
        PlannedFault("engine_killed", "generator-0", at_step=2),
        PlannedFault("engine_killed", "generator-99", at_step=2),  # there is no such engine
    ]
    (tmp_path / "faults.json").write_text(dump(planned_faults))
    result = offbeat("simulate", STUB, "--seed", "1", "--schedule", str(tmp_path / "faults.json"))
    assert result.exit_code == 0
    assert "fired: engine_killed\n" in result.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file or directory"),
        ("[", "is no schedule of faults"),
        ('[{"action": "engine_killed"}]', "engine_killed needs exactly one of at_step"),
        ('[{"action": "rain", "at_step": 1}]', "no fault is named rain"),
    ],
)
def test_a_schedule_that_cannot_be_played_is_bad_usage(
    tmp_path: Path, text: str | None, told: str
) -> None:
    path = tmp_path / "faults.json"
    if text is not None:
        path.write_text(text)
    result = offbeat("simulate", STUB, "--schedule", str(path))
    assert result.exit_code == 2
    assert told in result.stdout


def test_a_profile_there_is_not_is_bad_usage() -> None:
    result = offbeat("simulate", STUB, "--faults", "weather")
    assert result.exit_code == 2
    assert "no fault profile is named 'weather'" in result.stdout


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


def test_more_steps_than_anybody_takes_are_refused() -> None:
    result = offbeat("check", QUICKSTART, "steps=100000000000000000000000000")
    assert result.exit_code == 2
    assert "has to be: integer, at least 1, at most 1000000000" in result.stderr


def test_a_resumed_run_has_one_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run_dir(load_recipe(STUB).config, run)
    result = offbeat("train", "--resume", str(run), "steps=3", f"run_dir={tmp_path / 'other'}")
    assert result.exit_code == 2
    assert f"--resume {run} goes on in that directory, and run_dir=" in result.stderr


def test_a_check_prints_nothing_but_its_report() -> None:
    program = f"import sys; sys.argv = ['offbeat', 'check', {QUICKSTART!r}]\n"
    program += "from offbeat.cli.main import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
