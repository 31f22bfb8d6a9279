"""``ready_first``: whatever is ready trains first, and nothing is ever too old to train."""

from dataclasses import dataclass

from offbeat.sampler.policy import NEVER, View, past_bound


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """Arrival order, with room kept for the groups that would otherwise grow too old.

    A group sampled at version o may be trained while the trainer is at o + ``max_staleness``, its
    *expiry*, or before. The open step has ``quota`` places left and every later one has
    ``groups_per_step``, so all groups can be trained in time if and only if, for every version w
    from the trainer's on (earliest deadline first)::

        groups with expiry <= w   <=   quota + (w - trainer_version) * groups_per_step

    ``admit`` keeps that true as groups come, ``select`` as places go: a ready group is passed over
    when taking it would leave an older one, still in flight, without a place. So a step waits for
    its oldest stragglers rather than discarding them.
    """

    groups_per_step: int
    max_staleness: int  # [weight versions]

    @property
    def reach(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step

    def admit(self, view: View) -> int | None:
        ahead = view.serving_version + self.max_staleness - view.trainer_version
        places = view.quota + ahead * self.groups_per_step
        return NEVER if view.outstanding < places else None

    def select(self, view: View) -> list[int]:
        quota, taken = view.quota, list[int]()
        due = {version + self.max_staleness: count for version, count in view.versions.items()}
        refused_from: int | None = None  # this expiry and all later ones have to wait
        for group in view.ready:
            if not quota:
                break
            expiry = group.bound_version + self.max_staleness
            if expiry < view.trainer_version:
                continue  # past the bound: ``stale`` reports it
            if refused_from is not None and expiry >= refused_from:
                continue
            if self._leaves_room(due, quota - 1, expiry, view.trainer_version):
                quota -= 1
                due[expiry] -= 1
                taken.append(group.ordinal)
            else:
                refused_from = expiry
        return taken

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)

    def _leaves_room(
        self, due: dict[int, int], places: int, expiry: int, trainer_version: int
    ) -> bool:
        """With ``places`` left in this step, all groups due before ``expiry`` still have one."""
        before = 0
        for version in range(trainer_version, expiry):
            before += due.get(version, 0)
            if before > places + (version - trainer_version) * self.groups_per_step:
                return False
        return True
