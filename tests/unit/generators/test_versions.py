"""Version spans, read off the clock."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.generators.embedded.engine import VersionLog


def test_a_stretch_without_a_change_is_one_span() -> None:
    assert VersionLog(5).spans(10, 13) == ((5, 4),)


def test_changes_split_a_stretch_at_their_ticks() -> None:
    log = VersionLog(0)
    log.change(3, 1)
    log.change(5, 2)
    assert log.spans(1, 6) == ((0, 2), (1, 2), (2, 2))
    assert log.spans(3, 4) == ((1, 2),)


def test_the_last_of_two_changes_at_one_tick_counts() -> None:
    log = VersionLog(0)
    log.change(3, 1)
    log.change(3, 2)
    assert log.spans(2, 3) == ((0, 1), (2, 1))


def test_a_change_to_the_same_version_is_no_boundary() -> None:
    log = VersionLog(4)
    log.change(3, 4)
    assert log.spans(1, 6) == ((4, 6),)


@given(
    gaps=st.lists(st.integers(0, 3), max_size=12),
    first=st.integers(0, 20),
    length=st.integers(1, 20),
    forgotten=st.integers(0, 20),
)
def test_spans_say_the_version_of_every_tick(
    gaps: list[int], first: int, length: int, forgotten: int
) -> None:
    log, at_tick, tick = VersionLog(0), [0] * 60, 0
    for version, gap in enumerate(gaps, start=1):
        tick += gap
        log.change(tick, version)
        at_tick[tick:] = [version] * (60 - tick)
    log.forget_before(min(forgotten, first))
    spans = log.spans(first, first + length - 1)
    said = [version for version, count in spans for _ in range(count)]
    assert said == at_tick[first : first + length]
    assert log.current == at_tick[-1]
