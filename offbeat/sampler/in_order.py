"""``in_order``: every batch holds exactly the prompts stamped for it."""

from dataclasses import dataclass

from offbeat.sampler.policy import OutstandingGroup, View, doomed_in_flight, past_bound


@dataclass(frozen=True, slots=True)
class InOrder:
    """Batches in prompt order, at most ``max_lookahead`` ahead of the one in training.

    A group is stamped with its target step when admitted. It is admitted only if, sampled now, it
    would still be within ``max_staleness`` when that step trains it: step t trains at version
    t - 1. With ``max_staleness`` 0 this is synchronous training.
    """

    groups_per_step: int
    max_staleness: int  # [weight versions]
    max_lookahead: int  # [batches]

    @property
    def reach(self) -> int:
        return (min(self.max_lookahead, self.max_staleness) + 1) * self.groups_per_step

    def admit(self, view: View) -> int | None:
        step = view.trainer_version + 1
        last = self._last_step(view)
        if step <= last and view.stamped.get(step, 0) < view.quota:
            return step
        for target in range(step + 1, last + 1):
            if view.stamped.get(target, 0) < self.groups_per_step - view.shrunk.get(target, 0):
                return target
        return None

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        return group.stamp <= self._last_step(view)

    def select(self, view: View) -> list[int]:
        oldest = view.trainer_version - self.max_staleness
        stamped = view.ready_for.get(view.trainer_version + 1, {}).values()
        due = sorted(group.ordinal for group in stamped if group.bound_version >= oldest)
        return due[: max(0, view.quota)]

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)

    def doomed(self, view: View, *, foreseen: bool) -> list[int]:
        """A group is in time for its own step or late for it: no other group changes that."""
        del foreseen
        return doomed_in_flight(view, self.max_staleness)

    def _last_step(self, view: View) -> int:
        """The last step that a group sampled now would be in time for, within the look-ahead."""
        return min(
            view.trainer_version + 1 + self.max_lookahead,
            view.serving_version + 1 + self.max_staleness,
        )
