"""The standard columns of a prompt group, and the check that every producer runs.

A group's payload is a plain ``dict[str, ndarray]`` of packed columns. Legend: G samples of the
group, B branches over all samples, P prompt tokens (stored once and shared by all samples), N
response tokens over all branches. Ragged columns share one ``response_offsets``: branch i owns
values ``[offsets[i], offsets[i + 1])``. A sample is one branch, unless ``branch_samples`` assigns
several branches to it. (An agent that rewrites its history produces several.) Branches are in the
order of their samples. In a multi-turn sample, tokens of later observations are response tokens
with ``loss_mask`` False. So are tokens that an earlier branch of the sample trains.

A prompt with media has further columns, once per group. Their names start with ``media_``. Only the
plug-in that makes them knows their number, types and meaning.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import ge
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import MEDIA_PREFIX

Columns = Mapping[str, NDArray[np.generic]]


class Axis(enum.StrEnum):
    """Axis of a column, by which its entries are indexed."""

    PROMPT = "prompt token"  # [P]
    RESPONSE = "response token"  # [N], ragged over samples
    SAMPLE = "sample"  # [G]
    BRANCH = "branch"  # [B]
    OFFSET = "branch boundary"  # [B + 1]


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of one column: type, axis and writer."""

    name: str
    dtype: np.dtype[Any]  # comparing dtypes of this type costs a twentieth of comparing with a name
    axis: Axis
    writer: str


PROMPT_IDS: Final = "prompt_ids"
RESPONSE_IDS: Final = "response_ids"
RESPONSE_OFFSETS: Final = "response_offsets"
BRANCH_SAMPLES: Final = "branch_samples"
LOSS_MASK: Final = "loss_mask"
GENERATION_LOGPROBS: Final = "generation_logprobs"
WEIGHT_VERSIONS: Final = "weight_versions"
REWARDS: Final = "rewards"
POLICY_LOGPROBS: Final = "policy_logprobs"
REFERENCE_LOGPROBS: Final = "reference_logprobs"
TEACHER_LOGPROBS: Final = "teacher_logprobs"

_ENV, _TRAINER = "environment worker", "trainer"
_BOOL, _INT32, _INT64, _FLOAT32 = map(np.dtype, ("bool", "int32", "int64", "float32"))
STANDARD: Final = {
    column.name: column
    for column in (
        Column(PROMPT_IDS, _INT32, Axis.PROMPT, _ENV),
        Column(RESPONSE_IDS, _INT32, Axis.RESPONSE, _ENV),
        Column(RESPONSE_OFFSETS, _INT64, Axis.OFFSET, _ENV),
        Column(LOSS_MASK, _BOOL, Axis.RESPONSE, _ENV),
        Column(GENERATION_LOGPROBS, _FLOAT32, Axis.RESPONSE, _ENV),
        Column(WEIGHT_VERSIONS, _INT32, Axis.RESPONSE, _ENV),
        Column(REWARDS, _FLOAT32, Axis.SAMPLE, _ENV),
        Column(BRANCH_SAMPLES, _INT32, Axis.BRANCH, _ENV),
        Column(POLICY_LOGPROBS, _FLOAT32, Axis.RESPONSE, _TRAINER),
        Column(REFERENCE_LOGPROBS, _FLOAT32, Axis.RESPONSE, _TRAINER),
        Column(TEACHER_LOGPROBS, _FLOAT32, Axis.RESPONSE, _TRAINER),
    )
}
OPTIONAL_COLUMNS: Final = frozenset({BRANCH_SAMPLES})
"""Columns of the environment worker that not every group has."""
ROLLOUT_COLUMNS: Final = tuple(
    c.name for c in STANDARD.values() if c.writer == _ENV and c.name not in OPTIONAL_COLUMNS
)
"""The columns of every group that an engine has sampled."""
RECORDED_COLUMNS: Final = tuple(name for name in ROLLOUT_COLUMNS if name != GENERATION_LOGPROBS)
"""The columns of a group that no engine has sampled. Its token probabilities are unknown."""


def check(columns: Columns, required: Iterable[str] = ROLLOUT_COLUMNS) -> None:
    """Check a group's columns: presence, types, matching lengths, finite values, order.

    Raises:
        SchemaError: A column is invalid. The error names the first one, its value and the expected
            value.
    """
    for name in required:
        if name not in columns:
            raise SchemaError(name, "missing", f"{STANDARD[name].dtype} per {STANDARD[name].axis}")
    offsets = columns[RESPONSE_OFFSETS]
    if offsets.ndim != 1 or len(offsets) < 2:  # noqa: PLR2004 - one branch has two boundaries
        raise SchemaError(RESPONSE_OFFSETS, f"shape {offsets.shape}", "at least two boundaries")
    ends = offsets.tolist()  # few: plain integers cost less than an operation on the array
    if ends[0] != 0 or any(map(ge, ends, ends[1:])):
        raise SchemaError(
            RESPONSE_OFFSETS, f"{ends[:8]}...", "0 first, then rising: no empty branch"
        )
    branches = len(ends) - 1
    samples = branches if BRANCH_SAMPLES not in columns else _samples(columns[BRANCH_SAMPLES])
    lengths = {
        Axis.PROMPT: None,
        Axis.RESPONSE: int(ends[-1]),
        Axis.SAMPLE: samples,
        Axis.BRANCH: branches,
        Axis.OFFSET: len(ends),
    }
    for name, values in columns.items():
        if name.startswith(MEDIA_PREFIX):
            check_medium(name, values)
        else:
            _check_column(name, values, lengths)


def check_medium(name: object, values: object) -> None:
    """Check that a media column is a finite array with one axis, without interpreting it.

    Raises:
        SchemaError: It is not such an array, or its name is not the name of a media column.
    """
    if not isinstance(name, str) or not name.startswith(MEDIA_PREFIX):
        raise SchemaError(str(name), "not declared", f"a name that starts with {MEDIA_PREFIX}")
    if not isinstance(values, np.ndarray):
        raise SchemaError(name, f"a {type(values).__name__}", "an array")
    array = cast("NDArray[np.generic]", values)
    if array.ndim != 1:
        raise SchemaError(name, f"shape {array.shape}", "one axis")
    _check_finite(name, array)


def _samples(sample_of_branch: NDArray[np.generic]) -> int:
    """Return the number of samples that these branches belong to.

    Raises:
        SchemaError: The branches are not ordered by sample, starting with sample 0.
    """
    steps = np.diff(sample_of_branch, prepend=-1) if sample_of_branch.ndim == 1 else np.zeros(0)
    if not len(steps) or steps[0] != 1 or not bool(np.isin(steps, (0, 1)).all()):
        got = f"{sample_of_branch.tolist()[:8]}"
        raise SchemaError(BRANCH_SAMPLES, got, "0 first, then the same sample or the next one")
    return int(sample_of_branch[-1]) + 1


def _check_column(
    name: str, values: NDArray[np.generic], lengths: Mapping[Axis, int | None]
) -> None:
    column = STANDARD.get(name)
    if column is None:
        raise SchemaError(name, "not declared", f"one of {', '.join(STANDARD)}")
    if values.dtype != column.dtype:
        raise SchemaError(name, f"dtype {values.dtype}", str(column.dtype))
    want = lengths[column.axis]
    if values.ndim != 1 or (want is not None and len(values) != want):
        raise SchemaError(name, f"shape {values.shape}", f"({want},): one per {column.axis}")
    if column.axis is Axis.PROMPT and len(values) == 0:
        raise SchemaError(name, "empty", "at least one token")
    _check_finite(name, values)


def _check_finite(name: str, values: NDArray[np.generic]) -> None:
    if values.dtype.kind == "f" and not np.logical_and.reduce(np.isfinite(values)):
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise SchemaError(name, f"{values[bad]} at index {bad}", "finite values")


def payload_bytes(columns: Columns) -> int:
    """Return the bytes of the packed columns."""
    return sum(values.nbytes for values in columns.values())
