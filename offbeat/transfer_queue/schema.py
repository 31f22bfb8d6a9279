"""The standard columns of a prompt group, and the check that every producer runs.

A group's payload is a plain ``dict[str, ndarray]`` of packed columns. Legend: G samples of the
group, P prompt tokens (the prompt is stored once, all samples share it), N response tokens over all
samples. Ragged columns share one ``response_offsets``: sample i owns values
``[offsets[i], offsets[i + 1])``. In a multi-turn sample the tokens of later observations are
response tokens with ``loss_mask`` False.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError

Columns = Mapping[str, NDArray[np.generic]]


class Axis(enum.StrEnum):
    """Axis of a column: what its entries are indexed by."""

    PROMPT = "prompt token"  # [P]
    RESPONSE = "response token"  # [N], ragged over samples
    SAMPLE = "sample"  # [G]
    OFFSET = "sample boundary"  # [G + 1]


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of one column: type, axis, writer and readers."""

    name: str
    dtype: str
    axis: Axis
    writer: str
    readers: tuple[str, ...]


PROMPT_IDS: Final = "prompt_ids"
RESPONSE_IDS: Final = "response_ids"
RESPONSE_OFFSETS: Final = "response_offsets"
LOSS_MASK: Final = "loss_mask"
GENERATION_LOGPROBS: Final = "generation_logprobs"
WEIGHT_VERSIONS: Final = "weight_versions"
REWARDS: Final = "rewards"
POLICY_LOGPROBS: Final = "policy_logprobs"
REFERENCE_LOGPROBS: Final = "reference_logprobs"
TEACHER_LOGPROBS: Final = "teacher_logprobs"

_ENV, _TRAINER = "environment worker", "trainer"
STANDARD: Final = {
    column.name: column
    for column in (
        Column(PROMPT_IDS, "int32", Axis.PROMPT, _ENV, (_TRAINER,)),
        Column(RESPONSE_IDS, "int32", Axis.RESPONSE, _ENV, (_TRAINER,)),
        Column(RESPONSE_OFFSETS, "int64", Axis.OFFSET, _ENV, (_TRAINER,)),
        Column(LOSS_MASK, "bool", Axis.RESPONSE, _ENV, (_TRAINER,)),
        Column(GENERATION_LOGPROBS, "float32", Axis.RESPONSE, _ENV, (_TRAINER,)),
        Column(WEIGHT_VERSIONS, "int32", Axis.RESPONSE, _ENV, (_TRAINER,)),
        Column(REWARDS, "float32", Axis.SAMPLE, _ENV, ("controller, as a tag",)),
        Column(POLICY_LOGPROBS, "float32", Axis.RESPONSE, _TRAINER, (_TRAINER,)),
        Column(REFERENCE_LOGPROBS, "float32", Axis.RESPONSE, _TRAINER, (_TRAINER,)),
        Column(TEACHER_LOGPROBS, "float32", Axis.RESPONSE, _TRAINER, (_TRAINER,)),
    )
}
ROLLOUT_COLUMNS: Final = tuple(c.name for c in STANDARD.values() if c.writer == _ENV)
RECORDED_COLUMNS: Final = tuple(name for name in ROLLOUT_COLUMNS if name != GENERATION_LOGPROBS)
"""The columns of a group whose tokens no engine has drawn: nobody knows how probable they were."""


def check(columns: Columns, required: Iterable[str] = ROLLOUT_COLUMNS) -> None:
    """Check a group's columns: present, typed, of matching lengths, finite, well-ordered.

    Raises:
        SchemaError: Names the first column at fault, its value and the expected one.
    """
    for name in required:
        if name not in columns:
            raise SchemaError(name, "missing", f"{STANDARD[name].dtype} per {STANDARD[name].axis}")
    offsets = columns[RESPONSE_OFFSETS]
    if offsets.ndim != 1 or len(offsets) < 2:  # noqa: PLR2004 - one sample has two boundaries
        raise SchemaError(RESPONSE_OFFSETS, f"shape {offsets.shape}", "at least two boundaries")
    if offsets[0] != 0 or bool(np.any(np.diff(offsets) < 1)):
        raise SchemaError(
            RESPONSE_OFFSETS, f"{offsets.tolist()[:8]}...", "0 first, then rising: no empty sample"
        )
    lengths = {
        Axis.PROMPT: None,
        Axis.RESPONSE: int(offsets[-1]),
        Axis.SAMPLE: len(offsets) - 1,
        Axis.OFFSET: len(offsets),
    }
    for name, values in columns.items():
        _check_column(name, values, lengths)


def _check_column(
    name: str, values: NDArray[np.generic], lengths: Mapping[Axis, int | None]
) -> None:
    column = STANDARD.get(name)
    if column is None:
        raise SchemaError(name, "not declared", f"one of {', '.join(STANDARD)}")
    if values.dtype != column.dtype:
        raise SchemaError(name, f"dtype {values.dtype}", column.dtype)
    want = lengths[column.axis]
    if values.ndim != 1 or (want is not None and len(values) != want):
        raise SchemaError(name, f"shape {values.shape}", f"({want},): one per {column.axis}")
    if column.axis is Axis.PROMPT and len(values) == 0:
        raise SchemaError(name, "empty", "at least one token")
    if values.dtype.kind == "f" and not bool(np.isfinite(values).all()):
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise SchemaError(name, f"{values[bad]} at index {bad}", "finite values")


def payload_bytes(columns: Columns) -> int:
    """Return the bytes of the packed columns."""
    return sum(values.nbytes for values in columns.values())
