"""Messages that only holders of a shared key can make."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.weight_sync.rendezvous.frames import (
    HEADER_BYTES,
    LONGEST_BODY,
    ForeignFrame,
    FrameReader,
    SharedKey,
)

KEY = SharedKey(b"k" * 32)


@given(bodies=st.lists(st.binary(max_size=40), max_size=4), cut=st.integers(1, 50))
def test_bodies_arrive_as_they_were_sent_however_the_stream_is_cut(
    bodies: list[bytes], cut: int
) -> None:
    stream, reader, got = b"".join(map(KEY.frame, bodies)), FrameReader(KEY), list[bytes]()
    for start in range(0, len(stream), cut):
        reader.feed(stream[start : start + cut])
        while (body := reader.next()) is not None:
            got.append(body)
    assert got == bodies


@given(body=st.binary(min_size=1, max_size=60), at=st.integers(0), flip=st.integers(1, 255))
def test_no_byte_of_a_message_can_be_changed(body: bytes, at: int, flip: int) -> None:
    message = bytearray(KEY.frame(body))
    message[4 + at % (len(message) - 4)] ^= flip
    reader = FrameReader(KEY)
    reader.feed(bytes(message))
    with pytest.raises(ForeignFrame, match="without the key"):
        reader.next()


def test_another_key_makes_no_message_of_this_run() -> None:
    reader = FrameReader(KEY)
    reader.feed(SharedKey.random().frame(b"a"))
    with pytest.raises(ForeignFrame):
        reader.next()


def test_a_message_that_says_to_be_too_long_is_refused_before_its_body_is_awaited() -> None:
    reader = FrameReader(KEY)
    reader.feed((LONGEST_BODY + 1).to_bytes(4, "little") + bytes(HEADER_BYTES - 4))
    with pytest.raises(ForeignFrame, match=str(LONGEST_BODY + 1)):
        reader.next()


def test_the_key_is_not_in_its_text() -> None:
    assert "kkk" not in repr(KEY) + str(KEY)
    assert SharedKey.random() != SharedKey.random()
