"""Room of the buffer: for one more group, and for a step whose groups are trained before others.

A group has room if, with it and ``w`` others that go before it, both bounds hold::

    n + w + 1 <= C                     groups
    b + (f + w + 1) * m <= B           bytes

    C, B   ``buffer.capacity_groups``, and ``buffer.capacity_mib`` in bytes
    n      groups in flight, ready or in training: all in the ledger but the admitted
    b      bytes of the columns that the queue holds
    f      groups in flight; each may still grow to ``m`` bytes, the largest that a group can be
    w      admitted groups that are trained before this one, whose room it leaves

Groups that are ready or in flight for later steps must leave, the last step's first, until ``l`` of
them with ``h`` bytes, ``m`` for each in flight, fit beside a whole step of ``g`` largest groups::

    l <= C - g    and    h <= B - g * m
"""

from typing import NamedTuple

from offbeat.controller.state import RunState
from offbeat.sampler.policy import earliest_step


class BufferBounds(NamedTuple):
    """Bounds of the buffer of a run; the module's formula in code."""

    capacity_groups: int  # C
    capacity_bytes: int  # B
    max_group_bytes: int  # m

    @classmethod
    def of(cls, state: RunState, max_group_bytes: int) -> "BufferBounds":
        """Return the bounds of a run, whose largest group has ``max_group_bytes``."""
        buffer = state.config.buffer
        groups = buffer.capacity_groups or state.sampler.max_outstanding_groups
        return cls(groups, int(buffer.capacity_mib * 2**20), max_group_bytes)

    def has_room(self, state: RunState, waiting: int) -> bool:
        """Return whether one more group fits the buffer, besides ``waiting`` others."""
        ledger = state.ledger
        if len(ledger.groups) - ledger.admitted + waiting >= self.capacity_groups:
            return False
        promised = (ledger.in_flight + waiting + 1) * self.max_group_bytes
        return state.queue.bytes_held + promised <= self.capacity_bytes

    def groups_without_room(self, state: RunState) -> list[int]:
        """Return groups of later steps that do not fit beside a whole step of the largest groups.

        Those that would be trained last are returned first.
        """
        whole_step, step, ledger = state.config.groups_per_step, state.step, state.ledger
        dispatched = [group for groups in ledger.in_flight_at.values() for group in groups.values()]
        later = sorted(
            (target_step, group.prompt_index)
            for group in (*ledger.ready.values(), *dispatched)
            if (target_step := earliest_step(group.target_step)) > step
        )

        def nbytes(prompt_index: int) -> int:
            is_ready = prompt_index in ledger.ready
            return state.queue.group_bytes(prompt_index) if is_ready else self.max_group_bytes

        groups = self.capacity_groups - whole_step
        free_bytes = self.capacity_bytes - whole_step * self.max_group_bytes
        held_bytes = sum(nbytes(prompt_index) for _, prompt_index in later)
        returned = list[int]()
        while later and (len(later) > groups or held_bytes > free_bytes):
            _, prompt_index = later.pop()
            held_bytes -= nbytes(prompt_index)
            returned.append(prompt_index)
        return returned
