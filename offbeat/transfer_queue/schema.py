"""The standard columns of a prompt group, and the check that every producer runs.

A group's payload is a plain ``dict[str, ndarray]`` of packed columns. Legend: G samples of the
group, B branches over all samples, P prompt tokens (the prompt is stored once, all samples share
it), N response tokens over all branches. Ragged columns share one ``response_offsets``: branch i
owns values ``[offsets[i], offsets[i + 1])``. A sample is one branch, unless ``branch_samples`` says
otherwise: an agent that rewrites its history leaves several, which are adjacent and in the order of
the samples. In a multi-turn sample the tokens of later observations are response tokens with
``loss_mask`` False; so are tokens that an earlier branch of the sample trains.

A prompt with pictures has three more columns, once per group (``media_columns``): I pictures, V
values over all of them.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import MediaKind

Columns = Mapping[str, NDArray[np.generic]]


class Axis(enum.StrEnum):
    """Axis of a column: what its entries are indexed by."""

    PROMPT = "prompt token"  # [P]
    RESPONSE = "response token"  # [N], ragged over samples
    SAMPLE = "sample"  # [G]
    BRANCH = "branch"  # [B]
    OFFSET = "branch boundary"  # [B + 1]
    GROUP = "group"  # [1]
    PICTURE = "side of a picture"  # [I * 3]
    MEDIA = "value of a picture"  # [V], ragged over pictures


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
BRANCH_SAMPLES: Final = "branch_samples"
LOSS_MASK: Final = "loss_mask"
GENERATION_LOGPROBS: Final = "generation_logprobs"
WEIGHT_VERSIONS: Final = "weight_versions"
REWARDS: Final = "rewards"
POLICY_LOGPROBS: Final = "policy_logprobs"
REFERENCE_LOGPROBS: Final = "reference_logprobs"
TEACHER_LOGPROBS: Final = "teacher_logprobs"
MEDIA_VALUES: Final = "media_values"
MEDIA_SIZES: Final = "media_sizes"
MEDIA_KIND: Final = "media_kind"
MEDIA_COLUMNS: Final = (MEDIA_VALUES, MEDIA_SIZES, MEDIA_KIND)
"""The columns of a group whose prompt has pictures: all of them, or none."""

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
        Column(BRANCH_SAMPLES, "int32", Axis.BRANCH, _ENV, (_TRAINER,)),
        Column(MEDIA_VALUES, "float32", Axis.MEDIA, _ENV, (_TRAINER,)),
        Column(MEDIA_SIZES, "int32", Axis.PICTURE, _ENV, (_TRAINER,)),
        Column(MEDIA_KIND, "int32", Axis.GROUP, _ENV, (_TRAINER,)),
        Column(POLICY_LOGPROBS, "float32", Axis.RESPONSE, _TRAINER, (_TRAINER,)),
        Column(REFERENCE_LOGPROBS, "float32", Axis.RESPONSE, _TRAINER, (_TRAINER,)),
        Column(TEACHER_LOGPROBS, "float32", Axis.RESPONSE, _TRAINER, (_TRAINER,)),
    )
}
OPTIONAL_COLUMNS: Final = frozenset({BRANCH_SAMPLES, *MEDIA_COLUMNS})
"""Columns of the environment worker that not every group has."""
ROLLOUT_COLUMNS: Final = tuple(
    c.name for c in STANDARD.values() if c.writer == _ENV and c.name not in OPTIONAL_COLUMNS
)
"""The columns of every group that an engine has drawn."""
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
    if offsets.ndim != 1 or len(offsets) < 2:  # noqa: PLR2004 - one branch has two boundaries
        raise SchemaError(RESPONSE_OFFSETS, f"shape {offsets.shape}", "at least two boundaries")
    if offsets[0] != 0 or bool(np.any(np.diff(offsets) < 1)):
        raise SchemaError(
            RESPONSE_OFFSETS, f"{offsets.tolist()[:8]}...", "0 first, then rising: no empty branch"
        )
    branches = len(offsets) - 1
    samples = branches if BRANCH_SAMPLES not in columns else _samples(columns[BRANCH_SAMPLES])
    lengths = {
        Axis.PROMPT: None,
        Axis.RESPONSE: int(offsets[-1]),
        Axis.SAMPLE: samples,
        Axis.BRANCH: branches,
        Axis.OFFSET: len(offsets),
        Axis.GROUP: 1,
        Axis.PICTURE: None,
        Axis.MEDIA: None,
    }
    for name, values in columns.items():
        _check_column(name, values, lengths)
    if any(name in columns for name in MEDIA_COLUMNS):
        _check_pictures(columns)


def check_media(columns: Columns) -> None:
    """Check the columns of pictures: all present, typed, finite, values as many as the sizes say.

    Raises:
        SchemaError: Names the first column at fault, its value and the expected one.
    """
    for name in MEDIA_COLUMNS:
        if name in columns:
            _check_column(name, columns[name], {STANDARD[name].axis: None})
    _check_pictures(columns)


def _check_pictures(columns: Columns) -> None:
    """Check typed columns of pictures against each other."""
    for name in MEDIA_COLUMNS:
        if name not in columns:
            raise SchemaError(name, "missing", f"with {', '.join(MEDIA_COLUMNS)}, or none of them")
    kinds, sizes = columns[MEDIA_KIND].tolist(), columns[MEDIA_SIZES]
    if len(kinds) != 1 or not 0 <= kinds[0] < len(MediaKind):
        want = ", ".join(f"{code} ({kind})" for code, kind in enumerate(MediaKind))
        raise SchemaError(MEDIA_KIND, f"{kinds[:8]}", f"one of {want}")
    if not len(sizes) or len(sizes) % 3 or int(sizes.min()) < 1:
        raise SchemaError(MEDIA_SIZES, f"{sizes.tolist()[:8]}", "three sides above 0 per picture")
    # Python's integers: a product of three int32 may overflow 64 bits
    sides = sizes.tolist()
    want = sum(a * b * c for a, b, c in zip(sides[::3], sides[1::3], sides[2::3], strict=True))
    got = len(columns[MEDIA_VALUES])
    if MediaKind.PATCHES is tuple(MediaKind)[kinds[0]]:
        if not got or got % want:
            raise SchemaError(MEDIA_VALUES, f"{got} values", f"a multiple of {want}, the patches")
    elif got != want:
        raise SchemaError(MEDIA_VALUES, f"{got} values", f"{want}, by {MEDIA_SIZES}")


def _samples(sample_of_branch: NDArray[np.generic]) -> int:
    """Return the number of samples that these branches belong to.

    Raises:
        SchemaError: Not the branches of sample 0, then those of sample 1, and so on.
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
