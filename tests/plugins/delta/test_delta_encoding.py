"""What changed in a chunk, written down and put back: every bit, and few bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.plugins.delta.encoding import apply, count_changed_words, encode, whole

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WORDS = 3 << 19  # of a chunk
BITS_OF_A_CHANGE = 20  # of a 16-bit value that moved by one step, where 1 in 256 did


def bytes_of(words: NDArray[Any]) -> NDArray[np.uint8]:
    return words.view(np.uint8)


def put_back(base: NDArray[Any], new: NDArray[Any], width: int) -> NDArray[np.uint8]:
    into = np.full(new.nbytes, 77, np.uint8)
    part = encode(bytes_of(base), bytes_of(new), width)
    apply(whole(bytes_of(new)) if part is None else part, bytes_of(base), into)
    return into


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    words=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.4, 1.0]),
    small=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_change_is_put_back_bit_for_bit(
    width: int, words: int, share: float, seed: int, *, small: bool
) -> None:
    dice, dtype = np.random.default_rng(seed), UNSIGNED[width]
    base = dice.integers(0, 256, words * width, np.uint8).view(dtype)
    steps = dice.integers(0, 256, words * width, np.uint8).view(dtype)
    if small:
        steps = np.where(steps % 2, 1, -1).astype(dtype)
    new = np.where(dice.random(words) < share, base + steps, base).astype(dtype)
    assert np.array_equal(put_back(base, new, width), bytes_of(new))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nans_keep_their_payload_and_zeros_their_sign(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    size = UNSIGNED[width]
    strange = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    words = np.concatenate(
        (
            bytes_of(strange.view(torch.uint8).numpy()).view(size),
            np.array([-1, -2, -3]).astype(size),
        )
    )  # the last three are NaNs with payloads
    base = np.zeros(900, size)
    new = base.copy()
    new[7::100][: words.size] = words
    assert np.array_equal(put_back(base, new, width), bytes_of(new))
    assert np.array_equal(put_back(new, base, width), bytes_of(base))


def test_a_step_of_sixteen_bit_weights_costs_few_bits_a_change() -> None:
    dice = np.random.default_rng(0)
    base = dice.integers(0, 2**16, 1 << 18, np.uint16)
    places = np.flatnonzero(dice.random(base.size) < 1 / 256)
    new = base.copy()
    new[places] += dice.choice(np.array([1, 2**16 - 1], np.uint16), places.size)
    encoded = encode(bytes_of(base), bytes_of(new), 2)
    assert encoded is not None
    assert count_changed_words(encoded) == places.size
    assert encoded.nbytes * 8 < BITS_OF_A_CHANGE * places.size


def test_a_chunk_that_changed_everywhere_is_sent_whole_and_is_hardly_longer() -> None:
    dice = np.random.default_rng(0)
    base, new = (dice.integers(0, 2**32, 5000, np.uint32) for _ in range(2))
    assert encode(bytes_of(base), bytes_of(new), 4) is None
    assert whole(bytes_of(new)).nbytes == new.nbytes + 24
    assert np.array_equal(put_back(base, new, 4), bytes_of(new))


@pytest.mark.parametrize(("changed", "is_whole"), [(WORDS // 2, False), (WORDS // 2 + 1, True)])
def test_positions_are_encoded_of_half_the_words_at_most_wherever_they_are(
    changed: int, *, is_whole: bool
) -> None:
    """More words than are compared at once; the changed ones at the end."""
    base = np.zeros(WORDS, np.uint32)
    new = base.copy()
    new[-changed:] = 1
    assert (encode(bytes_of(base), bytes_of(new), 4) is None) == is_whole


@pytest.mark.parametrize("cut", [0, 10, 24, 40, -1])
def test_bytes_that_are_no_encoding_are_refused(cut: int) -> None:
    base = np.zeros(4096, np.uint16)
    new = base.copy()
    new[::50] = 1
    encoded = encode(bytes_of(base), bytes_of(new), 2)
    assert encoded is not None
    with pytest.raises(ValueError, match="bytes"):
        apply(encoded[:cut], bytes_of(base), np.empty(base.nbytes, np.uint8))
