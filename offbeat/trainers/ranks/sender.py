"""Sender of weight sync on a rank: rank 0 sends for all, or every rank what it holds."""

from collections.abc import Callable
from typing import Protocol, cast

from offbeat.config.limits import trainer_device
from offbeat.config.sections.sync import ReshardSyncConfig
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.transport import (
    FollowsLayout,
    PublishedRelease,
    Sender,
    ShardSource,
    Source,
    WeightSource,
)
from offbeat.weight_sync.transports.messages import TransferTimeouts
from offbeat.weight_sync.transports.object_store import ObjectStoreSender


class SharedSource(Source, Protocol):
    """Weight source of which every rank has a part."""

    def take_part(self) -> None:
        """Take part in the gathering while rank 0 iterates over all chunks."""
        ...


class NullSender:
    """Sender of every rank but rank 0: it takes part in the gathering and sends nothing."""

    handles = delta_handles = 0

    def __init__(self, source: SharedSource) -> None:
        self._source = source

    def publish(self, version: int) -> PublishedRelease:
        del version
        self._source.take_part()
        return PublishedRelease(self._source.manifest, "", ())

    def forget(self) -> None:
        """Do nothing: rank 0 keeps the base."""

    def close(self) -> None:
        """Do nothing: no thread was started."""


def sender_of(
    spec: TrainerSpec, source: WeightSource, host: Callable[[], str], incarnation: str, peers: Peers
) -> Sender:
    """Create the sender of a rank; all ranks create theirs together.

    With several ranks ``source`` is a ``ShardSource`` where every rank sends, else a
    ``SharedSource``.
    """
    config = spec.config.sync
    if config.transport == "reshard":
        device = trainer_device(spec.config.trainer)
        return _reshard_sender(config, source, host(), incarnation, peers, device)
    if spec.rank:
        return NullSender(cast("SharedSource", source))
    return ObjectStoreSender(cast("Source", source), delta=config.delta)


def publish(sender: Sender, version: int, layout: EngineLayout | None) -> PublishedRelease:
    """Publish a snapshot, cut for engines of this layout from here on; None: as so far."""
    if layout is not None and isinstance(sender, FollowsLayout):
        sender.follow(layout)
    return sender.publish(version)


def _reshard_sender(
    config: ReshardSyncConfig,
    source: WeightSource,
    host: str,
    incarnation: str,
    peers: Peers,
    device: str,
) -> Sender:
    from offbeat.trainers.ranks.reshard_sender import ReshardSender  # noqa: PLC0415 -- loads torch
    from offbeat.weight_sync.shards import WholeShards  # noqa: PLC0415
    from offbeat.weight_sync.transports.choose_wire import make_wire  # noqa: PLC0415
    from offbeat.weight_sync.transports.reshard_server import ReshardServer  # noqa: PLC0415

    shards = source if isinstance(source, ShardSource) else WholeShards(source)
    wire = make_wire(config.wire, device)
    timeouts = TransferTimeouts(config.slowest_mib_s * 2**20, config.slack_s)
    server = ReshardServer(host=host, incarnation=incarnation, timeouts=timeouts, wire=wire)
    return ReshardSender(shards, server, peers, delta=config.delta)
