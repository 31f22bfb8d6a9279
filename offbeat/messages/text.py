"""Sanitising of external text for a line of a log, a terminal, or a journal."""

from typing import Final

LONGEST: Final = 2000
"""Characters kept of one text: a user's exception may quote a whole response or file."""


def printable(text: str, *, longest: int = LONGEST) -> str:
    """Return the text without control characters, line breaks, and characters that cannot be encoded.

    Line ends and tabs become spaces; other characters that are not printable are escaped;
    characters beyond ``longest`` are left out, and counted.
    """
    left_out = len(text) - longest
    if left_out > 0:
        text = f"{text[:longest]} ... and {left_out} characters more"
    if text.isprintable():
        return text
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else _escaped(each) for each in line)


def first_line(error: BaseException) -> str:
    """Return an error in one line: the first one of its text that is not blank, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0]) if lines else type(error).__name__


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode("ascii")
