"""What a transport is: two ends, and a handle that the controller passes from one to the other.

The controller's code is the same for all of them. The trainer *publishes* a release: a manifest with
the digests of its chunks, the release's digest, and some handles. Whoever holds the handles can have
an engine take the release, now or later. What they are is the transport's business: the chunks
themselves, addresses of memory, or the place where somebody sends.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from offbeat.weight_sync.manifest import Bytes, Manifest


class Source(Protocol):
    """The weights of a process, in chunks."""

    manifest: Manifest

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Each chunk with its digest, packed where ``room(index, bytes)`` says."""
        ...


class PublishedRelease(NamedTuple):
    """One release, as its publisher hands it over."""

    manifest: Manifest  # sealed
    digest: str
    handles: tuple[Any, ...]


class Sender(Protocol):
    """The trainer's end."""

    @property
    def handles(self) -> int:
        """How many handles each release has."""
        ...

    def publish(self, version: int) -> PublishedRelease:
        """A snapshot of the weights as they are: they may change as soon as this returns."""
        ...

    def close(self) -> None:
        """Send nothing any more. Idempotent."""
        ...


Sink = Callable[[int, Bytes], object]
"""Takes chunk ``index``. What it raises ends the transfer for this receiver alone."""
