"""Interface of transports: a sender, and handles that the controller passes to the receivers.

The controller's code is the same for all of them. The trainer *publishes* a release: a manifest
with the digests of its chunks, the release's digest, and some handles. With the handles, an engine
can receive the release, now or later. Their content depends on the transport: the chunks
themselves, addresses of memory, or the address of a sender.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from offbeat.weight_sync.manifest import Bytes, Manifest


class Source(Protocol):
    """Weights of a process, in chunks."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the weights that ``chunks`` yields, without a seal."""
        ...

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Yield each chunk with its digest, packed into the array ``room(index, bytes)``."""
        ...


class PublishedRelease(NamedTuple):
    """A release as its publisher returns it."""

    manifest: Manifest  # sealed
    digest: str
    handles: tuple[Any, ...]


class Sender(Protocol):
    """The trainer's end of a transport."""

    @property
    def handles(self) -> int:
        """Return the number of handles per release."""
        ...

    def publish(self, version: int) -> PublishedRelease:
        """Publish a snapshot of the current weights, which may change as soon as this returns."""
        ...

    def close(self) -> None:
        """Stop sending. Idempotent."""
        ...


Sink = Callable[[int, Bytes], object]
"""Receives chunk ``index``. An error that it raises ends the transfer for this receiver alone."""
