"""Failures of the queue service. ``SchemaError`` is in ``messages``, ``StaleHandle`` in ``transfer_queue``."""

from offbeat.messages.failures import OffbeatError, SchemaError


class LeaseExpired(OffbeatError):
    """A lease that is not open: it expired, was released, or never existed.

    Others get its groups.
    """

    lease_id: int
    during: str

    def __str__(self) -> str:
        return (
            f"cannot {self.during} lease {self.lease_id}: it is not held any more, and its groups "
            "are delivered again. Renew a lease in time, or claim with a longer lease_s"
        )


class QueuePayloadLost(OffbeatError):
    """The payload of a group is lost: its node, process or owner died."""

    group: str
    attempt: int
    reason: str

    def __str__(self) -> str:
        return (
            f"the payload of group {self.group} attempt {self.attempt} is lost ({self.reason}). "
            "Make the group again, as a newer attempt"
        )


class QueueFull(OffbeatError):
    """No room for a put, within its deadline if it waited. Nothing was stored.

    ``limit`` names the exceeded bound: ``rows`` or ``bytes``. ``in_use`` counts what is stored and
    what is reserved for earlier producers.
    """

    limit: str
    requested: int
    in_use: int
    capacity: int
    waited_s: float | None = None

    def __str__(self) -> str:
        waited = "" if self.waited_s is None else f" after {self.waited_s:g} s"
        return (
            f"no room for {self.requested:,} {self.limit}{waited}: {self.in_use:,} of "
            f"{self.capacity:,} are taken. Let consumers clear groups, wait longer, or raise max_{self.limit}"
        )


class TooLarge(QueueFull):
    """A put that does not fit into an empty queue: waiting cannot help."""

    def __str__(self) -> str:
        return (
            f"a put of {self.requested:,} {self.limit} can never fit: the queue holds at most "
            f"{self.capacity:,}. Cut the group, or raise max_{self.limit}"
        )


class UnknownPartition(OffbeatError):
    """No partition of that name is declared."""

    partition: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        known = ", ".join(sorted(self.known)) or "none"
        return f"partition {self.partition!r} is not declared (declared: {known}). Declare it first"


class Redeclared(SchemaError):
    """A declared name is used with another declaration. The first declaration holds."""

    def __str__(self) -> str:
        return (
            f"{self.column} is declared with {self.want}; it cannot become {self.got}. "
            "Use another name"
        )


class ServiceBug(OffbeatError):
    """The service raised an unexpected exception while it handled a call."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"the transfer queue raised {self.kind}: {self.detail}. This is a bug of the queue"


class ClientClosed(OffbeatError):
    """A call on a client after its ``close``."""

    queue: str
    during: str

    def __str__(self) -> str:
        return f"cannot {self.during}: this client of {self.queue} is closed. Connect another one"


class SnapshotFailed(OffbeatError):
    """A snapshot could not be written or restored. An existing snapshot is unchanged."""

    directory: str
    detail: str

    def __str__(self) -> str:
        return f"snapshot {self.directory}: {self.detail}"
