"""Machines of the simulated cluster: their actors, and whether their memory still exists.

The controller is on the first machine, so its loss is the loss of the cluster. When another machine
dies, its actors, payloads and published weights are lost at once. A new machine replaces it.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.network import DEATH_NOTICED_S

FIRST: Final = "machine-0"
"""Machine of the controller."""


class MachineMemory(NamedTuple):
    """Memory of one incarnation of a machine, which stores a payload or a release."""

    machine: str
    incarnation: int


FIRST_MEMORY: Final = MachineMemory(FIRST, 1)


class Machines:
    """Machine of each actor. Actors without an entry are on the first machine."""

    def __init__(self, loop: VirtualLoop, placement: Mapping[str, str]) -> None:
        self._loop, self._placement = loop, placement
        self._incarnations: dict[str, int] = {}
        # Time until which the loss is not known
        self._unreachable: dict[MachineMemory, float] = {}

    def memory_of(self, actor: str) -> MachineMemory:
        """Return the memory of the machine that an actor is on now."""
        return self._now(self._placement.get(actor, FIRST))

    def actors_on(self, machine: str) -> list[str]:
        return [actor for actor, where in self._placement.items() if where == machine]

    @property
    def mortal(self) -> list[str]:
        """Return the machines that can die without the controller."""
        return sorted(set(self._placement.values()) - {FIRST})

    def die(self, machine: str, at_s: float) -> None:
        """Make a machine's memory unreadable from now on. Readers learn that after ``at_s``."""
        self._unreachable[self._now(machine)] = at_s + DEATH_NOTICED_S

    def replace(self, machine: str) -> None:
        """Replace a machine by a new one. Processes that start there from now on use its memory."""
        self._incarnations[machine] = self._incarnations.get(machine, 1) + 1

    def noticed_in_s(self, memory: MachineMemory | None) -> float:
        """Return the seconds until a reader of this memory learns that it is gone."""
        if memory is None:
            return 0.0
        return max(0.0, self._unreachable.get(memory, 0.0) - self._loop.time())

    def replaced_in_s(self, actor: str) -> float:
        """Return the seconds until processes start again on this actor's machine; 0 if they do now.

        No process starts on a machine that is cut off, because it would outlive the machine.
        """
        memory = self.memory_of(actor)
        return self.noticed_in_s(memory) if self.is_gone(memory) else 0.0

    def is_gone(self, memory: MachineMemory | None) -> bool:
        return memory in self._unreachable

    def _now(self, machine: str) -> MachineMemory:
        return MachineMemory(machine, self._incarnations.get(machine, 1))


def place_actors(rng: random.Random, actors: Sequence[str]) -> dict[str, str]:
    """Assign actors to two or three machines, including the controller's. None is empty."""
    machines = [f"machine-{index}" for index in range(rng.choice((2, 3)))]
    placed = {actor: rng.choice(machines) for actor in actors}
    placed[rng.choice(actors)] = machines[1]
    return {actor: machine for actor, machine in placed.items() if machine != FIRST}
