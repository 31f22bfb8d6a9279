"""Present state of a run, for the display."""

import msgspec


class NamedWait(msgspec.Struct, frozen=True):
    """A wait in progress: for a remote reply, or for a change of the run's state."""

    waiter: str
    target: str
    for_s: float  # so long already
    deadline_s: float | None  # since its begin; None: the watchdog judges it


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status that the controller reports about twice a second.

    A figure that does not exist yet is None.
    """

    step: int  # optimizer steps done
    steps: int  # optimizer steps of the run
    phase: str
    reward: float | None = None  # mean over the last 20 steps
    reward_recent: tuple[float, ...] = ()  # of those steps, oldest first
    loss: float | None = None  # of the last step, in a run without rewards
    staleness_mean: float | None = None  # mean of the last step
    staleness_max: int | None = None
    ready: int = 0  # number of ready groups
    in_flight: int = 0
    trainer_busy: float | None = None  # fraction of time
    generator_busy: float | None = None
    samples_per_s: float | None = None
    verdict: str = ""
    waiting_for: str = ""  # what the run waits for now; empty if nothing
    waits: tuple[NamedWait, ...] = ()  # the longest ones
