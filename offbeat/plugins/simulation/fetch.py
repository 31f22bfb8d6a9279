"""One simulated engine's fetch of a release from the trainer ranks that hold its buckets.

The product's state machine, ``BucketFetch``, decides which rank is asked for which bucket, and
which is asked again. Streams, time and faults are simulated. Every bucket is a separate event, so
that a fault can occur between any two.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from offbeat.messages.failures import ReleaseLost, WeightSyncFailed
from offbeat.messages.weights import WeightRelease
from offbeat.plugins.reshard.fetch import BucketFetch
from offbeat.plugins.reshard.section import SENDERS_AT_ONCE, ReshardSyncConfig
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.faults import FaultMoment
from offbeat.plugins.simulation.network import HELD_BACK_S
from offbeat.plugins.simulation.records import FetchBegan, FetchEnded
from offbeat.plugins.simulation.source_layout import rank_name
from offbeat.plugins.simulation.source_ranks import SourceRanks

CANCELLED: Final = "nobody waits for it any more"
_NEVER: Final = ("bucket_lost", "rank_frozen")
"""Faults after which a bucket does not arrive, while its sender's connection stays."""


class _Stream(msgspec.Struct, eq=False):
    """One request to one rank, which sends the buckets one after another."""

    sender: int
    buckets: tuple[int, ...]
    snapshot: Mapping[int, str]
    bucket_s: float  # time between two buckets
    arrived: int = 0
    is_over: bool = False


class SimulatedFetch:
    """A fetch of one release by one engine process."""

    def __init__(
        self,
        engine: Actor,
        incarnation: str,
        epoch: int,
        release: WeightRelease,
        ranks: SourceRanks,
        takes_s: float,
        on_end: Callable[[Exception | None, str], None],
    ) -> None:
        """Prepare a fetch.

        Args:
            engine: The actor that receives.
            incarnation: Its incarnation.
            epoch: Epoch of the transfer.
            release: The release that it was asked to load.
            ranks: The senders.
            takes_s: Seconds that one rank needs to send the requested buckets.
            on_end: Called once, with the failure of the fetch, if it failed, and with the content
                of its buckets.
        """
        self._engine, self._incarnation, self._epoch = engine, incarnation, epoch
        self._release, self._ranks, self._takes_s = release, ranks, takes_s
        self._on_end, self._context = on_end, engine.context
        sync = engine.context.config.sync
        self._limit_s = sync.slack_s if isinstance(sync, ReshardSyncConfig) else 1.0
        plan, first = ranks.plan, zlib.crc32(engine.name.encode())
        self._fetch = BucketFetch(plan.routes, plan.manifest.chunk_nbytes, first=first)
        self._got = dict[int, str]()
        self._streams = 0  # open ones
        self._is_over = False

    def start(self) -> None:
        """Ask the first ranks."""
        release, began = self._release, (self._engine.name, self._incarnation, self._epoch)
        self._context.record(FetchBegan, *began, release.version, release.digest)
        self._ask()

    def stop(self) -> None:
        """End the fetch because its caller has cancelled it."""
        if not self._is_over:
            self._end(CANCELLED)

    # --- streams ---------------------------------------------------------------------------------

    def _ask(self) -> None:
        fetch = self._fetch
        while self._streams < SENDERS_AT_ONCE and (task := fetch.next()) is not None:
            self._streams += 1
            self._open(*task)
        if not self._streams and fetch.is_over:
            self._end(self._problem())

    def _open(self, sender: int, buckets: tuple[int, ...]) -> None:
        ranks, bucket_s = self._ranks, self._takes_s / len(buckets)
        stream = _Stream(sender, buckets, ranks.snapshot(sender), bucket_s)
        if why := ranks.refusal(sender, self._release.digest):
            self._engine.later(self._context.network.latency(), self._broken, stream, why, True)  # noqa: FBT003
        else:
            self._engine.later(bucket_s, self._due, stream)

    def _due(self, stream: _Stream) -> None:
        """Handle the arrival of the next bucket of a stream, unless a fault prevents it."""
        if self._is_over or stream.is_over:
            return
        ranks, engine, context = self._ranks, self._engine, self._context
        if ranks.is_dead(stream.sender):
            self._broken(stream, "the sender ended")
            return
        kind = context.faults.at(FaultMoment.BUCKET, engine.name, rank_name(stream.sender))
        if kind == "rank_killed":
            ranks.kill(stream.sender)
            self._broken(stream, "the sender ended")
        elif kind == "fetch_kills":
            engine.die()
        elif (
            kind in _NEVER or ranks.hangs(stream.sender) or not context.network.reaches(engine.name)
        ):
            if kind == "rank_frozen":
                ranks.freeze(stream.sender)
            engine.later(self._limit_s, self._broken, stream, "the sender hangs")
        elif kind == "bucket_late":
            late_s = context.rng.uniform(*HELD_BACK_S)
            engine.later(late_s, self._arrives, stream, kind)
            if late_s > self._limit_s:
                engine.later(self._limit_s, self._broken, stream, "the sender hangs")
        else:
            self._arrives(stream, kind)

    def _arrives(self, stream: _Stream, kind: str) -> None:
        if self._is_over:
            return
        bucket = stream.buckets[stream.arrived]
        content = stream.snapshot[bucket]
        if kind == "bucket_corrupted":
            content = f"not {content}"
        for _ in range(2 if kind == "bucket_doubled" else 1):
            if not self._took(stream.sender, bucket, content):
                self._broken(stream, "it sent a bucket with another digest")
        if stream.is_over:
            return
        stream.arrived += 1
        if stream.arrived < len(stream.buckets):
            self._engine.later(stream.bucket_s, self._due, stream)
        else:
            self._fetch.ended(stream.sender)
            self._close(stream)

    def _took(self, sender: int, bucket: int, content: str) -> bool:
        """Keep a requested bucket, or return False if it differs from the published one."""
        if content != self._release.manifest.chunk_digests[bucket]:
            return False
        if self._fetch.took(sender, bucket):
            self._got[bucket] = content
        return True

    def _broken(self, stream: _Stream, why: str, gone: bool = False) -> None:  # noqa: FBT001, FBT002
        if not (self._is_over or stream.is_over):
            self._fetch.fail(stream.sender, why, gone=gone)
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        stream.is_over = True
        self._streams -= 1
        self._ask()

    # --- end -------------------------------------------------------------------------------------

    def _problem(self) -> str:
        for bucket, why in sorted(self._fetch.lost.items()):
            return f"{why}; no other rank holds bucket {bucket}"
        return ""

    def _end(self, problem: str) -> None:
        self._is_over = True
        buckets = range(len(self._ranks.plan.routes))
        contents = sorted({self._got.get(each, "missing") for each in buckets})
        ended = self._engine.name, self._incarnation, self._epoch
        self._context.record(FetchEnded, *ended, problem, tuple(contents), self._fetch.resent)
        if problem != CANCELLED:
            content = contents[0] if len(contents) == 1 else f"torn: {contents}"
            self._on_end(self._failure(problem) if problem else None, content)

    def _failure(self, problem: str) -> Exception:
        engine, version = self._engine.name, self._release.version
        if self._fetch.is_release_gone:
            return ReleaseLost(engine, version, problem)
        return WeightSyncFailed(engine, self._epoch, version, problem)
