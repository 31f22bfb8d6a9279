"""Columns to try the codec with, and what it means that they came back."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.transfer_queue.codec import BFLOAT16, Column, Columns, Ragged
from offbeat.transfer_queue.codec.dtypes import WIRE


def bits(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Any bit pattern: NaNs with a payload, infinities, subnormal numbers."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def otherwise_laid_out(values: NDArray[Any], how: str) -> NDArray[Any]:
    """The same values in other memory."""
    match how:
        case "big-endian":
            return values.astype(values.dtype.newbyteorder(">"))
        case "with gaps":
            wide = np.repeat(values, 2, axis=0)
            return wide[::2]
        case "backwards":
            return values[::-1].copy()[::-1]
        case "fortran":
            return np.asfortranarray(values)
        case _:
            return values


def as_written(values: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    dtype = values.dtype.newbyteorder("<")
    return str(dtype), values.shape, np.ascontiguousarray(values, dtype).tobytes()


def same(one: Column, other: Column) -> bool:
    """Same kind, type, shape and bits, wherever and however they lie."""
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return same(one.values, other.values) and one.offsets.tolist() == other.offsets.tolist()
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return as_written(one) == as_written(other)
    return isinstance(one, list) and isinstance(other, list) and repr(one) == repr(other)


def all_same(one: Columns, other: Columns) -> bool:
    return list(one) == list(other) and all(same(one[name], other[name]) for name in one)


layouts = st.sampled_from(["as they are", "big-endian", "with gaps", "backwards", "fortran"])
dtypes = st.sampled_from(sorted(WIRE)).map(WIRE.__getitem__)
inner_shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
seeds = st.integers(0, 2**32 - 1)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def dense(draw: st.DrawFn, rows: int) -> NDArray[Any]:
    values = bits(draw(seeds), (rows, *draw(inner_shapes)), draw(dtypes))
    return otherwise_laid_out(values, draw(layouts))


@st.composite
def ragged(draw: st.DrawFn, offsets: NDArray[np.int64]) -> Ragged:
    return Ragged(draw(dense(int(offsets[-1]))), offsets)


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Column]:
    """Dense, ragged and plain columns of the same rows; ragged ones share their offsets or not."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=4))
    rows = len(lengths)
    shared = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    column = st.one_of(
        dense(rows),
        ragged(shared),
        ragged(shared.copy()),
        st.lists(plain_values, min_size=rows, max_size=rows),
    )
    return draw(st.dictionaries(st.text(max_size=8), column, max_size=5))


def example(samples: int = 4, tokens: int = 64) -> dict[str, Column]:
    """A group as a rollout makes it: shared offsets, five types, dense 2-D, and text."""
    offsets = np.arange(samples + 1, dtype=np.int64) * tokens
    count = samples * tokens
    return {
        "input_ids": Ragged(np.arange(count), offsets),
        "loss_mask": Ragged(np.arange(count) % 3 == 0, offsets),
        "logprobs": Ragged(-np.linspace(0, 9, count, dtype=np.float32), offsets),
        "hidden": bits(1, (samples, 2, 3), BFLOAT16),
        "rewards": np.linspace(0, 1, samples),
        "finish": [{"reason": "stop", "turns": index} for index in range(samples)],
    }
