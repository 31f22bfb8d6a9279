"""Where the elements of megatron's parameters are in Hugging Face's tensors, for any cut of any model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.checks import rank_buffers, rank_parameters
from offbeat.plugins.megatron.errors import UnmappedParameter
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.mapping import TensorBox, make_boxes
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import Region, Shape

SMALL = Architecture(
    name="two groups of two heads",
    layers=1,
    hidden=3,
    heads=4,
    groups=2,
    head_dim=5,
    intermediate=8,
    vocabulary=7,
    max_positions=8,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=False,
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Architecture, ModelGrid]:
    """An architecture, and parallel sizes that can cut it."""
    experts = draw(st.sampled_from([0, 4]))
    tensor, context, data = (draw(st.sampled_from([1, 2])) for _ in range(3))
    tensor *= draw(st.sampled_from([1, 2]))
    pipeline = draw(st.sampled_from([1, 2]))
    stages = tuple(draw(st.integers(1, 2)) for _ in range(pipeline))
    expert, within = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    if not experts or tensor * context * data % (expert * within):
        expert = within = 1
    # Fewer groups than ranks: a group's rows are on several.
    shared = draw(st.sampled_from([each for each in (1, 2, 4) if tensor % each == 0]))
    groups = tensor // shared if shared > 1 else tensor * draw(st.integers(1, 2))
    sigmoid = draw(st.booleans()) if experts else False
    architecture = Architecture(
        name="any",
        layers=sum(stages),
        hidden=draw(st.integers(1, 6)),
        heads=groups * shared * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=shared * draw(st.integers(1, 3)),
        intermediate=tensor * draw(st.integers(1, 3)),
        expert_intermediate=within * draw(st.integers(1, 3)),
        shared_intermediate=tensor * draw(st.integers(0, 2)) if experts else 0,
        dense_layers=draw(st.sampled_from([(), (0,)])) if experts and sum(stages) > 1 else (),
        vocabulary=draw(st.integers(1, 9)),
        max_positions=8,
        norm_eps=1e-6,
        rope_theta=1e4,
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        experts=experts,
        experts_per_token=2 if experts else 0,
        sigmoid_routing=sigmoid,
        shared_gate=not sigmoid,
        shared_name="shared_experts" if sigmoid else "shared_expert",
    )
    grid = ModelGrid(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=data,
        expert=expert,
        expert_tensor=within,
        stages=stages,
    )
    return architecture, grid


def world_of(a: Architecture, grid: ModelGrid) -> list[list[TensorBox]]:
    layouts = [ParallelLayout(grid, rank) for rank in range(grid.ranks)]
    return [make_boxes(weights_of(a, layout), a, layout) for layout in layouts]


def weights_of(a: Architecture, layout: ParallelLayout) -> dict[str, Shape]:
    return rank_parameters(a, layout) | rank_buffers(a, layout)


@given(cuts())
def test_the_ranks_together_hold_every_element_of_every_tensor_once(
    cut: tuple[Architecture, ModelGrid],
) -> None:
    boxes = {box.key: box for rank in world_of(*cut) for box in rank}
    held = dict[str, np.ndarray]()
    for box in boxes.values():
        whole = held.setdefault(box.tensor, np.zeros(box.whole, int))
        assert whole.shape == box.whole
        whole[box.region.slices] += 1
    assert all((count == 1).all() for count in held.values())


@given(cuts())
def test_every_layout_of_a_model_has_the_same_tensors(
    cut: tuple[Architecture, ModelGrid],
) -> None:
    def shapes(boxes: list[list[TensorBox]]) -> dict[str, tuple[int, ...]]:
        return {box.tensor: box.whole for rank in boxes for box in rank}

    assert shapes(world_of(*cut)) == shapes(world_of(cut[0], ModelGrid()))


@given(cuts())
def test_a_rank_s_boxes_cover_its_parameters_without_overlap(
    cut: tuple[Architecture, ModelGrid],
) -> None:
    a, grid = cut
    layout = ParallelLayout(grid, grid.ranks - 1)
    shapes = weights_of(a, layout)
    covered = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for box in make_boxes(shapes, a, layout):
        covered[box.parameter][box.local.slices] += 1
    for name, count in covered.items():
        padding = "embedding" in name or name == "output_layer.weight"
        assert ((count <= 1) if padding else (count == 1)).all()


def test_a_parameter_that_no_rule_knows_is_named() -> None:
    layout = ParallelLayout(ModelGrid())
    with pytest.raises(UnmappedParameter, match=r"decoder\.layers\.0\.mlp\.gate_score"):
        make_boxes({"decoder.layers.0.mlp.gate_score": (1,)}, SMALL, layout)


def test_queries_keys_and_values_of_a_group_lie_together() -> None:
    layout = ParallelLayout(ModelGrid(tensor=2), 1)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    boxes = make_boxes({name: (20, 3)}, SMALL, layout)
    assert [(box.tensor.rpartition(".self_attn.")[2], box.region, box.local) for box in boxes] == [
        ("q_proj.weight", Region((10, 0), (20, 3)), Region((0, 0), (10, 3))),
        ("k_proj.weight", Region((5, 0), (10, 3)), Region((10, 0), (15, 3))),
        ("v_proj.weight", Region((5, 0), (10, 3)), Region((15, 0), (20, 3))),
    ]
