"""Checks that a run which gives its engines up had faults that explain it: I21."""

from typing import Final

from offbeat.config.run import RunConfig
from offbeat.simulation.audit_world import World
from offbeat.simulation.faults import KINDS

LASTING: Final = frozenset({"engine_flaps", "loads_hang"})
"""Faults that cost a process at every restart, for as long as the run goes on."""

_COSTLY: Final = frozenset(
    name
    for name, kind in KINDS.items()
    if kind.profile in ("engines", "machines", "network", "controller") and kind.target != "worker"
)
"""Faults of which each may cost every engine one process, and no more."""


class EngineRestarts:
    """Most restarts of engines that the faults of an episode can cause."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._budget = config.generator.restart_budget
        self._engines, self._world = config.generator.engines, world

    @property
    def at_most(self) -> int | None:
        """Return the number; None where a fault lasts."""
        faults = self._world.faults
        if not LASTING.isdisjoint(faults):
            return None
        costly = sum(count for kind, count in faults.items() if kind in _COSTLY)
        # A poison prompt costs the engine of each attempt.
        poisoned = sum(map(len, self._world.poisoned.values()))
        return costly * self._engines + poisoned

    @property
    def explain_the_end(self) -> bool:
        """Return whether they can have used ``generator.restart_budget`` up."""
        return self.at_most is None or self.at_most >= self._budget
