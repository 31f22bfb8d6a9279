"""Stop strings in the text of byte-level tokens, wherever the tokens cut it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from offbeat.generators.stop_strings import StopMatcher, TextStream, text_before_stop

SPECIAL = 999
TOKENS = [bytes([value]) for value in range(256)] + [b"ab", b"\xc3\xa9t", b" Obs", b"x\xe2\x82"]


def decode(token_ids: Sequence[int]) -> str:
    """As byte-level BPE: the bytes of all tokens, then text; the special token has none."""
    content = b"".join(TOKENS[token] for token in token_ids if token != SPECIAL)
    return content.decode(errors="replace")


def encode(text: str) -> list[int]:
    return list(text.encode())


def first_complete(token_ids: Sequence[int], stop: Sequence[str]) -> int:
    """Tokens up to the one that completes a stop string, by decoding everything again and again."""
    lengths = range(1, len(token_ids) + 1)
    found = (n for n in lengths if any(each in decode(token_ids[:n]) for each in stop))
    return next(found, 0)


def matched_at(token_ids: Sequence[int], stop: Sequence[str]) -> int:
    matcher = StopMatcher(decode, stop)
    return next((n for n, token in enumerate(token_ids, 1) if matcher.push(token)), 0)


@given(st.text("aé€🙂 Obs", max_size=30), st.lists(st.text("aé€🙂 Ob", min_size=1), min_size=1))
def test_the_matcher_ends_where_the_whole_text_first_contains_a_stop_string(
    text: str, stop: list[str]
) -> None:
    tokens = encode(text)
    assert matched_at(tokens, stop) == first_complete(tokens, stop)


@given(st.lists(st.sampled_from([*range(97, 100), *range(256, 260), SPECIAL]), max_size=20))
def test_tokens_of_several_characters_and_special_ones_are_seen_through(tokens: list[int]) -> None:
    stop = ("ba", "tOb", "ét ", "bx", "xé")
    assert matched_at(tokens, stop) == first_complete(tokens, stop)


def test_a_token_that_completes_a_stop_string_and_begins_a_character_ends_the_sample() -> None:
    begins_euro = TOKENS.index(b"x\xe2\x82")
    assert matched_at([*encode("a"), begins_euro, 0xAC], ["ax"]) == 2
    assert matched_at([*encode("a"), begins_euro, 0xAC], ["x€"]) == 3


def test_a_stop_string_ends_inside_a_token_and_with_the_last_byte_of_a_character() -> None:
    assert matched_at([*encode("<"), TOKENS.index(b"ab")], ["<a"]) == 2
    assert [matched_at(list("🙂".encode())[:count], ["🙂"]) for count in (3, 4)] == [0, 4]


@given(st.lists(st.integers(0, 255), max_size=400), st.sampled_from(["never said", "€", "abc"]))
def test_a_token_is_found_without_decoding_all_tokens_before_it(
    tokens: list[int], stop: str
) -> None:
    lengths = list[int]()

    def counted(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    matcher = StopMatcher(counted, [stop])
    for token in tokens:
        matcher.push(token)
    assert max(lengths, default=0) <= 16
    assert len(lengths) <= 2 * len(tokens)


@given(st.text(max_size=40))
def test_the_pieces_of_a_stream_join_to_the_text(text: str) -> None:
    stream = TextStream(decode)
    assert "".join(stream.push(token) for token in encode(text)) == text


def test_a_character_is_held_back_until_its_last_byte() -> None:
    stream = TextStream(decode)
    assert [stream.push(token) for token in encode("a€b")] == ["a", "", "", "€", "b"]


def test_bytes_that_are_no_text_are_not_held_back_for_ever() -> None:
    stream = TextStream(decode)
    pieces = [stream.push(0xFF) for _ in range(20)] + [stream.push(token) for token in encode("ab")]
    assert "".join(pieces).endswith("ab")
    assert matched_at([0xFF] * 20 + encode("stop!"), ["stop"]) == 24


def test_the_text_is_cut_before_the_stop_string_that_is_complete_first() -> None:
    assert text_before_stop("go on; then stop", ["stop", "then"]) == "go on; "
    assert text_before_stop("abcd", ["d", "bcd"]) == "a"
    assert text_before_stop("abc", ["x"]) == "abc"
    assert not text_before_stop("abc", ["a"])
