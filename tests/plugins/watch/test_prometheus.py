"""``/metrics`` of ``offbeat watch`` between a step and its evaluation."""

from pathlib import Path

from offbeat.plugins.watch.server import last_record
from tests.unit.runs.test_metrics_file import scored, step, written


def test_prometheus_is_told_the_last_step_and_the_newest_scores(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", step(1), scored(1, 0.5), step(2, 2.0))
    between = last_record(tmp_path)
    written(tmp_path / "metrics.jsonl", step(1), step(2, 2.0), scored(2, 0.75))
    right_after = last_record(tmp_path)
    assert between is not None
    assert right_after is not None
    assert between.metrics == {"train/loss": 2.0, "eval/reward": 0.5}
    assert right_after.metrics == {"train/loss": 2.0, "eval/reward": 0.75}
