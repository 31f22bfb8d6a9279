"""Memory that the queue service lends to producers and takes back."""

import os
from collections.abc import Iterator

import pytest

from offbeat.queue_service.storage.arenas import ArenaAllocator, Slot
from offbeat.queue_service.storage.slots import PAGE


@pytest.fixture
def allocator() -> Iterator[ArenaAllocator]:
    made = ArenaAllocator()
    yield made
    made.close()


def test_memory_is_in_excess_from_a_return_until_it_is_cooled(allocator: ArenaAllocator) -> None:
    slot = Slot(allocator.make("producer", 1).id, 0)
    allocator.hold(slot, PAGE)
    allocator.pin(slot)
    allocator.let_go(slot)
    assert not allocator.has_excess, "a reader still needs it"
    allocator.let_go(slot)
    assert allocator.has_excess
    assert allocator.bytes_in_use == 0
    allocator.cool(0)
    assert not allocator.has_excess


def test_cooling_releases_the_memory_of_all_but_the_newest_free_slots(
    allocator: ArenaAllocator,
) -> None:
    arena = allocator.make("producer", 1)
    slots = [Slot(arena.id, place * PAGE) for place in range(3)]
    for slot in slots:
        allocator.hold(slot, PAGE)
        os.pwrite(arena.fd, b"\1" * PAGE, slot.offset)
        allocator.let_go(slot)
    allocator.cool(2 * PAGE)
    assert [bool(allocator.read(slot, PAGE).any()) for slot in slots] == [False, True, True]
    assert allocator.announce("producer") == slots, "all are free, whether their memory is kept"
    assert allocator.announce("producer") == []
