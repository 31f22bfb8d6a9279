"""Prompt sources: pure functions from an index in the endless order to a prompt.

There is no cursor. A run that resumes asks for the prompt indices it still needs and gets the same
prompts, so nothing is skipped and nothing repeated.
"""

import abc
import codecs
import heapq
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

from offbeat.environments.inputs import digest_of
from offbeat.environments.permutation import permuted
from offbeat.messages.failures import OffbeatError
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


class PromptFileError(OffbeatError):
    """A prompt file cannot be used as it is. ``line`` is 0 for the file as a whole."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(path, line, problem)
        self.path, self.line, self.problem = path, line, problem

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.problem}"
            if self.line
            else f"{self.path}: {self.problem}"
        )


RowCheck = Callable[[Mapping[str, object]], str | None]
"""Returns why a row of a prompt file cannot be used; None when it can."""


class RowPrompts(abc.ABC):
    """Prompt source over numbered rows; a subclass returns the content of a row."""

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
        return Prompt(prompt_index, epoch, row, self._data(row))

    @abc.abstractmethod
    def _data(self, row: int) -> dict[str, Any]: ...


class JsonlPrompts(RowPrompts):
    """The rows of a JSON Lines file; blank lines are skipped.

    Each row is an object in which ``problem_of`` finds no problem: unless the environment has rows
    of its own, ``prompt`` (a string, tokenised as it is) or ``messages`` (a list of ``{"role": ...,
    "content": ...}``, rendered by the chat template). All other keys belong to the environment.
    Every line is checked once, here; rows are kept as bytes.

    Raises:
        PromptFileError: Names the line, its problem and what is expected.
    """

    def __init__(
        self,
        path: Path,
        *,
        shuffle: bool,
        seed: int,
        epochs: int | None,
        problem_of: RowCheck | None = None,
    ) -> None:
        content = _content(path)
        self.digest = digest_of([content])
        """Digest of the file's bytes."""
        self._lines = _read_rows(path, content, problem_of or row_problem)
        super().__init__(len(self._lines), shuffle=shuffle, seed=seed, epochs=epochs)

    def longest(self, count: int) -> Iterator[Prompt]:
        """Yield the prompts of the longest rows by bytes, longest first."""
        for row in heapq.nlargest(count, range(self.rows), key=lambda row: len(self._lines[row])):
            yield Prompt(row, 0, row, self._data(row))

    def _data(self, row: int) -> dict[str, Any]:
        return msgspec.json.decode(self._lines[row], type=dict[str, Any])


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


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptFileError(str(path), 0, f"cannot be read: {error.strerror}") from error


def _read_rows(path: Path, text: bytes, problem_of: RowCheck) -> list[bytes]:
    rows = list[bytes]()
    for number, line in enumerate(text.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if stripped := line.strip():
            problem = _problem(stripped, problem_of)
            if problem is not None:
                raise PromptFileError(str(path), number, problem)
            rows.append(stripped)
    if not rows:
        raise PromptFileError(str(path), 0, "holds no prompts; write one JSON object a line")
    return rows


_DEEPEST: Final = 100
"""Maximum nesting of lists and objects: far below the limit of recursive readers."""

_TOO_DEEP: Final = f"is nested more than {_DEEPEST} deep; make it flatter, or put it in a string"


def _depth(value: object) -> int:
    """Return the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            child
            for each in cast("list[dict[str, object] | list[object]]", level)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _problem(line: bytes, problem_of: RowCheck) -> str | None:
    try:
        row: object = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"is not JSON: {error}"
    except RecursionError:
        return _TOO_DEEP
    if line.count(b"[") + line.count(b"{") > _DEEPEST and _depth(row) > _DEEPEST:
        return _TOO_DEEP
    if not isinstance(row, dict):
        return f"is a JSON {type(row).__name__}; a row is an object, one a line"
    return problem_of(cast("dict[str, object]", row))


def row_problem(fields: Mapping[str, object]) -> str | None:
    """Return why a row is not a prompt; None when it is."""
    if ("prompt" in fields) == ("messages" in fields):
        both = "both" if "prompt" in fields else "neither"
        return f"has {both} of 'prompt' and 'messages' (keys: {', '.join(fields)}); give one"
    if "prompt" in fields:
        return _problem_of_prompt(fields["prompt"])
    return _problem_of_messages(fields["messages"])


def _problem_of_prompt(prompt: object) -> str | None:
    if not isinstance(prompt, str):
        return f"'prompt' is {prompt!r}; it is a string"
    return None if prompt else "'prompt' is empty; it needs at least one character"


def _problem_of_messages(messages: object) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"'messages' is {messages!r}; it is a list with at least one message"
    for place, message in enumerate(cast("list[object]", messages)):
        if not isinstance(message, dict):
            return f"messages[{place}] is {message!r}; a message is an object"
        fields = cast("dict[str, object]", message)
        if not isinstance(fields.get("role"), str) or "content" not in fields:
            return f"messages[{place}] has keys {', '.join(fields)}; it needs 'role' and 'content'"
    return None
