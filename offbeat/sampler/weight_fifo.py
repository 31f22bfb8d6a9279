"""Implements ``weight_fifo``: batches by weight version. A batch waits for its oldest group."""

from dataclasses import dataclass
from itertools import islice

from offbeat.sampler.pacing import Paced
from offbeat.sampler.policy import View


@dataclass(frozen=True, slots=True)
class WeightFifo(Paced):
    """Oldest weight version first, in arrival order within a version.

    No group is trained while a group of an older version is in flight, unless that group is past
    the bound and cannot be trained any more. This is earliest deadline first, so every group for
    which ``admit`` found a place is trained in time.
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
