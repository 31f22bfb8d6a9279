"""A seeded permutation in constant memory and time."""

import hashlib
from functools import lru_cache

_ROUNDS = 6
_MASK = (1 << 64) - 1


def permuted(place: int, rows: int, seed: int, epoch: int) -> int:
    """Return the row at ``place`` of epoch ``epoch``: a permutation of ``range(rows)`` per epoch.

    A balanced Feistel network over the smallest power of four that holds ``rows``; a value outside
    the range is mapped again (cycle walking, Black and Rogaway 2002), fewer than four times on
    average. Unlike a shuffled list it costs no memory, and no pause at the start of an epoch.
    """
    half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    place = _feistel(place, half_bits, keys)
    while place >= rows:
        place = _feistel(place, half_bits, keys)
    return place


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8]) for i in range(0, 8 * _ROUNDS, 8))


def _feistel(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
