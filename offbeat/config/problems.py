"""Reports all problems of a recipe at once: each with its place and its fix.

Defines the result of a cross-check, and the check of a name that several sections have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from offbeat.config.by_value import is_by_value
from offbeat.config.secrets import is_secret_key, without_secrets
from offbeat.messages.failures import OffbeatError, ShortInNotebooks
from offbeat.messages.text import printable

_LONGEST_VALUE: Final = 60
_LONGEST_LINE: Final = 4000


@dataclass(frozen=True, slots=True)
class Location:
    """Source of a value: a line of a file, a whole file, or an override."""

    source: str  # path as the user wrote it, or "override 'steps=10'"
    line: int | None = None  # from 1
    column: int | None = None  # from 1

    def __str__(self) -> str:
        return ":".join(
            str(part) for part in (self.source, self.line, self.column) if part is not None
        )


class Absent:
    """Marks a missing value: ``Problem.value`` of a missing key or file."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. ``key`` is dotted, and empty if the problem concerns the whole file."""

    location: Location
    key: str
    value: Any  # as written; ABSENT if missing
    message: str  # what is wrong, one line
    hint: str  # how to fix it, a line or several; may be empty

    def __str__(self) -> str:
        shown = "" if isinstance(self.value, Absent) else f" = {self._shown()}"
        named = self.key and not self.message.startswith(self.key)
        head = f"{self.location}: {self.key}{shown}: " if named else f"{self.location}: "
        text = printable(f"{head}{self.message}", longest=_LONGEST_LINE)
        hints = (printable(line, longest=_LONGEST_LINE) for line in self.hint.splitlines())
        return "\n    ".join([text, *hints])

    def _shown(self) -> str:
        """Return the value without secrets, because a report may end in a log that others read."""
        return shorten(without_secrets(self.value, named=is_secret_key(self.key)))


class ConfigError(ShortInNotebooks, OffbeatError):
    """A recipe cannot be used. ``problems`` has all problems found, in reading order.

    Fix: follow the hints. ``offbeat config explain KEY`` explains a key.
    """

    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count > 1 else ''} in the configuration"
        return "\n".join(
            [head, *(f"  {problem}".replace("\n", "\n  ") for problem in self.problems)]
        )


def shorten(value: Any) -> str:  # noqa: ANN401 - whatever a recipe can hold
    """Return the value as YAML writes it, on one line of bounded length."""
    match value:
        case None:
            text = "null"
        case bool():
            text = str(value).lower()
        case _:
            text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


@dataclass(frozen=True, slots=True)
class Clash:
    """Settings that cannot be combined. The first of ``keys`` is the main one."""

    keys: tuple[str, ...]
    message: str
    hint: str


def target_clashes(key: str, target: str, kind: str, hint: str) -> Iterator[Clash]:
    """Yield a clash if a target is not of the form ``module:name``."""
    module, _, name = target.partition(":")
    names = (*module.replace("/", ".").split("."), name)  # the import explains a path
    if not is_by_value(target) and not all(each.isidentifier() for each in names):
        yield Clash((key,), f"{key}={target} does not name {kind} in a module", hint)
