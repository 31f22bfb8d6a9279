"""Extracts the final answer of a response as text, and compares two numbers.

All functions run in linear time on any text. A model may write millions of digits, half a tag, or
noise, and no such text may hang a worker.
"""

import re
from typing import Final, NamedTuple

THOUGHT: Final = "<think>"
_TAG: Final = re.compile(r"(</?think>)")
_OPENING: Final = "<answer>"
_CLOSING: Final = "</answer>"
_NUMBER: Final = r"""
    \$?
    (?P<sign> (?<![\w)\].,]) - )?                  # a minus; in 5-3 and in a word it is none
    \$?
    (?P<digits>
        (?: [0-9]{1,3} (?:,[0-9]{3})+ (?![0-9])    # 1,234: commas between groups of three
          | [0-9]++ )
        (?: \.[0-9]++ )?
      | (?<![0-9.]) \.[0-9]++ )
"""
_ANYWHERE: Final = re.compile(_NUMBER, re.VERBOSE | re.ASCII)
_STRICT: Final = re.compile(r"\#{4}\s*+" + _NUMBER, re.VERBOSE | re.ASCII)
_PLAIN: Final = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{NO-BREAK SPACE}": " ",
        **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # fullwidth forms of ASCII
    }
)


class FinalAnswer(NamedTuple):
    """The last number of a text."""

    number: str  # canonical form: equal text for equal numbers
    strict: bool  # whether it follows ####


def find_open_thought(prompt: str) -> str:
    """Return ``<think>`` if a prompt ends inside a block that it has just opened, else no text.

    Some chat templates open the block themselves, so a response begins inside it. Prepend the
    returned text to the response, so that a response that is cut off inside the block has no
    answer.
    """
    return THOUGHT if prompt.rstrip().endswith(THOUGHT) else ""


def without_thinking(text: str) -> str:
    """Return ``text`` without its ``<think>...</think>`` blocks.

    An unclosed block extends to the end, because the model was cut off before it answered. A
    closing tag without an opening tag ends a block that began before the text, because some chat
    templates open the block.
    """
    said, thinking = list[str](), False
    for piece in _TAG.split(text):
        if piece == THOUGHT:
            thinking = True
        elif piece == "</think>":
            if not thinking:
                said.clear()
            thinking = False
        elif not thinking:
            said.append(piece)
    return "".join(said)


def find_tagged_answer(text: str) -> str | None:
    """Return the content of the last ``<answer>...</answer>``, or None without one.

    A block extends from its opening tag to the next closing tag.
    """
    answer, at = None, 0
    while (start := text.find(_OPENING, at)) >= 0:
        start += len(_OPENING)
        end = text.find(_CLOSING, start)
        if end < 0:
            break
        answer, at = text[start:end], end + len(_CLOSING)
    return answer


def final_answer(text: str) -> FinalAnswer | None:
    """Return the last number after ``####``, else the last number of the text, or None without one.

    ``$``, thousands commas, a percent sign and a trailing full stop are ignored: ``$1,234.50.`` is
    1234.5, ``72.0`` is 72. Fractions and exponents are not parsed: ``1/2`` gives 2.
    """
    plain = text.translate(_PLAIN).replace("{,}", ",")  # LaTeX's comma between thousands
    strict = _last(_STRICT, plain)
    if strict is not None:
        return FinalAnswer(strict, strict=True)
    anywhere = _last(_ANYWHERE, plain)
    return None if anywhere is None else FinalAnswer(anywhere, strict=False)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007 - the last one is what is wanted
        pass
    return None if match is None else _canonical(match["digits"], negative=bool(match["sign"]))


def _canonical(digits: str, *, negative: bool) -> str:
    """Normalise digits as text. ``int`` needs quadratic time and refuses more than 4300 digits."""
    whole, _, fraction = digits.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if negative and number != "0" else number
