"""``metrics.jsonl`` as its readers see it: a step's record and that of an evaluation beside it."""

from pathlib import Path

from offbeat.run_files.limits import METRICS_BYTES, SAMPLED_LINES
from offbeat.runs.metrics_file import read_metrics_file
from offbeat.telemetry.records import MetricRecord, encode_line


def written(path: Path, *records: tuple[int, dict[str, float]]) -> Path:
    lines = [encode_line(MetricRecord(v, v, float(v), metrics)) for v, metrics in records]
    path.write_bytes(b"".join(lines))
    return path


def step(version: int, loss: float = 1.0) -> tuple[int, dict[str, float]]:
    return version, {"train/loss": loss}


def scored(version: int, reward: float) -> tuple[int, dict[str, float]]:
    return version, {"eval/reward": reward}


def test_an_evaluation_leaves_the_metrics_of_its_step_there_whichever_is_written_first(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "m", step(1), scored(1, 0.5), scored(2, 0.75), step(2, 2.0))
    found = read_metrics_file(path)
    assert {version: dict(each.metrics) for version, each in found.steps.items()} == {
        1: {"train/loss": 1.0},
        2: {"train/loss": 2.0},
    }
    assert {version: dict(each.metrics) for version, each in found.evaluations.items()} == {
        1: {"eval/reward": 0.5},
        2: {"eval/reward": 0.75},
    }


def test_an_evaluation_stands_at_the_version_scored_also_if_an_old_run_recorded_a_later_one(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "m", step(3), (3, {"eval/reward": 0.5, "eval/version": 2.0}))
    assert [*read_metrics_file(path).evaluations] == [2]


def test_a_step_that_is_trained_again_takes_the_evaluations_that_a_rewind_undid(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path / "m",
        *(step(1), scored(1, 0.1), step(2), scored(2, 0.2), step(3), scored(3, 0.3)),
        *(step(2, 9.0), step(3, 9.0), scored(3, 0.9)),
    )
    found = read_metrics_file(path).evaluations
    assert {version: each.metrics["eval/reward"] for version, each in found.items()} == {
        1: 0.1,
        3: 0.9,
    }


def test_an_evaluation_that_ended_in_a_later_step_stands_if_a_rewind_went_back_to_its_version(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "m", step(1), step(2), step(3), scored(1, 0.1), step(2, 9.0))
    assert list(read_metrics_file(path).evaluations) == [1]


def test_of_a_long_file_every_evaluation_is_read_and_some_of_the_steps(tmp_path: Path) -> None:
    path, filling = tmp_path / "metrics.jsonl", {f"part/{n:099d}": 0.0 for n in range(20)}
    steps = 2 * METRICS_BYTES // len(encode_line(MetricRecord(1, 1, 0.0, filling)))
    with path.open("wb") as file:
        for version in range(1, steps + 1):
            file.write(encode_line(MetricRecord(version, version, 0.0, filling)))
            if version % 500 == 0:
                file.write(encode_line(MetricRecord(version, version, 0.0, {"eval/reward": 1.0})))
        file.write(b'{"eval/torn')
    found = read_metrics_file(path)
    assert found.sampled
    assert sorted(found.evaluations) == list(range(500, steps + 1, 500))
    assert 0.9 * SAMPLED_LINES < len(found.steps) <= SAMPLED_LINES
    assert not found.unreadable


def test_of_very_many_evaluations_as_many_are_read_as_of_steps(tmp_path: Path) -> None:
    path, count = tmp_path / "metrics.jsonl", 3 * SAMPLED_LINES
    filling = {f"eval/{n:099d}": 0.0 for n in range(1 + METRICS_BYTES // count // 100)}
    written(path, *((version, filling) for version in range(1, count + 1)))
    found = read_metrics_file(path)
    assert found.sampled
    assert SAMPLED_LINES <= len(found.evaluations) <= 2 * SAMPLED_LINES
    assert {1, count} <= found.evaluations.keys()
