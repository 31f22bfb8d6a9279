from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offbeat.trainers.held_columns import read_groups
from offbeat.transfer_queue.tensordict_codec import build_chunk, stack_groups
from tests.unit.transfer_queue.test_schema import group


def address_of(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def test_a_chunk_is_a_tensordict_of_views_though_its_columns_are_read_only() -> None:
    first, second = group(), group() | {"policy_logprobs": np.zeros(5, np.float32)}
    for values in (*first.values(), *second.values()):
        values.flags.writeable = False

    chunk = build_chunk([first, second])

    assert chunk.batch_size == (2,)
    entries: tuple[Any, ...] = chunk.unbind(0)
    for columns, entry in zip((first, second), entries, strict=True):
        assert {name: each.data_ptr() for name, each in entry.items()} == {
            name: address_of(values) for name, values in columns.items()
        }
    for columns, again in zip((first, second), read_groups(chunk), strict=True):
        assert again.keys() == columns.keys()
        assert all(np.array_equal(again[name], columns[name]) for name in columns)


def test_memory_that_a_chunk_borrows_is_read_only_when_it_is_read_as_numpy() -> None:
    columns = group()
    for values in columns.values():
        values.flags.writeable = False  # as Ray hands out the memory of its store
    (again,) = read_groups(build_chunk([columns]))
    with pytest.raises(ValueError, match="read-only"):
        again["rewards"][0] = 5.0  # type: ignore[index]  # that it refuses is the test
    assert columns["rewards"].tolist() == group()["rewards"].tolist()


def test_a_chunk_without_groups_has_none() -> None:
    chunk = build_chunk([])
    assert len(chunk) == 0 and read_groups(chunk) == []


def test_groups_of_a_chunk_are_stacked_again_in_another_order() -> None:
    chunk = build_chunk([group(), group() | {"rewards": np.array([5.0, 6.0], np.float32)}])
    reordered = stack_groups(chunk.unbind(0)[::-1])
    assert reordered[0]["rewards"].tolist() == [5.0, 6.0]


def test_a_ragged_column_of_all_groups_is_jagged_on_request() -> None:
    chunk: Any = build_chunk([group(), {"response_ids": np.arange(3, dtype=np.int32)}])
    jagged = chunk.get("response_ids", as_nested_tensor=True, layout=torch.jagged)
    assert jagged.offsets().diff().tolist() == [len(group()["response_ids"]), 3]
