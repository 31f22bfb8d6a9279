"""The text of an evaluation's responses."""

import msgspec
import numpy as np

from offbeat.fakes.receipts import make_receipt
from offbeat.messages.text import SAMPLE_CHARACTERS, bound_text
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.response_text import response_texts
from offbeat.transfer_queue.schema import RESPONSE_IDS, RESPONSE_OFFSETS
from tests.support.environment_fakes import CharTokenizer

RECEIPT = make_receipt(0, 1, (((1, 2),), ((1, 1),)), rewards=(1.0, 0.0))


def columns(*rows: str) -> Columns:
    ids = [ord(character) for row in rows for character in row]
    ends = np.cumsum([0, *map(len, rows)])
    return {RESPONSE_IDS: np.array(ids, dtype=np.int32), RESPONSE_OFFSETS: ends}


def test_special_tokens_are_in_the_text() -> None:
    assert response_texts(CharTokenizer(), RECEIPT, columns("7\0", "8")) == ("7</s>", "8")


def test_a_sample_with_several_branches_has_the_text_of_each() -> None:
    branched = msgspec.structs.replace(RECEIPT, branches=(2, 1))
    both = "[branch 1 of 2]\na\n[branch 2 of 2]\nbc"
    assert response_texts(CharTokenizer(), branched, columns("a", "bc", "d")) == (both, "d")


def test_each_branch_of_a_long_sample_keeps_its_ends() -> None:
    branched = msgspec.structs.replace(RECEIPT, branches=(2, 1))
    long = "a" + "-" * SAMPLE_CHARACTERS + "b"
    text, _ = response_texts(CharTokenizer(), branched, columns(long, "bc", "d"))
    assert text.startswith("[branch 1 of 2]\na-")
    assert text.endswith("-b\n[branch 2 of 2]\nbc")
    assert len(text) < SAMPLE_CHARACTERS


def test_the_placeholder_of_a_sample_without_a_turn_is_no_text() -> None:
    masked = msgspec.structs.replace(RECEIPT, turns=(0, 1))
    assert response_texts(CharTokenizer(), masked, columns("=", "8")) == ("", "8")


def test_a_long_text_keeps_its_ends_and_says_what_is_missing() -> None:
    half = SAMPLE_CHARACTERS // 2
    text = "a" * half + "b" * 3 + "c" * half
    assert bound_text(text) == "a" * half + " [... 3 characters left out ...] " + "c" * half
    assert bound_text("x" * SAMPLE_CHARACTERS) == "x" * SAMPLE_CHARACTERS


def test_a_lone_surrogate_becomes_a_character_that_a_file_can_hold() -> None:
    assert bound_text("7\ud800") == "7?"
