"""Encodes the changes in a chunk of weights as positions and steps of single words. Pure, numpy.

A *word* is as wide as the narrowest type in the chunk. Words are compared and restored as unsigned
integers, so every bit pattern survives: NaNs with their payload, negative zeros, infinities.

    header     uint64 [word bytes, changed words, wide steps]; word bytes 0: the chunk itself follows
    high bits  position >> 8, in unary: bit (position >> 8) + rank is set    (Elias-Fano)
    low bytes  position & 255
    steps      new - old as integers, zigzag; one byte each, 255 marks a wide one
    wide       steps of 255 and more, as whole words

An optimizer step moves most changed 16-bit weights by one or two representable values, so a changed
word costs about 18 bits: 10 for its position, 8 for its step.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.weight_sync.manifest import Bytes

_HEADER: Final = 3  # uint64
_LOW_BITS: Final = 8
_WIDE: Final = 255
_WHOLE: Final = 0  # word bytes of a chunk that is not encoded
_BLOCK: Final = 1 << 20  # words compared at once
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def count_changed_words(data: Bytes) -> int:
    """Return the number of changed words of an encoded chunk."""
    return int(data[: _HEADER * 8].view(np.uint64)[1])


def whole_nbytes(new: Bytes) -> int:
    """Return the size of ``whole(new)``."""
    return _HEADER * 8 + new.nbytes


def whole(new: Bytes) -> Bytes:
    """Return a chunk as a delta part that does not depend on the base."""
    return np.concatenate((np.array([_WHOLE, 0, 0], np.uint64).view(np.uint8), new))


def encode(base: Bytes, new: Bytes, width: int) -> Bytes | None:
    """Return the changes from ``base`` to ``new``, or None if ``whole(new)`` is not longer.

    Args:
        base: Bytes of a chunk.
        new: The same number of bytes.
        width: Bytes of a word, a divisor of the size of the chunk.
    """
    old_words, new_words = base.view(_UNSIGNED[width]), new.view(_UNSIGNED[width])
    differs = _differing(old_words, new_words)
    if differs is None:
        return None
    places = np.flatnonzero(differs)
    steps = _zigzag(new_words[places] - old_words[places])
    wide = steps[steps >= _WIDE]
    parts = (
        np.array([width, places.size, wide.size], np.uint64).view(np.uint8),
        _high_bits(places, new_words.size),
        places.astype(np.uint8),  # the low byte
        np.minimum(steps, _WIDE).astype(np.uint8),
        wide.view(np.uint8),
    )
    return np.concatenate(parts) if sum(map(len, parts)) < whole_nbytes(new) else None


def apply(data: Bytes, base: Bytes, into: Bytes) -> None:
    """Apply the changes to ``base`` and write the result into ``into``, which has the same size.

    Raises:
        ValueError: The bytes do not encode changes of such a chunk.
    """
    if data.nbytes < _HEADER * 8:
        raise ValueError(f"{data.nbytes} bytes, fewer than the {_HEADER * 8} of a header")
    width, count, wide = (int(each) for each in data[: _HEADER * 8].view(np.uint64))
    if width == _WHOLE:
        _check_size(data.nbytes - _HEADER * 8, into.nbytes)
        into[:] = data[_HEADER * 8 :]
        return
    if width not in _UNSIGNED or into.nbytes % width:
        raise ValueError(f"words of {width} bytes in a chunk of {into.nbytes}")
    words = into.nbytes // width
    cuts = np.cumsum([_HEADER * 8, _high_nbytes(count, words), count, count, wide * width])
    _check_size(data.nbytes, int(cuts[-1]))
    high, low, small, large = np.split(data[: cuts[-1]], cuts[:-1])[1:]
    places = (np.flatnonzero(np.unpackbits(high)) - np.arange(count)) << _LOW_BITS
    places += low
    steps = small.astype(_UNSIGNED[width])
    steps[small == _WIDE] = np.frombuffer(large.tobytes(), _UNSIGNED[width])
    into[:] = base
    into.view(_UNSIGNED[width])[places] += _from_zigzag(steps)


def _differing(
    old: NDArray[np.unsignedinteger], new: NDArray[np.unsignedinteger]
) -> NDArray[np.bool_] | None:
    """Return which words differ, or None as soon as more than half do, too many to list."""
    differs, count = np.empty(new.size, np.bool_), 0
    for begin in range(0, new.size, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        np.not_equal(old[block], new[block], out=differs[block])
        count += np.count_nonzero(differs[block])
        if count * 2 > new.size:
            return None
    return differs


def _high_nbytes(count: int, words: int) -> int:
    return -(-(count + (words >> _LOW_BITS) + 1) // 8)


def _high_bits(places: NDArray[np.int64], words: int) -> Bytes:
    bits = np.zeros(_high_nbytes(places.size, words) * 8, np.uint8)
    bits[(places >> _LOW_BITS) + np.arange(places.size)] = 1
    return np.packbits(bits)


def _zigzag(differences: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return 0, 1, 2, 3, 4 for the differences 0, -1, 1, -2, 2."""
    signs = differences >> (differences.itemsize * 8 - 1)
    return np.bitwise_xor(differences << 1, np.negative(signs))


def _from_zigzag(steps: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    return np.bitwise_xor(steps >> 1, np.negative(steps & 1))


def _check_size(got: int, want: int) -> None:
    if got != want:
        raise ValueError(f"{got} bytes, expected {want}")
