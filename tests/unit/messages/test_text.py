"""External text in one line of a log."""

import json

import msgspec
import pytest

from offbeat.messages.text import LONGEST, first_line, printable, printable_json, printable_lines


@pytest.mark.parametrize("length", [0, 1, LONGEST - 1, LONGEST])
def test_a_text_that_is_not_too_long_is_kept_whole(length: int) -> None:
    assert printable("a" * length) == "a" * length


def test_characters_beyond_the_longest_text_are_left_out_and_counted() -> None:
    assert printable("abcdef", longest=4) == "abcd ... and 2 characters more"
    text = printable("a" * (LONGEST + 7))
    assert text == "a" * LONGEST + " ... and 7 characters more"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("two\nlines\tand a tab\r\n", "two lines and a tab"),
        ("\x1b[2Jcleared", r"\x1b[2Jcleared"),
        ("\udcff", r"\udcff"),
        ("caf\u00e9", "caf\u00e9"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, want: str) -> None:
    assert printable(text) == want


def test_an_error_is_its_first_line_that_is_not_blank_or_else_its_type() -> None:
    assert first_line(ValueError("\n  \n no disk \nat all")) == "no disk"
    assert first_line(ValueError("")) == "ValueError"


def test_lines_stay_lines_and_nothing_in_them_acts_on_a_terminal() -> None:
    assert printable_lines("a\n  b ±\n") == "a\n  b ±\n"
    hostile = "\x1b]0;title\x07\r\x9b2J\u202eabc\tx\udcff\n"
    shown = printable_lines(hostile)
    assert shown == "\\x1b]0;title\\x07\\r\\x9b2J\\u202eabc\\tx\\udcff\n"
    assert all(line.isprintable() for line in shown.splitlines())


def test_json_on_a_terminal_has_escapes_and_the_same_value() -> None:
    value = {"text": "ä € \x9b31m\u202e\u2066\x85\u2028\x7f\U000e0001"}
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    shown = printable_json(text)
    assert json.loads(shown) == value
    assert shown.replace("\n", "").isprintable()
    assert "ä €" in shown
