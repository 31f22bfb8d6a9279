"""Bytes nobody wrote: torn, flipped, extended, and forged with a valid digest."""

import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from codec_payloads import payloads
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.transfer_queue import codec
from offbeat.transfer_queue.codec import CorruptPayload, unpack

Columns = dict[str, NDArray[Any]]
PREAMBLE = struct.Struct("<8s16sQI28x")


def sealed(content: bytes, header_bytes: int | None = None, size: int | None = None) -> bytearray:
    """A preamble with a valid digest around any header and body."""
    parts = (b"offbeatQ", b"", len(content) + 64 if size is None else size)
    unsigned = PREAMBLE.pack(*parts, header_bytes or 0) + content
    digest = xxhash.xxh3_128_digest(unsigned[24:size])
    return bytearray(unsigned[:8] + digest + unsigned[24:])


def forged(offsets: Any, columns: Any, body: bytes = b"", pieces: object = (1,)) -> bytearray:
    """A packed payload with a valid digest and whatever header."""
    return forged_header(b"\x01" + msgspec.msgpack.encode([pieces, offsets, columns]), body)


def forged_header(header: bytes, body: bytes = b"") -> bytearray:
    return sealed(header.ljust(-len(header) // 64 * -64, b"\0") + body, len(header))


def outcome(buffer: bytearray) -> Columns | None:
    """The columns, or None if they were refused as they must be; any other error is a failure."""
    try:
        return unpack(buffer)
    except CorruptPayload:
        return None


def pack(columns: Columns) -> bytearray:
    return bytearray(codec.pack(columns))


@given(payloads, st.data())
def test_a_flipped_bit_is_always_seen(columns: Columns, data: st.DataObject) -> None:
    buffer = pack(columns)
    place = data.draw(st.integers(0, len(buffer) * 8 - 1))
    buffer[place // 8] ^= 1 << place % 8
    with pytest.raises(CorruptPayload):
        unpack(buffer)


def test_every_byte_of_a_payload_is_guarded() -> None:
    buffer = pack({"x": np.arange(3, dtype=np.int8), "y": np.array([0, 2])})
    for place in range(len(buffer)):
        buffer[place] ^= 0x10
        with pytest.raises(CorruptPayload):
            unpack(buffer)
        buffer[place] ^= 0x10
    assert len(unpack(buffer)) == 2


@given(payloads, st.data())
def test_a_torn_payload_is_always_seen(columns: Columns, data: st.DataObject) -> None:
    whole = pack(columns)
    kept = data.draw(st.integers(0, len(whole) - 1))
    assert outcome(whole[:kept]) is None
    torn = whole[:kept].ljust(len(whole), b"\0")
    assert torn == whole or outcome(torn) is None


@given(payloads, st.binary(min_size=1, max_size=99))
def test_bytes_behind_a_payload_are_refused(columns: Columns, more: bytes) -> None:
    assert outcome(pack(columns) + more) is None


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(content: bytes) -> None:
    assert outcome(bytearray(content)) is None
    assert outcome(bytearray(b"offbeatQ" + content)) is None


@given(st.binary(max_size=120), st.binary(max_size=64))
def test_a_random_header_with_a_valid_digest_is_refused_or_read(header: bytes, body: bytes) -> None:
    outcome(forged_header(header, body))
    outcome(forged_header(b"\x01" + header, body))


counts = st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**60, 2**63 - 1, 2**64 - 1]))
odd = st.none() | st.booleans() | st.floats() | st.text(max_size=2) | st.lists(counts, max_size=2)
descriptions = st.tuples(
    st.sampled_from(["a", "b", "", "offsets"]) | odd,
    st.sampled_from(["int8", "bool", "float64", "bfloat16", "msgpack", "object", "O", "V2"]) | odd,
    st.lists(counts, max_size=4) | st.just([1] * 40) | odd,
    counts | odd,
    st.none() | counts | odd,
)


@settings(max_examples=300)
@given(
    st.just([]) | odd,
    st.lists(descriptions | odd, max_size=4) | odd,
    st.binary(max_size=200) | st.just(bytes(256)),
    (st.sampled_from([[1, 1], [2], [1, 0]]) | st.lists(counts, max_size=3) | odd).filter(
        lambda pieces: pieces != [1]
    ),
)
def test_a_hostile_header_with_a_valid_digest_ends_in_a_refusal_or_in_columns_within_the_buffer(
    offsets: Any, columns: Any, body: bytes, pieces: Any
) -> None:
    buffer = forged(offsets, columns, body)
    for column in (outcome(buffer) or {}).values():
        assert column.nbytes <= len(buffer)
    assert outcome(forged(offsets, columns, body, pieces)) is None


ONE = ["a", "int8", [1], 0, None]
HOSTILE: dict[str, tuple[Any, Any, bytes]] = {
    "an array beyond the buffer": ([], [["a", "int64", [2], 0, None]], bytes(8)),
    "2**60 values": ([], [["a", "int8", [2**60], 0, None]], b"x"),
    "more values than numpy can count": ([], [["a", "int64", [2**63 - 1], 0, None]], b"x"),
    "a negative extent": ([], [["a", "int8", [-1], 0, None]], b"x"),
    "no dimension": ([], [["a", "int8", [], 0, None]], b"x"),
    "two dimensions": ([], [["a", "int8", [1, 1], 0, None]], b"x"),
    "a name that is there twice": ([], [["a", "int8", [0], 0, None]] * 2, b""),
    "an unknown type": ([], [["a", "object", [1], 0, None]], bytes(8)),
    "another buffer": ([], [["a", "int8", [1], 1, None]], b"x"),
    "bytes that no array owns": ([], [ONE], b"xy"),
    "offsets that are not there": ([], [["a", "int8", [1], 0, 0]], b"x"),
    "offsets of nested rows": ([[1, 0]], [ONE], b"x"),
    "a list": ([], [["a", "msgpack", [1], 0, None]], b"\x90"),
    "a name that is not UTF-8": ([], [[msgspec.Raw(b"\xa1\xff"), *ONE[1:]]], b"x"),
    "a field too many": ([], [[*ONE, 7]], b"x"),
    "an extent that is a float": ([], [["a", "int8", [1.0], 0, None]], b"x"),
    "a header that is a dict": ({}, {}, b""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_forged_header_is_refused_at_once(case: str) -> None:
    offsets, columns, body = HOSTILE[case]
    buffer = forged(offsets, columns, body)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayload):
            unpack(buffer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize("size", [0, 63, 2**40, 2**60, 2**64 - 1])
def test_a_length_that_is_not_the_buffers_is_refused(size: int) -> None:
    with pytest.raises(CorruptPayload, match="length"):
        unpack(sealed(b"", 0, size))


def test_a_header_longer_than_the_payload_is_refused() -> None:
    with pytest.raises(CorruptPayload, match="length"):
        unpack(sealed(b"", 2**32 - 1))


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(CorruptPayload, match="version 2; expected version 1"):
        unpack(forged_header(b"\x02\x93\x91\x01\x90\x90"))


def test_corruption_tells_its_field_and_both_values() -> None:
    assert "digest is 00; expected ff" in str(CorruptPayload("digest", "00", "ff"))
