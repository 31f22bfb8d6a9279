"""Buffer room: finds groups that must leave for those that are trained earlier."""

from offbeat.controller.state import RunState
from offbeat.sampler.policy import earliest_step


def groups_without_room(
    state: RunState, capacity_groups: int, capacity_bytes: int, max_group_bytes: int
) -> list[int]:
    """Return groups of later steps that do not fit beside a whole step of the largest groups.

    A ready group counts with its bytes, a group in flight with the largest that it may have. Those
    that would be trained last are returned first.
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
        return state.queue.group_bytes(prompt_index) if is_ready else max_group_bytes

    groups, free_bytes = capacity_groups - whole_step, capacity_bytes - whole_step * max_group_bytes
    held_bytes = sum(nbytes(prompt_index) for _, prompt_index in later)
    returned = list[int]()
    while later and (len(later) > groups or held_bytes > free_bytes):
        _, prompt_index = later.pop()
        held_bytes -= nbytes(prompt_index)
        returned.append(prompt_index)
    return returned
