# pyright: basic
# tensordict and nested tensors are not fully typed.
"""Converts columns to tensors: the chunks that trainers receive, and TensorDicts of single rows.

Tensors are views wherever the column is contiguous, of read-only memory too: **do not write to
them** unless the column was yours to write. Under a tensor of shared or mapped memory a write changes
what others read, or ends the process; ``clone()`` what must change.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue import codec, schema
from offbeat.transfer_queue.codec.dtypes import BFLOAT16, typed
from offbeat.transfer_queue.codec.memory import address, memory_at


def build_chunk(groups: Iterable[schema.Columns]) -> TensorDictBase:
    """Return prompt groups as one TensorDict of batch size [groups], without a copy.

    ``chunk[i]`` is group i: a TensorDict of batch size [] with the columns of ``schema``. Ragged
    columns are values and offsets. Groups differ in length, so a column of all groups is built on
    request: ``chunk.get(name, as_nested_tensor=True, layout=torch.jagged)``.
    """
    return stack_groups(
        [
            TensorDict({name: torch.from_dlpack(values) for name, values in columns.items()})
            for columns in groups
        ]
    )


def stack_groups(groups: Sequence[TensorDictBase]) -> TensorDictBase:
    """Return groups of chunks as a chunk, without a copy."""
    if not groups:
        return TensorDict({}, batch_size=[0])
    return LazyStackedTensorDict(*groups, stack_dim=0)


class RaggedTensor(NamedTuple):
    """Ragged column as varlen kernels expect it: row i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Tensor  # [N, ...]
    offsets: Tensor  # [rows + 1] int64; attention kernels expect int32


def packed(columns: codec.Columns) -> dict[str, Tensor | RaggedTensor | list[Any]]:
    """Convert ragged columns to :class:`RaggedTensor`, dense ones to tensors; lists stay lists.

    Ragged columns with the same offsets share one offsets tensor.

    Raises:
        SchemaError: A dtype that torch does not have.
    """
    offsets = _SharedOffsets()
    return {name: _packed(name, column, offsets) for name, column in columns.items()}


def tensordict_of(columns: codec.Columns) -> TensorDict:
    """Return the rows as a TensorDict of batch size [rows]: ragged columns are jagged.

    Ragged columns with the same offsets share their layout, so they can be combined elementwise.

    Raises:
        SchemaError: Columns with different numbers of rows, or a dtype that torch does not have.
    """
    rows = codec.rows_of(columns)
    tensors: dict[str, Any] = {}
    for name, column in packed(columns).items():
        if isinstance(column, RaggedTensor):
            tensors[name] = torch.nested.nested_tensor_from_jagged(*column)
        else:
            tensors[name] = NonTensorStack(*column) if isinstance(column, list) else column
    return TensorDict(tensors, batch_size=[rows])


def columns_of(batch: TensorDict) -> dict[str, codec.Column]:
    """Return the rows of a TensorDict as columns: views of contiguous host memory where possible.

    Raises:
        SchemaError: A nested TensorDict, or a nested tensor that is not jagged in its second axis.
    """
    seen: dict[tuple[int, int], tuple[Tensor, NDArray[np.int64]]] = {}
    columns: dict[str, codec.Column] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            columns[name] = _listed(name, value)
        elif not value.is_nested:
            columns[name] = _array(value)
        else:
            jagged = _jagged(name, value)
            offsets = jagged.offsets()
            key = offsets.data_ptr(), len(offsets)
            if key not in seen:
                seen[key] = offsets, _array(offsets)  # kept, so that its address is not reused
            columns[name] = codec.Ragged(_array(jagged.values()), seen[key][1])
    return columns


class _SharedOffsets:
    """One tensor for all equal offsets: jagged tensors combine only if they share the object."""

    def __init__(self) -> None:
        self._tensors: dict[bytes, Tensor] = {}

    def tensor(self, name: str, offsets: NDArray[np.int64]) -> Tensor:
        content = offsets.tobytes()
        if content not in self._tensors:
            self._tensors[content] = _tensor(name, offsets)
        return self._tensors[content]


def _packed(
    name: str, column: codec.Column, offsets: _SharedOffsets
) -> Tensor | RaggedTensor | list[Any]:
    if isinstance(column, codec.Ragged):
        return RaggedTensor(_tensor(name, column.values), offsets.tensor(name, column.offsets))
    return column if isinstance(column, list) else _tensor(name, column)


def _tensor(name: str, values: NDArray[Any]) -> Tensor:
    _, dtype, values = typed(name, values)
    array = np.ascontiguousarray(values, dtype)
    # torch warns about numpy's read-only flag, which it does not have, so it gets the bare memory
    memory = memory_at(address(array), array.nbytes, array)
    if dtype == BFLOAT16:
        return torch.from_numpy(memory.view(np.int16).reshape(array.shape)).view(torch.bfloat16)
    return torch.from_numpy(memory.view(dtype).reshape(array.shape))


def _array(tensor: Tensor) -> NDArray[Any]:
    local = tensor.detach().cpu()
    if local.dtype == torch.bfloat16:
        return local.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return local.numpy()


def _jagged(name: str, nested: Tensor) -> Any:  # noqa: ANN401 - torch gives jagged tensors no type
    """Return the tensor with its rows contiguous, whatever it was sliced from."""
    # only the ragged extent is symbolic
    if nested.layout is not torch.jagged or isinstance(nested.shape[1], int):
        want = "nested with layout=torch.jagged, ragged in its second axis"
        raise SchemaError(name, f"nested with layout {nested.layout}, shape {nested.shape}", want)
    jagged = cast("Any", nested)
    return jagged if jagged.lengths() is None else jagged.contiguous()


def _listed(name: str, value: Any) -> list[Any]:  # noqa: ANN401 - whatever a TensorDict may hold
    if isinstance(value, TensorDict):
        raise SchemaError(name, "a nested TensorDict", "flat columns: flatten_keys() first")
    return list(cast("Iterable[Any]", value.tolist()))
