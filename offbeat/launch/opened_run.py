"""Opens the directory of a run that starts or resumes."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from offbeat.config.run import RunConfig
from offbeat.controller.journal import recover
from offbeat.launch.control import take_commands
from offbeat.run_files.files import ELSEWHERE, FAILURES
from offbeat.runs.directory import (
    JOURNAL,
    SUMMARY,
    ResumedDirectory,
    lock_directory,
    make_run_dir,
    reopen_run_dir,
)
from offbeat.runs.inputs import read_inputs
from offbeat.runs.unfinished import describe_unsaved_steps
from offbeat.telemetry.hub import all_trackers

log = structlog.stdlib.get_logger()
_NOT_BEGUN: Final = ("starting", "aborted", "failed")
"""Phases and outcomes of a run that may never have trained under its recipe."""


class OpenedRun(NamedTuple):
    """A run with a locked directory."""

    run_id: str
    directory: Path
    inputs: Mapping[str, str]
    resumed: ResumedDirectory | None = None
    notice: str = ""
    """Sentence on steps that a resumed run trains again, or why it trains none. May be empty."""

    def tell_changes(self, say: Callable[[str], object]) -> None:
        """Log and report which settings a resumed run changes, and which steps it repeats."""
        for each in () if self.resumed is None else self.resumed.notices:
            log.warning("run.changed", what=each)
            say(each)
        if self.notice:
            log.warning("run.notice", what=self.notice)
            say(self.notice)

    def has_begun(self, phase: str) -> None:
        """Record the recipe of a resumed run, once its trainer and engines use it."""
        if self.resumed is not None and phase not in _NOT_BEGUN:
            self.resumed.accept()


def open_run(
    config: RunConfig,
    run_dir: Path | None,
    resume: Path | None,
    ours: ExitStack,
    commits: Mapping[str, str],
    *,
    changed_code: bool,
) -> OpenedRun:
    """Open a new or resumed run and keep its directory locked until ``ours`` ends.

    Raises:
        RunDirUnusable: Raised by ``make_run_dir`` or ``reopen_run_dir``.
        JournalCorrupt, JournalVersion: The journal of the run to resume cannot be read.
    """
    new_id = f"{config.name}-{secrets.token_hex(4)}"
    if resume is None:
        directory = make_run_dir(config, run_dir, commits)
        ours.enter_context(lock_directory(directory))
        return OpenedRun(new_id, directory, read_inputs(directory))
    ours.enter_context(lock_directory(resume.absolute()))
    resumed = reopen_run_dir(config, resume, changed_code=changed_code, commits=commits)
    take_commands(resumed.path)  # discard commands for an earlier driver
    ledger = recover(resumed.path / JOURNAL)
    return OpenedRun(
        ledger.run_id or new_id,
        resumed.path,
        resumed.inputs,
        resumed,
        _explain_steps(resumed.path, ledger.trainer_version, config),
    )


def _explain_steps(directory: Path, taken: int, config: RunConfig) -> str:
    """Return a sentence on steps that the run trains again, or does not train. May be empty."""
    unsaved = describe_unsaved_steps(directory, taken)
    if unsaved and config.steps < taken:
        return f"{unsaved}; steps={config.steps} is less than the {taken} steps that were trained"
    return unsaved or _explain_no_step(taken, config)


def _explain_no_step(taken: int, config: RunConfig) -> str:
    if taken < config.steps:
        return ""
    model = ", the model is written" if config.checkpoint.final else ""
    return (
        f"step {taken} is already trained, but steps={config.steps}: nothing is left to "
        f"train{model}"
    )


def written_files(directory: Path) -> dict[str, Path]:
    """Return the files that the run has written and that exist."""
    names = {
        "config": "config.yaml",
        "metrics": "metrics.jsonl",
        "summary": SUMMARY,
        **{tracker: tracker for tracker in all_trackers()},
        "journal": JOURNAL,
        "timeline": "trace.json",
        "rollouts": "rollouts",
        "failures": FAILURES,
        "evaluations": "evaluations",
        "model": "checkpoints",
        "logs": "logs",
        "elsewhere": ELSEWHERE,
    }
    paths = {what: directory / name for what, name in names.items()}
    return {
        what: path
        for what, path in paths.items()
        if path.is_file() or (path.is_dir() and any(path.iterdir()))
    }
