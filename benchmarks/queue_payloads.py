"""Groups as a rollout leaves them: dense columns of 16 samples, drawn from the group's number."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.generic]
Columns = Mapping[str, Column]
SAMPLES: Final = 16
LARGE_SAMPLES: Final = 16
REWARD: Final = "reward"
"""[16, 1] float32, each the number of the group: how a consumer knows which one it was given."""

NAMES: Final = ("input_ids", "logprobs", "mask", REWARD)


def group(number: int, tokens: int) -> dict[str, Column]:
    """13 bytes a token of every sample, and a reward."""
    rng = np.random.default_rng(number)
    return {
        "input_ids": rng.integers(0, 150_000, (SAMPLES, tokens), dtype=np.int64),
        "logprobs": rng.random((SAMPLES, tokens), dtype=np.float32),
        "mask": np.ones((SAMPLES, tokens), dtype=np.bool_),
        REWARD: np.full((SAMPLES, 1), number, dtype=np.float32),
    }


def split(number: int, columns: int, payload_bytes: int) -> dict[str, Column]:
    """Return the same bytes in the requested number of columns, and a reward."""
    tokens = payload_bytes // (4 * SAMPLES * columns)
    wide: dict[str, Column] = {
        f"column_{index}": np.full((SAMPLES, tokens), index, dtype=np.float32)
        for index in range(columns)
    }
    return wide | {REWARD: np.full((SAMPLES, 1), number, dtype=np.float32)}


def large(megabytes: int) -> dict[str, Column]:
    """Return one column of so many MiB, and a reward."""
    tokens = megabytes * 2**20 // 4 // LARGE_SAMPLES
    rng = np.random.default_rng(0)
    return {
        "x": rng.random((LARGE_SAMPLES, tokens), dtype=np.float32),
        REWARD: np.zeros((LARGE_SAMPLES, 1), dtype=np.float32),
    }


def joined(groups: Sequence[Columns]) -> dict[str, Column]:
    """The rows of all groups, for a queue that knows no groups."""
    if len(groups) == 1:
        return dict(groups[0])
    return {name: np.concatenate([each[name] for each in groups]) for name in groups[0]}


def payload_bytes(columns: Columns) -> int:
    """Return the bytes of the columns, without any header."""
    return sum(column.nbytes for column in columns.values())
