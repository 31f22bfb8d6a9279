"""Error of the queue index."""

from offbeat.messages.failures import OffbeatError


class StaleHandle(OffbeatError):
    """An outdated handle: the queue has a newer attempt, another form of this one, or nothing."""

    group: int | str
    attempt: int
    present: int | None

    def __str__(self) -> str:
        now = "nothing" if self.present is None else f"attempt {self.present}"
        return f"group {self.group} attempt {self.attempt} is gone: the queue holds {now} of it"
