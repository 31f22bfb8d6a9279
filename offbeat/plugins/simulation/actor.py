"""Base of the fake actors: a name, its current process, and an owner that replaces a dead one."""

from collections.abc import Callable
from typing import Final

from offbeat.messages.failures import StaleFence
from offbeat.messages.fences import FenceGuard
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.faults import FaultMoment
from offbeat.plugins.simulation.network import DEATH_NOTICED_S, SimulatedCall
from offbeat.plugins.simulation.processes import OUTSIDE, Entry, Process
from offbeat.plugins.simulation.records import FenceObeyed, FenceRefused

START_S: Final = (0.5, 3.0)
LATE_START_S: Final = (20.0, 60.0)


class Actor:
    """Base class of the fake actors.

    An incarnation begins with ``born`` and ends with ``ended``.
    """

    in_order = False

    def __init__(self, name: str, context: SimulationContext) -> None:
        self.name, self.context = name, context
        self.incarnation_number, self.is_retired = 0, False
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        is_there = self.incarnation_number > 0 and self.process.alive
        if self.is_retired or is_there:  # decided while this process was starting
            return
        if (wait_s := self.context.machines.replaced_in_s(self.name)) > 0.0:
            self.context.loop.run_in(wait_s, OUTSIDE, self._begin_incarnation)
            return
        self.incarnation_number += 1
        self.process = Process(f"{self.name} incarnation {self.incarnation_number}")
        self._guard = FenceGuard(self.name)
        self._highest = 0  # highest incarnation seen, counted separately from the guard
        self.born()

    def born(self) -> None:
        """Called when a new process has started, without any state."""
        raise NotImplementedError

    def ended(self) -> None:
        """Called when the process has died."""

    def serve(self, call: SimulatedCall) -> None:
        raise NotImplementedError

    def die(self, noticed_in_s: float = DEATH_NOTICED_S) -> bool:
        """Kill the process; the owner starts a new one a little later. Return False if none lived.

        ``noticed_in_s``: seconds until its callers notice the death.
        """
        process, loop = self.process, self.context.loop
        if not process.alive:
            return False
        loop.kill(process)
        self.context.network.died(process, noticed_in_s)
        self.ended()
        if self.is_retired:
            return True
        late = self.context.faults.at(FaultMoment.BIRTH, self.name)
        start_s = self.context.rng.uniform(*(LATE_START_S if late else START_S))
        loop.run_in(start_s, OUTSIDE, self._begin_incarnation)
        return True

    def retire(self) -> None:
        """Kill the process for good. The owner starts no other one."""
        self.is_retired = True
        self.die()

    def belong_to_another_driver(self) -> None:
        """Change the owner. The new driver starts a process of this name, even after ``retire``."""
        was_retired, self.is_retired = self.is_retired, False
        if was_retired and not self.process.alive:
            start_s = self.context.rng.uniform(*START_S)
            self.context.loop.run_in(start_s, OUTSIDE, self._begin_incarnation)
        else:
            self.die()

    def later(self, delay_s: float, callback: Callable[..., object], *args: object) -> Entry:
        """Run the callback in this process later, if the process is still alive then."""
        return self.context.loop.run_in(delay_s, self.process, callback, *args)

    def check_fence(self, call: SimulatedCall) -> None:
        """Check the fence of a call.

        Raises:
            StaleFence: Its controller was replaced.
        """
        got, record = call.fence.incarnation, self.context.record
        try:
            self._guard.check(call.fence)
        except StaleFence:
            record(FenceRefused, self.name, got, self._highest)
            raise
        if got < self._highest:
            record(FenceObeyed, self.name, got, self._highest)
        elif got > self._highest:
            self._highest = got
            self.superseded(got)

    def superseded(self, incarnation: int) -> None:
        """Handle the first call of a new controller."""
