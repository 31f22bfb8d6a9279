"""Lines of the list of runs: outcome, reason, steps, reward, score, start and duration.

A line is made from the small files of a run and a bounded part of its metrics. Files of an
unchanged run are not read again.
"""

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
import numpy as np

from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import cut, first_line
from offbeat.plugins.watch.runs import Signature, WatchedRuns, file_states
from offbeat.run_files.limits import (
    LINE_BYTES,
    STATUS_BYTES,
    SUMMARY_BYTES,
    UNREADABLE,
    NoRegularFile,
    read_json,
    regular_bytes,
)
from offbeat.runs.applied_steps import bin_means
from offbeat.runs.directory import CONFIG, SUMMARY
from offbeat.runs.metrics_file import decode_record, with_evaluation
from offbeat.runs.page_files import METRICS
from offbeat.runs.past_run import read_events
from offbeat.telemetry.records import EVALUATION_MARK, MetricRecord, is_evaluation
from offbeat.telemetry.status_file import ALIVE_WITHIN_S, STATUS_FILE, StatusRecord
from offbeat.telemetry.summary import Summary

T = TypeVar("T")
Outcome = Literal["finished", "failed", "stopped", "running", "lost"]
LISTED: Final = 500
"""Maximum lines; older runs are not listed."""
_POINTS: Final = 40  # rewards of a line
_READ_WHOLE: Final = 4 * 2**20  # bytes of metrics up to which every step counts
_REASON: Final = 300  # characters
_SCORE: Final = re.compile(r"eval/(?:(.+)/)?reward")
_NEWER_S: Final = 2.0  # a status that is newer than the summary by more is of a resumed run
_STARTS_WITHIN_S: Final = 600.0
"""A run without a status loads its model, which writes no file. Beyond this time it is lost."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of runs. A figure is None until it exists."""

    name: str
    outcome: Outcome
    reason: str = ""  # why it failed or stopped, in one line
    steps: int | None = None
    steps_asked: int | None = None
    reward: float | None = None  # mean over the last steps
    rewards: list[float | None] = []  # of the whole run, at equal distances
    score: float | None = None  # mean reward of the last evaluation
    score_name: str = ""
    began_unix_s: float
    duration_s: float | None = None


class RunLines:
    """The list of runs of a directory. Safe for any number of threads."""

    def __init__(self, runs: WatchedRuns, now_unix_s: Callable[[], float] = time.time) -> None:
        self._runs, self._now_unix_s = runs, now_unix_s
        self._read = dict[str, tuple[Signature, _RunFiles]]()
        self._lock = threading.Lock()

    def lines(self) -> list[RunLine]:
        """Return a line for each run, the newest start first."""
        now_unix_s = self._now_unix_s()
        with self._lock:
            found, lines = dict[str, tuple[Signature, _RunFiles]](), list[RunLine]()
            for name, directory in self._runs.readable():
                try:
                    signature = tuple(file_states(directory))
                    known = self._read.get(name)
                    if known is None or known[0] != signature:
                        known = signature, _RunFiles(directory, signature)
                    lines.append(_line(name, known[1], now_unix_s))
                    found[name] = known
                except Exception as damage:  # noqa: BLE001  one run must not hide the others
                    reason = cut(f"its files cannot be read: {first_line(damage)}", _REASON)
                    lines.append(
                        RunLine(name=name, outcome="lost", reason=reason, began_unix_s=0.0)
                    )
            self._read = found
        return sorted(lines, key=lambda line: (-line.began_unix_s, line.name))[:LISTED]


class _RunFiles:
    """Content of a run's files that a line needs."""

    def __init__(self, directory: Path, signature: Signature) -> None:
        changed = {file: changed_ns / 1e9 for file, _, changed_ns in signature}
        self.changed_unix_s = max(changed.values(), default=0.0)
        self.summary = _decoded(directory / SUMMARY, SUMMARY_BYTES, Summary)
        self.status = _decoded(directory / STATUS_FILE, STATUS_BYTES, StatusRecord)
        newest = changed.get(STATUS_FILE, 0.0)
        if self.summary is not None and newest > changed.get(SUMMARY, 0.0) + _NEWER_S:
            self.summary = None  # a resumed run keeps its old summary
        self.record = last_record(directory)
        self.rewards = sample_rewards(directory / METRICS)
        self.began_unix_s = self._began(directory, changed)

    def _began(self, directory: Path, changed: Mapping[str, float]) -> float:
        """Return the time of the first event, else the time when the recipe was written."""
        with contextlib.suppress(OSError, OffbeatError, StopIteration):
            first = next(iter(read_events(directory)))
            if first.unix_s:
                return first.unix_s
        return changed.get(CONFIG) or self.changed_unix_s


def _line(name: str, files: _RunFiles, now_unix_s: float) -> RunLine:
    outcome, reason = _outcome(files, now_unix_s)
    end_unix_s = now_unix_s if outcome == "running" else files.changed_unix_s
    done = _progress(files)
    score_name, score = _score(done.evaluation)
    return RunLine(
        name=name,
        outcome=outcome,
        reason=cut(" ".join(reason.split()), _REASON),
        steps=done.steps,
        steps_asked=done.steps_asked,
        reward=done.reward,
        rewards=files.rewards,
        score=score,
        score_name=score_name,
        began_unix_s=files.began_unix_s,
        duration_s=done.wall_s or max(0.0, end_unix_s - files.began_unix_s),
    )


def _outcome(files: _RunFiles, now_unix_s: float) -> tuple[Outcome, str]:
    """Return how the run ended, and why in words."""
    summary, status = files.summary, files.status
    if summary is not None:
        ended_by = f"ended by {summary.ended_by}" if summary.ended_by else ""
        outcome: Outcome = "stopped" if summary.outcome == "aborted" else summary.outcome
        return outcome, summary.error or ended_by
    if status is not None and status.is_fresh(now_unix_s):
        return "running", status.status.waiting_for and f"waits for {status.status.waiting_for}"
    limit_s = _STARTS_WITHIN_S if status is None and files.record is None else ALIVE_WITHIN_S
    if now_unix_s - files.changed_unix_s <= limit_s:
        return "running", "starts"
    return "lost", "no summary and no sign of life: killed, or its machine failed"


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run, from its summary, its status or its metrics."""

    steps: int | None
    steps_asked: int | None
    reward: float | None
    evaluation: Mapping[str, float]
    wall_s: float | None = None


def _progress(files: _RunFiles) -> _Progress:
    summary, record = files.summary, files.record
    evaluation = {} if record is None else record.metrics
    if summary is not None:
        return _Progress(
            steps=summary.steps,
            steps_asked=summary.steps_asked or None,
            reward=summary.reward_last,
            evaluation=summary.evaluation or evaluation,
            wall_s=summary.wall_s,
        )
    status = None if files.status is None else files.status.status
    known = [each for each in files.rewards if each is not None]
    reward = known[-1] if known else None
    recorded = None if record is None else record.version
    if status is None:
        return _Progress(steps=recorded, steps_asked=None, reward=reward, evaluation=evaluation)
    return _Progress(
        steps=max(status.step, recorded or 0),
        steps_asked=status.steps,
        reward=reward if status.reward is None else status.reward,
        evaluation=evaluation,
    )


def _score(evaluation: Mapping[str, float]) -> tuple[str, float | None]:
    """Return the name of an evaluation set and its mean reward. Of several sets, the first."""
    for name in sorted(evaluation):
        found = _SCORE.fullmatch(name)
        if found and math.isfinite(evaluation[name]):
            return found[1] or "", evaluation[name]
    return "", None


def last_record(run_dir: Path) -> MetricRecord | None:
    """Return the last complete record of a step, with the metrics of the newest evaluation.

    Both are searched in the last ``LINE_BYTES`` of the metrics, some hundred steps. So the scores
    of an evaluation stay until the next one. Return None before the first record.
    """
    try:
        regular_bytes(run_dir / METRICS)
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LINE_BYTES))
            lines = file.read(LINE_BYTES).split(b"\n")
    except (OSError, NoRegularFile):
        return None
    whole = lines[-2::-1]  # newest first; the part after the last newline is a torn record
    step = next((line for line in whole if EVALUATION_MARK not in line), b"")
    scores = next((line for line in whole if EVALUATION_MARK in line), b"")
    records = [record for line in (step, scores) if (record := decode_record(line)) is not None]
    return with_evaluation(records[0], records[-1]) if records else None


def sample_rewards(path: Path) -> list[float | None]:
    """Return at most ``_POINTS`` rewards of a ``metrics.jsonl``, oldest first.

    Of a short file each is the mean of several steps. Of a long file only some steps are read.
    """
    try:
        nbytes = regular_bytes(path)
        with path.open("rb") as file:
            if nbytes <= _READ_WHOLE:
                lines = file.read(_READ_WHOLE).splitlines()
            else:
                lines = list[bytes]()
                for offset in range(0, nbytes, -(-nbytes // _POINTS)):
                    file.seek(offset)
                    file.readline(LINE_BYTES if offset else 0)  # the rest of the line at the offset
                    lines.append(file.readline(LINE_BYTES))
    except (OSError, NoRegularFile):
        return []
    rewards = dict[int, float]()  # by version, ascending
    for record in map(decode_record, lines):
        if record is not None and not is_evaluation(record):
            while rewards and next(reversed(rewards)) >= record.version:
                rewards.popitem()  # a rewind has undone it
            rewards[record.version] = record.metrics.get("train/reward", math.nan)
    means = bin_means(np.array([*rewards.values()], dtype=np.float64), _POINTS).tolist()
    if not any(map(math.isfinite, means)):
        return []
    return [mean if math.isfinite(mean) else None for mean in means]


def _decoded(path: Path, nbytes: int, kind: type[T]) -> T | None:
    """Decode a JSON file of a run; return None if it is missing or has different content."""
    try:
        return read_json(path, nbytes, kind)
    except UNREADABLE:
        return None
