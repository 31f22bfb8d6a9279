"""Errors shared by the index of the main job and the queue service."""

from offbeat.messages.failures import OffbeatError


class StaleHandle(OffbeatError):
    """An outdated handle: the queue has a newer attempt, another form of this one, or nothing."""

    def __init__(self, group: int | str, attempt: int, held: int | None) -> None:
        super().__init__(group, attempt, held)
        self.group, self.attempt, self.held = group, attempt, held

    def __str__(self) -> str:
        now = "nothing" if self.held is None else f"attempt {self.held}"
        return f"group {self.group} attempt {self.attempt} is gone: the queue holds {now} of it"
