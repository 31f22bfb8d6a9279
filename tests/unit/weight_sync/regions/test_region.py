"""Geometry of sharded tensors."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.weight_sync.region import Region, chunk_cuts, cut_part, union_elements


@st.composite
def regions_of_one_shape(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    regions = list[Region]()
    for _ in range(draw(st.integers(0, 5))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        regions.append(Region(tuple(a for a, _ in ends), tuple(b for _, b in ends)))
    return shape, regions


@given(regions_of_one_shape())
def test_the_elements_of_a_union_are_counted_once(
    drawn: tuple[tuple[int, ...], list[Region]],
) -> None:
    shape, regions = drawn
    covered = np.zeros(shape, bool)
    for region in regions:
        covered[region.within(Region.whole(shape))] = True
    assert union_elements(regions) == covered.sum()


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_cut_as_torch_cuts_them(length: int, parts: int) -> None:
    cuts = chunk_cuts(length, parts)
    sizes = [len(each) for each in torch.arange(length).chunk(parts)]
    own = [stop - start for start, stop in pairwise(cuts)]
    assert [size for size in own if size] == [size for size in sizes if size]
    assert len(own) == parts


def test_ten_rows_over_four_ranks_are_three_three_three_and_one() -> None:
    assert chunk_cuts(10, 4) == [0, 3, 6, 9, 10]


@given(regions_of_one_shape(), st.integers(1, 20))
def test_slices_of_a_region_are_the_region_and_small(
    drawn: tuple[tuple[int, ...], list[Region]], most: int
) -> None:
    for region in drawn[1]:
        parts = region.slice_rows(most)
        assert sum(each.elements for each in parts) == region.elements
        assert union_elements(parts) == region.elements
        assert all(each.elements <= most or each.shape[0] == 1 for each in parts)


def test_five_rows_in_slices_of_two_are_two_two_and_one() -> None:
    slices = Region((1, 0), (6, 2)).slice_rows(4)
    assert slices == [Region((at, 0), (min(at + 2, 6), 2)) for at in (1, 3, 5)]


def test_a_part_lies_between_two_cuts_of_one_axis() -> None:
    assert cut_part((4, 6), 1, [0, 2, 6], 1) == Region((0, 2), (4, 6))
