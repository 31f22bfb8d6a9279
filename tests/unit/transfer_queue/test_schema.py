from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.schema import check, payload_bytes


def group() -> dict[str, NDArray[Any]]:
    """Two samples, of two tokens and of one."""
    return {
        "prompt_ids": np.array([5, 6, 7], np.int32),
        "response_ids": np.array([1, 2, 3], np.int32),
        "response_offsets": np.array([0, 2, 3], np.int64),
        "loss_mask": np.array([True, True, True]),
        "generation_logprobs": np.array([-0.1, -0.2, -0.3], np.float32),
        "weight_versions": np.zeros(3, np.int32),
        "rewards": np.array([0.0, 1.0], np.float32),
    }


def test_a_whole_group_passes_and_weighs_the_sum_of_its_columns() -> None:
    columns = group()
    check(columns)
    assert payload_bytes(columns) == 12 + 12 + 24 + 3 + 12 + 12 + 8


def test_a_group_of_one_sample_passes() -> None:
    columns = {**group(), "response_offsets": np.array([0, 3], np.int64)}
    check({**columns, "rewards": np.array([1.0], np.float32)})


@pytest.mark.parametrize(
    ("column", "values", "complaint"),
    [
        ("rewards", np.array([0.0, np.nan], np.float32), "nan at index 1"),
        ("rewards", np.array([0.0], np.float32), r"shape \(1,\).*\(2,\): one per sample"),
        ("generation_logprobs", np.array([0, np.inf, 0], np.float32), "inf at index 1"),
        ("loss_mask", np.array([1, 1, 1], np.int64), "int64; the schema wants bool"),
        ("generation_logprobs", np.zeros(3, np.float64), "float64; the schema wants float32"),
        ("response_ids", np.array([1, 2], np.int32), "one per response token"),
        ("response_offsets", np.array([0, 2, 2], np.int64), "no empty branch"),
        ("response_offsets", np.array([1, 2, 3], np.int64), "0 first"),
        ("response_offsets", np.array([0], np.int64), "two boundaries"),
        ("prompt_ids", np.array([], np.int32), "at least one token"),
        ("surprise", np.zeros(3, np.int32), "not declared"),
        ("response_ids", np.zeros((3, 1), np.int32), r"shape \(3, 1\)"),
    ],
)
def test_a_poisoned_column_is_named_with_what_it_is_and_what_it_should_be(
    column: str, values: NDArray[Any], complaint: str
) -> None:
    with pytest.raises(SchemaError, match=f"column '{column}' is .*{complaint}"):
        check({**group(), column: values})


def test_branches_of_samples_pass_with_a_reward_for_each_sample() -> None:
    check(
        {
            **group(),
            "branch_samples": np.array([0, 0], np.int32),
            "rewards": np.array([1.0], np.float32),
        }
    )


@pytest.mark.parametrize("samples", [[1, 1], [0, 2], [0, -1], []])
def test_branches_out_of_order_are_refused(samples: list[int]) -> None:
    with pytest.raises(SchemaError, match="the same sample or the next one"):
        check({**group(), "branch_samples": np.array(samples, np.int32)})


@pytest.mark.parametrize(
    ("branches", "complaint"),
    [([0, 1, 1], "one per branch"), ([0, 0], "'rewards' .* one per sample")],
)
def test_branches_fit_the_boundaries_and_the_rewards(branches: list[int], complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        check({**group(), "branch_samples": np.array(branches, np.int32)})


def test_a_missing_column_is_named() -> None:
    columns = group()
    del columns["loss_mask"]
    with pytest.raises(SchemaError, match="column 'loss_mask' is missing"):
        check(columns)
