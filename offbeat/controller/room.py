"""Buffer room: finds ready groups that must leave for those that are trained earlier."""

from offbeat.controller.state import RunState
from offbeat.sampler.policy import earliest_step


def groups_without_room(
    state: RunState, capacity_groups: int, capacity_bytes: int, max_group_bytes: int
) -> list[int]:
    """Return ready groups of later steps that do not fit beside a whole step of the largest groups.

    After a rewind or a take-over the groups of the step in progress may have to be rolled out again.
    Those that would be trained last are returned first.
    """
    whole_step, step = state.config.groups_per_step, state.step
    ready = state.ledger.ready.values()
    later = sorted(
        (target_step, group.prompt_index)
        for group in ready
        if (target_step := earliest_step(group.target_step)) > step
    )
    groups, free_bytes = capacity_groups - whole_step, capacity_bytes - whole_step * max_group_bytes
    held_bytes = sum(state.queue.group_bytes(prompt_index) for _, prompt_index in later)
    returned = list[int]()
    while later and (len(later) > groups or held_bytes > free_bytes):
        _, prompt_index = later.pop()
        held_bytes -= state.queue.group_bytes(prompt_index)
        returned.append(prompt_index)
    return returned
