"""Index of the columns of groups: which exist, their size and location. Pure: no I/O, no clock.

The index belongs to the controller. (The ledger records which groups are claimed.) Payload handles
are opaque. In production they are object references owned by the controller's process. Dropping the
last reference frees the memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offbeat.messages.failures import OffbeatError


class StaleHandle(OffbeatError):
    """A handle is outdated: the queue has a newer attempt, another form of this one, or nothing.

    Fix: report it.
    """

    group: int | str
    attempt: int
    present: int | None

    def __str__(self) -> str:
        now = "nothing" if self.present is None else f"attempt {self.present}"
        return f"group {self.group} attempt {self.attempt} is gone: the queue holds {now} of it"


@dataclass(slots=True)
class _Part:
    columns: frozenset[str]
    payload_bytes: int
    payload: object


@dataclass(slots=True)
class _Entry:
    attempt: int
    parts: list[_Part]  # the first put, then added columns

    @property
    def columns(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.columns for part in self.parts))


def _nobody_waits() -> None:
    """Do nothing, because outside a controller no caller waits for room."""


class QueueIndex:
    """Maps each group to its payloads and columns.

    Between calls, ``bytes_held`` is the sum over all groups. A put is all or nothing. It replaces
    an older attempt of the group, and is refused if the index has a newer one.
    """

    def __init__(self, changed: Callable[[], None] = _nobody_waits) -> None:
        """Create an empty index.

        ``changed`` is called after each put and each removal of payloads.
        """
        self._changed = changed
        self._entries: dict[int, _Entry] = {}
        self.bytes_held = 0

    def __contains__(self, prompt_index: object) -> bool:
        return prompt_index in self._entries

    def put(
        self,
        prompt_index: int,
        attempt: int,
        columns: Iterable[str],
        payload_bytes: int,
        payload: object,
    ) -> None:
        """Add a group with its first columns.

        Raises:
            StaleHandle: The index already has this attempt or a newer one.
        """
        entry = self._entries.get(prompt_index)
        if entry is not None and entry.attempt >= attempt:
            raise StaleHandle(prompt_index, attempt, entry.attempt)
        first = _Part(frozenset(columns), payload_bytes, payload)
        if entry is not None:
            self.bytes_held -= sum(part.payload_bytes for part in entry.parts)
        self._entries[prompt_index] = _Entry(attempt, [first])
        self.bytes_held += payload_bytes
        self._changed()

    def add_columns(
        self,
        prompt_index: int,
        attempt: int,
        columns: Iterable[str],
        payload_bytes: int,
        payload: object,
    ) -> None:
        """Add further columns of a group, as a second payload next to the first.

        Adding columns that exist changes nothing, so a repeated call is harmless.

        Raises:
            StaleHandle: The group was cleared, or the index has a different attempt of it.
        """
        entry = self._entries.get(prompt_index)
        if entry is None or entry.attempt != attempt:
            raise StaleHandle(prompt_index, attempt, None if entry is None else entry.attempt)
        added = _Part(frozenset(columns), payload_bytes, payload)
        if not added.columns <= entry.columns:
            entry.parts.append(added)
            self.bytes_held += payload_bytes

    def drop_added(self, prompt_indices: Iterable[int]) -> None:
        """Drop the columns added to these groups. They are valid for only one trainer version."""
        for prompt_index in prompt_indices:
            added = self._entries[prompt_index].parts[1:]
            self.bytes_held -= sum(part.payload_bytes for part in added)
            del self._entries[prompt_index].parts[1:]

    def payloads(self, prompt_index: int) -> tuple[object, ...]:
        """Return the handles of a group's payloads, oldest first."""
        return tuple([part.payload for part in self._entries[prompt_index].parts])

    def group_bytes(self, prompt_index: int) -> int:
        """Return the size of a group's payloads, or 0 if none is held."""
        entry = self._entries.get(prompt_index)
        return sum(part.payload_bytes for part in entry.parts) if entry else 0

    def clear(self, prompt_indices: Iterable[int]) -> None:
        """Drop the groups' payloads. Memory is freed once all other references are gone."""
        for prompt_index in prompt_indices:
            entry = self._entries.pop(prompt_index, None)
            if entry is not None:
                self.bytes_held -= sum(part.payload_bytes for part in entry.parts)
        self._changed()
