from collections.abc import Iterator

import pytest

from offbeat.transfer_queue.index import QueueIndex


def test_columns_added_later_ride_behind_the_first_payload_and_only_once() -> None:
    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "first")
    for _ in range(2):
        index.add_columns(7, 1, ("policy_logprobs",), 5, "second")
    assert index.payloads(7) == ("first", "second") and index.bytes_held == 15


def test_a_put_that_fails_leaves_what_was_there() -> None:
    def broken() -> Iterator[str]:
        yield "response_ids"
        raise ConnectionError

    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "old")
    with pytest.raises(ConnectionError):
        index.put(7, 2, broken(), 25, "new")
    assert index.payloads(7) == ("old",) and index.bytes_held == 10
