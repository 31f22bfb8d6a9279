"""Sender of each ``sync.transport``, and the canaries that a trainer adds to some releases.

A process imports only the code for its transport.
"""

from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from offbeat.config.limits import shares_weights, trainer_device
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import PluginGeneratorConfig
from offbeat.messages.weights import Canary
from offbeat.models.media_canaries import Prompts, canary_prompts
from offbeat.models.media_rules import TEXT_ONLY
from offbeat.trainers.backend import TrainerBackend
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.canary import KEPT, prompts, tolerance
from offbeat.weight_sync.dtypes import wire_dtypes
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.transport import (
    DigestedSource,
    PublishedRelease,
    Sender,
    Source,
    WeightSource,
)
from offbeat.weight_sync.transport_plugin import find_transport_plugin
from offbeat.weight_sync.wire_format import find_wire_format


class SharedSource(Source, Protocol):
    """Weight source of which every rank holds a part."""

    def take_part(self) -> None:
        """Join the gathering while rank 0 iterates over all chunks."""
        ...


class NullSender:
    """Sender of every rank except rank 0. It joins the gathering and sends nothing."""

    handles = delta_handles = 0

    def __init__(self, source: SharedSource) -> None:
        self._source = source

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        del version, layout
        self._source.take_part()
        return PublishedRelease(self._source.manifest, "", ())

    def forget(self) -> None:
        """Do nothing, because rank 0 keeps the base."""

    def close(self) -> None:
        """Do nothing, because no thread was started."""


class Canaries:
    """Adds a canary to the first and every ``sync.canary_interval``-th release of a process.

    All ranks must call ``add`` together, for every release that they publish.
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
        # Other engines are asked only for text, because they would read placeholders as tokens
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


def make_sender(
    spec: TrainerSpec, source: WeightSource, host: Callable[[], str], incarnation: str, peers: Peers
) -> Sender:
    """Create the sender of a rank. All ranks must create theirs together.

    Args:
        spec: Spec of the rank.
        source: Weights of the rank. With several ranks, a ``ShardSource`` if every rank sends, else
            a ``SharedSource``.
        host: Returns the address at which other machines reach this one. Called only if needed.
        incarnation: Incarnation of this process.
        peers: All ranks.
    """
    config = spec.config.sync
    if (transport := find_transport_plugin(config)) is not None:
        device = trainer_device(spec.config.trainer)
        return transport.make_sender(config, source, host(), incarnation, peers, device)
    if spec.rank:
        return NullSender(cast("SharedSource", source))
    if shares_weights(spec.config):
        from offbeat.weight_sync.transport import InPlaceSender  # noqa: PLC0415

        return InPlaceSender(cast("DigestedSource", source))
    from offbeat.weight_sync.object_store import ObjectStoreSender  # noqa: PLC0415

    return ObjectStoreSender(cast("Source", source), delta=config.delta)
