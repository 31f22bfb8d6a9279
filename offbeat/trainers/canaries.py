"""Canaries: next-token distributions that a trainer adds to some of its weight releases."""

import msgspec

from offbeat.config.run import RunConfig
from offbeat.messages.weights import Canary
from offbeat.multimodal.canary_pictures import canary_prompts
from offbeat.trainers.backend import TrainerBackend
from offbeat.weight_sync.canary import KEPT, tolerance
from offbeat.weight_sync.precision import wire_formats
from offbeat.weight_sync.transport import PublishedRelease


class Canaries:
    """Adds a canary to every ``sync.canary_interval``-th release of a process, the first included.

    All ranks call ``add`` together, for every release that they publish.
    """

    def __init__(self, config: RunConfig) -> None:
        self._interval = config.sync.canary_interval
        self._tolerance = tolerance(*wire_formats(config.model.dtype, config.sync))
        # Another engine is asked for text alone: it would take placeholders for tokens
        self._with_pictures = config.generator.backend == "embedded"
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
