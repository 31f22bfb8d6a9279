"""The progress of reading, checking or copying files, in bytes."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StagingProgress:
    """A moment of a job. A job in which no field changes makes no progress."""

    doing: str = "starting"
    file: str = ""
    file_done_bytes: int = 0
    file_bytes: int = 0
    total_bytes: int = 0
    """Bytes handled so far in all files; it never falls."""

    def __str__(self) -> str:
        if not self.file:
            return self.doing
        return f"{self.doing} {self.file}, {self.file_done_bytes:,} of {self.file_bytes:,} bytes"


class ProgressMeter:
    """Counter that one thread advances and others read."""

    def __init__(self) -> None:
        self.now = StagingProgress()

    def begin(self, doing: str, file: str, file_bytes: int) -> None:
        """Begin the next file."""
        self.now = StagingProgress(doing, file, 0, file_bytes, self.now.total_bytes)

    def advance(self, nbytes: int) -> None:
        """Count bytes of the file that was begun."""
        self.now = replace(
            self.now,
            file_done_bytes=self.now.file_done_bytes + nbytes,
            total_bytes=self.now.total_bytes + nbytes,
        )
