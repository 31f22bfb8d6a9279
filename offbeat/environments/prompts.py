"""Prompt sources: pure functions from an index in the endless order to a prompt.

There is no cursor. A run that resumes asks for the prompt indices it still needs and gets the same
prompts, so nothing is skipped and nothing repeated.
"""

import abc
from typing import Any, Protocol

import msgspec

from offbeat.environments.permutation import permuted
from offbeat.messages.groups import Prompt


class PromptSource(Protocol):
    """An order of prompts that depends only on the arguments of the constructor."""

    @property
    def rows(self) -> int:
        """Number of prompts in one epoch, at least one."""
        ...

    def prompt(self, prompt_index: int) -> Prompt | None:
        """Return prompt ``prompt_index``; None beyond the last epoch.

        Calls may come in any order.
        """
        ...


class RowPrompts(abc.ABC):
    """Prompt source over numbered rows; a subclass returns the content of a row."""

    _folder = ""
    """Folder of the files that rows come from; empty if from no file."""

    def __init__(self, rows: int, *, shuffle: bool, seed: int, epochs: int | None) -> None:
        self._rows, self._shuffle, self._seed, self._epochs = rows, shuffle, seed, epochs

    @property
    def rows(self) -> int:
        return self._rows

    def prompt(self, prompt_index: int) -> Prompt | None:
        epoch, place = divmod(prompt_index, self._rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        row = permuted(place, self._rows, self._seed, epoch) if self._shuffle else place
        return Prompt(prompt_index, epoch, row, self._data(row), folder=self._folder)

    @abc.abstractmethod
    def _data(self, row: int) -> dict[str, Any]: ...


class ArithmeticOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.options`` of the built-in task: both terms are in ``[low, high)``."""

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
