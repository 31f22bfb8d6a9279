"""Brings the tensors of an incoming release into an engine's process, on any transport.

    chunks         arrive with the call, through the object store
    buckets        are fetched from the trainer ranks that hold them
    a delta        arrives either way; the release's chunks are rebuilt from it and its base
    initial ones   are not fetched, because the engine was created with these weights

Blocking work runs in threads next to the serving engine. torch and the transport are imported only
when the first transfer arrives, because runs on other transports need neither.
"""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog

from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.background import in_thread
from offbeat.weight_sync.delta_plugin import CheckedBase
from offbeat.weight_sync.manifest import Bytes, Manifest, on_host
from offbeat.weight_sync.transport import ReleaseHandle
from offbeat.weight_sync.transport_plugin import ReleaseReceiver, find_transport

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory

log = structlog.stdlib.get_logger()


class WeightFetcher:
    """Fetches releases for one engine from the trainer ranks that hold their parts."""

    def __init__(self, member: str, device: str = "cpu", *, keeps_base: bool = False) -> None:
        """Create the fetcher.

        Args:
            member: Name of the engine.
            device: Device into which device wires receive.
            keeps_base: Whether the engine uses deltas. Deltas and their bases are transferred only
                between main memories.
        """
        self.member, self._device, self._only_on_host = member, device, keeps_base
        self._receiver: ReleaseReceiver | None = None  # of the transport of the first release
        self._has_joined = False

    async def fetch(
        self, ranks: ReleaseHandle, epoch: int, sent: Manifest, release: Manifest, *, to_host: bool
    ) -> "tuple[BucketMemory, ...]":
        """Receive and verify all buckets of a release from the ranks that hold them.

        This includes buckets that the plan intends only for other ranks of the engine. A cancelled
        fetch stops at the next bucket, or at the deadline of the present one.

        Args:
            ranks: Handle with the ranks.
            epoch: Epoch of the transfer.
            sent: Manifest of the release, or of its delta.
            release: Manifest of the release. Errors use its tensor names.
            to_host: Whether the buckets must be in main memory.

        Raises:
            TransferFailed: No rank that holds a bucket could send it.
            TransferRefused: The ranks send from their devices, and only workers can receive that.
        """
        receiver, cancelled = self._get_receiver(ranks), threading.Event()
        to_host = to_host or self._only_on_host
        if to_host:
            receiver.check_on_host(ranks, epoch)
        everything = range(len(ranks.buckets))
        try:
            received = await in_thread(
                f"fetch {epoch}",
                lambda: receiver.receive(
                    ranks, epoch, sent, cancelled, needed=everything, release=release
                ),
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return tuple(map(on_host, received.buckets)) if to_host else received.buckets

    def _get_receiver(self, ranks: ReleaseHandle) -> ReleaseReceiver:
        if self._receiver is None:
            transport = find_transport(ranks.transport)
            self._receiver = transport.make_receiver(self.member, device=self._device)
        return self._receiver

    def warn_of_whole_tensors(self, manifest: Manifest, reason: str) -> None:
        """Log a warning that regions are joined into whole tensors, but only once."""
        if not self._has_joined:
            self._has_joined = True
            log.warning(
                "weights.whole_tensors",
                engine=self.member,
                tensors=len(manifest.tensors),
                nbytes=sum(spec.nbytes for spec in manifest.tensors),
                reason=reason,
            )


class IncomingRelease:
    """Release that an engine loads, and the path of its tensors into this process."""

    def __init__(
        self,
        epoch: int,
        release: WeightRelease,
        handles: Sequence[Bytes | ReleaseHandle],
        fetcher: WeightFetcher,
        base: CheckedBase | None = None,
    ) -> None:
        """Describe the release. Nothing is fetched yet.

        Args:
            epoch: Epoch of the transfer.
            release: The release without handles.
            handles: Its chunks or the chunks of its delta, or the ranks that hold its parts.
            fetcher: Fetches the parts for this engine.
            base: Base of the delta, or None without a delta.
        """
        self.epoch, self.release = epoch, release
        self._handles, self._fetcher, self._base = handles, fetcher, base
        self.chunks: tuple[BucketMemory, ...] = ()
        """Chunks of the release in this process, or empty if none were brought here."""

    @property
    def is_initial(self) -> bool:
        """Return whether the release names the engine's initial weights."""
        return self.release.manifest is None

    @property
    def ranks(self) -> ReleaseHandle | None:
        """Return the trainer ranks that hold the parts, or None if the chunks came with the call."""
        first = self._handles[0] if self._handles else None
        return first if isinstance(first, ReleaseHandle) else None

    async def bring(self, *, to_host: bool = False) -> "tuple[BucketMemory, ...]":
        """Bring the release into this process and return its chunks.

        With ``to_host``, the chunks are in main memory.

        Raises:
            TransferFailed: No rank that holds a bucket could send it.
            TransferRefused: The parts of a delta were altered on the way, or the ranks send from
                their devices, which only workers can receive.
        """
        release, delta, ranks = self.release, self.release.delta, self.ranks
        parts = cast("tuple[BucketMemory, ...]", self._handles)
        if ranks is not None:
            sent = release.manifest if delta is None else delta.manifest
            parts = await self._fetcher.fetch(
                ranks, self.epoch, sent, release.manifest, to_host=to_host
            )
        if delta is not None and self._base is not None:
            changes = cast("tuple[Bytes, ...]", parts)
            rebuild = partial(self._base.rebuild, self.epoch, release, delta, changes)
            parts = await in_thread(f"delta {self.epoch}", rebuild)
        self.chunks = parts
        return parts

    async def bring_whole(
        self, reason: str = "the loader of this engine takes whole tensors, not regions"
    ) -> tuple[Bytes, ...]:
        """Bring the release into main memory as whole tensors and return their chunks.

        If it arrived in regions, ``release`` is replaced by a release of the joined tensors.

        Args:
            reason: Why the engine cannot load regions.

        Raises:
            TransferFailed, TransferRefused: Raised by ``bring``.
        """
        chunks = await self.bring(to_host=True)
        if self.release.manifest.pieces:
            from offbeat.weight_sync.region_tensors import join_release  # noqa: PLC0415 -- torch

            self._fetcher.warn_of_whole_tensors(self.release.manifest, reason)
            join = partial(join_release, self.release, chunks)
            self.release = await in_thread("whole tensors", join)
            chunks = self.release.chunks
        return cast("tuple[Bytes, ...]", chunks)
