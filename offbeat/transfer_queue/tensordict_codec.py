# pyright: basic
# tensordict and nested tensors are not fully typed.
"""Builds the chunks that trainers receive from the columns of groups.

Tensors are views of contiguous columns, including read-only memory: **do not write to them** unless
you own the column. For shared or mapped memory, a write changes the data of other readers, or ends
the process. ``clone()`` tensors before changing them.
"""

from collections.abc import Iterable, Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from offbeat.transfer_queue.schema import Columns


def build_chunk(groups: Iterable[Columns]) -> TensorDictBase:
    """Return prompt groups as one TensorDict of batch size [groups], without a copy.

    ``chunk[i]`` is group i: a TensorDict of batch size [] with the columns of ``schema``. Ragged
    columns are values and offsets. Groups differ in length. So a column over all groups is built
    only on request: ``chunk.get(name, as_nested_tensor=True, layout=torch.jagged)``.
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
