"""Payload that a worker packs and a trainer reads; an opaque handle to the controller."""

from dataclasses import dataclass

from offbeat.plugins.simulation.machines import FIRST_MEMORY, MachineMemory


@dataclass(frozen=True, slots=True)
class SimulatedPayload:
    """Columns of one group, lost with the controller that owns them or with their machine."""

    prompt_index: int
    attempt: int
    incarnation: int  # incarnation of the controller that owns it
    seed: int
    oldest: int
    newest: int
    poison: str
    memory: MachineMemory = FIRST_MEMORY  # memory that stores it
    masked: tuple[int, ...] = ()  # samples whose loss mask is False throughout
    branches: tuple[int, ...] = ()  # rows of each sample
    media_bytes: int = 0  # of the pictures of the prompt
