"""The payload that a worker packs and a trainer reads; an opaque handle to the controller."""

from dataclasses import dataclass

from offbeat.simulation.machines import FIRST_MEMORY, MachineMemory


@dataclass(frozen=True, slots=True)
class SimulatedPayload:
    """The columns of one group.

    It is gone with the controller that owns it, or with its machine.
    """

    prompt_index: int
    attempt: int
    incarnation: int  # of the controller that owns it
    seed: int
    oldest: int
    newest: int
    poison: str
    memory: MachineMemory = FIRST_MEMORY  # that it is in
