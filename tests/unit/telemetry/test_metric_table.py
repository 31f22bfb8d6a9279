from pathlib import Path

from offbeat.telemetry.metric_table import METRICS, ROWS, undeclared
from offbeat.telemetry.metrics_doc import document

ROOT = Path(__file__).resolve().parents[3]


def test_every_metric_is_declared_once() -> None:
    assert len(METRICS) == len(ROWS)


def test_every_metric_has_a_group_a_unit_and_says_what_it_means_and_what_to_do() -> None:
    for metric in METRICS.values():
        assert metric.name.count("/") == 1
        assert metric.unit
        assert metric.meaning.endswith(".")
        assert metric.when_it_rises.endswith(".")


def test_an_undeclared_metric_is_told_with_the_nearest_name() -> None:
    error = undeclared("train/rewards")
    assert "the nearest is 'train/reward'" in str(error)
    assert type(error)(*error.args).nearest == "train/reward"


def test_the_document_is_what_the_table_says() -> None:
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == document(), (
        "docs/metrics.md is out of date; run: python -m offbeat.telemetry.metrics_doc"
    )
