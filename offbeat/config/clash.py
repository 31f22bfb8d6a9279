"""Defines the result of a cross-check, and the check of a name that several sections have."""

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.config.by_value import is_by_value


@dataclass(frozen=True, slots=True)
class Clash:
    """Settings that do not go together. The first of ``keys`` is the one to look at."""

    keys: tuple[str, ...]
    message: str
    hint: str


def target_clashes(key: str, target: str, kind: str, hint: str) -> Iterator[Clash]:
    """Yield that a target has not the form of the name of an object, ``module:name``."""
    module, _, name = target.partition(":")
    names = (*module.replace("/", ".").split("."), name)  # the import explains a path
    if not is_by_value(target) and not all(each.isidentifier() for each in names):
        yield Clash((key,), f"{key}={target} does not name {kind} in a module", hint)
