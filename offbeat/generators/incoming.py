"""A release on its way into an engine: it brings its tensors here, whatever transport sent them.

    chunks         came with the call, through the object store
    buckets        are fetched from the trainer ranks that hold them
    a delta        comes either way, and makes the chunks of the release from its base
    initial ones   are not brought: the engine was created with these weights

Work that blocks runs in threads next to the serving engine. torch and the transport are imported
when the first transfer arrives: a run on another transport needs neither.
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
            device: Device where wires of devices receive.
            keeps_base: Whether the engine takes deltas: they travel between main memories, and so
                do their bases.
        """
        self.member, self._device, self._only_on_host = member, device, keeps_base
        self._receiver: ReleaseReceiver | None = None  # of the transport of the first release
        self._has_joined = False

    async def fetch(
        self, ranks: ReleaseHandle, epoch: int, sent: Manifest, release: Manifest, *, to_host: bool
    ) -> "tuple[BucketMemory, ...]":
        """Receive and verify all buckets of a release from the ranks that hold them.

        Also those that the plan has for other ranks of an engine alone. A cancelled fetch stops at
        the next bucket, or at that bucket's deadline.

        Args:
            ranks: The ranks.
            epoch: Epoch of the transfer.
            sent: Manifest of the release, or of what it changes.
            release: Manifest of the release, which names the tensors in errors.
            to_host: Whether the buckets have to be in main memory.

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
        """Log once that regions are joined to whole tensors."""
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
    """The one thing that an engine loads: a release, and how its tensors get into this process."""

    def __init__(
        self,
        epoch: int,
        release: WeightRelease,
        handles: Sequence[Bytes | ReleaseHandle],
        fetcher: WeightFetcher,
        base: CheckedBase | None = None,
    ) -> None:
        """Nothing is brought yet.

        Args:
            epoch: Epoch of the transfer.
            release: The release without handles.
            handles: Its chunks or the chunks of its delta, or the ranks that hold its parts.
            fetcher: Fetches the parts for this engine.
            base: What the delta applies to; None: there is no delta.
        """
        self.epoch, self.release = epoch, release
        self._handles, self._fetcher, self._base = handles, fetcher, base
        self.chunks: tuple[BucketMemory, ...] = ()
        """The chunks of the release as they were brought here; empty if its engine brought none."""

    @property
    def is_initial(self) -> bool:
        """Return whether these are the weights that the engine was created with."""
        return self.release.manifest is None

    @property
    def ranks(self) -> ReleaseHandle | None:
        """Return the trainer ranks that hold the parts, or None if the chunks came with the call."""
        first = self._handles[0] if self._handles else None
        return first if isinstance(first, ReleaseHandle) else None

    async def bring(self, *, to_host: bool = False) -> "tuple[BucketMemory, ...]":
        """Bring the release here, and return its chunks.

        ``to_host``: they have to be in main memory.

        Raises:
            TransferFailed: No rank that holds a bucket could send it.
            TransferRefused: The parts of a delta are not those that were sent, or the ranks send from
                their devices, and only workers can receive that.
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
        self, reason: str = "the loader of this engine takes whole tensors, no regions"
    ) -> tuple[Bytes, ...]:
        """Bring the release into main memory as whole tensors, and return their chunks.

        If it arrived in regions, ``release`` is another one afterwards, of the joined tensors.

        Args:
            reason: Why the engine cannot load regions.

        Raises:
            TransferFailed, TransferRefused: As ``bring``.
        """
        chunks = await self.bring(to_host=True)
        if self.release.manifest.pieces:
            from offbeat.weight_sync.region_tensors import joined_release  # noqa: PLC0415 -- torch

            self._fetcher.warn_of_whole_tensors(self.release.manifest, reason)
            join = partial(joined_release, self.release, chunks)
            self.release = await in_thread("whole tensors", join)
            chunks = self.release.chunks
        return cast("tuple[Bytes, ...]", chunks)
