import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainers.batches.packing import (
    PROMPT,
    Batch,
    flatten,
    pack,
    padding_microbatch,
    visible,
    visible_in,
)
from offbeat.trainers.batches.planner import (
    MicrobatchPlanner,
    PackedRow,
    best_response_tokens,
    plan_flat_microbatches,
    plan_microbatches,
    plan_rows,
)
from tests.support.random_groups import make_group

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
shapes = st.lists(st.tuples(st.integers(1, 5), lengths), min_size=1, max_size=4)


def batch_of(shape: list[tuple[int, list[int]]], masked: float, *, only_trained: bool) -> Batch:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, prompt, responses, masked) for prompt, responses in shape]
    return flatten(groups, only_trained=only_trained, vocabulary=64)


@given(
    shape=shapes,
    masked=st.sampled_from([0.0, 0.5, 0.95]),
    only_trained=st.booleans(),
    response_tokens=st.sampled_from([0.0, 8.0, 1e9]),
    budget=st.sampled_from([1, 24, 4096]),
    flat=st.booleans(),
)
def test_every_wanted_token_is_predicted_once_by_what_stands_before_it(
    shape: list[tuple[int, list[int]]],
    masked: float,
    only_trained: bool,
    response_tokens: float,
    budget: int,
    flat: bool,
) -> None:
    batch = batch_of(shape, masked, only_trained=only_trained)
    rows = plan_rows(batch, response_tokens=response_tokens, max_tokens=budget)
    sources = list[int]()
    plan = plan_flat_microbatches if flat else plan_microbatches
    for microbatch in plan(rows, budget):
        packed = pack(batch, microbatch, flat=flat)
        seen = visible_in(packed)
        width = packed.input_ids_RT.shape[1]
        assert width == (sum if flat else max)(row.length for row in microbatch)
        assert len(set(packed.predicts_U.tolist())) == len(packed.predicts_U)
        for which, target, source in zip(
            packed.which_N, packed.target_N, packed.source_N, strict=True
        ):
            sources.append(int(source))
            assert target == batch.tokens[source]
            branch = batch.branch[source]
            row, column = divmod(int(packed.predicts_U[which]), width)
            context = np.flatnonzero(seen[row, column])
            start = batch.start_S[branch]
            want = [*batch.prompts[batch.group_S[branch]], *batch.tokens[start:source]]
            assert packed.input_ids_RT[row, context].tolist() == want
            assert packed.positions_RT[row, context].tolist() == list(range(len(want)))
    assert sorted(sources) == np.flatnonzero(batch.wanted).tolist()


@given(shape=shapes, budget=st.integers(1, 60))
def test_no_microbatch_exceeds_its_budget_unless_one_sample_does(
    shape: list[tuple[int, list[int]]], budget: int
) -> None:
    batch = batch_of(shape, 0.0, only_trained=True)
    rows = plan_rows(batch, response_tokens=20, max_tokens=budget)
    for microbatch in plan_microbatches(rows, budget):
        padded = len(microbatch) * max(row.length for row in microbatch)
        row = microbatch[0]
        longest = int(batch.length_S[batch.group_S == row.group].max()) - 1
        unsplittable = row.length <= len(batch.prompts[row.group]) + longest
        assert padded <= budget or (len(microbatch) == 1 and unsplittable)


@given(shape=shapes, budget=st.integers(1, 60))
def test_no_flat_microbatch_exceeds_its_budget_unless_one_row_does(
    shape: list[tuple[int, list[int]]], budget: int
) -> None:
    batch = batch_of(shape, 0.0, only_trained=True)
    rows = plan_rows(batch, response_tokens=math.inf, max_tokens=budget)
    microbatches = list(plan_flat_microbatches(rows, budget))
    assert sorted(row.branches for each in microbatches for row in each) == sorted(
        row.branches for row in rows
    )
    for microbatch in microbatches:
        assert len(microbatch) == 1 or sum(row.length for row in microbatch) <= budget


@pytest.mark.parametrize(
    ("shape", "call_pairs", "flat"),
    [
        ([(8, [4] * 8)] * 16, 5000.0, False),  # calls would cost more than masked pairs
        ([(400, [40] * 8)] * 4, 5000.0, True),
        ([(4000, [1000] * 4)], 5000.0, True),
        ([(4000, [1000] * 4)], None, False),  # the model cannot split its attention
    ],
)
def test_the_layout_is_the_cheapest_by_size(
    shape: list[tuple[int, list[int]]], call_pairs: float | None, flat: bool
) -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, prompt, responses) for prompt, responses in shape]
    planner = MicrobatchPlanner(
        8192, shared_prompt=True, ratio_tokens=900.0, vocabulary=64, call_pairs=call_pairs
    )
    _, microbatches = planner.cut(groups, only_trained=True)
    assert all(bool(each.trees) == flat for each in microbatches)


def test_padding_and_other_samples_are_invisible() -> None:
    batch = batch_of([(2, [3, 2]), (1, [2])], 0.0, only_trained=True)
    packed = pack(batch, plan_rows(batch, response_tokens=1e9, max_tokens=100))
    assert packed.segments_RT.tolist() == [[0, 0, 1, 1, 2], [0, 1, -1, -1, -1]]
    assert visible(packed.segments_RT)[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert packed.positions_RT[0].tolist() == [0, 1, 2, 3, 2]


def test_samples_are_dealt_to_evenly_filled_rows() -> None:
    batch = batch_of([(4, [17] * 7)], 0.0, only_trained=True)
    rows = plan_rows(batch, response_tokens=40, max_tokens=1000)
    assert sorted(len(row.branches) for row in rows) == [2, 2, 3]
    assert sorted(branch for row in rows for branch in row.branches) == list(range(7))
    assert {row.length for row in rows} == {4 + 32, 4 + 48}


def test_a_row_is_split_when_the_budget_is_smaller_than_the_plan() -> None:
    batch = batch_of([(4, [17] * 6)], 0.0, only_trained=True)
    rows = plan_rows(batch, response_tokens=1e9, max_tokens=40)
    assert [len(row.branches) for row in rows] == [2, 2, 2]


def test_samples_without_a_wanted_token_are_left_out() -> None:
    rng = np.random.default_rng(0)
    group = make_group(rng, 3, [4, 4])
    group["loss_mask"][:4] = False
    group["loss_mask"][6:] = False
    batch = flatten([group], only_trained=True, vocabulary=64)
    (row,) = plan_rows(batch, response_tokens=99, max_tokens=99)
    assert row == PackedRow(group=0, branches=(1,), length=3 + 1)


def test_short_rows_are_not_padded_to_long_ones_once_a_microbatch_is_full_enough() -> None:
    rows = [PackedRow(0, (0,), 1000)] * 3 + [PackedRow(0, (0,), 100)] * 4
    sizes = [[row.length for row in each] for each in plan_microbatches(rows, 100_000)]
    assert sizes == [[1000] * 3, [100] * 4]


@pytest.mark.parametrize(("prompt", "ratio"), [(6.0, 600.0), (500.0, 600.0), (500.0, 26_000.0)])
def test_the_best_number_of_response_tokens_costs_least(prompt: float, ratio: float) -> None:
    def cost_of_a_response_token(response: float) -> float:
        row = prompt + response
        return (row * ratio + row**2) / response

    best = best_response_tokens(prompt, ratio)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert cost_of_a_response_token(best) < cost_of_a_response_token(factor * best)
    assert math.isfinite(best)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("response_tokens", [0.0, 1e9])
def test_response_tokens_know_the_trained_tokens_of_their_sample_in_all_its_branches(
    response_tokens: float, flat: bool
) -> None:
    group = make_group(np.random.default_rng(0), 2, [5, 3, 2, 4])
    group["branch_samples"] = np.array([0, 0, 1, 2], np.int32)
    group["loss_mask"] = np.array([0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0], np.bool_)
    batch = flatten([group], only_trained=True, vocabulary=64)
    rows = plan_rows(batch, response_tokens=response_tokens, max_tokens=100)
    packed = pack(batch, rows, flat=flat)
    # The last trained token of a branch is not in its row, nor is what stands behind it.
    of_first_sample, of_second_sample = [5] * (3 + 2), [2] * 1
    seen = packed.sample_tokens_RT[packed.segments_RT > PROMPT].tolist()
    assert sorted(seen) == sorted(of_first_sample + of_second_sample)
    assert (packed.sample_tokens_RT[packed.segments_RT <= PROMPT] == 0).all()


def test_padding_is_a_token_of_its_row() -> None:
    groups = [make_group(np.random.default_rng(0), prompt, [6, 2]) for prompt in (3, 5)]
    batch = flatten(groups, only_trained=False, vocabulary=64)
    packed = pack(batch, plan_rows(batch, response_tokens=0, max_tokens=99))
    pads = [
        set(row[own < 0]) for row, own in zip(packed.input_ids_RT, packed.segments_RT, strict=True)
    ]
    for row, own, pad in zip(packed.input_ids_RT, packed.segments_RT, pads, strict=True):
        assert pad <= set(row[own >= 0].tolist())
    assert any(pads)


@pytest.mark.parametrize("flat", [False, True])
def test_what_pads_a_step_is_a_token_that_its_rows_compute(flat: bool) -> None:
    groups = [make_group(np.random.default_rng(0), 3, [6, 2])]
    batch = flatten(groups, only_trained=False, vocabulary=64)
    packed = pack(batch, plan_rows(batch, response_tokens=0, max_tokens=99), flat=flat)
    assert packed.padding_token in groups[0]["prompt_ids"]
    padding = padding_microbatch(packed.padding_token)
    assert padding.is_padding
    assert not packed.is_padding
    assert padding.input_ids_RT.tolist() == [[packed.padding_token]]
