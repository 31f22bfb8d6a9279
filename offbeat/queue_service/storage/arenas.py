"""Memory shared by the processes of one node, in large anonymous segments called arenas.

The process that keeps the payloads creates the arenas, so their memory ends with that process,
however it ends: no file is left behind. Producers write into slots of arenas lent to them; readers
map an arena once and get views of it.
"""

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.queue_service.storage.slots import PAGE, Slots, rounded

ARENA_BYTES: Final = 64 << 20
KEPT_WARM_BYTES: Final = 256 << 20
MOST_MAPPED: Final = 128
"""Arenas that a reader keeps mapped without a view: each needs a file descriptor."""

Bytes = NDArray[np.uint8]


class Arena(msgspec.Struct, frozen=True, array_like=True):
    """Reference to an arena for other processes of the node: a file descriptor of its owner."""

    id: int
    pid: int
    fd: int
    size: int

    def opened(self, *, writable: bool) -> mmap.mmap:
        """Return a mapping of the arena.

        Raises:
            OSError: The owner has ended, or is of another user or on another node.
        """
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return mmap.mmap(fd, self.size, access=access)
        finally:
            os.close(fd)


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Location of a payload in an arena."""

    arena: int
    offset: int


def punch(memory: mmap.mmap, offset: int, length: int) -> None:
    """Release the memory of a page-aligned range to the system; it reads as zeros from then on."""
    memory.madvise(mmap.MADV_REMOVE, offset, length)


class Writer:
    """Producer's side: allocates slots in the arenas lent to it.

    A slot belongs to the producer until a put passes it to the queue. It returns through ``freed``,
    which only the owner of the arenas triggers. Returned memory is warm, and cheap to write again:
    up to ``KEPT_WARM_BYTES`` of it is kept, the rest is released.
    """

    def __init__(self) -> None:
        self._arenas: dict[int, tuple[mmap.mmap, Bytes, Slots]] = {}
        self._warm: dict[Slot, int] = {}  # bytes by free range, oldest first
        self._warm_bytes = 0

    def lend(self, arena: Arena) -> None:
        """Add an arena.

        Raises:
            OSError: It cannot be mapped.
        """
        memory = arena.opened(writable=True)
        self._arenas[arena.id] = (memory, np.frombuffer(memory, np.uint8), Slots(arena.size))

    def take(self, nbytes: int) -> tuple[Slot, Bytes] | None:
        """Allocate a slot; return it and its memory.

        None if no arena has room and another is needed.
        """
        for id_, (_, array, slots) in self._arenas.items():
            offset = slots.take(nbytes)
            if offset is not None:
                slot = Slot(id_, offset)
                self._not_free(slot, rounded(max(nbytes, 1)))
                return slot, array[offset : offset + nbytes]
        return None

    def freed(self, slots: Sequence[Slot]) -> None:
        """Return slots that have no readers any more to the free ranges."""
        for slot in slots:
            length = self._arenas[slot.arena][2].give(slot.offset)
            self._warm[slot] = length
            self._warm_bytes += length
        while self._warm_bytes > KEPT_WARM_BYTES:
            slot = next(iter(self._warm))
            length = self._warm.pop(slot)
            self._warm_bytes -= length
            punch(self._arenas[slot.arena][0], slot.offset, length)

    def close(self) -> None:
        """Release the arenas."""
        self._arenas.clear()

    def _not_free(self, written: Slot, length: int) -> None:
        """Forget warm ranges that are written to again, so that they are not released."""
        if self._warm.get(written) == length:  # sizes are usually alike
            self._warm_bytes -= self._warm.pop(written)
            return
        start, end = written.offset, written.offset + length
        for slot, nbytes in list(self._warm.items()):
            if slot.arena == written.arena and slot.offset < end and start < slot.offset + nbytes:
                self._warm_bytes -= self._warm.pop(slot)


class Reader:
    """Consumer's side: views of slots, and a callback when the last view of a slot is gone."""

    def __init__(self, unpinned: Callable[[Slot, int], None]) -> None:
        """Create a reader.

        Args:
            unpinned: Called once for each ``view``, with its slot and bytes, when nothing refers to
                its memory any more. It runs wherever the last reference was dropped, so it must not
                block.
        """
        self._unpinned = unpinned
        self._maps: dict[int, mmap.mmap] = {}  # ordered by last use
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._views: set[int] = set()  # ids of views; a plain counter would not be thread-safe

    @property
    def has_views(self) -> bool:
        """Return whether any view of a slot is alive."""
        return bool(self._views)

    def view(self, arena: Arena, slot: Slot, nbytes: int) -> Bytes:
        """Return the memory of a slot, read-only.

        It does not change as long as any view of it lives.

        Raises:
            OSError: The arena cannot be mapped: its owner has ended or is elsewhere.
        """
        memory = self._mapped(arena)
        # Views of ``block`` refer to it and not to the mapping: it is the first array over it.
        block = np.frombuffer(memory, np.uint8, nbytes, slot.offset)
        number = next(self._numbers)
        self._views.add(number)
        weakref.finalize(block, self._gone, number, slot, nbytes).atexit = False
        return block

    def _mapped(self, arena: Arena) -> mmap.mmap:
        """Return the mapping of an arena; drop the least recently used of too many mappings."""
        with self._lock:
            memory = self._maps.pop(arena.id, None)
            if memory is None:
                memory = arena.opened(writable=False)
            self._maps[arena.id] = memory
            if len(self._maps) > MOST_MAPPED:
                del self._maps[next(iter(self._maps))]  # its views keep the memory they need
            return memory

    def _gone(self, number: int, slot: Slot, nbytes: int) -> None:
        self._views.discard(number)
        self._unpinned(slot, nbytes)

    def close(self) -> None:
        """Release the arenas; their views keep the memory they need."""
        self._maps.clear()


class ArenaAllocator:
    """Owner's side: creates arenas, and counts the users of each slot.

    A slot is held from its put until it is let go, and pinned by each reader that views it. Once
    free of both, it belongs to its producer again: ``announce`` reports it with the next reply to
    the producer.
    """

    def __init__(self) -> None:
        self._made = 0
        self._arenas: dict[int, tuple[Arena, mmap.mmap, str]] = {}  # and the name of the producer
        self._needs: dict[Slot, int] = {}
        self._lengths: dict[Slot, int] = {}
        self._unannounced: dict[str, list[Slot]] = {}
        self._warm: list[Slot] = []  # not announced, and their memory not released yet
        self.bytes_in_use = 0  # bytes of slots held or pinned
        self.has_excess = False  # whether slots were freed since ``cool``

    def probe(self, content: bytes) -> Arena:
        """Return a page with this content.

        Other processes test on it whether they can map memory.
        """
        arena = self._new("", PAGE)
        self._arenas[arena.id][1][: len(content)] = content
        return arena

    def make(self, producer: str, nbytes: int) -> Arena:
        """Create an arena of at least ``nbytes`` for slots of this producer."""
        arena = self._new(producer, rounded(max(nbytes, ARENA_BYTES), 2 << 20))
        self._unannounced.setdefault(producer, [])
        return arena

    def _new(self, producer: str, size: int) -> Arena:
        fd = os.memfd_create("offbeat-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._made += 1
        arena = Arena(self._made, os.getpid(), fd, size)
        self._arenas[arena.id] = (arena, mmap.mmap(fd, size), producer)
        return arena

    def arena(self, slot: Slot) -> Arena:
        return self._arenas[slot.arena][0]

    def owns(self, producer: str, slot: Slot, nbytes: int) -> bool:
        """Return whether the slot is free and lies inside an arena lent to this producer."""
        if slot.arena not in self._arenas or slot in self._needs:
            return False
        arena, _, owner = self._arenas[slot.arena]
        return (
            owner == producer
            and slot.offset % PAGE == 0
            and 0 <= slot.offset <= slot.offset + nbytes <= arena.size
        )

    def hold(self, slot: Slot, nbytes: int) -> None:
        """Mark the slot as holding a payload."""
        self._needs[slot] = 1
        length = self._lengths[slot] = rounded(max(nbytes, 1))
        self.bytes_in_use += length

    def pin(self, slot: Slot) -> None:
        """Add a reader of the slot."""
        self._needs[slot] += 1

    def let_go(self, slot: Slot) -> None:
        """Drop the payload of the slot, or one reader."""
        self._needs[slot] -= 1
        if self._needs[slot]:
            return
        del self._needs[slot]
        self.bytes_in_use -= self._lengths[slot]
        _, _, producer = self._arenas[slot.arena]
        if producer in self._unannounced:
            self._unannounced[producer].append(slot)
            self._warm.append(slot)
            self.has_excess = True
        else:
            self._give_back(slot)
            del self._lengths[slot]
            self._close_if_unused(slot.arena)

    def announce(self, producer: str) -> list[Slot]:
        """Return the slots that returned to the producer since the last call."""
        slots = self._unannounced.get(producer)
        if not slots:
            return []
        self._unannounced[producer] = []
        announced = set(slots)
        self._warm = [slot for slot in self._warm if slot not in announced]
        for slot in slots:
            self._lengths.pop(slot, None)
        return slots

    def cool(self, keep_bytes: int) -> None:
        """Release the memory of free slots that have not been announced to their producers.

        The newest keep theirs, up to ``keep_bytes``, and at least one does unless that is 0.
        """
        kept, left = list[Slot](), keep_bytes
        for slot in reversed(self._warm):
            left -= self._lengths[slot]
            if left >= 0 or (keep_bytes and not kept):
                kept.append(slot)
            else:
                self._give_back(slot)
        self._warm = kept[::-1]
        self.has_excess = False

    def read(self, slot: Slot, nbytes: int) -> Bytes:
        """Return a view in this process. It does not keep the slot: copy it to keep the content."""
        return np.frombuffer(self._arenas[slot.arena][1], np.uint8, nbytes, slot.offset)

    def producer_gone(self, producer: str) -> None:
        """Release a producer that is gone.

        Its payloads stay readable, its arenas until the last one.
        """
        self.cool(0)
        for slot in self._unannounced.pop(producer, ()):
            self._lengths.pop(slot, None)
        for id_ in [id_ for id_, (_, _, owner) in self._arenas.items() if owner == producer]:
            self._close_if_unused(id_)

    def close(self) -> None:
        for arena, _, _ in self._arenas.values():
            os.close(arena.fd)
        self._arenas.clear()

    def _give_back(self, slot: Slot) -> None:
        punch(self._arenas[slot.arena][1], slot.offset, self._lengths[slot])

    def _close_if_unused(self, id_: int) -> None:
        if not any(slot.arena == id_ for slot in self._needs):
            arena, _, _ = self._arenas.pop(id_)
            os.close(arena.fd)  # the mapping ends with its last view
