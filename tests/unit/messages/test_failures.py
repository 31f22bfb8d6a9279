"""Every error of the package, wherever it is defined."""

import importlib
import pickle
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest

import offbeat
from offbeat.config.problems import Location, Problem
from offbeat.messages.failures import (
    CanaryFailed,
    Component,
    DeadlineExceeded,
    OffbeatError,
)
from offbeat.plugins.float8.precision import RefusedPair

PACKAGE = Path(offbeat.__file__).parent
VALUES: dict[Any, Any] = {
    str: "text",
    int: 7,
    bool: True,
    float: 0.5,
    int | str: 7,
    int | None: 7,
    float | None: 0.5,
    str | None: "text",
    tuple[int, ...]: (7, 8),
    tuple[float, ...]: (0.5,),
    tuple[str, ...]: ("one", "two"),
    tuple[str, str] | None: ("one problem", "one fix"),
    Literal["name", "range"]: "range",
    Component | None: Component.WORKER,
    list[BaseException]: [ValueError("cause")],
    tuple[RefusedPair, ...]: (RefusedPair("name", "float64", "fp8_block", "problem"),),
    tuple[Problem, ...]: (Problem(Location("recipe.yaml", 1, 2), "key", 3, "problem", "hint"),),
}
"""A value of every type that a field of an error has, beside enums."""


def value_of(kind: Any) -> Any:
    return next(iter(kind)) if isinstance(kind, EnumType) else VALUES[kind]


def subclasses(kind: type[OffbeatError]) -> Iterator[type[OffbeatError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.fixture(scope="module")
def errors() -> dict[str, OffbeatError]:
    """One error of each class of the package, its fields given by their names."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "OffbeatError" in path.read_text():
            importlib.import_module(
                ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            )
    made = dict[str, OffbeatError]()
    for kind in subclasses(OffbeatError):
        if kind.__module__.startswith("offbeat."):
            fields = get_type_hints(kind.__init__)
            fields.pop("return", None)
            made[kind.__name__] = kind(**{name: value_of(each) for name, each in fields.items()})
    return made


def test_every_error_survives_pickling_with_its_class_fields_and_sentence(
    errors: dict[str, OffbeatError],
) -> None:
    assert len(errors) > 100
    for error in errors.values():
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert type(copy) is type(error)
        assert repr(vars(copy)) == repr(vars(error))
        assert (repr(copy), str(copy)) == (repr(error), str(error))


def test_every_error_tells_its_fields_in_its_sentence(errors: dict[str, OffbeatError]) -> None:
    silent = [name for name, error in errors.items() if error.args and not str(error)]
    assert not silent


def test_the_fields_of_an_error_are_its_arguments_however_they_were_given() -> None:
    error = DeadlineExceeded("the controller", target="a sync", deadline_s=30.0)
    assert error.args == ("the controller", "a sync", 30.0, None)
    canary = CanaryFailed("engine 0", 3, 7, 42, -3.5, -0.25, 3.25, tolerance=0.02)
    assert canary.args == ("engine 0", 3, 7, 42, -3.5, -0.25, 3.25, 0.02)


def test_errors_of_equal_fields_are_two_errors() -> None:
    one, other = (DeadlineExceeded("the controller", "a sync", 30.0) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2
