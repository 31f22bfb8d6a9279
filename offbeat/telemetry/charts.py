"""Draws small charts with characters. Pure."""

from collections.abc import Sequence
from typing import Final

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float]) -> str:
    """Draw one character per value, from the lowest to the highest.

    Equal values give a level line. A value that is not finite is drawn as a blank.
    """
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    return "".join(_level(value, low, high) for value in values)


def bar(fraction: float, width: int) -> str:
    """Draw a bar ``width`` characters wide, filled to ``fraction`` in eighths of a character."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    full, part = divmod(eighths, 8)
    return (_PARTS[8] * full + (_PARTS[part] if part else "")).ljust(width)


def _level(value: float, low: float, high: float) -> str:
    if not low <= value <= high:
        return " "
    if high == low:
        return _LEVELS[len(_LEVELS) // 2]
    return _LEVELS[min(int((value - low) / (high - low) * len(_LEVELS)), len(_LEVELS) - 1)]
