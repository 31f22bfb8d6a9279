"""Sanitises and bounds external text for a log, a terminal, a journal, or a file of samples."""

import json
import textwrap
from collections.abc import Sequence
from typing import Final

from offbeat.messages.redaction import cut_head, cut_tail

LONGEST: Final = 2000
"""Maximum characters of one text. A user's exception may quote a whole response or file."""


COLUMNS: Final = 80
"""Width of a page of text, on a terminal and in a pipe."""

SAMPLE_CHARACTERS: Final = 4096
"""Maximum characters of a prompt or response in an evaluation.

The controller holds all samples of an evaluation in memory. There may be thousands, and a model may
write texts of any length.
"""


def bound_text(text: str, longest: int = SAMPLE_CHARACTERS) -> str:
    """Return the text, cut to at most ``longest`` characters, with a note in place of the middle.

    Characters that UTF-8 cannot encode become question marks.
    """
    encodable = text.encode(errors="replace").decode()
    left_out = len(encodable) - longest
    if left_out <= 0:
        return encodable
    half = longest // 2
    head, tail = cut_head(encodable, half), cut_tail(encodable, half)
    return f"{head} [... {left_out} characters left out ...] {tail}"


def join_branches(texts: Sequence[str]) -> str:
    """Return the texts of a sample's branches, with a heading for each if there are several."""
    if len(texts) == 1:
        return texts[0]
    return "\n".join(
        f"[branch {number} of {len(texts)}]\n{text}" for number, text in enumerate(texts, 1)
    )


def printable(text: str, *, longest: int = LONGEST) -> str:
    """Return the text without control characters, line breaks and unencodable characters.

    Line ends and tabs become spaces. Other characters that are not printable are escaped.
    Characters beyond ``longest`` are left out and counted.
    """
    left_out = len(text) - longest
    if left_out > 0:
        text = f"{cut_head(text, longest)} ... and {left_out} characters more"
    if text.isprintable():
        return text
    line = " ".join(text.split())
    return "".join(each if each.isprintable() else _escape(each) for each in line)


def printable_lines(text: str) -> str:
    """Return the text with its line ends. Escape all other characters that a terminal acts on."""
    return "".join(each if each == "\n" or each.isprintable() else _escape(each) for each in text)


def printable_json(text: str) -> str:
    """Return the same JSON, with each character escaped that a terminal may act on."""
    return "".join(
        each if each == "\n" or each.isprintable() else json.dumps(each)[1:-1] for each in text
    )


def wrap_line(text: str, first: str = "", rest: str = "") -> list[str]:
    """Return the text as lines of at most ``COLUMNS`` characters, made printable.

    Args:
        text: Text of one line. Spaces are kept, except where a line is broken.
        first: Beginning of the first line.
        rest: Beginning of the other lines.
    """
    plain = printable_lines(text).replace("\n", " ")
    return textwrap.wrap(
        plain,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    ) or [first]


def first_line(error: BaseException) -> str:
    """Return an error in one line: the first non-blank line of its text, or else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0]) if lines else type(error).__name__


def cut(text: str, longest: int) -> str:
    """Return the text, with its end replaced by " ..." if it is longer than ``longest``."""
    return text if len(text) <= longest else f"{cut_head(text, longest)} ..."


def list_names(names: Sequence[str], most: int) -> str:
    """Join the first ``most`` names, and append how many more follow."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _escape(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode("ascii")
