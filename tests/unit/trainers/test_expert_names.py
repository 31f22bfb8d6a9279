"""Experts apart, as files hold them, and together, as transformers computes with them."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbeat.trainers.expert_names import (
    APART,
    TOGETHER,
    ExpertNames,
    Meta,
    regions_apart,
    regions_together,
    split_experts,
)
from offbeat.weight_sync.chunks import dtype_name
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, cut_part

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 12,
}


def metas_of(named: list[tuple[str, Tensor]]) -> list[Meta]:
    return [(name, tuple(each.shape), dtype_name(each)) for name, each in named]


def by_name(module: nn.Module) -> list[tuple[str, Tensor]]:
    """In order of the names, as a megatron trainer gathers them: expert 10 before expert 2."""
    return sorted(module.state_dict().items())


def same(got: Iterator[tuple[str, Tensor]], want: list[tuple[str, Tensor]]) -> bool:
    found, wanted = dict(got), dict(want)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.fixture(scope="module")
def stored() -> list[tuple[str, Tensor]]:
    """The tensors of a small model as transformers has them in memory."""
    torch.manual_seed(0)
    return by_name(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)))  # pyright: ignore[reportArgumentType]


def test_transformers_holds_the_experts_of_a_layer_together(
    stored: list[tuple[str, Tensor]],
) -> None:
    names = dict(metas_of_shapes(stored))
    assert names["model.layers.1.mlp.experts.gate_up_proj"] == (12, 24, 8)
    assert names["model.layers.1.mlp.experts.down_proj"] == (12, 8, 12)


def metas_of_shapes(named: list[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, shape) for name, shape, _ in metas_of(named)]


def test_mixtral_is_held_under_the_same_names() -> None:
    sizes = {n: v for n, v in SIZES.items() if n not in ("num_experts", "moe_intermediate_size")}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))  # pyright: ignore[reportArgumentType]
    names = dict(metas_of_shapes(by_name(model)))
    assert names["model.layers.1.mlp.experts.gate_up_proj"] == (4, 24, 8)
    assert names["model.layers.1.mlp.experts.down_proj"] == (4, 8, 12)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.gate_up_proj_scale_inv",
        "model.layers.1.mlp.experts.down_proj_blocks",
        "model.layers.1.mlp.experts.3.gate_proj.weight_scale_inv",
        "model.layers.1.mlp.experts.3.down_proj.weight_packed",
    ],
)
@pytest.mark.parametrize("names", [APART, TOGETHER])
def test_a_tensor_whose_name_only_begins_like_an_experts_keeps_its_name(
    names: ExpertNames, name: str
) -> None:
    for shape in ((4, 6), (2, 4, 6)):
        values = torch.zeros(shape)
        assert list(names.metas([(name, shape, "float32")])) == [(name, shape, "float32")]
        assert same(names.named([(name, values)]), [(name, values)])
        held = TensorRegion(name, Region.whole(shape), values)
        assert list(names.regions([held], {name: shape})) == [held]


def test_experts_that_were_parted_and_joined_are_the_same(
    stored: list[tuple[str, Tensor]],
) -> None:
    parted = sorted(APART.named(stored))
    assert "model.layers.0.mlp.experts.11.up_proj.weight" in dict(parted)
    assert not any(name.endswith("gate_up_proj") for name, _ in parted)
    assert same(TOGETHER.named(parted), stored)


@pytest.mark.parametrize("names", [APART, TOGETHER])
@pytest.mark.parametrize("given_apart", [True, False])
def test_the_list_of_tensors_is_of_those_that_come_in_their_order(
    stored: list[tuple[str, Tensor]], names: ExpertNames, given_apart: bool
) -> None:
    named = sorted(APART.named(stored)) if given_apart else stored
    come = list(names.named(named))
    assert list(names.metas(metas_of(named))) == metas_of(come)


@pytest.mark.parametrize("names", [APART, TOGETHER])
def test_what_is_named_as_it_should_be_is_left_alone(
    stored: list[tuple[str, Tensor]], names: ExpertNames
) -> None:
    once = list(names.named(stored))
    assert [name for name, _ in names.named(once)] == [name for name, _ in once]
    assert same(names.named(once), once)


@given(st.integers(1, 13), st.integers(1, 3), st.integers(1, 3))
def test_any_number_of_experts_of_any_size(experts: int, columns: int, hidden: int) -> None:
    gate_up = torch.arange(float(experts * 2 * columns * hidden)).view(experts, -1, hidden)
    stored = [
        ("a.experts.down_proj", -gate_up[:, columns:].mT),
        ("a.experts.gate_up_proj", gate_up),
        ("b.weight", torch.ones(1)),
    ]
    parted = dict(APART.named(stored))
    assert torch.equal(parted[f"a.experts.{experts - 1}.gate_proj.weight"], gate_up[-1, :columns])
    assert torch.equal(parted[f"a.experts.{experts - 1}.up_proj.weight"], gate_up[-1, columns:])
    assert same(TOGETHER.named(sorted(parted.items())), stored)


def test_experts_are_held_one_layer_at_a_time(stored: list[tuple[str, Tensor]]) -> None:
    drawn = list[str]()

    def source() -> Iterator[tuple[str, Tensor]]:
        for name, each in sorted(APART.named(stored)):
            drawn.append(name)
            yield name, each

    drawn_before = {name: drawn[:-1] for name, _ in TOGETHER.named(source())}
    first_layer = [name for name in drawn_before if ".0.mlp.experts." in name]
    assert first_layer
    for name in first_layer:
        assert not any(each.startswith("model.layers.1") for each in drawn_before[name])


@given(st.booleans(), st.integers(1, 4), st.integers(1, 5), st.data())
def test_regions_of_experts_hold_the_elements_that_whole_tensors_hold(
    gated: bool, experts: int, rows: int, data: st.DataObject
) -> None:
    """Of any box that a rank may hold, under both namings."""
    kind = "gate_up" if gated else "up"
    fused = {
        f"m.experts.{kind}_proj": torch.rand(experts, (1 + gated) * rows, 3),
        "m.experts.down_proj": torch.rand(experts, 3, rows),
        "m.norm.weight": torch.rand(3),
    }
    apart = dict(split_experts(fused.items()))
    for names, source, wanted in (
        (regions_apart, fused, apart),
        (regions_together, apart, fused),
    ):
        shapes = {name: tuple(each.shape) for name, each in source.items()}
        held = [
            TensorRegion(name, Region.whole(shape), source[name]) for name, shape in shapes.items()
        ]
        cut = list[TensorRegion]()
        for name, region, values in held:
            axis = data.draw(st.integers(0, len(region.start) - 1))
            cuts = [0, data.draw(st.integers(0, region.stop[axis])), region.stop[axis]]
            for part in (cut_part(region.stop, axis, cuts, each) for each in (0, 1)):
                cut.append(TensorRegion(name, part, values[part.slices]))
        found = {name: torch.full_like(each, torch.nan) for name, each in wanted.items()}
        for name, region, values in names(cut, shapes):
            assert values.shape == region.shape
            found[name][region.slices] = values
        assert all(torch.equal(found[name], each) for name, each in wanted.items())
