"""Who encodes for whom, which pictures belong to whom, and what a message may be. No process group."""

from collections import deque
from dataclasses import astuple, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.messages.failures import SchemaError
from offbeat.models.media_rules import media_rules
from offbeat.plugins.encoder_ranks.bridge import (
    FIELDS,
    Bridge,
    Header,
    Kind,
    digest_media,
    list_digest,
    match_media,
)
from offbeat.plugins.encoder_ranks.errors import BridgeMismatch, ProvenanceMismatch
from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.sides import make_inventory
from offbeat.plugins.images.pictures import MediaKind, Pictures, merge
from offbeat.trainers.errors import AbsentModule, UntrainableModel
from offbeat.trainers.sides import Side, keep_side
from tests.support.image_text_models import MODELS, make, patched, pictures
from tests.support.pictures import features

FAMILIES = sorted(MODELS)


@given(encoders=st.integers(1, 6), each=st.integers(1, 6))
def test_every_lane_has_one_encoder_which_gets_its_share_and_no_other(
    encoders: int, each: int
) -> None:
    grid = Grid(encoders * each, encoders=encoders)
    assert grid.ranks == encoders * each + encoders
    assert [grid.list_shares(lane) for lane in grid.list_ranks(Side.LANGUAGE)] == [
        (lane,) for lane in range(grid.data)
    ]
    served = [lane for rank in grid.list_ranks(Side.TOWER) for lane in grid.list_shares(rank)]
    assert served == list(range(grid.data))
    for rank in grid.list_ranks(Side.TOWER):
        assert {grid.find_encoder(lane) for lane in grid.list_shares(rank)} == {rank}
    assert grid.leaders == grid.list_ranks(Side.LANGUAGE)


@given(
    encoders=st.integers(1, 3),
    each=st.integers(1, 3),
    tensor=st.integers(1, 4),
    embedding=st.integers(1, 4),
)
def test_ranks_that_share_matrices_get_the_same_groups_and_the_first_of_them_exchanges_messages(
    encoders: int, each: int, tensor: int, embedding: int
) -> None:
    lanes = encoders * each
    grid = Grid(lanes, embedding, encoders=encoders, encoder_tensor=tensor)
    assert grid.ranks == lanes * embedding + encoders * tensor
    towers = grid.list_ranks(Side.TOWER)
    for first in towers[::tensor]:
        alike = range(first, first + tensor)
        assert {grid.find_sender(rank) for rank in alike} == {first}
        assert {grid.list_shares(rank) for rank in alike} == {grid.list_shares(first)}
        assert {grid.find_encoder(lane) for lane in grid.list_shares(first)} == {first}
    assert [lane for rank in towers[::tensor] for lane in grid.list_shares(rank)] == list(
        range(lanes)
    )


def test_pictures_reach_the_lane_that_names_them_in_its_order() -> None:
    first, second, third = (pictures(seed) for seed in range(3))
    named = [[digest_media(third), digest_media(first)], [], [digest_media(second)]]
    batch = match_media(3, named, [first, second, third])
    assert batch.media == (third, first, second)
    assert batch.counts == (2, 0, 1)


def test_two_lanes_with_the_same_pictures_both_get_their_features() -> None:
    media = pictures(0)
    batch = match_media(2, [[digest_media(media)], [digest_media(media)]], [media, pictures(0)])
    assert batch.counts == (1, 1)


def test_pictures_that_a_lane_reads_and_nobody_got_are_an_error_as_are_those_nobody_reads() -> None:
    with pytest.raises(ProvenanceMismatch, match=r"of 1 groups which it did not get.*of 2 groups"):
        match_media(2, [[digest_media(pictures(0))]], [pictures(1), pictures(2)])
    with pytest.raises(ProvenanceMismatch, match=r"of 0 groups which it did not get.*of 1 groups"):
        match_media(2, [[digest_media(pictures(0))]], [pictures(0), pictures(1)])


def test_pictures_of_other_sizes_or_values_have_another_digest() -> None:
    values = np.ones(3 * 8 * 8, np.float32)
    seen = {
        digest_media(Pictures(kind, values * scale, np.array([size], np.int32)).media)
        for kind in MediaKind
        for scale in (1, 2)
        for size in ((3, 8, 8), (3, 4, 16))
    }
    assert len(seen) == 8
    assert list_digest(["a", "b"]) != list_digest(["b", "a"])


@pytest.mark.parametrize(
    ("dtype", "largest_gap"),
    [
        (torch.float64, 0.0),
        # On some CPUs BLAS chooses the kernel of a float32 product by its number of rows.
        (torch.float32, 5e-6),
        (torch.bfloat16, 0.0),
    ],
    ids=["float64", "float32", "bfloat16"],
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_merged_pictures_have_the_features_of_each_alone(
    family: str, dtype: torch.dtype, largest_gap: float
) -> None:
    """On one thread: several may cut a float32 product elsewhere for another number of rows."""
    assert torch.get_num_threads() == 1
    model = make(family, dtype)
    each = [pictures(0, 1, family), pictures(1, 1, family), pictures(2, 2, family)]
    if family.startswith("qwen"):
        each.append(patched(3, (1, 4, 6)))
    together = features(model, (merge(each),))
    apart = [features(model, (media,)) for media in each]
    expect = partial(torch.testing.assert_close, rtol=0, atol=largest_gap)
    expect(together.embedded_FH, torch.cat([one.embedded_FH for one in apart]))
    assert len(together.deep) == (1 if family.startswith("qwen3") else 0)
    for layer, deep in enumerate(together.deep):
        expect(deep, torch.cat([one.deep[layer] for one in apart]))


def test_a_field_that_no_rule_knows_is_not_merged_by_its_shape() -> None:
    media = {**pictures(0), "media_frames": np.ones(1, np.int32)}
    with pytest.raises(SchemaError, match="media_frames"):
        merge([media, media])


# --- messages -------------------------------------------------------------------------------------


class Queue:
    """A wire that hands back what was put into it."""

    def __init__(self) -> None:
        self.sent = deque[Tensor]()

    def send(self, tensor: Tensor, rank: int) -> None:
        del rank
        self.sent.append(tensor.clone())

    def receive(self, tensor: Tensor, rank: int) -> None:
        del rank
        tensor.copy_(self.sent.popleft())


DUE = Header(7, 3, Kind.FEATURES, 1, 99, 0, 4, 0, 0)


def bridge() -> Bridge:
    return Bridge(1, torch.device("cpu"), Queue())


def test_a_message_arrives_with_its_shape_and_type() -> None:
    ends = bridge()
    values = torch.randn(2, 4, 8, dtype=torch.float64)
    ends.send(DUE, values, 1)
    assert torch.equal(ends.receive(DUE, 2), values)
    assert ends.traffic.nbytes == values.nbytes + FIELDS * 8


def test_a_message_of_an_aborted_attempt_is_discarded_by_its_key() -> None:
    ends = bridge()
    ends.send(replace(DUE, exchange=6), torch.zeros(1, 9, 8), 1)
    ends.send(DUE, torch.ones(1, 4, 8), 1)
    assert torch.equal(ends.receive(DUE, 2), torch.ones(1, 4, 8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lane": 0},
        {"provenance": 98},
        {"kind": Kind.GRADIENTS},
        {"step": 2},
        {"exchange": 8},
    ],
    ids=lambda each: next(iter(each)),
)
def test_any_other_message_is_an_error_that_names_both(wrong: dict[str, int]) -> None:
    ends = bridge()
    ends.send(replace(DUE, **wrong), torch.zeros(1, 4, 8), 1)
    with pytest.raises(
        BridgeMismatch, match=r"rank 1 got Header.* from rank 2, but expected Header"
    ) as got:
        ends.receive(DUE, 2)
    assert astuple(DUE)[0] == 7 and str(got.value)


def test_features_of_another_number_are_an_error() -> None:
    ends = bridge()
    ends.send(DUE, torch.zeros(1, 5, 8), 1)
    with pytest.raises(BridgeMismatch, match="features=5"):
        ends.receive(DUE, 2)


# --- sides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_sides_of_a_model_have_all_its_names_and_none_in_common(family: str) -> None:
    model = make(family)
    inventory = make_inventory(model, has_experts=True)
    whole = set(model.state_dict())
    held = dict[Side, set[str]]()
    for side in Side:
        half = make(family)
        keep_side(half, side)
        held[side] = set(half.state_dict())
        assert {each.name for each in inventory.weights if each.side is side} <= held[side]
    assert held[Side.LANGUAGE] | held[Side.TOWER] == whole
    assert not held[Side.LANGUAGE] & held[Side.TOWER]
    assert all(name in held[side] for name, side in inventory.trained)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_tower_alone_makes_the_features_of_the_whole_model(family: str) -> None:
    whole, tower = make(family), make(family)
    keep_side(tower, Side.TOWER)
    rules = media_rules(whole.config)
    media = (rules.example(np.random.default_rng(0)),)
    assert torch.equal(features(tower, media).embedded_FH, features(whole, media).embedded_FH)


def test_a_language_side_that_is_asked_for_features_says_what_it_is() -> None:
    model = make("idefics3")
    keep_side(model, Side.LANGUAGE)
    with pytest.raises(AbsentModule, match=r"model.vision_model was called.*language"):
        features(model, (pictures(0),))


def test_a_model_with_experts_is_refused_where_all_ranks_would_count_their_load() -> None:
    with pytest.raises(UntrainableModel, match=r"has experts, .*trainer\.backend to megatron"):
        make_inventory(make("qwen3_vl_moe"))


def test_a_language_model_that_is_frozen_as_a_whole_is_refused() -> None:
    model = make("idefics3")
    for name, each in model.named_parameters():
        each.requires_grad = "vision_model" in name
    with pytest.raises(UntrainableModel, match="trains nothing of its language model"):
        make_inventory(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_has_room_for_both_sides_masters_and_moments(dtype: torch.dtype) -> None:
    model = make("idefics3", dtype)
    number, master = sum(each.numel() for each in model.parameters()), max(4, dtype.itemsize)
    assert make_inventory(model).state_nbytes == number * 3 * master
    frozen = [each for name, each in model.named_parameters() if "vision_model" in name]
    for each in frozen:
        each.requires_grad = False
    kept = sum(each.numel() for each in frozen)
    assert (
        make_inventory(model).state_nbytes == (number - kept) * 3 * master + kept * dtype.itemsize
    )
