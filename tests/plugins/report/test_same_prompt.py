"""The same prompts early and late in a run, from its evaluations or its trained samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.plugins.report.document import document, stories
from offbeat.plugins.report.same_prompt import SamePrompts, find_same_prompts
from offbeat.plugins.report.story import find_failed_samples
from offbeat.rollouts.log_table import build_table
from offbeat.rollouts.rollout_log import LoggedGroup
from offbeat.runs.logged_samples import TokenText
from offbeat.telemetry.evaluation_files import EvaluationFiles
from tests.support import shown_run
from tests.support.recorded_runs import receipt

IDS = TokenText(None)


def score(row: int, reward: float, response: str | None = "4", **facts: Any) -> ScoredSample:
    sample = ScoredSample(
        set="", prompt_index=row, row=row, sample=0, reward=reward, is_valid=True,
        is_correct=reward > 0, answer=None, finish_reason="stop", response_tokens=2, turns=1,
        response=response, prompt=f'{{"prompt": "{row}+1=", "answer": 1}}',
    )  # fmt: skip
    return replace(sample, **facts)


def evaluate(run_dir: Path, version: int, *samples: ScoredSample) -> None:
    files = EvaluationFiles(run_dir)
    files.take(EvaluatedVersion(version, version, samples))
    files.close()


def sample_group(run_dir: Path, index: int, row: int, rewards: tuple[float, float]) -> None:
    """Log a group of a prompt of the data set."""
    made = replace(receipt(index, 1, index), rewards=rewards)
    task = RolloutTask(
        Prompt(index, 0, row, {"prompt": f"{row}+1="}), 1, made.samples, made.engine, 0, 60.0
    )
    columns: dict[str, Any] = {
        "prompt_ids": np.array([1], dtype=np.int32),
        "response_ids": np.arange(14, dtype=np.int32),
        "response_offsets": np.array([0, 5, 14], dtype=np.int64),
    }
    (run_dir / "rollouts").mkdir(exist_ok=True)
    table = build_table([LoggedGroup(task, made, columns)])
    pq.write_table(table, run_dir / "rollouts" / f"{index:06d}.parquet")


def found_in(run_dir: Path) -> SamePrompts:
    found = find_same_prompts(run_dir, IDS)
    assert found is not None
    return found


def test_the_first_and_the_last_evaluation_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    evaluate(
        tmp_path, 0, score(0, 0.0, "one"), score(1, 1.0), score(2, 0.5), score(3, 0.0),
        score(4, 0.5),
    )  # fmt: skip
    evaluate(tmp_path, 10, score(0, 0.0), score(1, 0.0), score(2, 0.0), score(3, 0.0))
    evaluate(
        tmp_path, 20, score(0, 1.0, "two"), score(1, 0.25), score(2, 0.5), score(4, 0.75),
        score(9, 1.0),
    )  # fmt: skip
    found = found_in(tmp_path)
    assert (found.source, found.better, found.equal, found.worse) == ("evaluation", 2, 1, 1)
    gain, same, loss = found.prompts
    assert [each.why for each in found.prompts] == [
        "the largest gain",
        "unchanged",
        "the largest loss",
    ]
    assert (gain.prompt, gain.early.version, gain.early.reward, gain.early.text) == (
        "0+1=",
        0,
        0.0,
        "one",
    )
    assert (gain.late.version, gain.late.reward, gain.late.text) == (20, 1.0, "two")
    assert (same.key, loss.key) == ("row 2", "row 1")


def test_a_prompt_s_samples_are_one_mean_and_a_masked_one_counts_in_none(tmp_path: Path) -> None:
    masked = score(0, 0.0, "broken", is_valid=False)
    evaluate(tmp_path, 0, score(0, 0.0), score(0, 0.0, sample=1), score(1, 0.0, is_valid=False))
    evaluate(tmp_path, 5, masked, score(0, 1.0, "right", sample=1), score(1, 1.0))
    (only,) = found_in(tmp_path).prompts
    assert (only.late.mean, only.late.reward, only.late.text) == (1.0, 1.0, "right")


def test_rows_of_two_sets_with_one_number_are_two_prompts(tmp_path: Path) -> None:
    evaluate(tmp_path, 0, score(0, 0.0, set="a"), score(0, 1.0, set="b"))
    evaluate(tmp_path, 5, score(0, 1.0, set="a"), score(0, 0.0, set="b"))
    assert [each.key for each in found_in(tmp_path).prompts] == ["row 0 of a", "row 0 of b"]


@pytest.mark.parametrize(
    ("logged", "shown"),
    [
        ('{"question": "why?", "answer": 1}', "why?"),
        ('{"prompt": [{"role": "user"}]}', '{"prompt": [{"role": "user"}]}'),
        ('{"prompt": "cut off here', '{"prompt": "cut off here'),
        ("[" * 5000, "[" * 4000),
        (None, ""),
    ],
)
def test_a_row_without_plain_text_is_shown_as_it_was_logged(
    tmp_path: Path, logged: str | None, shown: str
) -> None:
    for version in (0, 5):
        evaluate(tmp_path, version, score(0, 0.0, None, prompt=logged))
    (only,) = found_in(tmp_path).prompts
    assert (only.prompt, only.early.text) == (shown, "")


def test_without_two_evaluations_a_prompt_of_both_ends_of_the_training_is_shown(
    tmp_path: Path,
) -> None:
    evaluate(tmp_path, 0, score(0, 0.0))
    rows = [7, *range(20, 38), 7]
    for index, row in enumerate(rows):
        sample_group(tmp_path, index, row, (1.0, 1.0) if index else (0.0, 1.0))
    found = found_in(tmp_path)
    assert (found.source, found.better, found.equal, found.worse) == ("training", 1, 0, 0)
    (only,) = found.prompts
    assert (only.key, only.prompt) == ("row 7", "7+1=")
    assert (only.early.group, only.early.mean, only.early.text) == (
        "g-000000",
        0.5,
        "[0][1][2][3][4]",
    )
    assert (only.late.group, only.late.mean, only.late.samples) == ("g-000019", 1.0, 2)


def test_a_run_without_a_prompt_at_both_ends_shows_none(tmp_path: Path) -> None:
    assert find_same_prompts(tmp_path, IDS) is None
    for index in range(20):
        sample_group(tmp_path, index, index, (0.0, 1.0))
    assert find_same_prompts(tmp_path, IDS) is None


def test_a_damaged_evaluation_hides_no_trained_prompt(tmp_path: Path) -> None:
    evaluate(tmp_path, 0, score(0, 0.0))
    (tmp_path / "evaluations" / "000009.parquet").write_bytes(b"PAR1 no PAR1")
    for index in (0, 1):
        sample_group(tmp_path, index, 7, (0.0, 1.0))
    assert found_in(tmp_path).source == "training"
    (tmp_path / "rollouts" / "x.parquet").write_bytes(b"PAR1 no PAR1")
    assert found_in(tmp_path).source == "training"


def test_long_texts_are_cut(tmp_path: Path) -> None:
    for version in (0, 5):
        evaluate(
            tmp_path, version, score(0, 0.0, "x" * 9000, prompt='{"prompt": "' + "y" * 9000 + '"}')
        )
    (only,) = found_in(tmp_path).prompts
    assert (len(only.prompt), len(only.late.text)) == (4000, 4000)


def test_failed_samples_are_counted_and_the_first_ones_kept_short(tmp_path: Path) -> None:
    assert find_failed_samples(tmp_path) is None
    line = (
        '{"group": "g-000001", "detail": "'
        + "d" * 9000
        + '", "traceback": "'
        + "t" * 9000
        + 'end"}\n'
    )
    (tmp_path / "failures.jsonl").write_text(line * 30 + "{torn")
    found = find_failed_samples(tmp_path)
    assert found is not None
    assert (found["count"], len(found["samples"])) == (31, 20)
    first = found["samples"][0]
    assert (len(first["detail"]), first["traceback"][-4:], len(first["traceback"])) == (
        2000,
        "tend",
        2000,
    )


def test_a_page_has_both_only_of_the_run_that_it_shows_in_full(tmp_path: Path) -> None:
    run = shown_run.with_losses(tmp_path / "one", 20)
    first, second = document([run, run])["runs"]
    assert first["same"]["source"] == "evaluation"
    assert first["failures"] is None
    assert "same" not in second
    assert stories([run, run])[1].same_prompts is None
