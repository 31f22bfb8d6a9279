"""Errors of decoding columns from bytes, and of the memory they are encoded into."""

from offbeat.messages.failures import OffbeatError


class CorruptPayload(OffbeatError):
    """Bytes that are not columns as the codec writes them: torn, damaged, forged, or of another version."""

    field: str
    got: str
    want: str

    def __str__(self) -> str:
        return (
            f"payload is corrupt: {self.field} is {self.got}; expected {self.want}. "
            "Discard it and roll the group out again"
        )


class UnusableBuffer(OffbeatError):
    """Memory passed to the codec that it cannot use, whatever its content."""

    got: str
    want: str

    def __str__(self) -> str:
        return f"buffer is {self.got}; the codec needs {self.want}"
