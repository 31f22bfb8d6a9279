"""Canaries: next-token distributions that a trainer adds to some of its weight releases."""

import msgspec

from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import PluginGeneratorConfig
from offbeat.messages.weights import Canary
from offbeat.models.media_canaries import Prompts, canary_prompts
from offbeat.models.media_rules import TEXT_ONLY
from offbeat.trainers.backend import TrainerBackend
from offbeat.weight_sync.canary import KEPT, prompts, tolerance
from offbeat.weight_sync.dtypes import wire_dtypes
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.wire_format import find_wire_format


class Canaries:
    """Adds a canary to every ``sync.canary_interval``-th release of a process, the first included.

    All ranks call ``add`` together, for every release that they publish.
    """

    def __init__(self, config: RunConfig) -> None:
        self._interval = config.sync.canary_interval
        self._quantize = config.sync.quantize
        engine = config.generator
        rounds = isinstance(engine, PluginGeneratorConfig) and engine.rounds_activations
        dtypes = wire_dtypes(config.model.dtype, config.sync)
        given = config.sync.canary_tolerance
        self._is_fixed = given is not None
        self._tolerance = given or tolerance(*dtypes, rounds_activations=rounds)
        # Another engine is asked for text alone: it would take placeholders for tokens
        self._with_media = config.generator.backend == "embedded"
        self._releases = 0  # published by this process

    def add(self, published: PublishedRelease, split: TrainerBackend) -> PublishedRelease:
        """Return the release, with a canary computed from the current weights if it is due."""
        is_due = bool(self._interval) and not self._releases % self._interval
        self._releases += 1
        if not is_due:
            return published
        asked = self._prompts(split)
        expected = split.top_logprobs(asked, KEPT, quantize=self._quantize)
        canary = Canary(asked, *expected, self._tolerance, self._is_fixed)
        manifest = msgspec.structs.replace(published.manifest, canary=canary)
        return published._replace(manifest=manifest)

    def _prompts(self, split: TrainerBackend) -> Prompts:
        if self._quantize is not None:
            return prompts(split.vocabulary, find_wire_format(self._quantize).canary_prompts)
        return canary_prompts(
            split.vocabulary, split.media_rules if self._with_media else TEXT_ONLY
        )
