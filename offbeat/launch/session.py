"""Checks a run, opens its directory, executes it, and reports how it ended.

The runtime that executes the run is an argument. Only this module chooses exit codes. It also
composes calls and commands for messages: to resume a run, and to preview it.
"""

import os
import re
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, Literal, Self

import msgspec
import structlog
from rich.console import Console

from offbeat.config.by_value import given, is_by_value, is_given, pack
from offbeat.config.loader import LoadedRecipe
from offbeat.config.run import RunConfig
from offbeat.controller.journal import JournalCorrupt, JournalVersion
from offbeat.environments.hub_files import HubFilesError
from offbeat.environments.inputs import ADVANTAGE, LOSS
from offbeat.launch.bounded_call import StartedCall
from offbeat.launch.checks.files import list_fetched_commits
from offbeat.launch.checks.report import has_model, problems_before_start, problems_of_model
from offbeat.launch.dry_run import dry
from offbeat.launch.evaluate import evaluation_only, render_evaluation
from offbeat.launch.hub_model import with_local_model
from offbeat.launch.hub_snapshot import CannotStage
from offbeat.launch.initial_model import with_initial_model, with_start_deadlines
from offbeat.launch.opened_run import OpenedRun, open_run, written_files
from offbeat.launch.run_parts import RunSpec
from offbeat.launch.screen import next_commands, screen
from offbeat.messages.exit_codes import FAILED, FINISHED, REFUSED
from offbeat.messages.failures import DeadlineExceeded, OffbeatError
from offbeat.messages.finding import Finding
from offbeat.messages.text import first_line, printable, printable_lines
from offbeat.run_files.limits import UNREADABLE
from offbeat.run_files.shared_directory import RunDirToken, new_token
from offbeat.runs.directory import CONFIG, RunDirUnusable, check_code_is_here
from offbeat.runs.inputs import read_inputs, targets
from offbeat.runs.page_files import readable_values
from offbeat.runs.unfinished import Outcome, describe_unsaved_steps, last_summary
from offbeat.telemetry.logs import Redactor, log_to
from offbeat.telemetry.report import render_summary
from offbeat.telemetry.summary import Summary

_ARGUMENT_BY_KEY: Final = {LOSS: "loss", ADVANTAGE: "advantage"}
_ONE: Final = "environment.target"
_NAMED: Final = re.compile(r"environment\.rewards\.([\w-]+)\.target")
_CHOSEN: Final = "..."
"""Placeholder for an object without a name."""


def compose_resume_call(
    directory: Path, config: RunConfig, *, failed_in_user_code: bool = False
) -> str:
    """Return the call that resumes a run from any process.

    The call passes every object again that was passed by value. If the run failed in the user's
    code, the call allows changed code, because the user will change it.
    """
    by_value = {key: each for key, each in targets(config).items() if is_by_value(each)}
    arguments = [repr(str(directory)), *_compose_objects(config, by_value)]
    if failed_in_user_code and targets(config):
        arguments.append("changed_code=True")
    return f"offbeat.resume({', '.join(arguments)})"


def compose_resume_command(
    directory: Path, config: RunConfig, *, failed_in_user_code: bool = False
) -> str:
    """Return the command that resumes a run. It allows changed code under the same condition."""
    allowed = " --changed-code" if failed_in_user_code and targets(config) else ""
    return f"offbeat train --resume {shlex.quote(str(directory))}{allowed}"


def compose_preview(directory: Path, *, in_python: bool) -> str:
    """Return the call or command that previews the recipe of a run."""
    if in_python:
        return f"offbeat.open_run({str(directory)!r}).preview()"
    return f"offbeat preview {shlex.quote(str(directory / CONFIG))}"


def _compose_objects(config: RunConfig, by_value: Mapping[str, str]) -> list[str]:
    """Return arguments that pass the objects again, by key of the recipe."""
    arguments, rewards, others = list[str](), list[str](), list[str]()
    for key, target in by_value.items():
        name = _find_name(target)
        if key == _ONE and config.environment.name in ("function", "agent"):
            arguments.append(f"{'agent' if config.environment.is_agent else 'reward'}={name}")
        elif key in _ARGUMENT_BY_KEY:
            arguments.append(f"{_ARGUMENT_BY_KEY[key]}={name}")
        elif named := _NAMED.fullmatch(key):
            rewards.append(f"{named[1]!r}: {name}")
        else:
            others.append(f"{key!r}: {name}")
    if rewards:
        arguments.append(f"reward={{{', '.join(rewards)}}}")
    return [*arguments, f"**{{{', '.join(others)}}}"] if others else arguments


def _find_name(target: str) -> str:
    """Return the name that the user's program has for an object, or a placeholder."""
    name = str(getattr(given(target), "__name__", "")) if is_given(target) else ""
    return name if name.isidentifier() else _CHOSEN


log = structlog.stdlib.get_logger()
_EXIT_OF_SIGNAL: Final = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupted(BaseException):
    """A signal arrived before a clean end was possible, or a second signal arrived."""

    def __init__(self, signals: "Signals") -> None:
        super().__init__(signals.reason)


class Signals:
    """Records the signal that requests the run's end. A second signal ends the run at once.

    Without a watcher, the first signal raises ``Interrupted`` wherever the process is. A watcher
    polls ``at_once`` instead, because an exception raised inside a library's call may surface as a
    different one, and an exception raised while Ray starts can crash the interpreter. ``held_back``
    delays the exception to the end of a block.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.reason = ""
        """Name of the signal or call that requested the end."""
        self.watched = False  # a watcher polls it regularly
        self.begun = False  # whether a run exists that can end in order
        self._again = self._held_back = False

    @property
    def at_once(self) -> bool:
        """Return whether the run cannot, or must not, end cleanly."""
        return self.received is not None and (self._again or not self.begun)

    @contextmanager
    def install(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python installs handlers only in the main thread
            return
        handled = set(_EXIT_OF_SIGNAL)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            handled.remove(signal.SIGHUP)  # under nohup the run continues without its terminal
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held_back(self) -> Generator[None, None, None]:
        """Delay ``Interrupted`` to the end of the block if the first signal arrives in it."""
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False
            if self.received is not None:
                raise Interrupted(self)

    def stop(self, reason: str = signal.SIGINT.name) -> None:
        """Request a clean end of the run, as the first signal does. Any thread may call this."""
        self._receive(signal.SIGINT, reason)

    def _receive(self, received: signal.Signals, reason: str) -> None:
        """Record the signal or call that requests the end. Only the first request counts."""
        self.reason = self.reason or reason
        self.received = self.received or received

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._again = self.received is not None
        self._receive(signal.Signals(number), signal.Signals(number).name)
        if not self.watched and (self._again or not self._held_back):
            raise Interrupted(self)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Processes and libraries that execute a run."""

    run: Callable[[RunSpec, RunDirToken, Console, Signals, OpenedRun], Summary]
    """Executes a checked and opened run to its end, and returns its summary.

    It polls ``Signals`` as a watcher, shows progress on the console, and passes on the commands of
    ``CommandInbox``. It calls ``OpenedRun.has_begun`` when the run has begun. When it returns or
    raises, nothing that it started is left.
    """

    failures: tuple[type[Exception], ...] = ()
    """Errors of the runtime's libraries that make a run fail.

    ``OffbeatError`` and ``OSError`` make a run fail on every runtime. Any other error is a bug, and
    is raised.
    """

    start: Callable[[RunConfig, Signals], object] | None = None
    """Starts processes of the runtime, if it has any, while the model is checked.

    ``run`` reports an error of the start. ``stop`` is called in any case.
    """

    stop: Callable[[], object] = lambda: None
    """Ends everything that ``start`` has started. Does nothing after ``run``."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Result of a session."""

    code: int
    """Exit code of the command line."""

    directory: Path | None = None
    """Directory of the run, or None if the run was refused."""

    summary: Summary | None = None
    problems: tuple[str, ...] = ()
    """Why the run was refused."""

    go_on: str = ""
    """Call or command that resumes the run."""


class Session:
    """Signals and output of a run. The defaults are for the command line."""

    def __init__(
        self,
        console: Console | None = None,
        errors: Console | None = None,
        *,
        in_python: bool = False,
    ) -> None:
        """Write to these consoles, else to the standard streams.

        With ``in_python``, the caller raises the problems in ``RunEnd``, so they are not printed.
        Texts then name Python calls, not commands.
        """
        self.console = screen(sys.stdout) if console is None else console
        self.errors = screen(sys.stderr) if errors is None else errors
        self.in_python = in_python
        self.signals = Signals()
        self.directory: Path | None = None
        self.opened = threading.Event()
        """Set when the run has a directory, or ends without one. A thread may wait for it."""

    @classmethod
    def silent(cls) -> Self:
        """Return a session for a caller in Python that prints nothing."""
        return cls(Console(quiet=True), Console(quiet=True), in_python=True)

    def refuse(self, *problems: object) -> RunEnd:
        """Return why the run does not begin, and print it on the command line."""
        if self.in_python:
            return RunEnd(REFUSED, problems=tuple(map(_in_python, problems)))
        for each in problems:
            _say(self.errors, printable_lines(str(each)), "red")
        return RunEnd(REFUSED, problems=tuple(map(str, problems)))


def _in_python(problem: object) -> str:
    return problem.in_python() if isinstance(problem, RunDirUnusable | Finding) else str(problem)


def drive(  # noqa: PLR0913 -- the options of a run, by name
    runtime: Runtime,
    loaded: LoadedRecipe,
    run_dir: Path | None,
    *,
    dry_run: bool,
    resume: Path | None = None,
    changed_code: bool = False,
    evaluates_only: bool = False,
    spares_prompts: bool = False,
    session: Session | None = None,
) -> RunEnd:
    """Run the recipe to its end."""
    session = session or Session()
    config = dry(loaded.config) if dry_run else loaded.config
    config = evaluation_only(config) if evaluates_only else config
    try:
        if resume is not None:
            check_code_is_here(config, resume, Path.cwd())
        if not dry_run:
            config = with_local_model(config, partial(_say, session.console))
        commits = list_fetched_commits(config, read_inputs(resume) if resume is not None else {})
    except (RunDirUnusable, CannotStage, HubFilesError, DeadlineExceeded, *UNREADABLE) as error:
        return session.refuse(error)
    signals = session.signals
    with ExitStack() as ours:
        ours.callback(runtime.stop)
        found = problems_before_start(config, run_dir, commits, dry_run=dry_run)
        of_model = partial(problems_of_model, config, commits, dry_run=dry_run)
        try:
            found += of_model() if found else _start_meanwhile(runtime, config, signals, of_model)
        except Interrupted as interrupted:
            if not session.in_python:
                _say(session.errors, f"offbeat: {interrupted} before the run began", "red")
            return RunEnd(exit_code("aborted", signals.received))
        if found:
            return session.refuse(*found)
        try:
            opened = open_run(config, run_dir, resume, ours, commits, changed_code=changed_code)
        except (RunDirUnusable, JournalCorrupt, JournalVersion) as error:
            return session.refuse(error)
        try:
            begun = with_start_deadlines(with_initial_model(config, opened.directory))
        except (OffbeatError, OSError) as error:
            return session.refuse(error)
        spec = RunSpec(
            begun,
            opened.run_id,
            opened.directory,
            Path.cwd(),
            driver=secrets.token_hex(4),
            inputs=opened.inputs,
            evaluates_only=evaluates_only,
            spares_prompts=spares_prompts,
            values=pack(targets(begun).values()),
        )
        session.directory = opened.directory
        session.opened.set()
        redactor = Redactor.from_environment(config=begun)
        logs = opened.directory / "logs"
        with log_to("driver", logs, run_id=opened.run_id, redactor=redactor):
            return _execute(runtime, spec, session, opened)


def _start_meanwhile(
    runtime: Runtime, config: RunConfig, signals: Signals, check: Callable[[], list[Finding]]
) -> list[Finding]:
    """Start the runtime while ``check`` runs, and return the findings of ``check``.

    Raises:
        Interrupted: A signal arrived.
    """
    if runtime.start is None or not has_model(config):
        return check()
    checking = StartedCall(check, "the check of the model")
    try:
        with signals.install():
            runtime.start(config, signals)
            return checking.result()
    except BaseException:
        checking.is_abandoned = True
        raise


def _execute(runtime: Runtime, spec: RunSpec, session: Session, opened: OpenedRun) -> RunEnd:
    console, errors, signals = session.console, session.errors, session.signals
    directory = spec.run_dir
    _say(console, f"{spec.run_id} writes to {directory}")
    log.info("run.began", driver=spec.driver, pid=os.getpid(), resumed=opened.resumed is not None)
    opened.tell_changes(partial(_say, console))
    try:
        with signals.install(), new_token(directory) as token:
            summary = runtime.run(spec, token, console, signals, opened)
    except Interrupted as interrupted:
        problem = f"{interrupted} before an orderly end"
        summary = summarize_lost_run(spec, "aborted", problem, ended_by=signals.reason)
    except (OffbeatError, OSError, *runtime.failures) as error:
        redactor = Redactor.from_environment(config=spec.config)
        problem = redactor(printable(f"{type(error).__name__}: {first_line(error)}"))
        summary = summarize_lost_run(spec, *_classify_failure(signals, problem))
    log.info("run.ended", outcome=summary.outcome, error=summary.error, steps=summary.steps)
    console.print(
        render_evaluation(directory)
        if spec.evaluates_only and summary.outcome == "finished"
        else render_summary(
            msgspec.structs.replace(summary, error=None) if session.in_python else summary,
            written_files(directory),
            readable_values(directory / CONFIG),
            compose_preview(directory, in_python=session.in_python),
        )
    )
    compose = compose_resume_call if session.in_python else compose_resume_command
    go_on = compose(directory, spec.config, failed_in_user_code=summary.failed_in_user_code)
    if not spec.evaluates_only:
        on_stubs = spec.config.trainer.backend == "stub"
        offered = next_commands(
            directory, summary, "" if on_stubs else go_on, in_python=session.in_python
        )
        _say(console, f"\n{offered}")
    if spec.evaluates_only and summary.outcome == "finished" and summary.evaluations_failed:
        summary = msgspec.structs.replace(
            summary, outcome="failed", error=summary.evaluation_failure
        )
    if summary.outcome == "failed" and not session.in_python:
        _say(errors, f"offbeat: {summary.error}", "red")
        _say(errors, f"logs: {directory / 'logs'}")
    may_lose_steps = summary.outcome != "finished" and spec.config.checkpoint.interval > 0
    if may_lose_steps and (unsaved := describe_unsaved_steps(directory, summary.trainer_version)):
        _say(errors, unsaved)
    return RunEnd(exit_code(summary.outcome, signals.received), directory, summary, go_on=go_on)


def exit_code(
    outcome: Literal["finished", "aborted", "failed"], received: signal.Signals | None
) -> int:
    """Return the exit code of a run: 0 if it finished, even if a signal came too late to end it."""
    if outcome == "finished":
        return FINISHED
    return FAILED if received is None else _EXIT_OF_SIGNAL[received]


def _classify_failure(signals: Signals, problem: str) -> tuple[Outcome, str]:
    """Return outcome and error.

    A signal may reach all processes, so failures that it causes do not count as failures of the
    run.
    """
    if signals.received is None:
        return "failed", problem
    return "aborted", f"{signals.reason} before an orderly end: {problem}"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def summarize_lost_run(
    spec: RunSpec, outcome: Outcome, error: str, *, ended_by: str = ""
) -> Summary:
    """Return a summary made from a run's files, in case its controller wrote no summary."""
    return last_summary(spec.run_dir, spec.config, spec.run_id, outcome, error, ended_by=ended_by)
