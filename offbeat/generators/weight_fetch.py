"""The receiving side of weight transfers, in threads next to the serving engine.

torch and the transport are imported when the first transfer arrives: a run on another transport
needs neither.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.background import start_in_thread
from offbeat.weight_sync.bucket_memory import on_host
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.transports.messages import ShardRoute

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.transports.reshard_receiver import ReshardReceiver

log = structlog.stdlib.get_logger()
T = TypeVar("T")
_ONLY_TCP: Final = "tcp, as no layout of this engine is recorded (docs/weight-sync.md)"


class WeightFetcher:
    """Receives weight releases from the trainer ranks that hold their parts."""

    def __init__(self, member: str, device: str = "cpu") -> None:
        """Create the fetcher.

        Args:
            member: Name of the engine.
            device: Device where wires of devices receive.
        """
        self._member, self._device = member, device
        self._receiver: ReshardReceiver | None = None
        self._has_joined = False

    async def fetch_buckets(
        self,
        route: ShardRoute,
        epoch: int,
        manifest: Manifest,
        release: Manifest | None = None,
    ) -> "tuple[BucketMemory, ...]":
        """Receive and verify all buckets of a release from the ranks that hold them.

        Also those that the plan has for other ranks of an engine alone. A cancelled fetch stops at
        the next bucket, or at that bucket's deadline.

        Args:
            route: The ranks.
            epoch: Epoch of the transfer.
            manifest: Manifest of the release, or of what it changes.
            release: Manifest that names the tensors, for errors; None: ``manifest``.

        Raises:
            TransferFailed: No rank that holds a bucket could send it.
        """
        from offbeat.weight_sync.transports.reshard_receiver import (  # noqa: PLC0415 -- see above
            ReshardReceiver,
        )

        if self._receiver is None:
            self._receiver = ReshardReceiver(self._member, device=self._device)
        receiver, cancelled = self._receiver, threading.Event()
        everything = range(len(route.buckets))
        try:
            received = await in_thread(
                f"fetch {epoch}",
                lambda: receiver.receive(
                    route, epoch, manifest, cancelled, needed=everything, release=release
                ),
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return received.buckets

    async def fetch_on_host(
        self,
        route: ShardRoute,
        epoch: int,
        manifest: Manifest,
        release: Manifest | None = None,
    ) -> tuple[Bytes, ...]:
        """Do as ``fetch_buckets``, into main memory.

        Raises:
            TransferFailed: No rank that holds a bucket could send it.
            TransferRefused: The ranks send from their devices, and only workers can receive that.
        """
        wire = route.senders[0].wire
        if wire != "tcp":
            raise TransferRefused(epoch, "sync.wire", wire, _ONLY_TCP)
        buckets = await self.fetch_buckets(route, epoch, manifest, release)
        return tuple(on_host(each) for each in buckets)

    async def joined(
        self, release: WeightRelease, buckets: "tuple[BucketMemory, ...]", reason: str
    ) -> WeightRelease:
        """Return a verified release of regions as one of whole tensors; log the reason once.

        Raises:
            TransferRefused: The buckets are not those of the release with this digest.
        """
        from offbeat.weight_sync.region_tensors import joined_release  # noqa: PLC0415 -- see above

        if not self._has_joined:
            self._has_joined = True
            tensors = release.manifest.tensors
            log.warning(
                "weights.whole_tensors",
                engine=self._member,
                tensors=len(tensors),
                nbytes=sum(spec.nbytes for spec in tensors),
                reason=reason,
            )
        return await in_thread("whole tensors", lambda: joined_release(release, buckets))


async def in_thread(name: str, work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread and return its result.

    If the caller is cancelled, the work runs to its end and its result is discarded.
    """
    return await asyncio.wrap_future(start_in_thread(work, name))
