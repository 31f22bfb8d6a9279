"""Messages between the two ends of a transfer from trainer ranks to an engine."""

from typing import Final

import msgspec

from offbeat.weight_sync.buckets import BucketRoute
from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.transport import ReleaseHandle


class TransferTimeouts(msgspec.Struct, frozen=True):
    """Timeouts of a transfer."""

    slowest_bytes_per_s: float  # a slower link counts as broken
    slack_s: float  # added to every wait, independent of the size

    def of(self, nbytes: int) -> float:
        """Return the timeout in seconds for ``nbytes``."""
        return nbytes / self.slowest_bytes_per_s + self.slack_s


class DevicePlace(msgspec.Struct, frozen=True):
    """Machine and device of memory, with names that are the same in every process."""

    machine: str
    device: str  # UUID


class Route(msgspec.Struct, frozen=True):
    """Address of a trainer rank that sends parts of a release."""

    host: str
    port: int  # port of the control channel
    store_port: int  # port of the store at which groups are formed
    # Secret of the participants. This record is sent only in Ray calls and between trainer ranks.
    key: SharedKey
    incarnation: str  # incarnation of the sender, because another process may reuse this port
    version: int
    digest: str
    timeouts: TransferTimeouts
    wire: str = "tcp"  # wire of the buckets
    place: DevicePlace | None = None  # device of the buckets; None: main memory


class ShardRoute(ReleaseHandle, frozen=True):
    """Ranks that send a release, and the buckets that each of them holds."""

    senders: tuple[Route, ...]  # by rank

    transport = "reshard"

    def encode_senders(self) -> bytes:
        """Return the ranks, for ``decode_route``."""
        return msgspec.msgpack.encode(self.senders)


_SENDERS: Final = msgspec.msgpack.Decoder(tuple[Route, ...])


def decode_route(senders: bytes, buckets: tuple[BucketRoute, ...]) -> ShardRoute:
    """Return the route of a release from its encoded ranks and its buckets."""
    ranks = _SENDERS.decode(senders)
    return ShardRoute(ranks[0].version, ranks[0].digest, buckets, ranks)


class Join(msgspec.Struct, frozen=True):
    """Request of an engine rank for some buckets of a release."""

    session: str
    epoch: int
    member: str
    incarnation: str
    digest: str
    buckets: tuple[int, ...]  # to send, in order
    layout: str  # digest of the member's plan


class Answer(msgspec.Struct, frozen=True):
    """Answer of a sender to a join."""

    error: str = ""  # why the sender refuses; empty: the member may connect
    gone: bool = False  # whether it refuses because it has a different release
