"""Memory shared by the processes of one node, in large anonymous pieces called arenas.

The process that keeps the payloads makes the arenas, so their memory lives as long as it does and
is gone with it, whatever way it ends: there is no file to leave behind. Producers write into slots
of arenas lent to them; readers map an arena once and get views of it.
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
"""Arenas that a reader keeps mapped without a view of them: each takes a descriptor of its process."""

Bytes = NDArray[np.uint8]


class Arena(msgspec.Struct, frozen=True, array_like=True):
    """Reference to an arena for other processes of the node: a descriptor of its owner."""

    id: int
    pid: int
    fd: int
    size: int

    def opened(self, *, writable: bool) -> mmap.mmap:
        """A mapping of it.

        Raises:
            OSError: The keeper is gone, of another user, or on another node.
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
    """Give the memory of a page-aligned range back to the system; it reads as zeros from then on."""
    memory.madvise(mmap.MADV_REMOVE, offset, length)


class Writer:
    """A producer's end: slots in the arenas lent to it.

    A slot is the producer's until it is handed over with a put. It comes back by ``freed``, which
    only the keeper of the arenas calls for. What comes back is warm, and cheap to write again: up
    to ``KEPT_WARM_BYTES`` of it is kept so, the memory of the rest is given back.
    """

    def __init__(self) -> None:
        self._arenas: dict[int, tuple[mmap.mmap, Bytes, Slots]] = {}
        self._warm: dict[Slot, int] = {}  # free ranges as they came back, oldest first: bytes
        self._warm_bytes = 0

    def lend(self, arena: Arena) -> None:
        """Take up an arena.

        Raises:
            OSError: It cannot be mapped.
        """
        memory = arena.opened(writable=True)
        self._arenas[arena.id] = (memory, np.frombuffer(memory, np.uint8), Slots(arena.size))

    def take(self, nbytes: int) -> tuple[Slot, Bytes] | None:
        """A slot and its memory; None if no arena has room, so that another has to be lent."""
        for id_, (_, array, slots) in self._arenas.items():
            offset = slots.take(nbytes)
            if offset is not None:
                slot = Slot(id_, offset)
                self._not_free(slot, rounded(max(nbytes, 1)))
                return slot, array[offset : offset + nbytes]
        return None

    def freed(self, slots: Sequence[Slot]) -> None:
        """Slots that nobody reads any more."""
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
        """Let go of the arenas."""
        self._arenas.clear()

    def _not_free(self, taken: Slot, length: int) -> None:
        """Forget the warm ranges that are written to again: they must not be given back."""
        if self._warm.get(taken) == length:  # as a rule the sizes are alike
            self._warm_bytes -= self._warm.pop(taken)
            return
        start, end = taken.offset, taken.offset + length
        for slot, held in list(self._warm.items()):
            if slot.arena == taken.arena and slot.offset < end and start < slot.offset + held:
                self._warm_bytes -= self._warm.pop(slot)


class Reader:
    """A consumer's end: views of slots, and word of when the last view of one is gone."""

    def __init__(self, unpinned: Callable[[Slot, int], None]) -> None:
        """Make it.

        Args:
            unpinned: Called once for each ``view``, with its slot and bytes, when nothing refers to
                its memory any more, from wherever the last reference was dropped: it must not
                    block.
        """
        self._unpinned = unpinned
        self._maps: dict[int, mmap.mmap] = {}  # the one read last is the last
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._views: set[int] = set()  # a count would not survive threads

    @property
    def has_views(self) -> bool:
        """Something still refers to memory of a slot."""
        return bool(self._views)

    def view(self, arena: Arena, slot: Slot, nbytes: int) -> Bytes:
        """The memory of a slot, read-only. It stays as it is as long as any view of it lives.

        Raises:
            OSError: The arena cannot be mapped: its keeper is gone or elsewhere.
        """
        memory = self._mapped(arena)
        # Views of ``block`` refer to it and not to the mapping: it is the first array over it.
        block = np.frombuffer(memory, np.uint8, nbytes, slot.offset)
        number = next(self._numbers)
        self._views.add(number)
        weakref.finalize(block, self._gone, number, slot, nbytes).atexit = False
        return block

    def _mapped(self, arena: Arena) -> mmap.mmap:
        """Producers come and go: of their arenas, those that were not read for longest are forgotten."""
        with self._lock:
            memory = self._maps.pop(arena.id, None)
            if memory is None:
                memory = arena.opened(writable=False)
            self._maps[arena.id] = memory
            if len(self._maps) > MOST_MAPPED:
                del self._maps[next(iter(self._maps))]  # views of it keep what they need
            return memory

    def _gone(self, number: int, slot: Slot, nbytes: int) -> None:
        self._views.discard(number)
        self._unpinned(slot, nbytes)

    def close(self) -> None:
        """Let go of the arenas; views of them keep what they need."""
        self._maps.clear()


class ArenaAllocator:
    """The end that keeps the payloads: makes arenas, and counts who still needs which slot.

    A slot is held from its put until it is let go, and pinned by each reader that views it. Free of
    both it belongs to its producer again: ``announce`` says so with the producer's next reply.
    """

    def __init__(self) -> None:
        self._made = 0
        self._arenas: dict[int, tuple[Arena, mmap.mmap, str]] = {}  # and the producer
        self._needs: dict[Slot, int] = {}
        self._lengths: dict[Slot, int] = {}
        self._unannounced: dict[str, list[Slot]] = {}
        self._warm: list[Slot] = []  # unannounced, and their memory not yet given back
        self.bytes_in_use = 0  # of slots held or pinned
        self.has_excess = False  # slots were freed since ``cool``

    def probe(self, content: bytes) -> Arena:
        """A page with this content, for others to find out whether they can map what is ours."""
        arena = self._new("", PAGE)
        self._arenas[arena.id][1][: len(content)] = content
        return arena

    def make(self, producer: str, nbytes: int) -> Arena:
        """A new arena of at least ``nbytes`` for slots of this producer."""
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
        """The slot lies in an arena lent to this producer, inside its bounds, and is not held."""
        if slot.arena not in self._arenas or slot in self._needs:
            return False
        arena, _, owner = self._arenas[slot.arena]
        return (
            owner == producer
            and slot.offset % PAGE == 0
            and 0 <= slot.offset <= slot.offset + nbytes <= arena.size
        )

    def hold(self, slot: Slot, nbytes: int) -> None:
        """A payload rests in the slot."""
        self._needs[slot] = 1
        length = self._lengths[slot] = rounded(max(nbytes, 1))
        self.bytes_in_use += length

    def pin(self, slot: Slot) -> None:
        """One more reader views it."""
        self._needs[slot] += 1

    def let_go(self, slot: Slot) -> None:
        """The payload is cleared, or one reader's view is gone."""
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
        """The slots that are the producer's again, since it was last told."""
        slots = self._unannounced.get(producer)
        if not slots:
            return []
        self._unannounced[producer] = []
        told = set(slots)
        self._warm = [slot for slot in self._warm if slot not in told]
        for slot in slots:
            self._lengths.pop(slot, None)
        return slots

    def cool(self, keep_bytes: int) -> None:
        """Give the memory of free slots back whose producers have not been told that they are.

        The newest of them keep theirs, up to ``keep_bytes``; at least one does, unless that is 0.
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
        """A view in this process; it keeps no slot: copy what must last."""
        return np.frombuffer(self._arenas[slot.arena][1], np.uint8, nbytes, slot.offset)

    def producer_gone(self, producer: str) -> None:
        """Release a producer that is gone: its payloads stay readable, its arenas until the last one."""
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
            os.close(arena.fd)  # the mapping goes with its last view
