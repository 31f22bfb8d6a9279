"""The receiving side of weight transfers, in threads next to the serving engine.

torch and the transport are imported when the first transfer arrives: a run on another transport
needs neither.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import structlog

from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.background import start_in_thread
from offbeat.weight_sync.bucket_memory import on_host
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.release_handle import ReleaseHandle
from offbeat.weight_sync.transport_plugin import ReleaseReceiver, find_transport

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory

log = structlog.stdlib.get_logger()
T = TypeVar("T")


class WeightFetcher:
    """Receives weight releases from the trainer ranks that hold their parts."""

    def __init__(self, member: str, device: str = "cpu") -> None:
        """Create the fetcher.

        Args:
            member: Name of the engine.
            device: Device where wires of devices receive.
        """
        self._member, self._device = member, device
        self._receiver: ReleaseReceiver | None = None  # of the transport of the first release
        self._has_joined = False

    async def fetch_buckets(
        self,
        route: ReleaseHandle,
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
        receiver, cancelled = self._get_receiver(route), threading.Event()
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
        route: ReleaseHandle,
        epoch: int,
        manifest: Manifest,
        release: Manifest | None = None,
    ) -> tuple[Bytes, ...]:
        """Do as ``fetch_buckets``, into main memory.

        Raises:
            TransferFailed: No rank that holds a bucket could send it.
            TransferRefused: The ranks send from their devices, and only workers can receive that.
        """
        self._get_receiver(route).check_on_host(route, epoch)
        buckets = await self.fetch_buckets(route, epoch, manifest, release)
        return tuple(on_host(each) for each in buckets)

    def _get_receiver(self, route: ReleaseHandle) -> ReleaseReceiver:
        if self._receiver is None:
            transport = find_transport(route.transport)
            self._receiver = transport.make_receiver(self._member, device=self._device)
        return self._receiver

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
