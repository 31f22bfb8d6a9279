"""Columns to try the codec with, and whether they came back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.transfer_queue.codec import DTYPES
from offbeat.transfer_queue.schema import Columns


def bits(seed: int, rows: int, dtype: str) -> NDArray[Any]:
    """Any bit pattern: NaNs with a payload, infinities, subnormal numbers."""
    count = rows * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.view(dtype)


def otherwise_laid_out(values: NDArray[Any], how: str) -> NDArray[Any]:
    """The same values in other memory."""
    match how:
        case "big-endian":
            return values.astype(values.dtype.newbyteorder(">"))
        case "with gaps":
            return np.repeat(values, 2)[::2]
        case "backwards":
            return values[::-1].copy()[::-1]
        case _:
            return values


def as_written(values: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    dtype = values.dtype.newbyteorder("<")
    return str(dtype), values.shape, np.ascontiguousarray(values, dtype).tobytes()


def all_same(one: Columns, other: Columns) -> bool:
    """Same names, types, lengths and bits, wherever and however they lie."""
    return list(one) == list(other) and all(
        as_written(one[name]) == as_written(other[name]) for name in one
    )


layouts = st.sampled_from(["as they are", "big-endian", "with gaps", "backwards"])
dtypes = st.sampled_from(sorted(DTYPES))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def columns(draw: st.DrawFn) -> NDArray[Any]:
    values = bits(draw(seeds), draw(st.integers(0, 9)), draw(dtypes))
    return otherwise_laid_out(values, draw(layouts))


payloads: st.SearchStrategy[Mapping[str, NDArray[Any]]] = st.dictionaries(
    st.text(max_size=8), columns(), max_size=5
)


def example(samples: int = 4, tokens: int = 64) -> dict[str, NDArray[Any]]:
    """A group as a rollout makes it."""
    count = samples * tokens
    return {
        "response_ids": np.arange(count, dtype=np.int32),
        "response_offsets": np.arange(samples + 1, dtype=np.int64) * tokens,
        "loss_mask": np.arange(count) % 3 == 0,
        "generation_logprobs": -np.linspace(0, 9, count, dtype=np.float32),
        "rewards": np.linspace(0, 1, samples, dtype=np.float32),
    }
