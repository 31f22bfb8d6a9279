"""Control messages between the two ends of a transfer over gloo."""

import msgspec

from offbeat.rendezvous.frames import SharedKey
from offbeat.weight_sync.reshard.buckets import BucketRoute


class TransferTimeouts(msgspec.Struct, frozen=True):
    """Timeouts of a transfer."""

    slowest_bytes_per_s: float  # a slower link counts as broken
    slack_s: float  # added to every wait, whatever the size

    def of(self, nbytes: int) -> float:
        """Return the seconds that ``nbytes`` may take."""
        return nbytes / self.slowest_bytes_per_s + self.slack_s


class DevicePlace(msgspec.Struct, frozen=True):
    """Machine and device of some memory, in names that do not depend on what a process can see."""

    machine: str
    device: str  # UUID


class Route(msgspec.Struct, frozen=True):
    """Address from which a release is sent: the handle of a broadcast transport."""

    host: str
    port: int  # port of the control channel
    store_port: int  # port of the store at which groups are formed
    # Secret of the participants; this record travels through Ray calls and between trainer ranks
    key: SharedKey
    incarnation: str  # incarnation of the sender: another process may listen at this port by now
    version: int
    digest: str
    timeouts: TransferTimeouts
    # Of a rank that sends buckets:
    wire: str = "tcp"  # what carries them
    place: DevicePlace | None = None  # device of the buckets; None: main memory


class ReshardRoute(msgspec.Struct, frozen=True):
    """Ranks from which a release is sent, and what each of them holds."""

    version: int
    digest: str
    senders: tuple[Route, ...]  # by rank
    buckets: tuple[BucketRoute, ...]


class Join(msgspec.Struct, frozen=True, tag=True):
    """Request of a member to receive a release."""

    session: str
    epoch: int
    members: tuple[str, ...]  # members that the sender may expect
    member: str
    incarnation: str
    digest: str
    # Of a release that several ranks send:
    buckets: tuple[int, ...] = ()  # those that this rank has to send, in order
    layout: str = ""  # digest of the plan that the member goes by


class Report(msgspec.Struct, frozen=True, tag=True):
    """Result of a round at one member."""

    session: str
    round: int
    member: str
    at: int  # number of verified chunks
    error: str = ""  # why it stopped before the last chunk
    left: bool = False  # whether it takes part in no further round


class MemberGone(msgspec.Struct, frozen=True, tag=True):
    """End of a member's connection: most likely its process died."""

    session: str
    member: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Request to stop the sender."""


class RoundPlan(msgspec.Struct, frozen=True):
    """The sender's plan of one round."""

    round: int
    members: tuple[str, ...] = ()  # in rank order, after the sender at rank 0
    first: int = 0  # first chunk to send
    error: str = ""  # reason why nothing is sent any more; empty otherwise
    gone: bool = False  # whether the error is that this sender has another release


Message = Join | Report | MemberGone | Close


def another_release(held: str | None, asked: str) -> str:
    """Say that a sender cannot send the release that is asked for; both are named by digest."""
    if held is None:
        return f"the sender holds no release, and {asked} is asked for"
    return f"the sender holds another release by now: {held}, not {asked}"
