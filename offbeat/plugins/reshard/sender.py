"""Sender of a reshard on a trainer rank. It snapshots its shard and sends the buckets it holds."""

from typing import Final

import msgspec

from offbeat.messages.weights import FullReason, WeightDelta
from offbeat.plugins.reshard.choose_wire import make_wire
from offbeat.plugins.reshard.messages import Route, ShardRoute, TransferTimeouts
from offbeat.plugins.reshard.section import ReshardSyncConfig
from offbeat.plugins.reshard.server import (
    OfferedRelease,
    ReshardServer,
)
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks
from offbeat.weight_sync.buckets import agree_on_digests
from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.delta_plugin import PackedShard, ShardChanges, make_packer
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import PlansDiffer, TransferFailed
from offbeat.weight_sync.manifest import Manifest, release_digest
from offbeat.weight_sync.transport import PublishedRelease, ShardSource, WeightSource, WholeShards

_ROUTES: Final = msgspec.msgpack.Decoder(Route)
_TEXT: Final = msgspec.msgpack.Decoder(str)
_DIGESTS: Final = msgspec.msgpack.Decoder(dict[int, str])
_CHANGES: Final = msgspec.msgpack.Decoder(ShardChanges)


class ReshardSender:
    """Publishes this rank's shard. All ranks must create a sender together, and publish together.

    For a release, ranks exchange digests and sizes of buckets, never weights.
    """

    handles = 1

    def __init__(
        self, source: ShardSource, server: ReshardServer, peers: Peers, *, delta: bool = False
    ) -> None:
        """Compare the plans of all ranks, and collect their addresses.

        Args:
            source: This rank's shard.
            server: Server of the shard.
            peers: All ranks.
            delta: Whether each release also has its changes since the previous one.

        Raises:
            PlansDiffer: Two ranks have different plans.
        """
        self._source, self._server, self._peers = source, server, peers
        self._packer, self.delta_handles = make_packer(delta=delta), int(delta)
        self._compare_plans()
        self._routes = tuple(peers.all_gather(server.route, _ROUTES))

    def _follow(self, layout: EngineLayout) -> None:
        before = self._source.manifest.digest
        run_on_all_ranks(self._peers, "plan", lambda: self._source.follow(layout))
        self._compare_plans()
        if self._source.manifest.digest != before:  # the new buckets have different sizes
            self._server.wire.release_memory()
            self._packer.forget()

    def _compare_plans(self) -> None:
        plans = self._peers.all_gather(self._source.manifest.digest, _TEXT)
        if other := next((rank for rank, each in enumerate(plans) if each != plans[0]), None):
            raise PlansDiffer((0, other), (plans[0], plans[other]))

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        """Publish a snapshot of this rank's shard. The shard may change as soon as this returns.

        If a layout is given, this and further releases are cut for engines of this layout.

        Raises:
            PlansDiffer: Two ranks have different plans.
            TransferFailed: The serving thread has ended.
            ReplicasDiverged: Two ranks hold different values of the same weights.
        """
        if layout is not None:
            self._follow(layout)
        packed = run_on_all_ranks(self._peers, "publish", self._pack)
        mine = {each.bucket: each.digest for each in packed.buckets}
        by_rank = self._peers.all_gather(mine, _DIGESTS)
        manifest = self._source.manifest
        sealed = manifest.seal(agree_on_digests(by_rank, self._names))
        digest = release_digest(sealed, sealed.chunk_digests)
        delta, full_reason = self._agree(packed.changes, sealed, digest)
        changes = None
        if delta is not None:
            changes = OfferedRelease(delta.manifest.digest, delta.digest, packed.parts)
        buckets = {each.bucket: each.data for each in packed.buckets}
        self._server.offer(OfferedRelease(manifest.digest, digest, buckets, changes))
        self._packer.published(digest, manifest.digest, buckets)
        if self._peers.rank:
            return PublishedRelease(sealed, digest, ())
        if delta is not None:
            delta = msgspec.structs.replace(delta, chunks=(self._route(version, delta.digest),))
        route = self._route(version, digest)
        return PublishedRelease(sealed, digest, (route,), delta, full_reason)

    def _agree(
        self, changes: ShardChanges, sealed: Manifest, digest: str
    ) -> tuple[WeightDelta | None, FullReason | None]:
        if not self.delta_handles:
            return None, None
        by_rank = self._peers.all_gather(changes, _CHANGES)
        return self._packer.agree(by_rank, sealed, digest, self._names)

    def _route(self, version: int, digest: str) -> ShardRoute:
        senders = tuple(
            msgspec.structs.replace(each, version=version, digest=digest) for each in self._routes
        )
        return ShardRoute(version, digest, self._source.routes, senders)

    def forget(self) -> None:
        """Forget the last release as a base."""
        self._packer.forget()

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._server.close()

    def _pack(self) -> PackedShard:
        if self._server.ended:
            raise TransferFailed(0, 0, f"the weight server has ended: {self._server.ended}")
        self._server.offer(None)  # reuse its memory, unless an engine is still receiving it
        wire = self._server.wire
        return self._packer.pack(self._source, lambda _, nbytes: wire.memory_to_send(nbytes))

    def _names(self, bucket: int) -> str:
        return next(each.tensors for each in walk(self._source.manifest) if each.index == bucket)


def make_reshard_sender(
    config: ReshardSyncConfig,
    source: WeightSource,
    host: str,
    incarnation: str,
    peers: Peers,
    device: str,
) -> ReshardSender:
    """Create the sender of a rank, and the server for engines. All ranks must call it together."""
    shards = source if isinstance(source, ShardSource) else WholeShards(source)
    timeouts = TransferTimeouts(config.slowest_mib_s * 2**20, config.slack_s)
    wire = make_wire(config.wire, device)
    server = ReshardServer(host=host, incarnation=incarnation, timeouts=timeouts, wire=wire)
    return ReshardSender(shards, server, peers, delta=config.delta)
