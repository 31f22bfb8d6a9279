"""Errors of a journal. Each names the file, the values, and the fix."""

from offbeat.messages.failures import OffbeatError


class JournalFailed(OffbeatError):
    """The disk refused a write or an fsync: its content since the last barrier is unknown."""

    file: str
    problem: str

    def __str__(self) -> str:
        return (
            f"journal {self.file} cannot be written: {self.problem}. Free or repair the disk, then "
            "resume the run: everything before the last barrier is there"
        )


class JournalRemoved(JournalFailed):
    """Somebody has removed a file of the journal that its run still writes."""

    def __str__(self) -> str:
        return (
            f"journal {self.file} was removed while its run went on: {self.problem}. Bring the run "
            "directory back from a copy, or start a new run; an export may be its model.path"
        )


class JournalTaken(OffbeatError):
    """Another controller writes this journal. The newer one continues, the other must end."""

    file: str

    def __str__(self) -> str:
        return (
            f"journal {self.file} belongs to another controller of this run. Only the one started "
            "last goes on: end the other, or name another run directory"
        )


class JournalCorrupt(OffbeatError):
    """A file of the journal was damaged after it was written; no crash does that."""

    file: str
    offset: int
    problem: str

    def __str__(self) -> str:
        return (
            f"journal {self.file} is damaged at byte {self.offset}: {self.problem}. Bring the file "
            "back from a copy, or start a new run from the last checkpoint's model"
        )


class JournalVersion(OffbeatError):
    """The journal was written by another version of this package."""

    file: str
    what: str
    found: int
    known: int

    def __str__(self) -> str:
        newer = "a newer" if self.found > self.known else "an older"
        return (
            f"journal {self.file} has {self.what} {self.found}, this version of offbeat reads "
            f"{self.known}. Go on with {newer} offbeat, the one that began the run, or start a new "
            "run from the last checkpoint's model"
        )
