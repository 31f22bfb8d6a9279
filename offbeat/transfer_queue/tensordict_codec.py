# pyright: basic
# tensordict and nested tensors are not fully typed.
"""Prompt groups as a TensorDict: what a reader outside the packed training path works with.

One row a sample, ragged columns as jagged nested tensors over the packed values; numpy memory is
shared wherever a column of a single group can be used as it is.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.schema import (
    PROMPT_IDS,
    RESPONSE_OFFSETS,
    STANDARD,
    Axis,
    Columns,
)


def to_tensordict(groups: Sequence[Columns]) -> TensorDict:
    """All samples of the groups, batch size [B], in order.

    Columns per response token and ``prompt_ids`` are jagged [B, *]; columns per sample are [B].
    Offsets are part of the jagged layout and no column of their own.

    Raises:
        SchemaError: No group, or groups with different columns.
    """
    if not groups:
        raise SchemaError("groups", "empty", "at least one group")
    names = set(groups[0])
    for group in groups:
        if set(group) != names:
            raise SchemaError("columns", str(sorted(group)), str(sorted(names)))
    samples = [len(group[RESPONSE_OFFSETS]) - 1 for group in groups]
    offsets = _joined_offsets([group[RESPONSE_OFFSETS] for group in groups])
    columns: dict[str, Tensor] = {}
    for name in sorted(names - {RESPONSE_OFFSETS}):
        values = [group[name] for group in groups]
        match STANDARD[name].axis:
            case Axis.RESPONSE:
                columns[name] = torch.nested.nested_tensor_from_jagged(_joined(values), offsets)
            case Axis.PROMPT:
                columns[name] = _prompts(values, samples)
            case _:
                columns[name] = _joined(values)
    return TensorDict(columns, batch_size=[sum(samples)])


def from_tensordict(batch: TensorDict) -> Columns:
    """The samples of one group, packed again.

    Raises:
        SchemaError: The samples do not share one prompt: they are not one group.
    """
    prompts = batch[PROMPT_IDS].unbind()
    if any(not torch.equal(prompt, prompts[0]) for prompt in prompts[1:]):
        raise SchemaError(PROMPT_IDS, "different prompts", "one prompt, shared by all samples")
    columns: dict[str, NDArray[np.generic]] = {PROMPT_IDS: prompts[0].numpy()}
    for name, values in cast("Iterable[tuple[str, Any]]", batch.items()):
        if name == PROMPT_IDS:
            continue
        if values.is_nested:
            columns[RESPONSE_OFFSETS] = values.offsets().numpy()
            columns[name] = values.values().numpy()
        else:
            columns[name] = values.numpy()
    return columns


def _joined(values: Sequence[NDArray[np.generic]]) -> Tensor:
    joined = values[0] if len(values) == 1 else np.concatenate(values)
    # torch warns about memory it may not write, such as shared memory: that is copied
    return torch.from_numpy(joined if joined.flags.writeable else joined.copy())


def _joined_offsets(offsets: Sequence[NDArray[np.generic]]) -> Tensor:
    """The boundaries of all samples in the joined values."""
    lengths = np.concatenate([np.diff(each) for each in offsets])
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))


def _prompts(prompts: Sequence[NDArray[np.generic]], samples: Sequence[int]) -> Tensor:
    """Each group's prompt once a sample."""
    repeated = [
        prompt for prompt, count in zip(prompts, samples, strict=True) for _ in range(count)
    ]
    boundaries = np.concatenate(([0], np.cumsum([len(prompt) for prompt in repeated])))
    return torch.nested.nested_tensor_from_jagged(_joined(repeated), torch.from_numpy(boundaries))
