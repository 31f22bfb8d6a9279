"""Placements that are declared by name, beside what the trainer and torch really hold."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.plugins.planning.declared import (
    DeclaredTensor,
    ModelSizes,
    classify,
    place_tensors,
    placement,
)
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import Region, union_elements
from tests.plugins.megatron.test_megatron_mapping import cuts, world_of

SIZES = ModelSizes(layers=8, key_value_heads=2, experts=16)


def rows(name: str, grid: ModelGrid, rank: int, length: int = 64) -> list[tuple[int, int]]:
    """First and last row of what a rank holds of a tensor [length, 4]."""
    parts = placement(DeclaredTensor(name, (length, 4), 2), SIZES, grid).at(rank)
    return [(each.start[0], each.stop[0]) for each in parts]


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_a_megatron_rank_holds_what_is_declared(cut: tuple[Architecture, ModelGrid]) -> None:
    a, grid = cut
    assume(grid.tensor <= a.groups)  # what a plan of a recipe refuses
    sizes = ModelSizes(a.layers, a.groups, a.experts, a.tied)
    for rank, boxes in enumerate(world_of(a, grid)):
        held = by_tensor(boxes)
        for name, regions in held.items():
            whole = next(box.whole for box in boxes if box.tensor == name)
            declared = placement(DeclaredTensor(name, whole, 2), sizes, grid).at(rank)
            assert union_elements(declared) == union_elements(regions)
            assert union_elements([*declared, *regions]) == union_elements(regions)


def by_tensor(boxes: list[TensorBox]) -> dict[str, list[Region]]:
    found = dict[str, list[Region]]()
    for box in boxes:
        found.setdefault(box.tensor, []).append(box.region)
    return found


@given(st.integers(1, 20), st.integers(2, 6))
def test_an_fsdp_rank_holds_its_chunk_and_some_hold_none(length: int, ranks: int) -> None:
    chunks = [len(each) for each in torch.arange(length).chunk(ranks)]
    grid = ModelGrid(shards=ranks)
    held = [rows("model.norm.weight", grid, rank, length) for rank in range(ranks)]
    assert [stop - start for ((start, stop),) in filter(None, held)] == chunks
    assert sum(not each for each in held) == ranks - len(chunks)


def test_an_fsdp_rank_holds_whole_experts_because_they_are_one_tensor_of_the_trainer() -> None:
    grid = ModelGrid(shards=3)
    names = [f"model.layers.0.mlp.experts.{each}.up_proj.weight" for each in range(16)]
    held = [[at for at, name in enumerate(names) if rows(name, grid, rank)] for rank in range(3)]
    assert [(each[0], each[-1]) for each in held] == [(0, 5), (6, 11), (12, 15)]


def test_one_rank_is_a_tensor_parallel_rank_and_an_expert_rank_at_once() -> None:
    # Four ranks: two tensor-parallel pairs. With expert_tensor 1 each holds other experts whole.
    grid = ModelGrid(tensor=2, data=2, expert=4, expert_tensor=1)
    assert [rows("model.layers.0.mlp.up_proj.weight", grid, rank)[0] for rank in range(4)] == [
        (0, 32),
        (32, 64),
        (0, 32),
        (32, 64),
    ]
    for rank in range(4):
        names = [f"model.layers.0.mlp.experts.{each}.up_proj.weight" for each in range(16)]
        held = [at for at, name in enumerate(names) if rows(name, grid, rank) == [(0, 64)]]
        assert held == list(range(4 * rank, 4 * rank + 4))


@pytest.mark.parametrize(("tensor", "data", "expert"), [(2, 4, 2), (4, 2, 4), (2, 2, 1)])
def test_every_rank_of_a_stage_is_one_expert_rank_and_those_of_a_part_are_its_copies(
    tensor: int, data: int, expert: int
) -> None:
    grid = ModelGrid(tensor=tensor, data=data, expert=expert, expert_tensor=1, pipeline=2)
    parts = [grid.of_expert(rank, 0, stage) for stage in range(2) for rank in range(expert)]
    assert sorted(rank for part in parts for rank in part) == list(range(grid.ranks))
    assert {len(part) for part in parts} == {tensor * data // expert}


def test_experts_are_counted_as_numbers_not_as_words() -> None:
    grid = ModelGrid(data=2, expert=2)
    assert rows("model.layers.0.mlp.experts.2.up_proj.weight", grid, 0)
    assert rows("model.layers.0.mlp.experts.10.up_proj.weight", grid, 1)


def test_ranks_beyond_the_key_value_heads_hold_copies_of_them() -> None:
    grid = ModelGrid(tensor=4)
    held = [rows("model.layers.0.self_attn.k_proj.weight", grid, rank) for rank in range(4)]
    assert held == [[(0, 32)], [(0, 32)], [(32, 64)], [(32, 64)]]


def test_the_rows_behind_the_vocabulary_belong_to_nobody() -> None:
    grid = ModelGrid(tensor=4, vocabulary_multiple=8)
    held = [rows("model.embed_tokens.weight", grid, rank, 50) for rank in range(4)]
    assert held == [[(0, 16)], [(16, 32)], [(32, 48)], [(48, 50)]]


def test_layers_are_in_the_stages_that_are_given() -> None:
    grid = ModelGrid(pipeline=3, stages=(1, 4, 3))
    stages = [
        next(r for r in range(3) if rows(f"model.layers.{each}.mlp.up_proj.weight", grid, r))
        for each in range(8)
    ]
    assert stages == [0, 1, 1, 1, 1, 2, 2, 2]


def test_a_tied_embedding_is_in_the_first_and_the_last_stage() -> None:
    tensor = DeclaredTensor("model.embed_tokens.weight", (64, 4), 2)
    grid = ModelGrid(pipeline=3, stages=(2, 3, 3))
    tied = placement(tensor, ModelSizes(8, 2, tied=True), grid)
    assert [bool(tied.at(rank)) for rank in range(3)] == [True, False, True]


def test_a_tensor_of_no_known_stage_is_refused_rather_than_put_in_the_first() -> None:
    with pytest.raises(LayoutRefused, match=r"tensor is model\.vision\.patch\.weight"):
        rows("model.vision.patch.weight", ModelGrid(pipeline=2), 0)


@pytest.mark.parametrize(
    ("name", "tensor", "want"),
    [
        # 64 rows divide by 4; 14 and 6 heads do not, and no trainer or engine cuts a head.
        ("q_proj.weight", 4, "a divisor of 14 attention heads"),
        ("q_b_proj.weight", 4, "a divisor of 14 attention heads"),
        ("k_proj.weight", 4, "a multiple or a divisor of 6 key-value heads"),
        ("v_proj.bias", 8, "a multiple or a divisor of 6 key-value heads"),
    ],
)
def test_a_cut_within_an_attention_head_is_refused(name: str, tensor: int, want: str) -> None:
    sizes = ModelSizes(8, key_value_heads=6, attention_heads=14)
    weight = DeclaredTensor(f"model.layers.0.self_attn.{name}", (64, 4), 2)
    with pytest.raises(LayoutRefused, match=f"tensor is {tensor}, expected {want}"):
        placement(weight, sizes, ModelGrid(tensor=tensor))
    assert placement(weight, sizes, ModelGrid(tensor=2)).at(1)


def test_the_side_whose_sizes_do_not_divide_a_tensor_is_named_with_the_tensor() -> None:
    sizes, fits = ModelSizes(8, key_value_heads=6, attention_heads=14), ModelGrid(tensor=2)
    weight = DeclaredTensor("model.layers.0.self_attn.q_proj.weight", (64, 4), 2)
    for side, grids in (
        ("senders", (ModelGrid(tensor=4), fits)),
        ("receivers", (fits, ModelGrid(tensor=4))),
    ):
        with pytest.raises(LayoutRefused) as refused:
            place_tensors([weight], sizes, *grids)
        assert str(refused.value).startswith(f"{side}, {weight.name}: tensor is 4, expected")


def test_a_state_space_input_is_cut_segment_by_segment_and_received_whole() -> None:
    sizes = ModelSizes(8, 2, segments=(16, 16, 4, 4, 8), state_space_groups=2)
    tensor = DeclaredTensor("model.layers.0.mixer.in_proj.weight", (48, 4), 2)
    grid = ModelGrid(tensor=2)
    held = placement(tensor, sizes, grid).at(1)
    assert [(each.start[0], each.stop[0]) for each in held] == [
        (8, 16),
        (24, 32),
        (34, 36),
        (38, 40),
        (44, 48),
    ]
    (received,) = place_tensors([tensor], sizes, grid, grid)
    assert received.target.at(1) == [Region.whole((48, 4))]


def test_what_no_rule_knows_is_whole_on_every_receiver() -> None:
    name = "model.layers.3.self_attn.something_new.weight"
    assert [rows(name, ModelGrid(tensor=2), rank) for rank in range(2)] == [[(0, 64)]] * 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "experts"),
        ("model.layers.3.mlp.experts.7.up_proj.weight_scale_inv", "no rule"),
        ("model.layers.3.self_attn.q_norm.weight", "dense"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "dense"),
        ("model.layers.3.self_attn.something_new.weight", "no rule"),
        ("model.norm.weight", "dense"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "dense"),
        ("lm_head.weight", "vocabulary"),
        ("model.layers.0.mixer.conv1d.bias", "state space"),
    ],
)
def test_bytes_are_counted_by_class(name: str, kind: str) -> None:
    assert classify(name) == kind


class NeverCut(tuple[int, ...]):
    """A shape of which nobody may ask for a length."""

    __slots__ = ()

    def __getitem__(self, _: Any) -> Any:
        raise AssertionError("cut for every rank, before heads refused them all")


@pytest.mark.parametrize(
    ("senders", "receivers"), [(1_000_000, 1), (1, 1_000_000)], ids=["senders", "receivers"]
)
def test_more_ranks_than_heads_are_refused_before_embeddings_and_norms_are_cut_for_each(
    senders: int, receivers: int
) -> None:
    sizes = ModelSizes(layers=1, key_value_heads=2, attention_heads=4)
    tensors = [
        DeclaredTensor("model.embed_tokens.weight", NeverCut((64, 32)), 2),
        DeclaredTensor("model.layers.0.input_layernorm.weight", NeverCut((32,)), 2),
        DeclaredTensor("model.layers.0.self_attn.q_proj.weight", (32, 32), 2),
    ]
    with pytest.raises(LayoutRefused, match=r"q_proj\.weight: tensor is 1000000, expected"):
        place_tensors(tensors, sizes, ModelGrid(tensor=senders), ModelGrid(tensor=receivers))
