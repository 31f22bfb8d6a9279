"""The map of an arena: no two slots overlap, and what is given back can be taken again."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from offbeat.queue_service.storage.slots import PAGE, Slots, rounded

SIZE = 64 * PAGE


@given(st.lists(st.one_of(st.integers(0, 20 * PAGE), st.integers(-64, -1)), max_size=200))
def test_slots_lie_apart_inside_the_arena_whatever_is_taken_and_given(steps: list[int]) -> None:
    """A positive step takes so many bytes; a negative one gives the slot of that number back."""
    slots, taken = Slots(SIZE), list[tuple[int, int]]()
    for step in steps:
        if step < 0 and taken:
            offset, length = taken.pop(step % len(taken))
            assert slots.give(offset) == length
        elif step >= 0 and (offset := slots.take(step)) is not None:
            taken.append((offset, rounded(max(step, 1))))
        ranges = sorted(taken)
        assert all(offset % PAGE == 0 and offset + length <= SIZE for offset, length in ranges)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
    for offset, _ in taken:
        slots.give(offset)
    assert slots.take(SIZE) == 0  # all of it is one piece again


@given(st.lists(st.integers(1, 8 * PAGE), max_size=40))
def test_nothing_is_refused_that_would_fit_behind_the_last_slot(sizes: list[int]) -> None:
    slots, end = Slots(SIZE), 0
    for size in sizes:
        fits = end + rounded(size) <= SIZE
        assert (slots.take(size) is not None) == fits
        end += rounded(size) if fits else 0


def test_the_lowest_memory_is_used_again_first() -> None:
    slots = Slots(SIZE)
    offsets = [slots.take(PAGE) for _ in range(4)]
    assert offsets == [0, PAGE, 2 * PAGE, 3 * PAGE]
    slots.give(2 * PAGE)
    slots.give(0)
    assert slots.take(PAGE) == 0
