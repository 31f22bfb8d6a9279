"""Trainer ranks of a simulated reshard: the buckets of each, and whether it answers.

Plan (``source_layout``) and agreement are the product's code. The content of a bucket is the digest
of its release, and so is its digest.
"""

from collections.abc import Callable, Mapping
from typing import Final

from offbeat.messages.weights import WeightRelease
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.processes import OUTSIDE
from offbeat.plugins.simulation.source_layout import source_plan
from offbeat.weight_sync.buckets import agree_on_digests
from offbeat.weight_sync.manifest import Manifest

_OTHERS_LIVE_S: Final = (0.0, 1.4)  # from the death of a rank to the end of the others
_FROZEN_S: Final = (2.0, 40.0)


class SourceRanks:
    """The ranks of one incarnation of the trainer, which serve their newest release.

    The controller sees them as one actor. Here each rank can die, hang, or diverge separately.
    """

    def __init__(self, host: Actor, context: SimulationContext) -> None:
        self._host, self._context, self.process = host, context, host.process
        self.plan = source_plan(context.source_layout)
        self._memory = context.machines.memory_of(host.name)
        ranks = range(context.source_layout.ranks)
        self._buckets = [self.plan.held_by(rank) for rank in ranks]
        self._held: list[dict[int, str]] = [{} for _ in ranks]
        self._digest = ""  # of the release that they serve
        self._dead, self._frozen = set[int](), set[int]()

    def publish(self, digest: str, *, diverges: bool) -> Manifest:
        """Serve this release from now on and return its manifest.

        Args:
            digest: Digest of the trainer's weights.
            diverges: Whether one copy of a bucket differs from the others. That copy belongs to the
                last rank that holds any bucket with copies.

        Raises:
            ReplicasDiverged: Copies of the same weights differ.
        """
        self._digest = ""
        self._held = [dict.fromkeys(each, digest) for each in self._buckets]
        if diverges:
            self._diverge(digest)
        sealed = self.plan.manifest.seal(self._agreed(self._held))
        self._digest = digest
        return sealed

    def _diverge(self, digest: str) -> None:
        for rank, buckets in reversed(list(enumerate(self._buckets))):
            for bucket in buckets:
                if len(self.plan.routes[bucket].holders) > 1:
                    self._held[rank][bucket] = f"diverged from {digest}"
                    return

    def _agreed(self, by_rank: list[dict[int, str]]) -> tuple[str, ...]:
        return agree_on_digests(by_rank, lambda bucket: f"bucket {bucket}")

    def refusal(self, rank: int, digest: str) -> str:
        """Return why a rank does not begin to send a release, or an empty string if it does."""
        if self.is_dead(rank):
            return "the sender is gone"
        if digest != self._digest:
            return "the sender holds another release by now"
        return ""

    def snapshot(self, rank: int) -> Mapping[int, str]:
        """Return the buckets of a rank's newest release. Streams send them until they end."""
        return self._held[rank]

    def is_dead(self, rank: int) -> bool:
        return rank in self._dead or not self.process.alive

    def hangs(self, rank: int) -> bool:
        """Return whether a rank neither sends nor ends its connections now."""
        context = self._context
        if context.machines.is_gone(self._memory) or not context.network.reaches(self._host.name):
            return True
        if self._dead or self._frozen:
            return rank in self._frozen
        return self.process.frozen

    def kill(self, rank: int) -> None:
        """Kill one rank. The others answer no more calls, and end a little later."""
        self._dead.add(rank)
        self._stop_calls()
        self._later(_OTHERS_LIVE_S, self._end)

    def freeze(self, rank: int) -> None:
        """Freeze one rank for a while. The others wait for it in their shared calls."""
        self._frozen.add(rank)
        self._stop_calls()
        self._later(_FROZEN_S, self._thaw)

    def _stop_calls(self) -> None:
        self._context.loop.freeze(self.process)

    def _later(self, between_s: tuple[float, float], callback: Callable[[], None]) -> None:
        delay_s = self._context.rng.uniform(*between_s)
        self._context.loop.run_in(delay_s, OUTSIDE, callback)

    def _end(self) -> None:
        if self._host.process is self.process:
            self._host.die()

    def _thaw(self) -> None:
        self._frozen.clear()
        if not self._dead:
            self._context.loop.thaw(self.process)


def ranks_of(release: WeightRelease) -> SourceRanks | None:
    """Return the ranks that send a release, or None if it is stored as a whole."""
    handle = next(iter(release.chunks), None)
    return handle if isinstance(handle, SourceRanks) else None
