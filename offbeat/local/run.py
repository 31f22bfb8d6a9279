"""Runs a recipe in this process, and watches the run as a driver watches a controller on Ray."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog
from rich.console import Console

from offbeat.environments.exits import contain_exits, exits_as_errors
from offbeat.launch.control import CommandInbox
from offbeat.launch.controller_host import ControllerHost
from offbeat.launch.opened_run import OpenedRun
from offbeat.launch.read_backs import ReadBacks
from offbeat.launch.run_parts import RunSpec, assemble
from offbeat.launch.screen import HeartbeatTimeout
from offbeat.launch.session import Interrupted, Runtime, Signals, summarize_lost_run
from offbeat.local.hosted import raise_bugs_as_failures
from offbeat.local.parts import LocalParts, Makers
from offbeat.local.threads import WorkThread
from offbeat.messages.failures import DeadlineExceeded, OffbeatError
from offbeat.messages.text import first_line
from offbeat.run_files.shared_directory import RunDirToken
from offbeat.telemetry.logs import Redactor, dump_stacks_on_signal, log_to
from offbeat.telemetry.progress import ProgressDisplay
from offbeat.telemetry.status_file import Status, StatusFile
from offbeat.telemetry.summary import Summary

log = structlog.stdlib.get_logger()
T = TypeVar("T")
_LOOK_S: Final = 0.25  # between two polls of signals, commands and status
_BEGUN_S: Final = 2.0  # once a signal came, the wait for whether the run has begun


class LocalController:
    """A controller on the event loop of its thread."""

    def __init__(self, spec: RunSpec, makers: Makers) -> None:
        """Start the thread, which builds the run and executes it to its end."""
        self.parts = LocalParts(makers)
        self._spec = spec
        self._lock = threading.Lock()
        self._host: ControllerHost | None = None
        self._early = list[Callable[[ControllerHost], None]]()  # calls before the run was built
        self._task: asyncio.Task[bytes] | None = None
        self._failure: OffbeatError | None = None
        thread = WorkThread("controller")
        self.ended: Future[bytes] = thread.submit(self._run)
        """The summary of the run as JSON, once it has ended and its parts are closed."""
        thread.shutdown(wait=False)

    def _run(self) -> bytes:
        try:
            with exits_as_errors():
                return asyncio.run(self._build_and_run())
        except Exception:
            log.exception("controller.failed")
            raise
        finally:
            self.parts.loop.stop(self._spec.config.supervision.shutdown_timeout_s)

    async def _build_and_run(self) -> bytes:
        contain_exits()
        try:
            host = await assemble(self._spec, self.parts.make_ports)
            with self._lock:
                self._host, self._task = host, asyncio.current_task()
            for call in self._early:
                call(host)
            return await host.run()
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            await self.parts.close(self._spec.config.supervision.shutdown_timeout_s)

    def tell(self, call: Callable[[ControllerHost], None]) -> None:
        """Call the controller on its loop, after its start."""
        with self._lock:
            if self._host is None or self._task is None:
                self._early.append(call)
                return
        with contextlib.suppress(RuntimeError):  # the run has ended, and its loop is closed
            self._task.get_loop().call_soon_threadsafe(call, self._host)

    def ask(self, question: Callable[[ControllerHost], T]) -> "Future[T]":
        """Return the controller's answer, computed on its loop.

        If the question raises, the run fails with that error, and there is no answer.
        """
        answer = Future[T]()

        def reply(host: ControllerHost) -> None:
            try:
                with raise_bugs_as_failures("controller", "answer"):
                    answer.set_result(question(host))
            except OffbeatError as error:
                self.fail(error)

        self.tell(reply)
        return answer

    def fail(self, error: OffbeatError) -> None:
        """End the run with an error, once its loop is free."""

        def cancel(_: ControllerHost) -> None:
            self._failure = error
            if self._task is not None:
                self._task.cancel(f"{type(error).__name__}: {first_line(error)}")

        self.tell(cancel)


@dataclass(slots=True)
class _WatchedRun:
    """A run, and the work that its watcher does several times per second."""

    spec: RunSpec
    controller: LocalController
    signals: Signals
    display: ProgressDisplay
    orders: CommandInbox
    opened: OpenedRun
    read_backs: ReadBacks
    _status: "Future[Status] | None" = None
    _silence: HeartbeatTimeout = field(default_factory=HeartbeatTimeout)

    def watch(self) -> Summary:
        """Show progress and pass on commands until the run has ended.

        Raises:
            OffbeatError: The run ended with this error, or its controller is silent for too long.
            Interrupted: A signal came before the run could end cleanly.
        """
        controller, signals = self.controller, self.signals
        signals.watched = True
        give_up_at: float | None = None
        while wait([controller.ended], timeout=_LOOK_S).not_done:
            if signals.received is not None and give_up_at is None:
                self._wait_for_status()  # the run may have begun since the last poll
                controller.tell(methodcaller("abort", signals.reason))
                give_up_at = time.monotonic() + self.spec.config.supervision.signal_grace_s
            if signals.at_once and not controller.ended.done():
                raise Interrupted(signals)
            if give_up_at is not None and time.monotonic() > give_up_at:
                problem = "the controller did not end in time"
                return summarize_lost_run(self.spec, "aborted", problem, ended_by=signals.reason)
            for order in self.orders.take_commands():
                controller.tell(methodcaller("control", order))
            self.read_backs.poll()
            self._look()
            self.opened.has_begun(self.display.phase)
            self._silence.check()
        with raise_bugs_as_failures("controller", "the run"):
            return Summary.from_json(controller.ended.result())

    def _wait_for_status(self) -> None:
        """Wait a moment for the status, which tells whether the run has begun."""
        if self._status is None:
            self._status = self.controller.ask(_read_status)
        either = cast("list[Future[Any]]", [self._status, self.controller.ended])
        wait(either, _BEGUN_S, FIRST_COMPLETED)
        self._look()

    def _look(self) -> None:
        """Show the status if it has arrived, and ask again."""
        if self._status is None:
            self._status = self.controller.ask(_read_status)
        if not self._status.done():
            self.display.wait("the controller, which reads prompts and journal")
            return
        self.signals.begun = True
        self._silence.broken()
        self.display.update(self._status.result())
        self._status = self.controller.ask(_read_status)


def _read_status(host: ControllerHost) -> Status:
    return msgspec.json.decode(host.status(), type=Status)


def run_local(
    makers: Makers,
    spec: RunSpec,
    token: RunDirToken,
    console: Console,
    signals: Signals,
    opened: OpenedRun,
) -> Summary:
    """Run everything in this process until the run ends."""
    del token  # the whole run sees its directory
    redactor = Redactor.from_environment(config=spec.config)
    dump_stacks_on_signal()
    orders = CommandInbox(spec.run_dir, spec.config.supervision.wall_clock_limit_s)
    with (
        log_to("controller", spec.run_dir / "logs", run_id=spec.run_id, redactor=redactor),
        ProgressDisplay(console, StatusFile(spec.run_dir, spec.run_id)) as display,
    ):
        controller = LocalController(spec, makers)
        read_backs = ReadBacks(spec.run_dir, controller.parts.ask_engines)
        watched = _WatchedRun(spec, controller, signals, display, orders, opened, read_backs)
        try:
            summary = watched.watch()
        except DeadlineExceeded as silence:
            controller.fail(silence)  # if it answers again, it must not continue
            raise
    opened.has_begun(summary.outcome)  # for a run that was too short for a poll
    return summary


LOCAL: Final = Runtime(partial(run_local, Makers()))
"""The runtime of ``runtime.backend=local``."""
