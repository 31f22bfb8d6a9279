"""The file of the ledger's events: one JSON object a line, in order.

Appending costs a microsecond of the loop; a barrier hands everything to the operating system, so
what was appended before it survives the death of this process. The fold of the file is the ledger.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from offbeat.controller.events import AnyEvent


class FileJournal:
    """Appends events to ``directory/events.jsonl``; the file must not exist yet."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(directory / "events.jsonl", flags, 0o644)
        self._encoder = msgspec.json.Encoder()
        self._pending = list[bytes]()

    def append(self, event: msgspec.Struct) -> None:
        self._pending.append(self._encoder.encode(event))

    async def barrier(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Hand what is pending to the operating system."""
        if not self._pending:
            return
        pending = b"\n".join(self._pending) + b"\n"
        written = 0
        while written < len(pending):
            written += os.write(self._file, memoryview(pending)[written:])
        self._pending.clear()

    def close(self) -> None:
        self.flush()
        os.close(self._file)


def read_journal(directory: Path) -> Iterator[AnyEvent]:
    """The events of a run, oldest first. A torn last line, of a crash, is left out."""
    decoder = msgspec.json.Decoder(AnyEvent)
    with (directory / "events.jsonl").open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)
