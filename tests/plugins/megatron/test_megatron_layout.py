"""Places of ranks in a layout, beside the library's own numbering, and which layouts fit a model."""

from dataclasses import replace
from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.layout_rules import broken_rules
from offbeat.weight_sync.grid import ModelGrid
from tests.plugins.megatron.test_megatron_mapping import SMALL

LARGE = {
    "TP8/PP4/EP16/ETP1/DP2": ModelGrid(tensor=8, pipeline=4, data=2, expert=16, expert_tensor=1),
    "TP8/PP4/CP2/EP16/ETP1/DP1": ModelGrid(
        tensor=8, pipeline=4, context=2, expert=16, expert_tensor=1
    ),
}
EXPERTS = replace(SMALL, layers=92, heads=96, groups=8, expert_intermediate=1536, experts=160)


@st.composite
def grids(draw: st.DrawFn) -> ModelGrid:
    tensor, context, data, pipeline = (draw(st.integers(1, 4)) for _ in range(4))
    stage = tensor * context * data
    within = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    rest = stage // within
    expert = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return ModelGrid(tensor, pipeline, context, data, expert, within)


def groups_by(grid: ModelGrid, same: tuple[str, ...]) -> list[list[int]]:
    """Ranks whose places are the same in these respects."""
    found = dict[tuple[int, ...], list[int]]()
    for rank in range(grid.ranks):
        layout = ParallelLayout(grid, rank)
        key = tuple(int(getattr(layout, f"{each}_rank")) for each in same)
        found.setdefault(key, []).append(rank)
    return sorted(found.values())


def check_against_the_library(grid: ModelGrid) -> None:
    state: Any = pytest.importorskip("megatron.core.parallel_state", reason="an extra")
    order = "tp-cp-ep-dp-pp"
    dense: Any = state.RankGenerator(
        tp=grid.tensor, ep=1, dp=grid.data, pp=grid.pipeline, cp=grid.context, order=order
    )
    within = grid.expert_tensor_ranks
    copies = grid.stage_ranks // (grid.expert * within)
    experts: Any = state.RankGenerator(
        tp=within, ep=grid.expert, dp=copies, pp=grid.pipeline, cp=1, order=order
    )
    assert groups_by(grid, ("context", "data", "pipeline")) == sorted(dense.get_ranks("tp"))
    assert groups_by(grid, ("tensor", "data", "pipeline")) == sorted(dense.get_ranks("cp"))
    assert groups_by(grid, ("tensor", "context", "pipeline")) == sorted(dense.get_ranks("dp"))
    assert groups_by(grid, ("tensor", "context", "data")) == sorted(dense.get_ranks("pp"))
    held = ("expert_tensor", "expert", "pipeline")
    assert groups_by(grid, held) == sorted(experts.get_ranks("dp"))
    for group in experts.get_ranks("tp-ep"):
        places = [ParallelLayout(grid, rank) for rank in group]
        held_by = [(each.expert_rank, each.expert_tensor_rank) for each in places]
        assert len(set(held_by)) == len(held_by) == grid.expert * within


# The library warns of every kernel it does not find.
@pytest.mark.filterwarnings("ignore")
@given(grids())
def test_ranks_have_the_places_that_the_library_gives_them(grid: ModelGrid) -> None:
    check_against_the_library(grid)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grid", LARGE.values(), ids=LARGE)
def test_sixty_four_ranks_have_the_places_that_the_library_gives_them(grid: ModelGrid) -> None:
    assert grid.ranks == 64
    check_against_the_library(grid)


@pytest.mark.parametrize("grid", LARGE.values(), ids=LARGE)
def test_a_tensor_parallel_rank_is_one_of_several_expert_ranks_as_well(grid: ModelGrid) -> None:
    places = [ParallelLayout(grid, rank) for rank in range(grid.stage_ranks)]
    assert [each.tensor_rank for each in places] == [*range(8), *range(8)]
    assert [each.expert_rank for each in places] == [*range(16)]


@pytest.mark.parametrize("grid", LARGE.values(), ids=LARGE)
def test_layouts_of_sixty_four_ranks_fit_a_model_of_a_hundred_and_sixty_experts(
    grid: ModelGrid,
) -> None:
    assert list(broken_rules(EXPERTS, grid, sequence_parallel=True)) == []


@given(grids())
def test_ranks_that_exchange_tokens_reach_whole_replicas_or_stay_within_one(
    grid: ModelGrid,
) -> None:
    replica, exchanging = grid.tensor * grid.context, grid.expert * grid.expert_tensor_ranks
    linked = lcm(replica, exchanging)  # ranks that wait for each other, directly or through others
    fills = ParallelLayout(grid, 0).experts_fill_replicas
    assert fills == (linked == max(replica, exchanging))


@pytest.mark.parametrize(
    ("grid", "setting", "want"),
    [
        (
            ModelGrid(tensor=12),
            "trainer.tensor_parallel",
            "a divisor or a multiple of the model's 8 key-value heads",
        ),
        (ModelGrid(pipeline=8), "trainer.pipeline_parallel", "[11, 11, 12, 12, 12, 12, 11, 11]"),
        (
            ModelGrid(pipeline=2, stages=(46, 45)),
            "trainer.layers_per_stage",
            "the model's 92 layers",
        ),
        (ModelGrid(data=3, expert=3), "trainer.expert_parallel", "the model's 160 experts"),
        (
            ModelGrid(data=7, expert_tensor=7),
            "trainer.expert_tensor_parallel",
            "a divisor of the model's 1536 columns of an expert",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) and each.startswith("trainer") else "",
)
def test_a_layout_that_does_not_fit_names_the_key_and_what_to_set(
    grid: ModelGrid, setting: str, want: str
) -> None:
    (problem, *_) = broken_rules(EXPERTS, grid, sequence_parallel=grid.tensor > 1)
    assert problem.setting == setting
    assert want in problem.want
