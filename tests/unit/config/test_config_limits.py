from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.limits import (
    max_group_bytes,
    max_outstanding_groups,
    max_sample_tokens,
    trainer_ranks,
)
from offbeat.config.run import RunConfig
from offbeat.sampler.build import build_sampler
from offbeat.transfer_queue.schema import OPTIONAL_COLUMNS, STANDARD, Axis, payload_bytes


def config(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"steps": 1, "model": {"path": "x"}, **values})


SAMPLERS: list[dict[str, st.SearchStrategy[Any]]] = [
    {"name": st.just("in_order"), "max_lookahead": st.none() | st.integers(0, 7)},
    {"name": st.sampled_from(["ready_first", "weight_fifo"])},
    {
        "name": st.just("windowed"),
        "over_sampling_ratio": st.sampled_from([1, 1.1, 1.5, 3, 4.7]),
    },
]


@given(
    st.integers(1, 9),
    st.integers(0, 5),
    st.one_of([st.fixed_dictionaries(each) for each in SAMPLERS]),
)
def test_the_reach_is_the_samplers_own(
    groups: int, staleness: int, sampler: dict[str, Any]
) -> None:
    run = config(groups_per_step=groups, sampler={**sampler, "max_staleness": staleness})
    assert max_outstanding_groups(run) == build_sampler(run.sampler, groups).max_outstanding_groups


def test_the_reach_of_a_custom_sampler_is_what_the_bound_can_train() -> None:
    run = config(groups_per_step=4, sampler={"name": "custom", "target": "a:B", "max_staleness": 2})
    assert max_outstanding_groups(run) == 12


def columns(samples: int, prompt: int, response: int, *, left_out: set[str]) -> dict[str, Any]:
    lengths = {
        Axis.PROMPT: prompt,
        Axis.RESPONSE: samples * response,
        Axis.SAMPLE: samples,
        Axis.BRANCH: samples,
        Axis.OFFSET: samples + 1,
    }
    return {
        name: np.zeros(lengths[column.axis], column.dtype)
        for name, column in STANDARD.items()
        if name not in left_out | OPTIONAL_COLUMNS
    }


ADDED = {
    "policy_logprobs": {"old_logprobs": "policy"},
    "reference_logprobs": {"kl_coef": 0.1},
    "teacher_logprobs": {"teacher": "x"},
}
"""Loss keys by the column that the trainer adds for them."""


@given(
    st.integers(1, 5),
    st.integers(2, 40),
    st.integers(1, 39),
    st.sets(st.sampled_from(list(ADDED))),
)
def test_no_group_is_larger_than_its_bound_and_the_largest_comes_close(
    samples: int, whole: int, new: int, added: set[str]
) -> None:
    new = min(new, whole - 1)
    run = config(
        samples_per_group=samples,
        generator={"max_model_len": whole, "sampling": {"max_new_tokens": new}},
        algorithm={"loss": {k: v for name in added for k, v in ADDED[name].items()}},
    )
    left_out = ADDED.keys() - added
    largest = payload_bytes(columns(samples, whole - new, new, left_out=left_out))
    assert largest <= max_group_bytes(run) <= largest + 4 * new


def test_observations_between_turns_are_bounded_by_the_whole_sequence() -> None:
    run = config(samples_per_group=3, environment={"max_turns": 2}, generator={"max_model_len": 64})
    left_out = set(ADDED)
    assert payload_bytes(columns(3, 1, 63, left_out=left_out)) <= max_group_bytes(run)


@pytest.mark.plugins
def test_the_limit_of_an_agents_sample_bounds_its_group() -> None:
    def agent(**rollout: int | str) -> RunConfig:
        return config(
            samples_per_group=3,
            environment={"name": "agent"},
            rollout=rollout,
            generator={"max_model_len": 64},
        )

    left_out = set(ADDED)
    assert payload_bytes(columns(3, 1, 31, left_out=left_out)) <= max_group_bytes(
        agent(max_sample_tokens=32)
    )
    assert max_group_bytes(agent(max_sample_tokens=32)) * 2 <= max_group_bytes(agent())
    masks = agent(max_sample_tokens=999, branches="mask")
    assert max_group_bytes(masks) == max_group_bytes(agent(branches="mask"))


@pytest.mark.plugins
def test_the_branches_of_an_agents_samples_fit_its_group() -> None:
    run = config(
        samples_per_group=3, environment={"name": "agent"}, generator={"max_model_len": 64}
    )
    assert max_sample_tokens(run) == 4 * 64
    shortest = (
        4 * 64 // run.rollout.max_branches
    )  # of as many branches as there may be, in one prompt
    whole = columns(3 * run.rollout.max_branches, 1, shortest, left_out=set(ADDED))
    whole["branch_samples"] = np.repeat(np.arange(3, dtype=np.int32), run.rollout.max_branches)
    whole["rewards"] = whole["rewards"][:3]
    assert payload_bytes(whole) <= max_group_bytes(run)


@pytest.mark.plugins
@pytest.mark.parametrize(("sizes", "ranks"), [((1, 1, 1, 1), 1), ((2, 3, 4, 5), 120)])
def test_ranks_are_the_product_of_the_axes(sizes: tuple[int, ...], ranks: int) -> None:
    names = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    axes = dict(zip(names, sizes, strict=True))
    assert trainer_ranks(config(trainer={"backend": "megatron", **axes})) == ranks


def test_a_stub_stands_in_for_all_ranks() -> None:
    assert trainer_ranks(config(trainer={"backend": "stub"})) == 1
