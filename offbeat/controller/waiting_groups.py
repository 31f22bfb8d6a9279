"""Orders the dispatch of returned groups.

backing off --again--> due --pop--> dispatched
^                                  |
+------ failed, tried in an outage +
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable

from offbeat.controller.group_moves import Place
from offbeat.controller.ledger import GroupRecord
from offbeat.controller.state import RunState
from offbeat.sampler.policy import earliest_step


class WaitingGroups:
    """Admitted groups that were dispatched before: due groups in order, and groups in back-off."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._due: list[tuple[int, int]] = []  # heap of (earliest step, prompt index)
        self._is_due = set[int]()  # those in the heap, each once
        self._backing_off = set[int]()  # not in the heap yet
        self._tried: dict[int, None] = {}  # in an outage, oldest first: others are tried before

    def back_off(self, prompt_index: int) -> None:
        """Keep a group until ``again`` is called for it."""
        self._backing_off.add(prompt_index)

    def again(self, prompt_index: int) -> None:
        """Make a group due."""
        self._tried.pop(prompt_index, None)
        if prompt_index in self._is_due:
            return
        self._is_due.add(prompt_index)
        self._backing_off.discard(prompt_index)
        heapq.heappush(self._due, self._rank(prompt_index))
        self._state.waits.changed()

    def reorder(self) -> None:
        """Sort the due groups again, because a refused step has moved target steps."""
        self._is_due = {each for each in self._is_due if self._is_admitted(each)}
        self._due = sorted(map(self._rank, self._is_due))  # a sorted list is a heap
        self._state.waits.changed()

    def after_all_others(self, prompt_index: int) -> None:
        """Keep a group back until no other group can be tried, or the outage is over."""
        self._tried[prompt_index] = None
        self._state.waits.changed()

    def outage_is_over(self) -> None:
        """Make all groups that were tried due again."""
        for prompt_index in list(self._tried):
            self.again_if_admitted(prompt_index)

    def again_if_admitted(self, prompt_index: int) -> None:
        """Make a group due, unless it is no longer admitted."""
        if self._is_admitted(prompt_index):
            self.again(prompt_index)
        else:
            self._tried.pop(prompt_index, None)

    def before(self, step: int) -> int:
        """Return how many groups in back-off, or tried in an outage, belong to earlier steps."""
        return bisect_left(self._held_back(), step)

    def _held_back(self) -> list[int]:
        """Return, in order, the steps of the groups that are admitted and not due."""
        groups = self._state.ledger.groups
        waiting = filter(self._is_admitted, self._backing_off.union(self._tried))
        return sorted(earliest_step(groups[each].target_step) for each in waiting)

    def next_due(self) -> GroupRecord | None:
        """Return the next due group, if the policy allows its dispatch now. Changes nothing."""
        state = self._state
        first = self._due[0] if self._due else None
        if first is not None and not self._is_admitted(first[1]):
            # It is no longer admitted. The next ``pop_due`` discards it.
            first = min((each for each in self._due if self._is_admitted(each[1])), default=None)
        if first is None:
            return None
        group = state.ledger.groups[first[1]]
        return group if state.sampler.may_dispatch(state.view, group) else None

    def pop_due(self) -> int:
        """Remove and return the next due group. There must be one.

        Discard the groups before it that are no longer admitted.
        """
        while True:
            _, prompt_index = heapq.heappop(self._due)
            self._is_due.remove(prompt_index)
            if self._is_admitted(prompt_index):
                return prompt_index

    def next_trial(self, has_room: Callable[[int], bool]) -> int | None:
        """Return, of the groups that may be dispatched now, the one tried longest ago.

        Its step leaves room for groups of earlier steps, which are dispatched once this trial is
        answered.

        Args:
            has_room: Returns whether one more group fits in addition to so many.
        """
        state, groups = self._state, self._state.ledger.groups
        steps = self._held_back() if self._tried else []
        for prompt_index in self._tried:
            if not self._is_admitted(prompt_index):
                continue
            group = groups[prompt_index]
            earlier = bisect_left(steps, earliest_step(group.target_step))
            if state.sampler.may_dispatch(state.view, group) and has_room(earlier):
                return prompt_index
        return None

    def pop_trial(self, has_room: Callable[[int], bool]) -> int:
        """Remove and return the group of ``next_trial``. There must be one."""
        prompt_index = self.next_trial(has_room)
        if prompt_index is None:
            raise LookupError("no group that was tried in the outage may be tried again")
        del self._tried[prompt_index]
        self._backing_off.discard(prompt_index)
        return prompt_index

    def _rank(self, prompt_index: int) -> tuple[int, int]:
        return earliest_step(self._state.ledger.groups[prompt_index].target_step), prompt_index

    def _is_admitted(self, prompt_index: int) -> bool:
        group = self._state.ledger.groups.get(prompt_index)
        return group is not None and group.place is Place.ADMITTED
