"""Driver of a run on Ray: creates and owns all actors, watches the run, and stops everything."""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

import msgspec
import ray
import structlog
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from rich.console import Console

from offbeat.actors.call import Handle, find_cause, lost
from offbeat.config.run import RunConfig
from offbeat.launch.cluster import (
    check_alive,
    check_room,
    find_sharing,
    make_actors,
    make_controller,
    make_run_files,
    start_ray,
    watch_gcs,
)
from offbeat.launch.composition import Actors
from offbeat.launch.control import CommandInbox
from offbeat.launch.gcs_watch import GcsWatch
from offbeat.launch.opened_run import OpenedRun
from offbeat.launch.read_backs import ReadBacks
from offbeat.launch.run_parts import RunSpec
from offbeat.launch.screen import HeartbeatTimeout
from offbeat.launch.session import Interrupted, Runtime, Signals, summarize_lost_run
from offbeat.launch.stopping import end_controller, stop_ray
from offbeat.messages.failures import ActorLost, DeadlineExceeded
from offbeat.run_files.shared_directory import RunDirToken
from offbeat.telemetry.progress import ProgressDisplay
from offbeat.telemetry.status_file import Status, StatusFile
from offbeat.telemetry.summary import Summary
from offbeat.weight_sync.served import ServedWeights

log = structlog.stdlib.get_logger()
_LOOK_S: Final = 0.5  # polling interval, and refresh of the display
_BEGUN_S: Final = 2.0  # time for a run that is about to end to report that it has begun


class _RayRuntime:
    """Ray for one run. ``start`` starts Ray early; otherwise ``run`` starts it."""

    def __init__(self) -> None:
        self._is_started = False
        self._failure: Exception | None = None

    def start(self, config: RunConfig, signals: Signals) -> None:
        """Start a private cluster. If it cannot start, ``run`` raises the error."""
        if os.environ.get("RAY_ADDRESS"):
            return
        with signals.held_back():
            try:
                self._start(config)
            except Exception as error:  # noqa: BLE001 -- not handled here: ``run`` raises it
                self._stop([])
                self._failure = error

    def _start(self, config: RunConfig) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_started:
            start_ray(config.runtime.env)
            self._is_started = True

    def stop(self) -> None:
        """Stop a cluster that no run has used."""
        if self._is_started or self._failure is not None:
            self._stop([])

    def _stop(self, handles: Sequence[Handle]) -> None:
        self._is_started = False
        self._failure = None
        stop_ray(handles)

    def run(
        self,
        spec: RunSpec,
        token: RunDirToken,
        console: Console,
        signals: Signals,
        opened: OpenedRun,
    ) -> Summary:
        """Execute the run between starting and leaving Ray. Before this returns, all actors end."""
        handles = list[Handle]()
        orders = CommandInbox(spec.run_dir, spec.config.supervision.wall_clock_limit_s)
        try:
            with signals.held_back():
                self._start(spec.config)
            with signals.install():  # Ray installs its own handler when it starts
                with signals.held_back():
                    check_room(spec)
                    if (sharing := find_sharing(spec, token)) is not None:
                        spec = replace(spec, sharing=sharing)
                        handles.append(make_run_files(spec, sharing))
                    actors = make_actors(spec)
                handles += [*actors.ranks, *actors.engines.values(), *actors.workers]
                with ProgressDisplay(console, StatusFile(spec.run_dir, spec.run_id)) as display:
                    asked = partial(_ask_engines, actors.engines)
                    read_backs = ReadBacks(spec.run_dir, asked)
                    watched = _WatchedRun(spec, opened, signals, display, orders, read_backs)
                    summary = watched.run_controllers(actors, handles)
                opened.has_begun(summary.outcome)  # for a run that was too short for a poll
                return summary
        finally:
            self._stop(handles)


@dataclass(frozen=True, slots=True)
class _WatchedRun:
    """A run with existing actors, and the work that its driver does twice per second."""

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
        """Show progress and pass on commands until the run has ended.

        Raises:
            OffbeatError: The controller is silent for too long, or the cluster has no room for it.
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
                self._abort(controller, signals.reason)
                give_up_at = time.monotonic() + self.spec.config.supervision.signal_grace_s
            if signals.at_once:
                raise Interrupted(signals)
            if give_up_at is not None and time.monotonic() > give_up_at:
                end_controller(controller)
                problem = "the controller did not end in time"
                return summarize_lost_run(self.spec, "aborted", problem, ended_by=signals.reason)
            for order in self.orders.take_commands():
                controller.control.remote(order)
            self.read_backs.poll()
            self.opened.has_begun(self.display.phase)
            self._look(controller, gcs, silence)
        try:
            return Summary.from_json(cast("bytes", ray.get(ended)))
        except RayTaskError as error:
            raise find_cause(error, "controller", "the run") from None
        except (RayActorError, OutOfMemoryError) as error:
            raise lost(error, "controller", "the run") from None

    def _abort(self, controller: Handle, reason: str) -> None:
        """Ask the controller to end the run cleanly, if the run has begun."""
        if not self.signals.begun:
            self._show(controller, _BEGUN_S)  # it may have begun since the last poll
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
        """Show the status and return whether the controller replied."""
        try:
            status = ask_status(controller, within_s)
        except TimeoutError:
            return False
        if status is None:
            self.display.wait("the controller, which reads prompts and journal")
        else:
            self.signals.begun = True
            self.display.update(msgspec.json.decode(status, type=Status))
        return True


def ask_status(controller: Handle, within_s: float) -> bytes | None:
    """Return the controller's status as JSON, or None while the controller is being built.

    Raises:
        TimeoutError: The controller did not reply. (If it is dead, ``run`` raises another error.)
        OffbeatError: The controller raised an error, and would raise it again.
    """
    try:
        return cast("bytes | None", ray.get(controller.status.remote(), timeout=within_s))
    except RayTaskError as error:
        raise find_cause(error, "controller", "its status") from None
    except (GetTimeoutError, RayError):
        raise TimeoutError from None


def _ask_engines(engines: Mapping[str, Handle]) -> dict[str, Future[ServedWeights]]:
    return {name: handle.served_weights.remote().future() for name, handle in engines.items()}


_ray: Final = _RayRuntime()
RAY: Final = Runtime(
    run=_ray.run, start=_ray.start, stop=_ray.stop, failures=(RayError, RuntimeError)
)
"""The runtime on Ray: a private cluster on this machine, or the one that ``RAY_ADDRESS`` names."""
