"""Layouts of engine ranks: several boxes of a tensor, planned, sent, selected and loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from region_target import UNREAD, RegionTarget, metas, packed, receive
from torch import Tensor

from offbeat.weight_sync.buckets import (
    BucketPlan,
    NamedRegion,
    find_needed,
    plan_buckets,
)
from offbeat.weight_sync.engine_layout import EngineLayout, find_needed_buckets, find_needs
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest, PieceSpec, TensorMeta
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.region_tensors import RegionTensors, find_groups
from offbeat.weight_sync.transaction import Transaction

NAMES = ("w", "v")


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Disjoint boxes that cover a tensor."""
    found = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(box.start[axis], box.stop[axis]))
        stop, start = list(box.stop), list(box.start)
        stop[axis] = start[axis] = cut
        found += [
            part
            for part in (Region(box.start, tuple(stop)), Region(tuple(start), box.stop))
            if part.elements
        ]
    return found


@dataclass
class Case:
    """Tensors with their regions on senders and receivers, each on at least one."""

    tensors: Mapping[str, Tensor]
    held: list[list[NamedRegion]]
    needed: list[list[NamedRegion]]
    bucket_bytes: int

    @property
    def layout(self) -> EngineLayout:
        return EngineLayout(NAMES, tuple(map(tuple, self.needed)))

    def plan(self, layout: EngineLayout | None) -> BucketPlan:
        needed = layout.placement(metas(self.tensors)) if layout else None
        return plan_buckets(metas(self.tensors), self.held, self.bucket_bytes, needed)

    def packed(self, plan: BucketPlan) -> tuple[Manifest, Mapping[int, Bytes]]:
        """The sealed release of all ranks, of which those that hold the same bucket agree."""
        shards = [
            [TensorRegion(name, region, self.tensors[name][region.slices]) for name, region in held]
            for held in self.held
        ]
        return packed(plan, shards)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = dict[str, Tensor]()
    held: list[list[NamedRegion]] = [[] for _ in range(draw(st.integers(1, 3)))]
    needed: list[list[NamedRegion]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name in NAMES:
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        values = torch.arange(int(np.prod(shape)), dtype=torch.float32)
        tensors[name] = values.view(shape)
        for side in (held, needed):
            for box in draw(boxes(shape)):
                ranks = draw(st.sets(st.integers(0, len(side) - 1), min_size=1))
                for rank in ranks:
                    side[rank].append((name, box))
    return Case(tensors, held, needed, draw(st.sampled_from([4, 16, 60, 1000])))


def sliced(case: Case, rank: int) -> dict[str, Tensor]:
    """What a rank has to end up with: plain slices of the tensors."""
    found = {name: torch.full_like(tensor, UNREAD) for name, tensor in case.tensors.items()}
    for name, region in case.needed[rank]:
        found[name][region.slices] = case.tensors[name][region.slices]
    return found


def same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(got[name], each) for name, each in want.items())


@given(cases())
def test_any_disjoint_boxes_of_every_rank_arrive_as_plain_slices_and_each_needed_byte_once(
    case: Case,
) -> None:
    plan = case.plan(case.layout)
    manifest, chunks = case.packed(plan)
    for rank, needed in enumerate(case.needed):
        buckets = find_needed_buckets(1, manifest, case.layout.needs(rank))
        assert list(buckets) == find_needed(plan.routes, rank)
        target = RegionTarget(case.tensors, case.layout.needs(rank))
        part = receive(target, manifest, chunks, buckets)
        assert sum(each.region.elements for each in part.pieces) == sum(
            region.elements for _, region in needed
        )
        assert same(target.tensors, sliced(case, rank))


@given(cases(), st.booleans())
def test_a_rank_finds_what_it_needs_in_any_release_also_in_one_that_is_planned_without_its_layout(
    case: Case, planned: bool
) -> None:
    manifest, chunks = case.packed(case.plan(case.layout if planned else None))
    for rank, needed in enumerate(case.needed):
        buckets = find_needed_buckets(1, manifest, case.layout.needs(rank))
        made = RegionTensors(manifest, buckets)
        got = dict(each for group in made.tensors([chunks[at] for at in buckets]) for each in group)
        assert got.keys() >= {name for name, _ in needed}
        for name, region in needed:
            assert got[name].shape == case.tensors[name].shape
            assert torch.equal(got[name][region.slices], case.tensors[name][region.slices])


@given(cases())
def test_groups_hold_every_tensor_once_in_order(case: Case) -> None:
    manifest = case.plan(None).manifest
    assert [index for group in find_groups(manifest) for index in group] == list(range(len(NAMES)))


SQUARE = TensorMeta("w", (4, 4), "float32")
ROWS, ALL = Region((0, 0), (2, 4)), Region.whole((4, 4))


def one_rank(needed: EngineLayout | None) -> BucketPlan:
    placement = needed.placement([SQUARE]) if needed else None
    return plan_buckets([SQUARE], [[("w", ALL)]], 1000, placement)


def test_a_region_that_no_bucket_holds_is_refused_by_name() -> None:
    plan = one_rank(EngineLayout(("w",), ((("w", ROWS),),)))
    with pytest.raises(TransferRefused, match=r"elements of 'w'\[0:4, 0:4\] is 8, expected 16"):
        find_needed_buckets(3, plan.manifest, find_needs(["w"], [("w", ALL)]))
    with pytest.raises(TransferRefused, match=r"tensor 'u' is not in the release"):
        find_needed_buckets(3, plan.manifest, find_needs(["u"], []))


def test_a_tensor_that_was_not_recorded_or_has_another_shape_is_sent_whole_to_every_rank() -> None:
    beyond = Region((0, 0), (5, 4))
    for layout in (EngineLayout(("u",), ((), ())), EngineLayout(("w",), ((("w", beyond),), ()))):
        (route,) = one_rank(layout).routes
        assert [rank for rank, _ in route.sender_by_receiver] == [0, 1]


def test_what_no_rank_needs_is_not_sent() -> None:
    assert one_rank(EngineLayout(("w",), ((), ()))).routes == ()


LEFT, RIGHT = Region((0, 0), (2, 1)), Region((0, 3), (2, 4))


@pytest.mark.parametrize(
    "regions",
    [[LEFT], [LEFT, RIGHT, Region((2, 0), (3, 4))], [LEFT, Region((2, 0), (4, 1))], [ROWS, LEFT]],
    ids=["one lacks", "one more", "as many elsewhere", "around a box"],
)
def test_other_regions_than_the_boxes_of_a_rank_are_refused_before_the_first_byte(
    regions: list[Region],
) -> None:
    manifest = one_rank(EngineLayout(("w",), ((("w", LEFT), ("w", RIGHT)),))).manifest
    specs, needed = {"w": ((4, 4), "float32")}, {"w": (LEFT, RIGHT)}
    Transaction("g0").begin(1, manifest, specs, needed)
    pieces = tuple(PieceSpec(0, region, 0, 0) for region in regions)
    wrong = msgspec.structs.replace(manifest, pieces=pieces)
    with pytest.raises(TransferRefused, match=r"4 elements of \[0:2, 0:1\] and \[0:2, 3:4\] once"):
        Transaction("g0").begin(1, wrong, specs, needed)
