"""Watches jobs by the bytes that they handle: one that stands still is abandoned, and named."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from offbeat.messages.failures import OffbeatError
from offbeat.staging.progress import StagingProgress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_LOOK_S: Final = 0.5
_SAY_EVERY_S: Final = 10.0


class WatchedJob(Protocol[T_co]):
    """Work that goes on elsewhere. No method blocks."""

    def result(self) -> T_co | None:
        """Return the result, None before there is one; an ``OffbeatError`` if there never will be."""
        ...

    def progress(self) -> StagingProgress:
        """Return the latest progress that is known."""
        ...

    def abandon(self) -> None:
        """End the work if it can be ended; its result is not wanted any more."""
        ...


class WatchClock(Protocol):
    """Time of the watchdog."""

    def now_s(self) -> float:
        """Return seconds that never fall."""
        ...

    def pause(self, seconds: float) -> None:
        """Return after some time."""
        ...


@dataclass(frozen=True, slots=True)
class Stalled:
    """Outcome of a job that handled no byte for too long."""

    progress: StagingProgress
    limit_s: float

    def __str__(self) -> str:
        return f"no byte moved for {self.limit_s:g} s: {self.progress}"


@dataclass(slots=True)
class _Watched(Generic[T]):
    job: WatchedJob[T]
    progress: StagingProgress
    changed_s: float

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        progress = self.job.progress()
        if progress != self.progress:
            self.progress, self.changed_s = progress, now_s
        return now_s - self.changed_s >= limit_s


def watch(
    job_by_name: Mapping[str, WatchedJob[T]],
    limit_s: float,
    clock: WatchClock,
    say: Callable[[str], None],
) -> dict[str, T | Stalled | OffbeatError]:
    """Return the outcome of each job, once all have one; those that stall are abandoned.

    ``say`` gets a line on the slowest job every few seconds.
    """
    started_s = said_s = clock.now_s()
    running = {name: _Watched(job, job.progress(), started_s) for name, job in job_by_name.items()}
    outcomes = dict[str, T | Stalled | OffbeatError]()
    while True:
        now_s = clock.now_s()
        for name, watched in list(running.items()):
            if (outcome := _outcome(watched, now_s, limit_s)) is not None:
                outcomes[name] = outcome
                del running[name]
        if not running:
            return {name: outcomes[name] for name in job_by_name}
        if now_s - said_s >= _SAY_EVERY_S:
            said_s = now_s
            slowest = min(running, key=lambda name: running[name].progress.total_bytes)
            done = f"{len(outcomes)} of {len(job_by_name)} done"
            say(f"{done}; slowest: {slowest}, {running[slowest].progress}")
        clock.pause(_LOOK_S)


def _outcome(
    watched: _Watched[T], now_s: float, limit_s: float
) -> T | Stalled | OffbeatError | None:
    try:
        result = watched.job.result()
    except OffbeatError as error:
        return error
    if result is None and watched.is_stalled(now_s, limit_s):
        watched.job.abandon()
        return Stalled(watched.progress, limit_s)
    return result
