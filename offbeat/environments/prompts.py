"""Prompt sources: pure functions from an index in the endless order to a prompt.

A source has no cursor. A run that resumes asks for the prompt indices it still needs and gets the
same prompts, so nothing is skipped and nothing repeated. The order is a seeded permutation that
needs constant memory and time. With several environments, their weights determine their shares.
"""

import abc
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from offbeat.messages.groups import Prompt

_ROUNDS = 6
_MASK = (1 << 64) - 1


def permute(place: int, rows: int, seed: int, epoch: int) -> int:
    """Return the row at ``place`` of epoch ``epoch``: a permutation of ``range(rows)`` per epoch.

    It is a balanced Feistel network over the smallest power of four that is at least ``rows``. A
    value outside the range is mapped again (cycle walking, Black and Rogaway 2002), fewer than four
    times on average. Unlike a shuffled list, this needs no memory, and no pause at the start of an
    epoch.
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


class PromptSource(Protocol):
    """Order of prompts that depends only on the constructor's arguments."""

    @property
    def rows(self) -> int:
        """Return the number of prompts in one epoch, at least one."""
        ...

    def prompt(self, prompt_index: int) -> Prompt | None:
        """Return prompt ``prompt_index``, or None after the last epoch.

        Calls may come in any order.
        """
        ...


class RowPrompts(abc.ABC):
    """Prompt source over numbered rows. A subclass returns the content of a row."""

    _folder = ""
    """Folder of the files with the rows, or empty if the rows do not come from files."""

    def __init__(self, rows: int, *, shuffle: bool, seed: int, epochs: int | None) -> None:
        self._rows, self._shuffle, self._seed, self._epochs = rows, shuffle, seed, epochs

    @property
    def rows(self) -> int:
        return self._rows

    def prompt(self, prompt_index: int) -> Prompt | None:
        epoch, place = divmod(prompt_index, self._rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        row = permute(place, self._rows, self._seed, epoch) if self._shuffle else place
        return Prompt(prompt_index, epoch, row, self._data(row), folder=self._folder)

    @abc.abstractmethod
    def _data(self, row: int) -> dict[str, Any]: ...


class ArithmeticOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.options`` of the built-in task. Both terms are in ``[low, high)``."""

    low: int = 0
    high: int = 100


class ArithmeticPrompts(RowPrompts):
    """Prompts ``a+b=`` for all pairs ``low <= a, b < high``.

    The row is ``(a - low) * (high - low) + (b - low)``.
    """

    def __init__(
        self, low: int, high: int, *, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        if not 0 <= low < high:
            raise ValueError(f"arithmetic needs 0 <= low < high, got low={low} and high={high}")
        self._low, self._span = low, high - low
        super().__init__(self._span**2, shuffle=shuffle, seed=seed, epochs=epochs)

    def _data(self, row: int) -> dict[str, Any]:
        a, b = (self._low + term for term in divmod(row, self._span))
        return {"prompt": f"{a}+{b}=", "answer": a + b}


class StubPrompts(RowPrompts):
    """Numbered prompts for dry runs."""

    def _data(self, row: int) -> dict[str, Any]:
        return {"prompt": f"stub prompt {row}"}


class EnvironmentPrompts:
    """Prompts of one of several environments. Each prompt names its environment."""

    def __init__(self, name: str, source: PromptSource) -> None:
        self._name, self.source = name, source

    @property
    def rows(self) -> int:
        return self.source.rows

    def prompt(self, prompt_index: int) -> Prompt | None:
        prompt = self.source.prompt(prompt_index)
        return None if prompt is None else msgspec.structs.replace(prompt, environment=self._name)


class MixedPrompts:
    """Prompt source over several environments: a pure function of the seed and the prompt index.

    Prompts come in cycles. A cycle has as many prompts of each environment as the environment's
    weight, in an order drawn from (seed, cycle). The n-th prompt of an environment in this order is
    prompt n of its source, so each row occurs once per epoch of its source. The mixed source ends
    when the source of any environment ends.
    """

    def __init__(
        self, sources: Mapping[str, PromptSource], weights: Mapping[str, int], seed: int
    ) -> None:
        self.sources = {name: EnvironmentPrompts(name, each) for name, each in sources.items()}
        self._weights, self._seed = dict(weights), seed
        self._ends = dict(zip(self._weights, accumulate(self._weights.values()), strict=True))
        self._cycle = sum(self._weights.values())

    @property
    def rows(self) -> int:
        """Return the number of rows of all environments together."""
        return sum(each.rows for each in self.sources.values())

    def prompt(self, prompt_index: int) -> Prompt | None:
        name, own_index = self.place(prompt_index)
        prompt = self.sources[name].prompt(own_index)
        return (
            None if prompt is None else msgspec.structs.replace(prompt, prompt_index=prompt_index)
        )

    def place(self, prompt_index: int) -> tuple[str, int]:
        """Return the environment of a prompt, and the prompt's index in its source."""
        cycle, place = divmod(prompt_index, self._cycle)
        slot = permute(place, self._cycle, self._seed, cycle)
        name = next(name for name, end in self._ends.items() if slot < end)
        weight = self._weights[name]
        return name, cycle * weight + slot - (self._ends[name] - weight)
