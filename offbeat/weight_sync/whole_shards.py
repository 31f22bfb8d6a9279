"""Shards of a trainer of one rank, which are whole tensors. Loads no torch."""

from collections.abc import Iterator
from typing import cast

from offbeat.weight_sync.buckets import BucketRoute
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.transport import BucketRoom, PackedBucket, Room, Source


class WholeShards:
    """Packs the whole tensors of a trainer of one rank: every chunk is a bucket."""

    def __init__(self, source: Source) -> None:
        self._source, self.manifest = source, source.manifest  # of whole tensors, for any engine
        route = BucketRoute((0,), ((0, 0),))
        self.routes = (route,) * len(source.manifest.chunk_nbytes)

    def follow(self, layout: EngineLayout) -> None:
        """Do nothing: whole tensors hold what any rank needs."""
        del layout

    def packed(self, room: BucketRoom) -> Iterator[PackedBucket]:
        chunks = self._source.chunks(cast("Room", room))  # they are packed into any memory
        for index, (data, digest) in enumerate(chunks):
            yield PackedBucket(index, data, digest)
