# pyright: basic
# tensordict and nested tensors are not fully typed.
"""The one door from columns to tensors: a TensorDict, or values and offsets for varlen training.

Tensors are views wherever the column is contiguous, of read-only memory too: **do not write to
them** unless the column was yours to write. Under a tensor of shared or mapped memory a write changes
what others read, or ends the process; ``clone()`` what must change.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec.dtypes import BFLOAT16, typed
from offbeat.transfer_queue.codec.memory import address, memory_at
from offbeat.transfer_queue.schema import (
    PROMPT_IDS,
    RESPONSE_OFFSETS,
    STANDARD,
    Axis,
    Columns,
)


class Packed(NamedTuple):
    """A ragged column as varlen kernels take it: row i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Tensor  # [N, ...]
    offsets: Tensor  # [rows + 1] int64; attention kernels want them as int32


def packed(columns: codec.Columns) -> dict[str, Tensor | Packed | list[Any]]:
    """Ragged columns as :class:`Packed`, dense ones as tensors, lists as they are.

    Ragged columns with the same offsets share one offsets tensor.

    Raises:
        SchemaError: A dtype that torch has not.
    """
    offsets = _SharedOffsets()
    return {name: _packed(name, column, offsets) for name, column in columns.items()}


def tensordict_of(columns: codec.Columns) -> TensorDict:
    """The rows as a TensorDict of batch size [rows]: ragged columns jagged, lists as non-tensors.

    Ragged columns with the same offsets share their layout, so they can be combined elementwise.

    Raises:
        SchemaError: Columns with different numbers of rows, or a dtype that torch has not.
    """
    rows = codec.rows_of(columns)
    tensors: dict[str, Any] = {}
    for name, column in packed(columns).items():
        if isinstance(column, Packed):
            tensors[name] = torch.nested.nested_tensor_from_jagged(*column)
        else:
            tensors[name] = NonTensorStack(*column) if isinstance(column, list) else column
    return TensorDict(tensors, batch_size=[rows])


def columns_of(batch: TensorDict) -> dict[str, codec.Column]:
    """The rows of a TensorDict as columns: views of what lies contiguous in the memory of the host.

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
                seen[key] = offsets, _array(offsets)  # held, so that its address is nobody else's
            columns[name] = codec.Ragged(_array(jagged.values()), seen[key][1])
    return columns


def to_tensordict(groups: Sequence[Columns]) -> TensorDict:
    """All samples of groups with standard columns, batch size [B], in order.

    Columns per response token and ``prompt_ids`` are jagged [B, *]; columns per sample are [B].
    Offsets are part of the jagged layout and no column of their own.

    Raises:
        SchemaError: No group, or groups with different columns.
    """
    if not groups:
        raise SchemaError("groups", "empty", "at least one group")
    return tensordict_of(codec.concat([_rows(group) for group in groups]))


def from_tensordict(batch: TensorDict) -> Columns:
    """The samples of one group with standard columns, packed again.

    Raises:
        SchemaError: The samples do not share one prompt: they are not one group.
    """
    prompts = batch[PROMPT_IDS].unbind()
    if any(not torch.equal(prompt, prompts[0]) for prompt in prompts[1:]):
        raise SchemaError(PROMPT_IDS, "different prompts", "one prompt, shared by all samples")
    columns: dict[str, NDArray[np.generic]] = {PROMPT_IDS: prompts[0].numpy()}
    for name, column in columns_of(batch).items():
        if name == PROMPT_IDS:
            continue
        if isinstance(column, codec.Ragged):
            columns[RESPONSE_OFFSETS] = column.offsets
            columns[name] = column.values
        else:
            columns[name] = cast("NDArray[np.generic]", column)
    return columns


def _rows(group: Columns) -> dict[str, codec.Column]:
    """The standard columns of one group with a row a sample, its prompt once a sample."""
    boundaries = cast("NDArray[np.int64]", group[RESPONSE_OFFSETS])
    samples = len(boundaries) - 1
    rows: dict[str, codec.Column] = {}
    for name in sorted(group.keys() - {RESPONSE_OFFSETS}):
        values = group[name]
        match STANDARD[name].axis:
            case Axis.RESPONSE:
                rows[name] = codec.Ragged(values, boundaries)
            case Axis.PROMPT:
                of_prompts = np.arange(samples + 1, dtype=np.int64) * len(values)
                rows[name] = codec.Ragged(np.tile(values, samples), of_prompts)
            case _:
                rows[name] = values
    return rows


class _SharedOffsets:
    """One tensor for all equal offsets: jagged tensors combine only if theirs is the very same."""

    def __init__(self) -> None:
        self._tensors: dict[bytes, Tensor] = {}

    def tensor(self, name: str, offsets: NDArray[np.int64]) -> Tensor:
        content = offsets.tobytes()
        if content not in self._tensors:
            self._tensors[content] = _tensor(name, offsets)
        return self._tensors[content]


def _packed(
    name: str, column: codec.Column, offsets: _SharedOffsets
) -> Tensor | Packed | list[Any]:
    if isinstance(column, codec.Ragged):
        return Packed(_tensor(name, column.values), offsets.tensor(name, column.offsets))
    return column if isinstance(column, list) else _tensor(name, column)


def _tensor(name: str, values: NDArray[Any]) -> Tensor:
    _, dtype, values = typed(name, values)
    array = np.ascontiguousarray(values, dtype)
    # torch warns of numpy's read-only mark, for it has none; so it is shown the memory without
    memory = memory_at(address(array), array.nbytes, owner=array, writeable=True)
    if dtype == BFLOAT16:
        return torch.from_numpy(memory.view(np.int16).reshape(array.shape)).view(torch.bfloat16)
    return torch.from_numpy(memory.view(dtype).reshape(array.shape))


def _array(tensor: Tensor) -> NDArray[Any]:
    local = tensor.detach().cpu()
    if local.dtype == torch.bfloat16:
        return local.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return local.numpy()


def _jagged(name: str, nested: Tensor) -> Any:  # noqa: ANN401 - torch gives jagged tensors no type
    """The tensor with its rows end to end, whatever it was cut from."""
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
