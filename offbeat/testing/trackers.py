"""Proves a tracker with some records of an invented run."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from offbeat.messages.failures import FixableError
from offbeat.messages.finding import Finding
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.tracker import TrackedRun, Tracker

T = TypeVar("T")

RECORDS: Final = (
    MetricRecord(1, 1, 1.0, {"train/reward": 0.5, "train/loss": -0.1}),
    MetricRecord(2, 2, 2.0, {"train/reward": float("nan"), "a/metric of yours": 1.0}),
    MetricRecord(2, 2, 2.5, {"eval/reward": 0.75}),
    MetricRecord(3, 3, 3.0, {}),
)
"""Records of three steps and an evaluation."""


class TrackerRefused(FixableError):
    """A tracker that a run would report as broken.

    Fix: correct the tracker as the message says.
    """

    form = "{}: {}. {}"


def prove_tracker(tracker: Tracker[Any], keys: Mapping[str, Any], folder: Path) -> None:
    """Prove that a tracker accepts the records of a run, of a resumed run and of an evaluation.

    Args:
        tracker: The object of the entry point.
        keys: Keys of the tracker's section in a recipe.
        folder: An empty folder, used as the directory of the run.

    Raises:
        TrackerRefused: The tracker refuses its keys, raises in a call, or changes a record.
    """
    subject = type(tracker).__name__
    section = _validate(subject, tracker, keys, "its keys")
    for what, changes in (
        ("for_dry_run", tracker.for_dry_run),
        ("for_evaluation", tracker.for_evaluation),
    ):
        changed = _call(subject, what, lambda changes=changes: changes(section))
        _validate(subject, tracker, {**keys, **changed}, f"the keys of {what}")
    found: list[object] = _call(subject, "check", lambda: [*tracker.check(section, {})])
    if strange := [each for each in found if not isinstance(each, Finding)]:
        problem = f"check yields {strange[0]!r}"
        raise TrackerRefused(
            subject, problem, "Yield what error, warning or ok of offbeat.interfaces return"
        )
    run = TrackedRun("run-1", "proof", folder, {"steps": 3})
    for _ in ("a run", "the same run, resumed"):
        sink = _call(subject, "make_sink", lambda: tracker.make_sink(section, run))
        if sink is None:
            fix = "Prove it with keys that switch it on"
            raise TrackerRefused(subject, "make_sink returns None: it is switched off", fix)
        for record in RECORDS:
            before = copy.deepcopy(record.metrics)
            _call(subject, "open", sink.open)
            _call(subject, "write", lambda record=record, sink=sink: sink.write(record))
            if record.metrics.keys() != before.keys():
                problem = (
                    f"write changed the metrics of step {record.step}, which all trackers share"
                )
                raise TrackerRefused(subject, problem, "Copy them first")
        _call(subject, "close", sink.close)


def _call(subject: str, what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        problem = f"{what} raised {type(error).__name__}: {error}"
        raise TrackerRefused(subject, problem, "A run would try again and write nothing") from error


def _validate(subject: str, tracker: Tracker[Any], keys: Mapping[str, Any], what: str) -> Any:  # noqa: ANN401 -- a model of the tracker
    try:
        return tracker.section.model_validate(keys)
    except ValidationError as error:
        problem = f"its section refuses {what}: {error}"
        raise TrackerRefused(subject, problem, "Change its section, or the keys") from error
