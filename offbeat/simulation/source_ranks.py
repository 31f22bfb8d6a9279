"""Trainer ranks of a simulated reshard: which buckets each of them holds, and whether it answers.

Plan and agreement are those of the product, for a model as small as one gets. The content of a
bucket is the digest of the release that it is of, and so is its digest.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

from offbeat.messages.weights import WeightRelease
from offbeat.simulation.actor import Actor
from offbeat.simulation.context import SimulationContext
from offbeat.simulation.processes import OUTSIDE
from offbeat.weight_sync.manifest import Manifest, TensorMeta
from offbeat.weight_sync.reshard.agreement import agreed_digests
from offbeat.weight_sync.reshard.buckets import BucketPlan, NamedRegion, plan_buckets
from offbeat.weight_sync.reshard.region import Region

_ROWS: Final = 12
_COLUMNS: Final = 4
_BUCKET_BYTES: Final = 32  # four rows of 16 bits
_OTHERS_LIVE_S: Final = (0.0, 1.4)  # from the death of a rank to the end of the others
_FROZEN_S: Final = (2.0, 40.0)


@cache
def source_plan(shards: int, copies: int) -> BucketPlan:
    """Return the plan of a matrix that is cut into shards, and of a vector that all ranks hold."""
    rows = _ROWS // shards
    held = list[list[NamedRegion]]()
    for rank in range(shards * copies):
        start = rank % shards * rows
        mine = Region((start, 0), (start + rows, _COLUMNS))
        held.append([("matrix", mine), ("vector", Region.whole((_COLUMNS,)))])
    tensors = [
        TensorMeta("matrix", (_ROWS, _COLUMNS), "bfloat16"),
        TensorMeta("vector", (_COLUMNS,), "bfloat16"),
    ]
    return plan_buckets(tensors, held, _BUCKET_BYTES)


class SourceRanks:
    """The ranks of one incarnation of the trainer, which serve their newest release.

    They are one actor for the controller; here each of them can die, hang, or diverge alone.
    """

    def __init__(self, host: Actor, context: SimulationContext) -> None:
        self._host, self._context, self.process = host, context, host.process
        self.plan = source_plan(*context.source_layout)
        self._memory = context.machines.memory_of(host.name)
        ranks = range(math.prod(context.source_layout))
        self._buckets = [self.plan.held_by(rank) for rank in ranks]
        self._held: list[dict[int, str]] = [{} for _ in ranks]
        self._digest = ""  # of the release that they serve
        self._dead, self._frozen = set[int](), set[int]()

    def publish(self, digest: str, *, diverges: bool) -> Manifest:
        """Serve this release from here on; return its manifest.

        Args:
            digest: Digest of the trainer's weights.
            diverges: Whether the last rank's copy of a bucket differs from that of the others.

        Raises:
            ReplicasDiverged: Copies of the same weights differ.
        """
        self._digest = ""
        self._held = [dict.fromkeys(each, digest) for each in self._buckets]
        if diverges:
            self._diverge(digest)
        sealed = self.plan.manifest.sealed(self._agreed(self._held))
        self._digest = digest
        return sealed

    def _diverge(self, digest: str) -> None:
        rank = len(self._held) - 1
        for bucket in self._buckets[rank]:
            if len(self.plan.routes[bucket].holders) > 1:
                self._held[rank][bucket] = f"diverged from {digest}"
                return

    def _agreed(self, by_rank: list[dict[int, str]]) -> tuple[str, ...]:
        return agreed_digests(by_rank, lambda bucket: f"bucket {bucket}")

    def refusal(self, rank: int, digest: str) -> str:
        """Return why a rank does not begin to send a release; empty if it does."""
        if self.is_dead(rank):
            return "the sender is gone"
        if digest != self._digest:
            return "the sender holds another release by now"
        return ""

    def snapshot(self, rank: int) -> Mapping[int, str]:
        """Return the buckets of a rank's newest release, which streams send to their end."""
        return self._held[rank]

    def is_dead(self, rank: int) -> bool:
        return rank in self._dead or not self.process.alive

    def hangs(self, rank: int) -> bool:
        """Return whether a rank neither sends nor ends its connections at this moment."""
        context = self._context
        if context.machines.is_gone(self._memory) or not context.network.reaches(self._host.name):
            return True
        if self._dead or self._frozen:
            return rank in self._frozen
        return self.process.frozen

    def kill(self, rank: int) -> None:
        """Kill one rank; the others answer their calls no more, and end with it a little later."""
        self._dead.add(rank)
        self._stop_calls()
        self._later(_OTHERS_LIVE_S, self._end)

    def freeze(self, rank: int) -> None:
        """Freeze one rank for a while, for which the others wait in the calls that they share."""
        self._frozen.add(rank)
        self._stop_calls()
        self._later(_FROZEN_S, self._thaw)

    def _stop_calls(self) -> None:
        self._context.loop.freeze(self.process)

    def _later(self, between_s: tuple[float, float], callback: Callable[[], None]) -> None:
        loop = self._context.loop
        loop.at(loop.time() + self._context.rng.uniform(*between_s), OUTSIDE, callback)

    def _end(self) -> None:
        if self._host.process is self.process:
            self._host.die()

    def _thaw(self) -> None:
        self._frozen.clear()
        if not self._dead:
            self._context.loop.thaw(self.process)


def ranks_of(release: WeightRelease) -> SourceRanks | None:
    """Return the ranks that send a release; None if it is stored as a whole."""
    handle = next(iter(release.chunks), None)
    return handle if isinstance(handle, SourceRanks) else None
