"""Driver of a run: creates and owns all actors, watches the run, and stops everything.

It is the only place that chooses an exit code.
"""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import os
import secrets
import signal
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final, Literal, cast

import msgspec
import ray
import structlog
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from rich.console import Console

from offbeat.actors.call import cause_of, lost
from offbeat.actors.handles import Handle
from offbeat.config.loader import LoadedRecipe
from offbeat.controller.journal import JournalCorrupt, JournalVersion
from offbeat.environments.hub_files import HubFilesError
from offbeat.launch.checks.files import fetched_commits
from offbeat.launch.checks.report import problems_before_start
from offbeat.launch.cluster import (
    check_alive,
    check_room,
    make_actors,
    make_controller,
    make_run_files,
    sharing_of,
    start_ray,
    watch_gcs,
)
from offbeat.launch.composition import Actors, RunSpec
from offbeat.launch.control import CommandInbox
from offbeat.launch.dry_run import dry
from offbeat.launch.evaluate import evaluation_only, rendered_evaluation
from offbeat.launch.gcs_watch import GcsWatch
from offbeat.launch.initial_model import with_initial_model, with_start_deadlines
from offbeat.launch.opened_run import OpenedRun, open_run, written_files
from offbeat.launch.read_backs import ReadBacks
from offbeat.launch.screen import HeartbeatTimeout, next_commands, screen
from offbeat.launch.stopping import end_controller, stop_ray
from offbeat.messages.exit_codes import FAILED, FINISHED, REFUSED
from offbeat.messages.failures import ActorLost, DeadlineExceeded, OffbeatError
from offbeat.messages.text import first_line, printable, printable_lines
from offbeat.run_files.shared_directory import RunDirToken, new_token
from offbeat.runs.directory import CONFIG, RunDirUnusable
from offbeat.runs.inputs import read_inputs
from offbeat.runs.report.recipe_values import readable_values
from offbeat.runs.unfinished import Outcome, last_summary
from offbeat.runs.unsaved import unsaved_steps
from offbeat.telemetry.logs import configure_logging
from offbeat.telemetry.progress import ProgressDisplay
from offbeat.telemetry.redaction import Redactor
from offbeat.telemetry.report import render_summary
from offbeat.telemetry.status_file import Status, StatusFile
from offbeat.telemetry.summary import Summary

log = structlog.stdlib.get_logger()
_EXIT_OF_SIGNAL: Final = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
_LOOK_S: Final = 0.5  # polling interval, and refresh of the display
_BEGUN_S: Final = 2.0  # for a run that is about to end to report that it has begun


class Interrupted(BaseException):
    """A signal arrived before an orderly end was possible, or a second signal arrived."""

    def __init__(self, signals: "Signals") -> None:
        super().__init__(signals.received.name if signals.received else "")


class Signals:
    """Records the signal that requests the run's end; a second one ends it at once.

    Without a watcher, the first signal raises ``Interrupted`` wherever the process is. A watcher
    polls ``at_once`` instead: an exception raised inside a Ray call would surface as another one,
    and one raised while Ray starts can crash the interpreter. ``held_back`` delays the exception to
    the end of a block.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.watched = False  # a watcher polls it regularly
        self.begun = False  # whether there is a run that can be ended in order
        self._again = self._held_back = False

    @property
    def at_once(self) -> bool:
        """Return whether the run cannot, or must not, be ended in order."""
        return self.received is not None and (self._again or not self.begun)

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
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
        """Delay ``Interrupted`` for the first signal to the end of the block."""
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False
            if self.received is not None:
                raise Interrupted(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._again = self.received is not None
        self.received = self.received or signal.Signals(number)
        if not self.watched and (self._again or not self._held_back):
            raise Interrupted(self)


def drive(
    loaded: LoadedRecipe,
    run_dir: Path | None,
    *,
    dry_run: bool,
    resume: Path | None = None,
    changed_code: bool = False,
    evaluates_only: bool = False,
) -> int:
    """Run the recipe to its end; return the exit code."""
    console, errors = screen(sys.stdout), screen(sys.stderr)
    config = dry(loaded.config) if dry_run else loaded.config
    config = evaluation_only(config) if evaluates_only else config
    try:
        commits = fetched_commits(config, read_inputs(resume) if resume is not None else {})
    except (HubFilesError, DeadlineExceeded) as error:
        _say_error(errors, error)
        return REFUSED
    if found := problems_before_start(config, run_dir, commits, dry_run=dry_run):
        for finding in found:
            _say_error(errors, finding)
        return REFUSED
    with ExitStack() as ours:
        try:
            opened = open_run(config, run_dir, resume, ours, commits, changed_code=changed_code)
        except (RunDirUnusable, JournalCorrupt, JournalVersion) as error:
            _say_error(errors, error)
            return REFUSED
        try:
            begun = with_start_deadlines(with_initial_model(config, opened.directory))
        except (OffbeatError, OSError) as error:
            _say_error(errors, error)
            return REFUSED
        spec = RunSpec(
            begun,
            opened.run_id,
            opened.directory,
            Path.cwd(),
            driver=secrets.token_hex(4),
            inputs=opened.inputs,
            evaluates_only=evaluates_only,
        )
        return _driven(spec, console, errors, opened)


def _driven(spec: RunSpec, console: Console, errors: Console, opened: OpenedRun) -> int:
    directory = spec.run_dir
    redactor = Redactor.from_environment(config=spec.config)
    configure_logging("driver", directory / "logs", run_id=spec.run_id, redactor=redactor)
    _say(console, f"{spec.run_id} writes to {directory}")
    log.info("run.began", driver=spec.driver, pid=os.getpid(), resumed=opened.resumed is not None)
    opened.log_changes()
    signals = Signals()
    try:
        with signals.installed(), new_token(directory) as token:
            summary = _run(spec, token, console, signals, opened)
    except Interrupted as interrupted:
        summary = _lost_controller_summary(spec, "aborted", f"{interrupted} before an orderly end")
    except (OffbeatError, RayError, RuntimeError, OSError) as error:
        problem = redactor(printable(f"{type(error).__name__}: {first_line(error)}"))
        summary = _lost_controller_summary(spec, *_outcome(signals, problem))
    log.info("run.ended", outcome=summary.outcome, error=summary.error, steps=summary.steps)
    console.print(
        rendered_evaluation(directory)
        if spec.evaluates_only and summary.outcome == "finished"
        else render_summary(summary, written_files(directory), readable_values(directory / CONFIG))
    )
    if not spec.evaluates_only:
        offered = next_commands(directory, summary, on_stubs=spec.config.trainer.backend == "stub")
        _say(console, f"\n{offered}")
    if spec.evaluates_only and summary.outcome == "finished" and summary.evaluations_failed:
        summary = msgspec.structs.replace(
            summary, outcome="failed", error=summary.evaluation_failure
        )
    if summary.outcome == "failed":
        _say(errors, f"offbeat: {summary.error}", "red")
        _say(errors, f"logs: {directory / 'logs'}")
    may_lose_steps = summary.outcome != "finished" and spec.config.checkpoint.interval > 0
    if may_lose_steps and (unsaved := unsaved_steps(directory, summary.trainer_version)):
        _say(errors, unsaved)
    return exit_code(summary.outcome, signals.received)


def exit_code(
    outcome: Literal["finished", "aborted", "failed"], received: signal.Signals | None
) -> int:
    """Return the exit code of a run: 0 if it finished, also where a signal came too late to end it."""
    if outcome == "finished":
        return FINISHED
    return FAILED if received is None else _EXIT_OF_SIGNAL[received]


def _outcome(signals: Signals, problem: str) -> tuple[Outcome, str]:
    """Return outcome and error.

    A signal may hit all processes: failures it causes are not the run's.
    """
    if signals.received is None:
        return "failed", problem
    return "aborted", f"{signals.received.name} before an orderly end: {problem}"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _say_error(errors: Console, error: object) -> None:
    _say(errors, printable_lines(str(error)), "red")


def _run(
    spec: RunSpec, token: RunDirToken, console: Console, signals: Signals, opened: OpenedRun
) -> Summary:
    """Do everything between starting Ray and leaving it; the actors end with this function."""
    handles = list[Handle]()
    orders = CommandInbox(spec.run_dir, spec.config.supervision.wall_clock_limit_s)
    try:
        with signals.held_back():
            start_ray(spec.config.runtime.env)
        with signals.installed():  # Ray installs a handler of its own when it starts
            with signals.held_back():
                check_room(spec)
                if (sharing := sharing_of(spec, token)) is not None:
                    spec = replace(spec, sharing=sharing)
                    handles.append(make_run_files(spec, sharing))
                actors = make_actors(spec)
            handles += [*actors.ranks, *actors.engines.values(), *actors.workers]
            with ProgressDisplay(console, StatusFile(spec.run_dir, spec.run_id)) as display:
                read_backs = ReadBacks(spec.run_dir, actors.engines)
                watched = _WatchedRun(spec, opened, signals, display, orders, read_backs)
                summary = watched.run_controllers(actors, handles)
            opened.has_begun(summary.outcome)  # of a run that was too short to be seen
            return summary
    finally:
        stop_ray(handles)


@dataclass(frozen=True, slots=True)
class _WatchedRun:
    """A run whose actors exist, and what its driver does twice per second."""

    spec: RunSpec
    opened: OpenedRun
    signals: Signals
    display: ProgressDisplay
    orders: CommandInbox
    read_backs: ReadBacks

    def run_controllers(self, actors: Actors, handles: list[Handle]) -> Summary:
        """Run controllers one after another, until one of them reaches the end of the run.

        All other actors stay alive: the next controller reads the journal and continues with them.
        """
        budget = self.spec.config.supervision.controller_restart_budget
        for left in range(budget, -1, -1):
            controller = make_controller(self.spec, actors)
            handles.append(controller)
            try:
                return self._watch(controller)
            except (ActorLost, DeadlineExceeded) as gone:
                if not left or self.signals.received is not None:
                    raise
                log.warning("controller.lost", error=str(gone), restarts_left=left)
            finally:
                end_controller(controller)  # it must not continue after its end is reported
        raise AssertionError("unreachable: the last incarnation returns or raises")

    def _watch(self, controller: Handle) -> Summary:
        """Show progress and pass commands on, until the run has ended.

        Raises:
            OffbeatError: The controller is silent for too long, or the cluster has no place for it.
        """
        ended = controller.run.remote()
        for order in self.orders.given:
            controller.control.remote(order)
        signals = self.signals
        signals.watched = True
        give_up_at: float | None = None
        silence, gcs = HeartbeatTimeout(), watch_gcs()
        while not ray.wait([ended], timeout=_LOOK_S)[0]:
            if signals.received is not None and give_up_at is None:
                self._abort(controller, signals.received.name)
                give_up_at = time.monotonic() + self.spec.config.supervision.signal_grace_s
            if signals.at_once:
                raise Interrupted(signals)
            if give_up_at is not None and time.monotonic() > give_up_at:
                end_controller(controller)
                problem = "the controller did not end in time"
                return _lost_controller_summary(self.spec, "aborted", problem)
            for order in self.orders.take_commands():
                controller.control.remote(order)
            self.read_backs.poll()
            self.opened.has_begun(self.display.phase)
            self._look(controller, gcs, silence)
        try:
            return Summary.from_json(cast("bytes", ray.get(ended)))
        except RayTaskError as error:
            raise cause_of(error, "controller", "the run") from None
        except (RayActorError, OutOfMemoryError) as error:
            raise lost(error, "controller", "the run") from None

    def _abort(self, controller: Handle, reason: str) -> None:
        """Ask the controller to end in order, if the run has begun."""
        if not self.signals.begun:
            self._show(controller, _BEGUN_S)  # it may have begun since the last look
        if not self.signals.at_once:
            controller.abort.remote(reason)

    def _look(self, controller: Handle, gcs: GcsWatch, silence: HeartbeatTimeout) -> None:
        """Raise if the controller is silent for too long, or the cluster has no place for it."""
        gcs.check()
        if self._show(controller):
            silence.broken()
        else:
            self.display.wait("an answer of the controller")
            if gcs.answers:  # otherwise its node cannot be checked
                check_alive()  # there may be no machine left to restart it on
        silence.check()

    def _show(self, controller: Handle, within_s: float = _LOOK_S) -> bool:
        """Show the status; return whether the controller replied."""
        try:
            status = cast("bytes | None", ray.get(controller.status.remote(), timeout=within_s))
        except (GetTimeoutError, RayError):
            return False  # a dead controller ends the wait above with its own error
        if status is None:
            self.display.wait("the controller, which reads prompts and journal")
        else:
            self.signals.begun = True
            self.display.update(msgspec.json.decode(status, type=Status))
        return True


def _lost_controller_summary(spec: RunSpec, outcome: Outcome, error: str) -> Summary:
    return last_summary(spec.run_dir, spec.config, spec.run_id, outcome, error)
