"""What a shell sees of ``offbeat simulate``: exit codes, output, and what is not loaded on the way."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.launch.commands.main import app
from offbeat.plugins.simulation.campaign import CampaignTotals, FailedEpisode
from offbeat.plugins.simulation.cli import _write_lines
from offbeat.plugins.simulation.faults import PROFILES
from offbeat.plugins.simulation.schedule import PlannedFault, dump
from tests.support.loaded_modules import modules_loaded_by

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
STUB = str(ROOT / "tests" / "support" / "stub.yaml")


def offbeat(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def test_help_lists_the_command() -> None:
    assert "  simulate  " in offbeat("--help").output


def test_a_bad_recipe_is_refused_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("steps: 0\nmodel: {path: x}\n")
    assert modules_loaded_by("simulate", str(recipe)) == (2, [])


def test_a_simulation_says_what_stands_in_the_place_of_code_of_the_user() -> None:
    mine = (
        "sampler.name=custom",
        "sampler.target=policies:Mine",
        "algorithm.advantage=mine:centred",
    )
    shown = offbeat("simulate", STUB, "--seeds", "1", "--base", "7", *mine).output
    assert shown.startswith(
        "in place of your code:\n"
        "  policies:Mine: each episode draws a policy of this package\n"
        "  mine:centred: grpo\n"
        "1 episodes from seed 7"
    )
    assert "in place of" not in offbeat("simulate", STUB, "--seeds", "1", "--base", "7").output


def test_no_code_of_the_user_is_replaced_in_an_environment_of_this_package() -> None:
    images = str(ROOT / "recipes" / "quickstart-images.yaml")
    shown = offbeat("simulate", images, "steps=2", "--seeds", "1", "--base", "7").output
    assert shown.startswith("1 episodes from seed 7")


def test_a_seed_is_simulated_in_full_and_again_with_the_same_digest() -> None:
    first, again = (offbeat("simulate", STUB, "--seed", "3", "--faults", "none") for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout.startswith("seed 3: finished after ")
    assert "no violation" in first.stdout
    assert first.stdout == again.stdout


def test_a_campaign_is_four_lines_the_last_of_which_replays_an_episode() -> None:
    arguments = ("simulate", STUB, "--seeds", "2", "--base", "7", "--faults", "engines")
    result = offbeat(*arguments)
    assert result.exit_code == 0
    episodes, fired, violations, verdict = result.stdout.splitlines()
    assert episodes == "2 episodes from seed 7, faults: engines"
    assert re.fullmatch(r"\d+ faults fired, \d+ of \d+ kinds, in \d+\.\d s", fired)
    assert violations == "violations in 0 episodes"
    held, command = verdict.split(": ", 1)
    assert held == "all invariants hold. Replay an episode"
    assert offbeat(*shlex.split(command)[1:]).stdout.startswith("seed 7: ")


def test_a_broken_invariant_is_shown_with_the_command_that_replays_its_seed() -> None:
    written = list[str]()
    totals = CampaignTotals(
        events=[10, 20, 30],
        findings=[FailedEpisode(8, ["I1: lost\n", "I2: old"], ["the last"], ["engine_killed"])],
    )
    _write_lines(totals, 1.5, "engines", 7, "offbeat simulate x.yaml", written.append)
    _, violations, verdict = "".join(written).splitlines()
    assert violations == "violations in 1 episodes; seed 8: I1: lost"
    assert verdict == "broken. Replay the first: offbeat simulate x.yaml --seed 8"


def test_a_verbose_campaign_tells_its_first_seed_and_what_was_struck() -> None:
    result = offbeat("simulate", STUB, "--seeds", "2", "--base", "7", "--faults", "engines", "-v")
    assert result.exit_code == 0
    assert "2 episodes from seed 7, faults: engines" in result.stdout
    assert "violations in 0 episodes" in result.stdout
    assert "<- never" in result.stdout


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
        ("[", "is not a schedule of faults"),
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


@pytest.mark.parametrize("page", ["offbeat/plugins/simulation/plugin.py", "docs/simulator.md"])
def test_every_profile_of_faults_is_offered_where_a_user_looks_for_it(page: str) -> None:
    (line,) = (
        line
        for line in (ROOT / page).read_text().splitlines()
        if "none" in line and "engines" in line
    )
    assert set(PROFILES) <= set(re.findall(r"\w+", line))
