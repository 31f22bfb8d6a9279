from typing import Any

import numpy as np
import pytest
import torch
from codec_payloads import all_same, bits, example, payloads, same
from hypothesis import given, settings
from numpy.typing import NDArray
from tensordict import TensorDict

from offbeat.messages.failures import SchemaError
from offbeat.trainers.held_columns import read_groups
from offbeat.transfer_queue.codec import BFLOAT16, Column, Ragged, pack, unpack
from offbeat.transfer_queue.tensordict_codec import (
    RaggedTensor,
    build_chunk,
    columns_of,
    packed,
    stack_groups,
    tensordict_of,
)
from tests.unit.transfer_queue.test_schema import group


def address_of(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


@settings(max_examples=30, deadline=None)
@given(payloads())
def test_any_columns_come_back_from_a_tensordict(columns: dict[str, Column]) -> None:
    again = columns_of(tensordict_of(columns))
    assert all_same(dict(sorted(again.items())), dict(sorted(columns.items())))


def test_tensors_of_an_unpacked_payload_are_views_of_it_though_it_is_read_only() -> None:
    buffer = pack(example()).tobytes()
    start, columns = address_of(np.frombuffer(buffer, np.uint8)), packed(unpack(buffer))
    ids, mask, hidden = columns["input_ids"], columns["loss_mask"], columns["hidden"]
    assert (
        isinstance(ids, RaggedTensor)
        and isinstance(mask, RaggedTensor)
        and isinstance(hidden, torch.Tensor)
    )
    for tensor in (ids.values, ids.offsets, mask.values, hidden):
        assert start <= tensor.data_ptr() < start + len(buffer)
    del buffer
    assert torch.equal(ids.values, torch.arange(256)), "the tensors keep the memory"


def test_packed_columns_with_equal_offsets_share_one_offsets_tensor() -> None:
    offsets = np.array([0, 2, 2, 5])
    columns = packed(
        {
            "a": Ragged(np.arange(5.0), offsets),
            "b": Ragged(np.arange(5), offsets.copy()),
            "c": Ragged(np.arange(3), np.array([0, 1, 2, 3])),
        }
    )
    a, b, c = columns["a"], columns["b"], columns["c"]
    assert (
        isinstance(a, RaggedTensor) and isinstance(b, RaggedTensor) and isinstance(c, RaggedTensor)
    )
    assert a.offsets is b.offsets and a.offsets is not c.offsets
    row = a.values[int(a.offsets[2]) : int(a.offsets[3])]
    assert torch.equal(row, torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64))


def test_ragged_columns_of_equal_rows_are_combined_elementwise() -> None:
    offsets = np.array([0, 1, 3])
    columns = {name: Ragged(np.full(3, 2.0), offsets.copy()) for name in "ab"}
    batch = tensordict_of(columns)
    assert (batch["a"] * batch["b"]).values().tolist() == [4, 4, 4]


def test_bfloat16_keeps_its_bits_both_ways() -> None:
    values = torch.tensor([1.5, -2.0, torch.inf], dtype=torch.bfloat16)
    columns = columns_of(TensorDict({"x": values}, batch_size=[3]))
    column = columns["x"]
    assert isinstance(column, np.ndarray) and column.dtype == BFLOAT16
    again = tensordict_of(unpack(pack(columns)))["x"]
    assert again.dtype == torch.bfloat16 and torch.equal(again, values)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.int64), np.dtype(np.bool_)])
def test_big_endian_and_strided_columns_become_tensors_by_value(dtype: np.dtype[Any]) -> None:
    values = bits(0, (6, 2), dtype)
    foreign = np.asfortranarray(values.astype(dtype.newbyteorder(">")))[::-1]
    assert same(columns_of(tensordict_of({"x": foreign}))["x"], values[::-1])


def test_a_list_is_one_row_each_whatever_its_rows_are() -> None:
    rows: list[Any] = ["a", None, {"b": [1]}, [2, 3], b"", 1.5, True]
    batch = tensordict_of({"x": rows, "y": np.zeros(7)})
    assert batch[2]["x"] == {"b": [1]} and columns_of(batch[1:4])["x"] == rows[1:4]


def test_a_slice_of_rows_becomes_columns_of_these_rows() -> None:
    batch = tensordict_of({"x": Ragged(np.arange(6), np.array([0, 1, 3, 6]))})
    narrowed = torch.nested.narrow(
        torch.arange(10).view(2, 5), 1, torch.tensor([1, 0]), torch.tensor([2, 3]), torch.jagged
    )
    for tensor, want in ((batch[1:]["x"], [[1, 2], [3, 4, 5]]), (narrowed, [[1, 2], [5, 6, 7]])):
        column = columns_of(TensorDict({"x": tensor}, batch_size=[2]))["x"]
        assert isinstance(column, Ragged)
        assert [column.row(index).tolist() for index in range(2)] == want


def test_tensors_that_are_no_columns_are_refused_by_name() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(3, 2), torch.tensor([0, 1, 3]))
    with pytest.raises(SchemaError, match=r"'odd'.*second axis"):
        columns_of(TensorDict({"odd": jagged.transpose(1, 2)}, batch_size=[2]))
    with pytest.raises(SchemaError, match=r"'odd'.*flatten_keys"):
        columns_of(TensorDict({"odd": TensorDict({}, batch_size=[2])}, batch_size=[2]))
    with pytest.raises(SchemaError, match=r"'b'.*2 rows, as 'a' has"):
        tensordict_of({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(SchemaError, match=r"'odd'.*dtype object"):
        tensordict_of({"odd": np.array([None])})


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
