"""What other people wrote, a model, a data set or a run directory, does not act on a terminal."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.launch.checks.report import print_findings
from offbeat.launch.commands.main import app
from offbeat.messages.finding import error
from tests.support import shown_run

HOSTILE = "\x1b]0;title\x07\x9b2J\u202e\r"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(shown_run.hostile(tmp_path_factory.mktemp("runs") / "one", HOSTILE))


@pytest.mark.parametrize("command", [("replay",), ("why", "0"), ("why", "3"), ("why", "99999")])
def test_a_run_of_hostile_texts_is_told_in_characters_that_are_shown(
    run: str, command: tuple[str, ...]
) -> None:
    name, *more = command
    told = CliRunner().invoke(app, [name, run, *more])
    assert told.exit_code in (0, 1, 2) and told.output
    assert acting(told.output) == set()


def test_the_hostile_texts_are_told(run: str) -> None:
    assert r"\x1b]0;title\x07\x9b2J\u202e\r" in CliRunner().invoke(app, ["why", run, "0"]).output


def test_a_finding_that_quotes_a_data_set_is_told_in_characters_that_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    finding = error("prompts", f"{tmp_path}: line 1: keys: {HOSTILE}", "Give a prompt.")
    print_findings([finding], versions="python 3.13")
    shown = capsys.readouterr().out
    assert acting(shown) == set()
    assert shown.count("\n") == 6, "two lines of the finding, the versions, and the sum"


def acting(text: str) -> set[str]:
    return {each for each in text if each != "\n" and not each.isprintable()}
