"""Evaluations on disk, and their metrics."""

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.messages.media import Thumbnail
from offbeat.telemetry.evaluation_files import (
    EvaluationFiles,
    evaluation_files,
    evaluation_metrics,
    read_evaluated_row,
    read_evaluation,
)
from offbeat.telemetry.metric_table import METRICS, declared_name


def evaluated(due: int = 120) -> EvaluatedVersion:
    rows = [(0, 0, 1.0, "5"), (0, 1, 0.0, "7"), (1, 0, 0.0, ""), (1, 1, 0.0, "8")]
    samples = [
        ScoredSample(
            set=name,
            prompt_index=prompt,
            row=prompt,
            sample=number,
            reward=reward,
            is_valid=True,
            is_correct=reward == 1.0,
            answer=answer if name else None,
            finish_reason="stop",
            response_tokens=3,
            turns=1,
            response=f"= {answer}</s>" if name else None,
            prompt='{"prompt": "2+3?"}',
        )
        for name in ("math", "")
        for prompt, number, reward, answer in rows
    ]
    return EvaluatedVersion(due, due + 1, tuple(samples))


def test_an_evaluation_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = EvaluationFiles(tmp_path)
    files.take(evaluated())
    files.close()
    ((due, path),) = evaluation_files(tmp_path)
    assert (due, path.name, read_evaluation(path)) == (120, "000120.parquet", evaluated())
    table = pq.read_table(path)
    assert table.column("answer").to_pylist()[2:5] == ["", "8", None]
    assert table.column("response").to_pylist()[2:5] == ["= </s>", "= 8</s>", None]


def test_small_copies_of_pictures_are_read_with_the_row_that_has_them(tmp_path: Path) -> None:
    small = Thumbnail(1, 2, b"abcdef")
    due, version, (first, *others) = msgspec.structs.astuple(evaluated())
    first = msgspec.structs.replace(first, previews=(small,))
    files = EvaluationFiles(tmp_path)
    files.take(EvaluatedVersion(due, version, (first, *others)))
    files.close()
    ((_, path),) = evaluation_files(tmp_path)
    row, another = (read_evaluated_row(path, "math", number) for number in (0, 1))
    assert row is not None and another is not None
    assert [sample.previews for sample in row.samples] == [(small,), ()]
    assert not any(sample.previews for sample in another.samples)
    assert read_evaluation(path) == evaluated()


@pytest.mark.plugins
def test_a_file_without_responses_is_read(tmp_path: Path) -> None:
    files = EvaluationFiles(tmp_path)
    files.take(evaluated())
    files.close()
    ((_, path),) = evaluation_files(tmp_path)
    pq.write_table(pq.read_table(path).drop_columns(["response", "prompt", "pictures"]), path)
    read = read_evaluation(path).samples
    assert {(sample.response, sample.prompt) for sample in read} == {(None, None)}


def test_the_next_controller_knows_what_is_done_and_what_was_cut_short(tmp_path: Path) -> None:
    first = EvaluationFiles(tmp_path)
    first.take(evaluated())
    first.close()
    (tmp_path / "evaluations" / "000130.tmp").write_bytes(b"half")
    again = EvaluationFiles(tmp_path)
    assert again.has(120)
    assert not again.has(130)
    assert again.newest == evaluation_metrics(evaluated())


def test_a_damaged_file_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "000120.parquet").write_bytes(b"PAR1")
    assert EvaluationFiles(tmp_path).newest == {}


def test_a_disk_that_refuses_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "evaluations").write_text("a file where the folder should be")
    files = EvaluationFiles(tmp_path)
    files.take(evaluated())
    files.close()
    assert files.newest == evaluation_metrics(evaluated())


def test_every_metric_of_an_evaluation_is_declared() -> None:
    metrics = evaluation_metrics(evaluated())
    assert {"eval/version", "eval/math/pass@2", "eval/math/maj@2", "eval/pass@1"} <= metrics.keys()
    assert "eval/maj@2" not in metrics, "that set has no answers"
    assert {declared_name(name) for name in metrics} <= METRICS.keys()
    assert declared_name("eval/math/nonsense") not in METRICS
