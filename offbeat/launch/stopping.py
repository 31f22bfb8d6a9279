"""Ends the processes of a run in bounded time, even if the cluster's control service is gone."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# Ray declares functions without the types of their parameters, and has no public name for its processes.

import atexit
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import psutil
import ray
import structlog
from ray._private import worker
from ray.exceptions import RayError

from offbeat.actors.call import Handle
from offbeat.launch.bounded_call import run_bounded
from offbeat.messages.failures import DeadlineExceeded

log = structlog.stdlib.get_logger()
_LEAVE_S: Final = 2.0  # time for a controller to end itself
_STOP_S: Final = 10.0  # to kill all actors; Ray ends this process 20 s after ``GcsLost``


def end_controller(controller: Handle) -> None:
    """End a controller's process.

    The process is asked to end itself, because a kill needs the cluster's control service. A frozen
    controller is killed.
    """

    def end() -> None:
        ray.wait([controller.leave.remote()], timeout=_LEAVE_S)
        ray.kill(controller)

    with contextlib.suppress(DeadlineExceeded, RayError):
        run_bounded(end, "the end of the controller", 2 * _LEAVE_S)


def stop_ray(
    handles: Sequence[Handle],
    *,
    kill: Callable[[Handle], None] = ray.kill,
    shutdown: Callable[[], None] = ray.shutdown,
    within_s: float = _STOP_S,
) -> None:
    """Kill all actors and disconnect from the cluster.

    Without the cluster's control service, both calls block. Then this process continues without
    them. A private cluster ends with this process in any case.
    """
    started = _processes_of_own_cluster()

    def stop() -> None:
        for handle in handles:
            kill(handle)
        shutdown()

    try:
        run_bounded(stop, "the end of its actors", within_s)
    except DeadlineExceeded as late:
        log.warning("cluster.not_left", error=str(late))
        atexit.unregister(shutdown)  # it would wait for the blocked call
    for process in started:  # agents outlive a raylet that has lost its control service
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _processes_of_own_cluster() -> list[psutil.Process]:
    """Return the processes of the private cluster, or none if this process joined a cluster.

    Other children of this process belong to the program that called ``offbeat.train``.
    """
    node: Any = worker._global_node  # noqa: SLF001 -- no public name
    started = list[psutil.Process]()
    kinds: list[list[Any]] = list(node.all_processes.values()) if node else []
    for info in itertools.chain.from_iterable(kinds):
        with contextlib.suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(info.process.pid)
            started += [daemon, *daemon.children(recursive=True)]
    return started
