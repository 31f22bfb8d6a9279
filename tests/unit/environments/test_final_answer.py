import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.final_answer import final_answer, find_tagged_answer, without_thinking


def number_of(text: str) -> str | None:
    answer = final_answer(text)
    return None if answer is None else answer.number


# --- thinking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("72", "72"),
        ("<think>1 or 2?</think>72", "72"),
        ("a<think>1</think>b<think>2</think>c", "abc"),
        ("so <think>1, no, 2", "so "),
        ("I was thinking 1</think>72", "72"),
        ("<think>1<think>2</think>3</think>72", "72"),
        ("<think></think>", ""),
        ("72 <Think>8", "72 <Think>8"),
    ],
)
def test_thinking_is_left_out_closed_or_not(text: str, said: str) -> None:
    assert without_thinking(text) == said


pieces = st.lists(st.one_of(st.sampled_from(["<think>", "</think>"]), st.text()))


@given(pieces)
def test_nothing_thought_is_ever_said(texts: list[str]) -> None:
    said = without_thinking("".join(texts))
    assert len(said) <= sum(map(len, texts))
    assert without_thinking(f"<think>{'x'.join(texts)}</think></think>72") == "72"


@given(st.text().filter(lambda text: "think>" not in text))
def test_a_text_without_tags_is_said_as_it_is(text: str) -> None:
    assert without_thinking(text) == text


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("It is 72.", "72"),
        ("72.0", "72"),
        ("72.50", "72.5"),
        ("0072", "72"),
        (".5", "0.5"),
        ("-0.0", "0"),
        ("$1,234.50.", "1234.5"),
        ("1,234,567", "1234567"),
        (r"\$1{,}234", "1234"),
        ("$-5", "-5"),
        ("-$5", "-5"),
        ("\N{MINUS SIGN}7", "-7"),
        ("12%", "12"),
        (r"\boxed{72}", "72"),
        ("**72**", "72"),
        ("7 apples and 3 pears", "3"),
        ("5-3", "3"),
        ("(-3)", "-3"),
        ("\n- 72", "72"),
        ("1, 2,3", "3"),
        ("\uff17\uff12\uff0e\uff15", "72.5"),
    ],
)
def test_a_number_is_read_however_it_is_written(text: str, number: str) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize("text", ["", "seventy-two", "####", "$", ".", "-", "\u0661\u0662", "½"])
def test_a_text_without_a_number_has_none(text: str) -> None:
    assert final_answer(text) is None


def test_a_number_behind_four_hashes_comes_before_any_other() -> None:
    assert final_answer("6 * 12 = 72\n#### 72\nThat was 3 steps.") == ("72", True)
    assert final_answer("#### 1\n#### $2,000.") == ("2000", True)
    assert final_answer("####\n-4") == ("-4", True)


def test_without_one_the_last_number_counts() -> None:
    assert final_answer("### 5") == ("5", False)
    assert final_answer("#### seven, or 7") == ("7", False)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.text("\n \t"), st.text())
def test_equal_numbers_have_equal_text(value: Decimal, space: str, before: str) -> None:
    forms = (f"{value:f}", f"{value:,f}", f"{value:,f}000", f"$ {value:f} %.".replace("$ ", "$"))
    read = {number_of(f"{before} ####{space}{form}") for form in forms}
    assert len(read) == 1
    assert Decimal(read.pop() or "none") == value


@given(st.text())
def test_whatever_is_read_is_canonical(text: str) -> None:
    number = number_of(text)
    assert number is None or number_of(number) == number


@given(pieces.map("".join) | st.binary().map(lambda raw: raw.decode(errors="surrogateescape")))
def test_no_text_is_a_crash(text: str) -> None:
    final_answer(without_thinking(text))


ADVERSARIAL = (
    *("9", "1,", "1,234,", "123,456,7890", "0.0,", "1.", ".", "-", "$", "-$", "- $"),
    *("#", "####", "#### ", "#### -", " ", "{,}", "<think>", "</think>", "<thin", "é-1"),
    *("<answer>", "</answer>", "<answer><"),
)


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_a_long_text_takes_time_in_proportion(piece: str) -> None:
    # In quadratic time each of these would take minutes, and pytest's limit would end the test.
    for text in (piece * (300_000 // len(piece)), "#### " + piece * 100_000 + "x"):
        final_answer(without_thinking(text))
        find_tagged_answer(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no tag", None),
        ("<answer>not closed", None),
        ("</answer>not opened", None),
        ("<answer></answer>", ""),
        ("<answer>1</answer> or <answer> 2\n</answer>.", " 2\n"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("<answer>1 <answer>2</answer> 3</answer>", "1 <answer>2"),
    ],
)
def test_the_last_answer_between_tags_counts(text: str, answer: str | None) -> None:
    assert find_tagged_answer(text) == answer


@given(st.text("<answer>/1"))
def test_tags_are_read_as_a_regular_expression_reads_them(text: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert find_tagged_answer(text) == (found[-1] if found else None)


def test_a_number_of_any_length_is_compared_whole() -> None:
    assert number_of("1" + "0" * 300_000 + ".000") == "1" + "0" * 300_000
