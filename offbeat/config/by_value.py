"""Objects passed to a run by value: a reward, an agent, an environment, a sampler, a loss.

A recipe names such an object ``offbeat.by_value:NAME-DIGEST``. So the run directory records which
code the run began with, because a different function has a different name. This process sends the
bytes to its children over their sockets, and to the Ray actors of the run. It writes them to no
file. Bytes and digest are computed when the object is passed: later changes by the program have no
effect.
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
    """An object passed by value holds something that no other process can use.

    Fix: create clients and locks where they are used, or name the function ``module:name``.
    """

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
    paths: tuple[str, ...]  # where modules that the value names are found


_given: Final[dict[str, Any]] = {}
_packed: Final[dict[str, PackedValue]] = {}
_unverifiable: Final[dict[str, tuple[str, ...]]] = {}


def give(value: Any) -> str:  # noqa: ANN401 -- any object that can be called
    """Keep a copy of an object for runs of this process; return its name ``module:name``.

    Raises:
        CannotBeSent: It cannot be pickled.
    """
    from offbeat.config.value_digest import digest_value  # noqa: PLC0415 -- imports numpy

    name = getattr(value, "__name__", type(value).__name__)
    try:
        pickled = _pickle(_cloudpickle(), value)
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
    """Return whether a target names an object that was passed by value."""
    return target.partition(":")[0] == _MODULE


def digest_in_name(target: str) -> str:
    """Return the digest in the name of a target."""
    return target.rpartition("-")[2]


def given(target: str) -> Any:  # noqa: ANN401 -- the user's object
    """Return the object of a target.

    Raises:
        KeyError: The object was never passed to this process.
    """
    return _given[target]


def is_given(target: str) -> bool:
    """Return whether this process has the object of a target."""
    return target in _given


def unverifiable(target: str) -> tuple[str, ...]:
    """Return the parts that a target's digest does not cover, as ``name (type)``."""
    return _unverifiable.get(target, ())


def _cloudpickle() -> Any:  # noqa: ANN401 -- a module without types
    # Imported only if an object is passed by value. It has no types.
    import cloudpickle  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    return cloudpickle


def pack(targets: Iterable[str]) -> tuple[PackedValue, ...]:
    """Return the targets' objects that were passed by value, for a child process."""
    return tuple(_packed[target] for target in targets if target in _packed)


def _pickle(cloudpickle: Any, value: object) -> bytes:  # noqa: ANN401 -- a module
    """Pickle with the code of the user's module, because a child may be unable to import it."""
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
    """Keep the objects that the parent of this process packed."""
    for each in values:
        if each.target not in _given:
            sys.path += [path for path in each.paths if path not in sys.path]
            _given[each.target], _packed[each.target] = _cloudpickle().loads(each.pickled), each
