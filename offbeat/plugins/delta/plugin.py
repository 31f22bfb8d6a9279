"""Releases by what they change: what the core asks of them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from offbeat.messages.finding import Finding
from offbeat.weight_sync.delta_plugin import DeltaPlugin

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.plugins.delta.kept_release import KeptBase
    from offbeat.plugins.delta.shard_deltas import ShardDeltas
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.manifest import Bytes, Manifest


class Deltas(DeltaPlugin):
    """Sends changed words, and rebuilds chunks from them."""

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Say what deltas need, and warn where they can hardly save a byte."""
        from offbeat.plugins.delta.checks import check_delta_settings

        yield check_delta_settings(config)

    def make_packer(self) -> "ShardDeltas":
        """Return what packs the releases of a trainer rank with their deltas."""
        from offbeat.plugins.delta.shard_deltas import ShardDeltas

        return ShardDeltas()

    def keep_release(self, engine: str) -> "KeptBase":
        """Return what keeps the release that an engine serves; at first there is none."""
        from offbeat.plugins.delta.kept_release import KeptBase

        return KeptBase(engine)

    def rebuild_buckets(
        self,
        epoch: int,
        release: "Manifest",
        buckets: Sequence[int],
        base: "Sequence[BucketMemory]",
        parts: "Sequence[BucketMemory]",
    ) -> "tuple[Bytes, ...]":
        """Return some buckets of a release, verified, from those of its base and their changes.

        Raises:
            TransferRefused: The changes are not of these buckets.
        """
        from offbeat.plugins.delta.shard_deltas import rebuilt_buckets

        return rebuilt_buckets(epoch, release, buckets, base, parts)


DELTA: Final = Deltas()
