"""``in_order``: every batch holds exactly the prompts stamped for it."""

from dataclasses import dataclass

from offbeat.sampler.policy import View, past_bound


@dataclass(frozen=True, slots=True)
class InOrder:
    """Batches in prompt order, at most ``max_lookahead`` ahead of the one in training.

    A group is stamped with its target step when admitted. It is admitted only if, sampled now, it
    would still be within ``max_staleness`` when that step trains it: step t trains at version
    t - 1. With a look-ahead of 0 this is synchronous training.
    """

    groups_per_step: int
    max_staleness: int  # [weight versions]
    max_lookahead: int  # [batches]

    @property
    def reach(self) -> int:
        return (min(self.max_lookahead, self.max_staleness) + 1) * self.groups_per_step

    def admit(self, view: View) -> int | None:
        step = view.trainer_version + 1
        last = min(
            step + self.max_lookahead,
            view.serving_version + self.max_staleness + 1,
        )
        if step <= last and view.stamped.get(step, 0) < view.quota:
            return step
        for target in range(step + 1, last + 1):
            if view.stamped.get(target, 0) < self.groups_per_step - view.shrunk.get(target, 0):
                return target
        return None

    def select(self, view: View) -> list[int]:
        step = view.trainer_version + 1
        due = sorted(group.ordinal for group in view.ready if group.stamp == step)
        return due[: view.quota]

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)
