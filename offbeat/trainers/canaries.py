"""Canaries: next-token distributions that a trainer adds to some of its weight releases."""

import msgspec

from offbeat.config.sections.sync import SyncConfig
from offbeat.messages.weights import Canary
from offbeat.multimodal.canary_pictures import canary_prompts
from offbeat.trainers.backend import TrainerBackend
from offbeat.weight_sync.canary import KEPT, tolerance
from offbeat.weight_sync.transport import PublishedRelease


class Canaries:
    """Adds a canary to every ``sync.canary_interval``-th release of a process, the first included.

    All ranks call ``add`` together, for every release that they publish.
    """

    def __init__(self, sync: SyncConfig, model_dtype: str, *, with_pictures: bool = False) -> None:
        """``with_pictures``: the engines can compute canary prompts with pictures."""
        self._interval = sync.canary_interval
        self._tolerance = tolerance(model_dtype, sync.wire_dtype)
        self._with_pictures = with_pictures
        self._releases = 0  # published by this process

    def add(self, published: PublishedRelease, split: TrainerBackend) -> PublishedRelease:
        """Return the release, with a canary computed from the current weights if it is due."""
        is_due = bool(self._interval) and not self._releases % self._interval
        self._releases += 1
        if not is_due:
            return published
        asked = canary_prompts(
            split.vocabulary, split.picture_rules if self._with_pictures else None
        )
        canary = Canary(asked, *split.top_logprobs(asked, KEPT), self._tolerance)
        manifest = msgspec.structs.replace(published.manifest, canary=canary)
        return published._replace(manifest=manifest)
