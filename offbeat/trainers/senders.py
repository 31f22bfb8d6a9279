"""Sender of each ``sync.transport``. A process imports only what its transport needs."""

from collections.abc import Callable
from typing import cast

from offbeat.config.limits import shares_weights, trainer_device
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.ranks.sender import NullSender, SharedSource
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.transport import (
    DigestedSource,
    Sender,
    Source,
    WeightSource,
)
from offbeat.weight_sync.transport_plugin import find_transport_of


def make_sender(
    spec: TrainerSpec, source: WeightSource, host: Callable[[], str], incarnation: str, peers: Peers
) -> Sender:
    """Create the sender of a rank; all ranks create theirs together.

    Args:
        spec: Spec of the rank.
        source: Weights of the rank: with several ranks a ``ShardSource`` if every rank sends, else a
            ``SharedSource``.
        host: Returns the address at which other machines reach this one; called only if needed.
        incarnation: Incarnation of this process.
        peers: All ranks.
    """
    config = spec.config.sync
    if (transport := find_transport_of(config)) is not None:
        device = trainer_device(spec.config.trainer)
        return transport.make_sender(config, source, host(), incarnation, peers, device)
    if spec.rank:
        return NullSender(cast("SharedSource", source))
    if shares_weights(spec.config):
        from offbeat.weight_sync.in_place import InPlaceSender  # noqa: PLC0415

        return InPlaceSender(cast("DigestedSource", source))
    from offbeat.weight_sync.object_store import ObjectStoreSender  # noqa: PLC0415

    return ObjectStoreSender(cast("Source", source), delta=config.delta)
