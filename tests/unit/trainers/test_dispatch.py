"""Groups are assigned to ranks evenly, wholly, and always the same way."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainers.ranks.dispatch import Replicas, pad_microbatches, shares

GROUPS = st.dictionaries(st.integers(0, 10_000), st.integers(0, 3000), max_size=24)
RANKS = st.integers(1, 9)


@given(tokens=GROUPS, ranks=RANKS)
def test_every_group_is_one_ranks(tokens: dict[int, int], ranks: int) -> None:
    assigned = shares(tokens, ranks)
    assert len(assigned) == ranks
    assert sorted(chain.from_iterable(assigned)) == sorted(tokens)
    assert all(list(each) == sorted(each) for each in assigned)


@given(tokens=GROUPS, ranks=RANKS)
def test_no_two_ranks_are_further_apart_than_the_heaviest_group(
    tokens: dict[int, int], ranks: int
) -> None:
    weights = {group: max(1, each) for group, each in tokens.items()}
    loads = [sum(weights[group] for group in each) for each in shares(tokens, ranks)]
    assert max(loads) - min(loads) <= max(weights.values(), default=0)


@given(tokens=GROUPS, ranks=RANKS)
def test_no_rank_is_idle_while_another_has_two_groups(tokens: dict[int, int], ranks: int) -> None:
    counts = [len(each) for each in shares(tokens, ranks)]
    assert min(counts) > 0 or max(counts) <= 1


@given(count=st.integers(0, 24), each=st.integers(0, 100), ranks=RANKS)
def test_of_equal_groups_the_lower_ranks_have_the_odd_ones(
    count: int, each: int, ranks: int
) -> None:
    counts = [len(part) for part in shares(dict.fromkeys(range(count), each), ranks)]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


@given(tokens=GROUPS, ranks=RANKS, data=st.data())
def test_the_order_in_which_groups_come_does_not_matter(
    tokens: dict[int, int], ranks: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(list(tokens.items())))
    assert shares(dict(shuffled), ranks) == shares(tokens, ranks)


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_all_ranks_compute_as_many_microbatches(counts: list[int]) -> None:
    own = [[f"microbatch {i}" for i in range(count)] for count in counts]
    all_ranks = [pad_microbatches(each, max(counts), "padding") for each in own]
    assert {len(each) for each in all_ranks} == {max(counts)}
    for before, after in zip(own, all_ranks, strict=True):
        assert [each for each in after if each != "padding"] == before


def test_microbatches_are_never_left_out() -> None:
    with pytest.raises(ValueError, match="3 microbatches"):
        pad_microbatches([1, 2, 3], 2, 0)


@given(
    data=st.integers(1, 4),
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 4),
    context=st.integers(1, 4),
)
def test_every_replica_has_one_leader_and_twins_share_the_data(
    data: int, tensor: int, pipeline: int, context: int
) -> None:
    world = Replicas(data, tensor, pipeline, context)
    assert [world.find_share(rank) for rank in world.leaders] == list(range(data))
    per_share = [0] * data
    for rank in range(world.ranks):
        per_share[world.find_share(rank)] += 1
    assert per_share == [tensor * context * pipeline] * data
    assert min(world.leaders) >= (pipeline - 1) * data * tensor * context
