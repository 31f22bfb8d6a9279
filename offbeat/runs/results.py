"""Results of a run as rows: metrics, evaluations, failures and the samples of a step."""

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from offbeat.algorithms.advantages import estimator
from offbeat.config.run import RunConfig
from offbeat.config.sections.algorithm import AlgorithmConfig
from offbeat.controller.events import AnyEvent, Committed, Rewound, StepApplied
from offbeat.messages.failures import OffbeatError, ShortInNotebooks
from offbeat.messages.groups import Receipt
from offbeat.messages.text import join_branches
from offbeat.run_files.files import FAILURES
from offbeat.runs.directory import CONFIG
from offbeat.runs.logged_samples import BranchesBySample, read_logged_rows, read_prompt, token_text
from offbeat.runs.metrics_file import ValidRecords, decode_record, whole_lines
from offbeat.runs.past_run import read_events, run_directory
from offbeat.telemetry.records import MetricRecord

_METRICS: Final = "metrics.jsonl"
Row = dict[str, Any]


class NoSuchStep(ShortInNotebooks, OffbeatError):
    """A step was not trained, or a rewind has undone it, so it has no samples to show.

    Fix: use one of the trained steps.
    """

    step: int
    trained: int

    def __str__(self) -> str:
        if not self.trained:
            return "no step is trained yet"
        return f"step {self.step} was not trained: the run has trained steps 1 to {self.trained}"


class NoSuchMetric(ShortInNotebooks, KeyError, OffbeatError):
    """No step or evaluation of the run has a requested metric so far.

    Fix: use one of the named metrics (docs/metrics.md).
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        if not self.known:
            return f"no {self.name} yet: the run has no step, or evaluation, that is done"
        near = difflib.get_close_matches(self.name, self.known, n=3)
        meant = (
            f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(self.known)}"
        )
        return f"no metric {self.name!r}. {meant}"


class Curve(NamedTuple):
    """A metric by the version that it belongs to."""

    name: str
    versions: tuple[int, ...]
    values: tuple[float, ...]
    is_of_evaluations: bool


def read_curve(run_dir: Path, name: str) -> Curve:
    """Return a metric by step, or by evaluation if its name begins with ``eval/``.

    Raises:
        NoSuchMetric: No row contains it.
    """
    is_of_evaluations = name.startswith("eval/")
    rows = (evaluation_rows if is_of_evaluations else metric_rows)(run_dir)
    points = [(row["version"], row[name]) for row in rows if name in row]
    if not points:
        raise NoSuchMetric(name, tuple(sorted({key for row in rows for key in row})))
    versions, values = zip(*points, strict=True)
    return Curve(name, versions, values, is_of_evaluations)


def read_config(run_dir: Path) -> RunConfig:
    """Return the recipe of a run."""
    return RunConfig.model_validate(yaml.safe_load((run_directory(run_dir) / CONFIG).read_bytes()))


def metric_rows(run_dir: Path) -> list[Row]:
    """Return a row per step of the current lineage: ``step``, ``version``, ``time_s``, metrics."""
    records, valid = _records(run_dir)
    return [_row(records[place]) for _, place in sorted(valid.steps.items())]


def evaluation_rows(run_dir: Path) -> list[Row]:
    """Return the metrics of each valid evaluation, by the scored version."""
    records, valid = _records(run_dir)
    return [_row(records[place]) for _, place in sorted(valid.evaluations.items())]


def failure_rows(run_dir: Path) -> list[Row]:
    """Return the failed samples and groups that the run has recorded, oldest first."""
    path = run_directory(run_dir) / FAILURES
    return [json.loads(line) for _, line in whole_lines(path)] if path.exists() else []


def sample_rows(run_dir: Path, step: int | None = None) -> list[Row]:
    """Return one row per sample that a step has trained, by default the last step.

    ``prompt``, ``response`` with its end token, ``reward`` (None: masked), ``advantage``,
    ``group``, ``sample``, ``tokens``, ``branches``, ``finish_reason``, ``oldest_version``,
    ``newest_version``. ``response`` has all branches of an agent's sample, each with a heading.
    Texts are None if rollouts were not logged, or are not on disk yet. The same holds for
    advantages that a function of the user computed.

    Raises:
        NoSuchStep: The step was not trained.
        NotARun: The directory contains no journal.
    """
    applied = _find_applied_step(run_dir, step)
    config = read_config(run_dir)
    wanted = set(zip(applied.prompt_indices, applied.attempts, strict=True))
    receipts = {
        (each.prompt_index, each.attempt): each
        for each in _receipts(read_events(run_dir))
        if (each.prompt_index, each.attempt) in wanted
    }
    logged, _ = read_logged_rows(run_dir, applied.prompt_indices)
    text = token_text(run_dir, config.model.path)
    rows = list[Row]()
    for key in sorted(receipts):
        receipt, branches = receipts[key], logged.get(key, {})
        advantages = _advantages(config.algorithm, receipt, branches)
        prompt = read_prompt(branches, text)
        rows += (
            _sample(receipt, sample, advantages[sample], prompt, branches)
            for sample in range(receipt.samples)
        )
    return rows


def _advantages(
    algorithm: AlgorithmConfig, receipt: Receipt, branches: BranchesBySample
) -> Sequence[float | None]:
    """Return a group's advantages. A user's function is not called: its results are in the log."""
    if algorithm.advantage_target is None:
        return estimator(algorithm.advantage, pass_k=algorithm.pass_k)(
            receipt.rewards, receipt.valid
        )
    logged = (branches.get(sample) for sample in range(receipt.samples))
    return [None if rows is None else rows[0].get("advantage") for rows in logged]


def _sample(
    receipt: Receipt,
    sample: int,
    advantage: float | None,
    prompt: str | None,
    branches: BranchesBySample,
) -> Row:
    logged = branches.get(sample)
    versions = [version for version, _ in receipt.version_spans[sample]]
    return {
        "prompt": prompt,
        "response": None if logged is None else _join_responses(logged),
        "reward": receipt.rewards[sample] if receipt.valid[sample] else None,
        "advantage": advantage,
        "group": receipt.prompt_index,
        "sample": sample,
        "tokens": receipt.response_tokens[sample],
        "branches": receipt.branches[sample] if receipt.branches else 1,
        "finish_reason": str(receipt.finish_reasons[sample]),
        "oldest_version": min(versions),
        "newest_version": max(versions),
    }


def _join_responses(logged: Sequence[Row]) -> str | None:
    """Return the text of a sample, or None if no text was logged for lack of a tokenizer."""
    texts = [row["response"] for row in logged if row["response"] is not None]
    return join_branches(texts) if texts else None


def _records(run_dir: Path) -> tuple[list[MetricRecord], ValidRecords]:
    records, valid = list[MetricRecord](), ValidRecords()
    path = run_directory(run_dir) / _METRICS
    for _, line in whole_lines(path) if path.exists() else ():
        if (record := decode_record(line)) is not None:
            valid.take(record, len(records))
            records.append(record)
    return records, valid


def _row(record: MetricRecord) -> Row:
    head = {"step": record.step, "version": record.version, "time_s": record.time_s}
    return head | dict(record.metrics)


def _find_applied_step(run_dir: Path, step: int | None) -> StepApplied:
    """Return the valid record of the step: a rewind may have undone earlier ones."""
    steps = dict[int, StepApplied]()
    for event in read_events(run_dir):
        if isinstance(event, StepApplied):
            steps[event.step] = event
        elif isinstance(event, Rewound):
            steps = {n: each for n, each in steps.items() if each.version <= event.to_version}
    newest = max(steps, default=0)
    found = steps.get(newest if step is None else step)
    if found is None:
        raise NoSuchStep(newest if step is None else step, newest)
    return found


def _receipts(events: Iterator[AnyEvent]) -> Iterator[Receipt]:
    yield from (event.receipt for event in events if isinstance(event, Committed))
