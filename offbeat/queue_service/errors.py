"""What a transfer queue refuses, and why. ``SchemaError`` stands beside them in ``messages``."""

from collections.abc import Iterable

from offbeat.messages.failures import OffbeatError, SchemaError


class StaleHandle(OffbeatError):
    """It comes too late: the queue holds a newer attempt, this one in another form, or nothing."""

    def __init__(self, group: int | str, attempt: int, held: int | None) -> None:
        super().__init__(group, attempt, held)
        self.group, self.attempt, self.held = group, attempt, held

    def __str__(self) -> str:
        now = "nothing" if self.held is None else f"attempt {self.held}"
        return f"group {self.group} attempt {self.attempt} is gone: the queue holds {now} of it"


class LeaseExpired(OffbeatError):
    """A lease that is not held: it ran out, was released, or never was. Others get its groups."""

    def __init__(self, lease_id: int, during: str) -> None:
        super().__init__(lease_id, during)
        self.lease_id, self.during = lease_id, during

    def __str__(self) -> str:
        return (
            f"cannot {self.during} lease {self.lease_id}: it is not held any more, and its groups "
            "are delivered again. Renew a lease in time, or claim with a longer lease_s"
        )


class PayloadLost(OffbeatError):
    """The group's payload is gone for good: its node, process or owner died."""

    def __init__(self, group: str, attempt: int, reason: str) -> None:
        super().__init__(group, attempt, reason)
        self.group, self.attempt, self.reason = group, attempt, reason

    def __str__(self) -> str:
        return (
            f"the payload of group {self.group} attempt {self.attempt} is lost ({self.reason}). "
            "Make the group again, as a newer attempt"
        )


class QueueFull(OffbeatError):
    """There is no room for a put, within the time it may wait if it waited. Nothing was stored.

    ``limit`` names what is short: ``rows`` or ``bytes``. ``held`` counts what rests in the queue
    and what is promised to producers that came before.
    """

    def __init__(
        self, limit: str, asked: int, held: int, most: int, waited_s: float | None = None
    ) -> None:
        super().__init__(limit, asked, held, most, waited_s)
        self.limit, self.asked, self.held, self.most = limit, asked, held, most
        self.waited_s = waited_s

    def __str__(self) -> str:
        waited = "" if self.waited_s is None else f" after {self.waited_s:g} s"
        return (
            f"no room for {self.asked:,} {self.limit}{waited}: {self.held:,} of {self.most:,} are "
            f"taken. Let consumers clear groups, wait longer, or raise max_{self.limit}"
        )


class TooLarge(QueueFull):
    """A put that does not fit into an empty queue: waiting cannot help."""

    def __str__(self) -> str:
        return (
            f"a put of {self.asked:,} {self.limit} can never fit: the queue holds at most "
            f"{self.most:,}. Cut the group, or raise max_{self.limit}"
        )


class UnknownPartition(OffbeatError):
    """No partition of that name is declared."""

    def __init__(self, partition: str, known: Iterable[str]) -> None:
        self.partition, self.known = partition, tuple(known)
        super().__init__(partition, self.known)

    def __str__(self) -> str:
        known = ", ".join(sorted(self.known)) or "none"
        return f"partition {self.partition!r} is not declared (declared: {known}). Declare it first"


class Redeclared(SchemaError):
    """A name that was declared in one way is used in another. The first declaration holds."""

    def __str__(self) -> str:
        return (
            f"{self.column} is declared with {self.want}; it cannot become {self.got}. "
            "Use another name"
        )
