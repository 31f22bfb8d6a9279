"""Implements ``ready_first``: ready groups train first, and no group ever gets too old to train."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.sampler.pacing import Paced, places_until
from offbeat.sampler.policy import View


@dataclass(frozen=True, slots=True)
class ReadyFirst(Paced):
    """Arrival order, with places kept for the groups that would otherwise grow too old.

    A ready group is passed over when taking it would leave an older one, still in flight, without a
    place. So a step waits for its oldest stragglers rather than discarding them.
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
                continue  # drawn before its last place went
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
        """The places of the open step, each for groups of one of these versions or an older one.

        As many are kept for a version as the groups up to it need beyond the places they will have
        in later steps. A group takes the first place that will do, so the kept ones go last.
        The newest versions have no entry when none is left for them.
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
            kept[-1] += free  # nobody is newer
        return kept
