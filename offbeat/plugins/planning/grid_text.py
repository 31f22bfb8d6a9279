"""Parallel sizes in text: ``tensor=8,pipeline=4,data=2``."""

from dataclasses import fields
from typing import Final

from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid

_STAGES: Final = "stages"
_MAY_BE_ZERO: Final = ("own_plan", "encoders")
_DIGITS: Final = 9  # of a size; a longer number cannot count ranks, layers or rows
_NAMES: Final = tuple(field.name for field in fields(ModelGrid))


def parse_grid(text: str) -> ModelGrid:
    """Return the grid of a text. ``stages`` lists its numbers as ``stages=10+9+9``.

    Raises:
        LayoutRefused: A name is unknown or repeated, or a value is not a number.
    """
    values = dict[str, int | tuple[int, ...]]()
    for item in filter(None, text.replace(" ", "").split(",")):
        name, _, value = item.partition("=")
        if name not in _NAMES:
            raise LayoutRefused("size", repr(name), f"one of {', '.join(_NAMES)}")
        if name in values:
            raise LayoutRefused(name, f"given twice in {text!r}", "one value")
        numbers = value.split("+")
        if not all(_is_size(name, number) for number in numbers):
            raise LayoutRefused(name, repr(value), "a positive number, as in tensor=8")
        if name == _STAGES:
            values[name] = tuple(map(int, numbers))
        elif len(numbers) > 1:
            raise LayoutRefused(name, repr(value), "one number")
        else:
            values[name] = int(value)
    return ModelGrid(**values)  # pyright: ignore[reportArgumentType] -- each is of its field's type


def _is_size(name: str, number: str) -> bool:
    """Return whether a text is a number that a size may have."""
    is_number = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
    return is_number and (int(number) > 0 or name in _MAY_BE_ZERO)


def describe_grid(grid: ModelGrid) -> str:
    """Describe a grid by its sizes that differ from one rank, and its number of ranks."""
    alone = ModelGrid()
    said = [
        f"{field.name} {value if field.name != _STAGES else '+'.join(map(str, value))}"
        for field in fields(grid)
        if (value := getattr(grid, field.name)) != getattr(alone, field.name)
    ]
    ranks = f"{grid.ranks} rank{'s' if grid.ranks > 1 else ''}"
    return f"{ranks}: {', '.join(said)}" if said else ranks
