"""State machine of one broadcast to some engines, in the sender.

Pure: no sockets, no clock, no threads.

    joins --> round 0 --> reports --> round 1 with those who are left --> ... --> over

A member that has ended, or does not join or report in time, is left out; one that has every chunk,
or that received a wrong chunk, leaves by itself. Members that stopped because of another are sent
to again, from the first chunk that one of them lacks.
"""

from typing import Final

from offbeat.weight_sync.transports.messages import Join, Report, RoundPlan

SILENT: Final = "was not heard of in time"


class Session:
    """State of one broadcast: the members of each round, and the chunks that each has received."""

    def __init__(self, first: Join, chunks: int) -> None:
        self.name, self.epoch = first.session, first.epoch
        self.rounds = 0  # rounds planned so far
        # Reason by member without a further round; empty: it has all chunks
        self.ended: dict[str, str] = {}
        self.left_out: tuple[str, ...] = ()  # members left out by the last plan
        self.dropped = 0  # messages of other sessions and rounds
        self._expected, self._chunks = first.members, chunks
        self._at = {first.member: 0}  # verified chunks by joined member
        self._responded = {first.member}  # members that reported since the last plan

    @property
    def members(self) -> tuple[str, ...]:
        """Return the members that have joined and not ended, in the order they were named."""
        return tuple(m for m in self._expected if m in self._at and m not in self.ended)

    @property
    def everybody(self) -> bool:
        """Return whether all expected members have sent their message."""
        awaited = self.members if self.rounds else self._expected
        return all(each in self._responded or each in self.ended for each in awaited)

    def joined(self, join: Join) -> bool:
        """Record a join; False if it is for another session, a duplicate, or too late."""
        known = join.member in self._at or join.member not in self._expected
        if join.session != self.name or known or self.rounds:
            self.dropped += 1
            return False
        self._at[join.member] = 0
        self._responded.add(join.member)
        return True

    def reported(self, report: Report) -> bool:
        """Record a member's result of the last round; False if it is of another round or session."""
        late = (report.session, report.round) != (self.name, self.rounds - 1)
        if late or report.member not in self.members or report.member in self._responded:
            self.dropped += 1
            return False
        self._responded.add(report.member)
        self._at[report.member] = report.at
        if report.left or report.at == self._chunks:
            self.ended[report.member] = report.error
        return True

    def gone(self, member: str) -> None:
        """Record that a member's process ended, which is no failure once it has left."""
        if member in self._expected:
            self.ended.setdefault(member, "is gone")

    def plan(self, sender_error: str = "") -> RoundPlan | None:
        """Return the next round, or None if no member is left. Silent members are left out.

        Args:
            sender_error: Why the sender itself cannot continue: all remaining members are notified.
        """
        if not sender_error:
            self._leave_out_the_silent()
        if not (left := self.members):
            return None
        if self.rounds > len(self._expected):  # every earlier round should have lost a member
            sender_error = sender_error or f"none of {self.rounds} rounds came to its end"
        self._responded, self.rounds = set[str](), self.rounds + 1
        if sender_error:
            self.ended |= dict.fromkeys(left, sender_error)
            return RoundPlan(self.rounds - 1, left, error=sender_error)
        return RoundPlan(self.rounds - 1, left, first=min(self._at[each] for each in left))

    def _leave_out_the_silent(self) -> None:
        awaited = self.members if self.rounds else self._expected
        silent = [m for m in awaited if m not in self._responded and m not in self.ended]
        self.ended |= dict.fromkeys(silent, SILENT)
        self.left_out = tuple(silent)
