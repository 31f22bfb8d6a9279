"""Implements ``ready_first`` and ``weight_fifo``: no group gets too old to be trained."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from offbeat.sampler.pacing import Paced, places_until
from offbeat.sampler.policy import View


@dataclass(frozen=True, slots=True)
class ReadyFirst(Paced):
    """Arrival order, with places kept for groups that would otherwise grow too old.

    A ready group is skipped if selecting it would leave an older group in flight without a place.
    So a step waits for its oldest stragglers rather than discarding them.
    """

    def select(self, view: View) -> list[int]:
        versions = sorted(
            version
            for version in view.versions
            if version + self.max_staleness >= view.trainer_version
        )
        kept = self._kept(view, versions)
        first = list(range(len(kept)))  # by version: where its first place may still be
        last = max((index for index, places in enumerate(kept) if places), default=-1)
        batch = list[int]()

        def offers(index: int) -> Iterator[tuple[int, int, int]]:
            for group in view.ready_at.get(versions[index], {}).values():
                if index > last:
                    return
                yield group.arrival, index, group.prompt_index

        for _, index, prompt_index in heapq.merge(*map(offers, range(last + 1))):
            if index > last:
                continue  # sampled before its last place was filled
            while not kept[first[index]]:
                first[index] += 1
            kept[first[index]] -= 1
            batch.append(prompt_index)
            while last >= 0 and not kept[last]:
                last -= 1
            if last < 0:
                break
        return batch

    def _kept(self, view: View, versions: list[int]) -> list[int]:
        """Return the places of the open step. Each is for groups of one version or older versions.

        A version keeps as many places as groups of this or older versions need beyond their places
        in later steps. A group uses the first place that fits, so kept places are used last. If no
        place is left for the newest versions, they have no entry.
        """
        kept, free, due = list[int](), max(0, view.groups_needed), 0
        held = view.versions
        for version in versions:
            if not free:
                break
            due += held[version]
            places = places_until(view, version + self.max_staleness, self.groups_per_step)
            spare = min(free, max(0, places - due))
            kept.append(free - spare)
            free = spare
        if kept:
            kept[-1] += free  # no version is newer
        return kept


@dataclass(frozen=True, slots=True)
class WeightFifo(Paced):
    """Oldest weight version first, in arrival order within a version.

    No group is trained while a group of an older version is in flight, unless that group is past
    the bound and cannot be trained any more. This order is earliest deadline first, so every group
    for which ``admit`` found a place is trained in time.
    """

    def select(self, view: View) -> list[int]:
        oldest = view.trainer_version - self.max_staleness
        in_flight = min(
            (version for version in view.in_flight_at if version >= oldest), default=None
        )
        versions = (
            version
            for version in sorted(view.ready_at)
            if version >= oldest and (in_flight is None or version <= in_flight)
        )
        in_order = (prompt_index for version in versions for prompt_index in view.ready_at[version])
        return list(islice(in_order, max(0, view.groups_needed)))
