"""Delta releases: the interface for the core."""

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
        """Report the requirements of deltas, and warn if they can hardly save a byte."""
        from offbeat.plugins.delta.checks import check_delta_settings

        yield check_delta_settings(config)

    def make_packer(self) -> "ShardDeltas":
        """Return a packer of a trainer rank's releases and their deltas."""
        from offbeat.plugins.delta.shard_deltas import ShardDeltas

        return ShardDeltas()

    def keep_release(self, engine: str) -> "KeptBase":
        """Return a holder of the release that an engine serves, initially empty."""
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
        """Return verified buckets of a release, rebuilt from the base's buckets and changes.

        Raises:
            TransferRefused: The changes are of other buckets.
        """
        from offbeat.plugins.delta.shard_deltas import rebuilt_buckets

        return rebuilt_buckets(epoch, release, buckets, base, parts)


DELTA: Final = Deltas()
