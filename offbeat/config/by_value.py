"""Objects that a program gives a run by value: a reward, an agent, an environment, a sampler, a loss.

A recipe names such an object ``offbeat.by_value:NAME-DIGEST``, so a run directory says which code the
run began with, and another function is another name. This process sends the bytes to its own children
over their sockets, and to the Ray actors of the run; it writes them to no file. They are the bytes of
the moment when the object is given, as is the digest: what the program changes later is of no effect.
"""

import sys
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from offbeat.messages.failures import OffbeatError, ShortInNotebooks

_MODULE: Final = "offbeat.by_value"
_SHOWN: Final = 12
"""Hexadecimal digits of a digest in a name."""


class CannotBeSent(ShortInNotebooks, OffbeatError):
    """An object that is given by value holds something that no other process can have."""

    name: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.name} cannot be sent to another process: {self.problem}. Make a client or a lock "
            "where it is used, or put the function into a module and name it module:name"
        )


class PackedValue(msgspec.Struct, frozen=True):
    """A value for another process. ``pickled`` is code: load it only from a parent process."""

    target: str
    pickled: bytes
    paths: tuple[str, ...]  # where modules are found that the value names


_given: Final[dict[str, Any]] = {}
_packed: Final[dict[str, PackedValue]] = {}
_unverifiable: Final[dict[str, tuple[str, ...]]] = {}


def give(value: Any) -> str:  # noqa: ANN401 -- any object that can be called
    """Keep a copy of an object for runs of this process; return the ``module:name`` that names it.

    Raises:
        CannotBeSent: It cannot be pickled.
    """
    from offbeat.config.value_digest import digest_value  # noqa: PLC0415 -- imports numpy

    name = getattr(value, "__name__", type(value).__name__)
    try:
        pickled = _pickled(_cloudpickle(), value)
        copy = _cloudpickle().loads(pickled)
    except Exception as error:
        raise CannotBeSent(name, f"{type(error).__name__}: {error}") from error
    found = digest_value(value)
    readable = "".join(each if each.isalnum() or each == "_" else "_" for each in name)
    target = f"{_MODULE}:{readable}-{found.digest[:_SHOWN]}"
    _given[target], _unverifiable[target] = copy, found.unverifiable
    _packed[target] = PackedValue(target, pickled, tuple(each for each in sys.path if each))
    return target


def is_by_value(target: str) -> bool:
    """Return whether a target names an object that was given by value."""
    return target.partition(":")[0] == _MODULE


def digest_in_name(target: str) -> str:
    """Return the digest in the name of a target."""
    return target.rpartition("-")[2]


def given(target: str) -> Any:  # noqa: ANN401 -- the user's object
    """Return the object of a target.

    Raises:
        KeyError: Nobody has given it to this process.
    """
    return _given[target]


def is_given(target: str) -> bool:
    """Return whether this process has the object of a target."""
    return target in _given


def unverifiable(target: str) -> tuple[str, ...]:
    """Return what a target's digest does not cover, as ``name (type)``."""
    return _unverifiable.get(target, ())


def _cloudpickle() -> Any:  # noqa: ANN401 -- a module without types
    # Only where an object is given by value. It has no types.
    import cloudpickle  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    return cloudpickle


def pack(targets: Iterable[str]) -> tuple[PackedValue, ...]:
    """Return the objects among the targets that were given by value, for a child process."""
    return tuple(_packed[target] for target in targets if target in _packed)


def _pickled(cloudpickle: Any, value: object) -> bytes:  # noqa: ANN401 -- a module
    """Pickle with the code of the user's module: a child may not import that of a script."""
    from offbeat.config.value_digest import is_installed  # noqa: PLC0415 -- imports numpy

    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or is_installed(module):
        return cloudpickle.dumps(value)
    already = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not already:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    finally:
        if not already:
            cloudpickle.unregister_pickle_by_value(module)


def unpack(values: Iterable[PackedValue]) -> None:
    """Keep the objects that the parent of this process has packed."""
    for each in values:
        if each.target not in _given:
            sys.path += [path for path in each.paths if path not in sys.path]
            _given[each.target], _packed[each.target] = _cloudpickle().loads(each.pickled), each
