"""Groups on disk: found byte for byte by their receipt, or not at all."""

import resource
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.messages.groups import Spooled
from offbeat.transfer_queue.spool import (
    NotInSpool,
    SpoolWriter,
    read,
    segment_name,
    sweep,
)
from offbeat.transfer_queue.spool_reader import Holds

Columns = dict[str, NDArray[np.generic]]


def group(seed: int, tokens: int = 20) -> Columns:
    """The columns of a group, other ones for each seed."""
    rng = np.random.default_rng(seed)
    return {
        "response_ids": rng.integers(0, 99, tokens).astype(np.int32),
        "response_offsets": np.array([0, tokens], np.int64),
        "loss_mask": rng.random(tokens) < 0.5,
        "rewards": rng.random(1).astype(np.float32),
    }


def writer(
    directory: Path, *, incarnation: str = "1-a", segment_bytes: int = 10_000
) -> SpoolWriter:
    return SpoolWriter(directory, "environment-0", incarnation, segment_bytes=segment_bytes)


def same(found: Mapping[str, NDArray[np.generic]], columns: Columns) -> bool:
    return found.keys() == columns.keys() and all(
        values.dtype == columns[name].dtype and np.array_equal(values, columns[name])
        for name, values in found.items()
    )


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@contextmanager
def no_file_larger_than(nbytes: int) -> Generator[None]:
    """As on a full disk: a write takes what still fits, the next one is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- writing and reading -----------------------------------------------------------------------------


def test_each_group_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    spool = writer(tmp_path)
    places = [spool.write(group(seed)) for seed in range(5)]
    assert all(same(read(tmp_path, place), group(seed)) for seed, place in enumerate(places))


def test_nothing_is_on_disk_before_the_first_group(tmp_path: Path) -> None:
    writer(tmp_path / "spool")
    assert files(tmp_path) == []


def test_a_full_segment_is_succeeded_and_a_group_lies_in_one_whole(tmp_path: Path) -> None:
    spool = writer(tmp_path, segment_bytes=3000)
    places = [spool.write(group(seed, tokens=100)) for seed in range(9)]
    assert 1 < len({place.segment for place in places}) < 9
    assert all(same(read(tmp_path, place), group(seed, 100)) for seed, place in enumerate(places))


def test_a_group_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    spool = writer(tmp_path, segment_bytes=100)
    places = [spool.write(group(seed, tokens=5000)) for seed in range(3)]
    assert len({place.segment for place in places}) == 3
    assert same(read(tmp_path, places[1]), group(1, 5000))


def test_another_incarnation_of_a_producer_writes_to_other_segments(tmp_path: Path) -> None:
    first = writer(tmp_path).write(group(1))
    second = writer(tmp_path, incarnation="2-b").write(group(2))
    assert first.segment != second.segment
    assert same(read(tmp_path, first), group(1)) and same(read(tmp_path, second), group(2))


def test_what_was_written_before_a_segment_was_removed_can_still_be_followed(
    tmp_path: Path,
) -> None:
    spool = writer(tmp_path)
    gone = spool.write(group(1))
    spool.rotate()
    sweep(tmp_path)
    place = spool.write(group(2))
    assert same(read(tmp_path, place), group(2))
    with pytest.raises(NotInSpool, match="No such file"):
        read(tmp_path, gone)


# --- what is not there -------------------------------------------------------------------------------


@given(data=st.data())
def test_any_changed_or_missing_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool = writer(directory)
    before, place = spool.write(group(1)), spool.write(group(2))
    path = directory / place.segment
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(place.offset, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    path.write_bytes(content)
    with pytest.raises(NotInSpool):
        read(directory, place)
    assert same(read(directory, before), group(1))


def test_another_group_at_the_same_place_is_not_taken_for_it(tmp_path: Path) -> None:
    place = writer(tmp_path).write(group(1))
    other = writer(tmp_path / "other").write(group(2))
    assert (place.segment, place.offset, place.nbytes) == (
        other.segment,
        other.offset,
        other.nbytes,
    )
    with pytest.raises(NotInSpool, match="a different group than the receipt's"):
        read(tmp_path / "other", place)


def test_a_receipt_names_no_file_outside_of_the_spool(tmp_path: Path) -> None:
    place = writer(tmp_path).write(group(1))
    (tmp_path / "below").mkdir()
    outside = msgspec.structs.replace(place, segment=f"../{place.segment}")
    with pytest.raises(NotInSpool, match="no name of a segment"):
        read(tmp_path / "below", outside)


@pytest.mark.parametrize("nbytes", [-1, 0, 2**62])
@pytest.mark.parametrize("offset", [-1, 0, 2**62])
def test_a_receipt_of_any_size_costs_no_more_than_the_segment(
    tmp_path: Path, offset: int, nbytes: int
) -> None:
    place = writer(tmp_path).write(group(1))
    with pytest.raises(NotInSpool):
        read(tmp_path, msgspec.structs.replace(place, offset=offset, nbytes=nbytes))


# --- a disk that refuses -----------------------------------------------------------------------------


def test_a_refused_group_leaves_nothing_and_those_around_it_are_whole(tmp_path: Path) -> None:
    spool = writer(tmp_path)
    before = spool.write(group(1))
    with no_file_larger_than(before.nbytes + 100), pytest.raises(OSError, match="too large"):
        spool.write(group(2))
    assert (tmp_path / before.segment).stat().st_size == before.nbytes
    after = spool.write(group(3))
    assert same(read(tmp_path, before), group(1)) and same(read(tmp_path, after), group(3))


def test_a_refused_first_group_leaves_no_file(tmp_path: Path) -> None:
    spool = writer(tmp_path)
    with no_file_larger_than(100), pytest.raises(OSError, match="too large"):
        spool.write(group(1))
    assert files(tmp_path) == []
    assert same(read(tmp_path, spool.write(group(2))), group(2))


def test_a_place_where_no_directory_can_be_made_refuses_every_group(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")
    spool = writer(tmp_path / "spool")
    for seed in range(2):
        with pytest.raises(OSError, match="File exists"):
            spool.write(group(seed))


# --- sweeping ----------------------------------------------------------------------------------------


def test_a_sweep_leaves_what_is_needed_and_what_is_not_of_the_spool(tmp_path: Path) -> None:
    spool = writer(tmp_path, segment_bytes=1)
    places = [spool.write(group(seed)) for seed in range(3)]
    (tmp_path / "notes").write_text("of somebody else")
    assert sweep(tmp_path, {places[1].segment}) == 2
    assert files(tmp_path) == sorted([places[1].segment, "notes"])


def test_a_sweep_of_everything_takes_the_directory_along(tmp_path: Path) -> None:
    spool = writer(tmp_path / "spool")
    spool.write(group(1))
    assert sweep(tmp_path / "spool") == 1
    assert files(tmp_path) == []
    assert sweep(tmp_path / "spool") == 0


# --- what is still needed ----------------------------------------------------------------------------


def place(segment: int, *, incarnation: str = "1-a", producer: str = "environment-0") -> Spooled:
    return Spooled(segment_name(producer, incarnation, segment), 0, 1, b"")


def test_a_segment_is_needed_while_a_group_in_it_is_held() -> None:
    holds = Holds()
    first, second = holds.hold(place(1)), holds.hold(place(1))
    newer = holds.hold(place(2))
    del first
    assert holds.list_unneeded() == []
    del second
    assert holds.list_unneeded() == [place(1).segment]
    assert holds.list_unneeded() == []
    del newer


def test_the_segment_that_is_being_written_is_needed_though_nobody_holds_a_group_in_it() -> None:
    holds = Holds()
    del_me = holds.hold(place(1))
    del del_me
    assert holds.list_unneeded() == []
    later = holds.hold(place(2))
    assert holds.list_unneeded() == [place(1).segment]
    del later


def test_a_new_incarnation_of_a_producer_ends_the_last_segment_of_the_one_before() -> None:
    holds = Holds()
    kept = [holds.hold(place(7))]
    kept.clear()
    kept.append(holds.hold(place(1, incarnation="2-b")))
    assert holds.list_unneeded() == [place(7).segment]


def test_producers_do_not_end_each_others_segments() -> None:
    holds = Holds()
    kept = [holds.hold(place(1))]
    kept.clear()
    kept.append(holds.hold(place(1, producer="environment-1")))
    assert holds.list_unneeded() == []


def test_an_answer_that_comes_late_does_not_end_a_later_segment() -> None:
    holds = Holds()
    kept = [holds.hold(place(2))]
    late = [holds.hold(place(1))]
    late.clear()
    assert holds.list_unneeded() == [place(1).segment]
    kept.clear()
    assert holds.list_unneeded() == []


def test_what_a_former_controller_left_is_needed_only_while_it_is_held() -> None:
    holds = Holds()
    left = [holds.inherit(place(3)), holds.inherit(place(3))]
    left.pop()
    assert holds.list_unneeded() == []
    left.pop()
    assert holds.list_unneeded() == [place(3).segment]


@given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_no_held_group_is_ever_unneeded_and_in_the_end_one_segment_is_left(
    moves: list[tuple[bool, int]],
) -> None:
    """Segments are begun in order; groups are held and let go in any."""
    holds, held, begun, gone = Holds(), list[tuple[str, object]](), 1, set[str]()
    for let_go, which in moves:
        if let_go and held:
            held.pop(which % len(held))
        else:
            begun += which == 0
            held.append((place(begun).segment, holds.hold(place(begun))))
        gone.update(holds.list_unneeded())
        assert gone.isdisjoint(segment for segment, _ in held)
    held.clear()
    gone.update(holds.list_unneeded())
    assert place(begun).segment not in gone
