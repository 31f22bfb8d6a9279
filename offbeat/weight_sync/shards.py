"""Sources of a reshard. Each rank packs the buckets that it holds, using only its own shard."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from offbeat.weight_sync.buckets import BucketPlan, BucketRoute
from offbeat.weight_sync.chunks import WeightChunk, pack, walk
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.transport import BucketRoom, PackedBucket


class HeldShards:
    """Packs this rank's regions of a sharded model. Nothing is gathered."""

    manifest: Manifest
    routes: tuple[BucketRoute, ...]

    def __init__(
        self,
        plan: BucketPlan,
        rank: int,
        held: Callable[[], Iterable[TensorRegion]],
        plan_for: Callable[[EngineLayout], BucketPlan] | None = None,
    ) -> None:
        """Create the source.

        Args:
            plan: Plan of the releases, until ``follow``.
            rank: This rank.
            held: Returns this rank's regions, in memory that training updates.
            plan_for: Returns the plan for a layout of engines, the same on every rank. None keeps
                ``plan`` for every layout.
        """
        self._rank, self._held, self._plan_for = rank, held, plan_for
        self._adopt(plan)

    def follow(self, layout: EngineLayout) -> None:
        """Plan further releases for the needs of engine ranks with this layout."""
        if self._plan_for is not None:
            self._adopt(self._plan_for(layout))

    def _adopt(self, plan: BucketPlan) -> None:
        self.manifest, self.routes = plan.manifest, plan.routes
        mine = set(plan.held_by(self._rank))
        self._chunks = [each for each in walk(plan.manifest) if each.index in mine]
        self._pieces = dict[int, list[tuple[str, Region]]]()
        for piece in plan.manifest.pieces:
            if piece.chunk in mine:
                name = plan.manifest.tensors[piece.tensor].name
                self._pieces.setdefault(piece.chunk, []).append((name, piece.region))

    def pack_buckets(self, room: BucketRoom) -> Iterator[PackedBucket]:
        held = dict[str, list[TensorRegion]]()
        for each in self._held():
            held.setdefault(each.name, []).append(each)
        for chunk in self._chunks:
            views = self._views(chunk, held)
            into = room(chunk.index, chunk.nbytes)
            digest = pack(chunk, dict(zip(chunk.names, views, strict=True)), into)
            yield PackedBucket(chunk.index, into, digest)

    def _views(self, chunk: WeightChunk, held: dict[str, list[TensorRegion]]) -> list[Tensor]:
        return [
            next(
                each.values[region.within(each.region)]
                for each in held[name]
                if each.region.contains(region)
            )
            for name, region in self._pieces[chunk.index]
        ]
