"""``offbeat why RUN --eval SET ROW``."""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from offbeat.launch.commands.main import app
from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.messages.media import Thumbnail
from offbeat.runs.past_run import JOURNAL
from offbeat.telemetry.evaluation_files import EvaluationFiles, evaluation_files

HOSTILE = "\x1b[2J<script>\n5"


def sample(row: int, number: int, *, reward: float = 0.0, name: str = "math") -> ScoredSample:
    return ScoredSample(
        set=name,
        prompt_index=row,
        row=row,
        sample=number,
        reward=reward,
        is_valid=number != 2,
        is_correct=reward == 1.0,
        answer="5" if reward else "",
        finish_reason="stop",
        response_tokens=3,
        turns=number + 1,
        response=HOSTILE,
        prompt='{"prompt": "2+3?", "answer": "5"}',
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    (run_dir / JOURNAL).mkdir(parents=True)
    files = EvaluationFiles(run_dir)
    for due, reward in ((0, 0.0), (100, 1.0)):
        samples = [sample(row, number) for row in (3, 4, 7) for number in range(2)]
        samples += [sample(4, 2), sample(4, 3, reward=reward), sample(0, 0, name="")]
        files.take(EvaluatedVersion(due, due + 1, tuple(samples)))
    files.close()
    return run_dir


def why(*args: object) -> Result:
    return CliRunner().invoke(app, ["why", *map(str, args)])


def test_a_row_is_shown_over_evaluations_and_its_samples_of_the_newest(run: Path) -> None:
    said = why(run, "--eval", "math", 4)
    assert said.exit_code == 0
    assert said.stdout.splitlines()[1:9] == [
        'prompt  {"prompt": "2+3?", "answer": "5"}',
        "",
        "     due   version    reward   correct   turns",
        "       0         1     0.000       0/3     2.5",
        "     100       101     0.333       1/3     2.5",
        "",
        "samples of the evaluation due at version 100",
        "   0     0.000  wrong    stop, 3 tokens, 1 turn  answer none",
    ]
    assert "   2    masked           stop, 3 tokens, 3 turns  answer none" in said.stdout
    assert "   3     1.000  correct  stop, 3 tokens, 4 turns  answer 5" in said.stdout


@pytest.mark.plugins
def test_small_copies_of_the_pictures_of_a_row_are_told_with_their_file(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).mkdir()
    small = (Thumbnail(1, 2, b"abcdef"), Thumbnail(1, 2, b"ghijkl"))
    files = EvaluationFiles(tmp_path)
    pictured = replace(sample(3, 0), previews=small)
    files.take(EvaluatedVersion(120, 120, (pictured, sample(3, 1))))
    files.close()
    told = (
        "pictures  small copies of 2 in evaluations/000120.parquet, column pictures: 2 x 1 pixels"
    )
    lines = why(tmp_path, "--eval", "math", 3).stdout.splitlines()
    assert told in re.sub(r"\n +", " ", "\n".join(lines)).splitlines()
    assert max(map(len, lines)) <= 80
    values = json.loads(why(tmp_path, "--eval", "math", 3, "--json").stdout)
    first, second = values["evaluations"][0]["samples"]
    assert first["pictures"] == [{"height": 1, "width": 2}] * 2
    assert second["pictures"] == []


def test_an_older_evaluation_is_shown_by_its_version(run: Path) -> None:
    said = why(run, "--eval", "math", 4, "--due", 0).stdout
    assert "due at version 0" in said and "correct  stop" not in said


def test_what_a_model_wrote_cannot_steer_the_terminal(run: Path) -> None:
    said = why(run, "--eval", "math", 4).stdout
    assert "\x1b" not in said and "      \\x1b[2J<script> 5" in said


def test_the_only_set_has_no_name_and_programs_read_json(run: Path) -> None:
    read = json.loads(why(run, "--eval", "-", 0, "--json").stdout)
    assert (read["set"], read["row"], read["shown"]) == ("", 0, 100)
    assert read["evaluations"][0]["samples"][0]["response"] == HOSTILE


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--eval", "maths", "4"], "no set 'maths' in its evaluations; there are the sets -, math"),
        (
            ["--eval", "math", "5"],
            "no row '5' of set math in its evaluations; there are rows 3, 4, 7",
        ),
        (["--eval", "math", "x"], "no row 'x' of set math"),
        (["--eval", "math", "4", "--due", "7"], "no evaluation due at version 7"),
        (["4", "--eval", "math", "4"], "and not both"),
        ([], "name a GROUP, or --eval SET ROW"),
        (["4", "--due", "3"], "--due needs --eval"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    run: Path, args: list[str], problem: str
) -> None:
    said = why(run, *args)
    assert said.exit_code == 2
    assert problem in " ".join(said.output.replace("│", "").split())


def test_a_run_without_an_evaluation_says_what_makes_one(run: Path) -> None:
    for _, path in evaluation_files(run):
        path.unlink()
    assert "set eval.interval or eval.at_start" in why(run, "--eval", "math", 4).output


def test_a_damaged_file_is_named(run: Path) -> None:
    path = evaluation_files(run)[0][1]
    path.write_bytes(b"PAR1")
    said = why(run, "--eval", "math", 4)
    assert said.exit_code == 2 and f"{path} is not a readable evaluation" in said.output


def test_the_name_of_no_run_is_refused(tmp_path: Path) -> None:
    assert why(tmp_path, "--eval", "math", 4).exit_code == 2
