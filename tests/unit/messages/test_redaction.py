"""Text is redacted before it is cut, so that no part of a secret stays at the cut."""

from collections.abc import Callable
from functools import partial
from urllib.parse import quote

import pytest

from offbeat.config.user_code import format_traceback
from offbeat.messages.redaction import (
    LONGEST_SECRET,
    compile_secrets,
    cut_head,
    cut_tail,
    remember_secrets,
)
from offbeat.messages.text import LONGEST, SAMPLE_CHARACTERS, bound_text, cut, printable

SECRET = "qz7-Qz8-Qz9/Qz0+Qz1"
PARTS = [SECRET[at : at + 6] for at in range(len(SECRET) - 5)]


def in_traceback(text: str) -> str:
    return format_traceback(ValueError(text))


@pytest.fixture(autouse=True)
def _known() -> None:  # pyright: ignore[reportUnusedFunction]
    remember_secrets([SECRET])


@pytest.mark.parametrize(
    "write",
    [
        printable,
        bound_text,
        partial(cut, longest=LONGEST),
        partial(cut_tail, longest=LONGEST),
        in_traceback,
    ],
    ids=["line", "sample", "value", "tail", "traceback"],
)
def test_a_cut_anywhere_in_a_secret_leaves_no_part_of_it(write: Callable[[str], str]) -> None:
    for longest in (LONGEST, SAMPLE_CHARACTERS // 2, LONGEST + LONGEST_SECRET):
        for before in range(longest - 2 * len(SECRET), longest + 2):
            text = "x" * before + SECRET + "x" * before
            written = write(text)
            assert not [part for part in PARTS if part in written.replace(SECRET, "")]


@pytest.mark.parametrize(
    "longest", [2_000, 100_000]
)  # in the second, redaction shrinks the text below it
def test_many_secrets_do_not_bring_the_cut_end_of_the_searched_text_into_view(longest: int) -> None:
    text = (SECRET + " ") * 8000
    for shown in (cut_head(text, longest), cut_tail(text, longest)):
        assert not [part for part in PARTS if part in shown]
        assert len(shown) <= longest


def test_text_that_is_not_cut_stays() -> None:
    assert cut_head("x" * 20, 20) == cut_tail("x" * 20, 20) == "x" * 20
    assert cut_head("x" * 20, 3) == cut_tail("x" * 20, 3) == "xxx"


@pytest.mark.parametrize("safe", ["", "/"])
def test_a_secret_in_a_url_is_found(safe: str) -> None:
    assert compile_secrets([SECRET]).search(f"https://x/?key={quote(SECRET, safe)}&a=1")
