"""Handle of a release that an engine fetches from the ranks that hold its parts."""

from typing import ClassVar

import msgspec

from offbeat.weight_sync.buckets import BucketRoute


class ReleaseHandle(msgspec.Struct, frozen=True):
    """Handle of a release in buckets. The transport derives a class with the addresses of its ranks."""

    version: int
    digest: str
    buckets: tuple[BucketRoute, ...]

    transport: ClassVar[str]
    """Name of the transport, whose plug-in makes what receives the release."""

    def encode_senders(self) -> bytes:
        """Return what the receivers of an engine need in addition to the buckets, which they know."""
        raise NotImplementedError
