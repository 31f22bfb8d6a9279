"""Receiving end of a reshard. Asks every source rank for its buckets, and others for missing ones.

It blocks, so run it in a separate thread. Every wait has a limit. The death of a sender is detected
immediately, and a hang at the time limit of a bucket. Then the other holders of its buckets are
asked.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from offbeat.plugins.reshard.choose_wire import make_wire
from offbeat.plugins.reshard.control import ControlClient
from offbeat.plugins.reshard.fetch import BucketFetch
from offbeat.plugins.reshard.group import BrokenLink, meet, open_connection
from offbeat.plugins.reshard.messages import Join, ShardRoute
from offbeat.plugins.reshard.section import BUCKETS_IN_FLIGHT, SENDERS_AT_ONCE
from offbeat.plugins.reshard.server import bucket_limit_s
from offbeat.plugins.reshard.wire import BucketLink, BucketWire
from offbeat.weight_sync.buckets import find_needed
from offbeat.weight_sync.chunks import BucketMemory, walk
from offbeat.weight_sync.errors import SenderGone, TransferFailed, TransferRefused
from offbeat.weight_sync.manifest import Manifest, digest_bytes

log = structlog.stdlib.get_logger()
_TURN_S: Final = 1.0  # interval at which an idle thread checks for failed senders
_ONLY_TCP: Final = "tcp, as no layout of this engine is recorded (docs/weight-sync.md)"
OnBucket = Callable[[int, BucketMemory], object]
"""Called with every complete bucket, from several threads, one call at a time."""


class ReceivedBuckets(NamedTuple):
    """Verified buckets of one receiver, and counts of their transfer."""

    buckets: tuple[BucketMemory, ...]  # in the order of the needed buckets
    resent: int  # buckets requested from another holder after a sender failed
    failed: dict[int, str]  # reason by failed sender


class ReshardReceiver:
    """One engine rank's end of a reshard. Its memory is reused when no bucket is referenced."""

    def __init__(
        self,
        member: str,
        rank: int = 0,
        device: str = "cpu",
        wires: Callable[[str, str], BucketWire] = make_wire,
    ) -> None:
        """Create one end.

        Args:
            member: Name of the engine, or of its worker.
            rank: Number of this receiver in the plan.
            device: Device into which device wires receive. tcp receives into main memory.
            wires: (name, device) -> one end of that wire. The receiver keeps it.
        """
        self.member, self.rank = member, rank
        self._device, self._make_wire = device, wires
        self._wires, self._lock = dict[str, BucketWire](), threading.Lock()
        self._plan = ""  # digest of the plan of the last transfer

    def receive(
        self,
        route: ShardRoute,
        epoch: int,
        manifest: Manifest,
        cancelled: threading.Event | None = None,
        on_bucket: OnBucket | None = None,
        needed: Sequence[int] | None = None,
        release: Manifest | None = None,
    ) -> ReceivedBuckets:
        """Receive and verify every bucket that this receiver needs.

        Args:
            route: The source ranks.
            epoch: Epoch of the transfer.
            manifest: Manifest of the whole release, or of its delta.
            cancelled: Event that stops the call at the next bucket.
            on_bucket: Called with each bucket. If it raises, the transfer ends.
            needed: Buckets to receive, or None for the plan's buckets of this receiver.
            release: Manifest that names the buckets' tensors in errors. None means ``manifest``.

        Raises:
            TransferFailed: No holder of a bucket could send it, or ``cancelled`` was set.
            SenderGone: All holders of a bucket have ended, or send a different release.
        """
        if needed is None:
            needed = find_needed(route.buckets, self.rank)
        self._go_by(manifest.digest)
        transfer = _Transfer(self, route, epoch, manifest, needed)
        transfer.cancelled = cancelled or threading.Event()
        transfer.on_bucket, transfer.named_by = on_bucket, release or manifest
        return transfer.run()

    def check_on_host(self, route: ShardRoute, epoch: int) -> None:
        """Check that a release can be received into main memory.

        Raises:
            TransferRefused: The ranks send from their devices, and only workers can receive that.
        """
        wire = route.senders[0].wire
        if wire != "tcp":
            raise TransferRefused(epoch, "sync.wire", wire, _ONLY_TCP)

    def wire(self, name: str) -> BucketWire:
        """Return this process's end of a wire."""
        with self._lock:
            if name not in self._wires:
                self._wires[name] = self._make_wire(name, self._device)
            return self._wires[name]

    def _go_by(self, plan: str) -> None:
        """Free the memory of the previous plan, because its buckets have different sizes."""
        with self._lock:
            if plan != self._plan:
                for each in self._wires.values():
                    each.release_memory()
            self._plan = plan


class _Transfer:
    def __init__(
        self,
        receiver: ReshardReceiver,
        route: ShardRoute,
        epoch: int,
        manifest: Manifest,
        needed: Sequence[int],
    ) -> None:
        self._receiver, self._route, self._epoch = receiver, route, epoch
        self._manifest, self._needed = manifest, needed
        # Engines begin with different senders, so that they do not all ask the same one at once
        first = zlib.crc32(receiver.member.encode())
        nbytes = manifest.chunk_nbytes
        self._fetch = BucketFetch(route.buckets, nbytes, receiver.rank, first=first, needed=needed)
        self._turn = threading.Condition()
        self._got = dict[int, BucketMemory]()
        self._error: Exception | None = None  # ends the transfer, even if senders are left
        self._asked = 0  # requests so far
        self.cancelled = threading.Event()
        self.on_bucket: OnBucket | None = None
        self.named_by = manifest

    def run(self) -> ReceivedBuckets:
        most = min(SENDERS_AT_ONCE, len(self._route.senders))
        name = f"fetch {self._epoch}"
        helpers = [threading.Thread(target=self._work, name=name) for _ in range(most - 1)]
        for each in helpers:
            each.start()
        self._work()
        for each in helpers:
            each.join()
        fetch = self._fetch
        if self._error is not None:
            raise self._error
        if fetch.lost:
            bucket, why = min(fetch.lost.items())
            detail = f"{why}; no other rank holds bucket {bucket} ({self._names(bucket)})"
            kind = SenderGone if fetch.is_release_gone else TransferFailed
            raise kind(self._epoch, bucket, detail)
        if fetch.failed:
            log.warning(
                "weights.resent", epoch=self._epoch, buckets=fetch.resent, failed=fetch.failed
            )
        return ReceivedBuckets(
            tuple(self._got[each] for each in self._needed), fetch.resent, dict(fetch.failed)
        )

    def _work(self) -> None:
        """Ask one sender after the other, until no bucket is left to ask for."""
        while (task := self._next()) is not None:
            sender, buckets = task
            why, gone = "", False
            try:
                self._pull(sender, buckets)
            except (BrokenLink, TransferFailed) as failure:
                why, gone = f"sender rank {sender}: {failure}", isinstance(failure, SenderGone)
            except Exception as error:  # noqa: BLE001 -- raised by ``run``
                with self._turn:
                    self._error = self._error or error
            with self._turn:
                if why:
                    self._fetch.fail(sender, why, gone=gone)
                else:
                    self._fetch.ended(sender)
                self._turn.notify_all()

    def _next(self) -> tuple[int, tuple[int, ...]] | None:
        with self._turn:
            while self._error is None and not self._fetch.is_over:
                if task := self._fetch.next():
                    return task
                self._turn.wait(_TURN_S)
            return None

    def _pull(self, sender: int, buckets: Sequence[int]) -> None:
        """Receive these buckets from one sender.

        Raises:
            BrokenLink: The sender ended or hangs.
            TransferFailed: The sender cannot be reached, refused, or sent a wrong bucket.
        """
        route, member = self._route.senders[sender], self._receiver.member
        wire = self._receiver.wire(route.wire)
        if problem := wire.refusal(route):
            raise TransferFailed(self._epoch, buckets[0], problem)
        with self._turn:
            self._asked += 1
            session = f"{self._epoch}.{member}.{self._receiver.rank}.{self._asked}"
        join = Join(
            session,
            self._epoch,
            member,
            route.incarnation,
            self._route.digest,
            tuple(buckets),
            self._manifest.digest,
        )
        control = ControlClient(route, self._epoch)
        try:
            control.send(join)
            answer = control.answer(buckets[0], 2 * route.timeouts.slack_s)
            if answer.error:
                kind = SenderGone if answer.gone else TransferFailed
                raise kind(self._epoch, buckets[0], answer.error)
            place = meet(route, session, 1)
            with open_connection(lambda: wire.link(place, route, control.address)) as link:
                self._take(link, wire, sender, buckets)
        finally:
            control.close()

    def _take(
        self, link: BucketLink, wire: BucketWire, sender: int, buckets: Sequence[int]
    ) -> None:
        sizes, timeouts = self._manifest.chunk_nbytes, self._route.senders[sender].timeouts
        for tag, bucket in enumerate(buckets):
            while link.in_flight < BUCKETS_IN_FLIGHT and tag + link.in_flight < len(buckets):
                ahead = tag + link.in_flight
                link.receive(wire.memory_to_receive(sizes[buckets[ahead]]), ahead)
            data = link.wait(bucket_limit_s(timeouts, sizes[bucket]))
            self._check(sender, bucket, data)
            with self._turn:
                if self.cancelled.is_set() or self._error is not None:
                    detail = "nobody waits for it any more"
                    self._error = self._error or TransferFailed(self._epoch, bucket, detail)
                    raise BrokenLink(detail)
                if self._fetch.took(sender, bucket):
                    self._got[bucket] = data
                    if self.on_bucket is not None:
                        self.on_bucket(bucket, data)
        link.finish(timeouts.slack_s)

    def _check(self, sender: int, bucket: int, data: BucketMemory) -> None:
        want, got = self._manifest.chunk_digests[bucket], digest_bytes(data)
        if got != want:
            detail = (
                f"sender rank {sender} sent bucket {bucket} ({self._names(bucket)}) with digest "
                f"{got}, expected {want}"
            )
            raise TransferFailed(self._epoch, bucket, detail)

    def _names(self, bucket: int) -> str:
        return next(each.tensors for each in walk(self.named_by) if each.index == bucket)
