"""Control messages between the two ends of a broadcast."""

import msgspec

from offbeat.rendezvous.frames import SharedKey


class TransferLimits(msgspec.Struct, frozen=True):
    """Timeouts of a transfer."""

    slowest_bytes_per_s: float  # a link that is slower is broken
    slack_s: float  # of every wait, whatever the size

    def of(self, nbytes: int) -> float:
        """Seconds that ``nbytes`` may take."""
        return nbytes / self.slowest_bytes_per_s + self.slack_s


class Route(msgspec.Struct, frozen=True):
    """Address from which a release is sent: the handle of a broadcast transport."""

    host: str
    port: int  # of the control channel
    store_port: int  # where a group finds together
    key: SharedKey  # of those who may take it; this record travels through Ray calls only
    life: str  # of the sender: another process may listen at this port by now
    version: int
    digest: str
    limits: TransferLimits


class Join(msgspec.Struct, frozen=True, tag=True):
    """Request of a member to receive a release."""

    session: str
    epoch: int
    members: tuple[str, ...]  # whom the sender may expect
    member: str
    life: str
    digest: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """Result of a round at one member."""

    session: str
    round: int
    member: str
    at: int  # chunks it has, verified
    error: str = ""  # why it stopped before the last one
    left: bool = False  # it takes part in no further round


class MemberGone(msgspec.Struct, frozen=True, tag=True):
    """A member's connection ended: its process, in all likelihood."""

    session: str
    member: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Request to stop the sender."""


class RoundPlan(msgspec.Struct, frozen=True):
    """The sender's plan of one round."""

    round: int
    members: tuple[str, ...] = ()  # in rank order, behind the sender at rank 0
    first: int = 0  # chunk it starts with
    error: str = ""  # nothing is sent any more, for this reason


Message = Join | Report | MemberGone | Close
