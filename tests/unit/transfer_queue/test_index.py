from collections.abc import Iterator

import pytest

from offbeat.transfer_queue.index import QueueIndex, StaleHandle


def test_a_late_put_of_an_older_attempt_is_refused() -> None:
    index = QueueIndex()
    index.put(7, 2, ("response_ids",), 10, "new")
    with pytest.raises(StaleHandle, match="group 7 attempt 1 is gone: the queue holds attempt 2"):
        index.put(7, 1, ("response_ids",), 10, "old")
    assert index.payloads(7) == ("new",)


def test_a_newer_attempt_replaces_what_an_older_one_left() -> None:
    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "old")
    index.put(7, 2, ("response_ids",), 25, "new")
    assert index.payloads(7) == ("new",) and index.bytes_held == 25


def test_columns_added_later_ride_behind_the_first_payload_and_only_once() -> None:
    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "first")
    for _ in range(2):
        index.add_columns(7, 1, ("policy_logprobs",), 5, "second")
    assert index.payloads(7) == ("first", "second") and index.bytes_held == 15


def test_columns_for_a_cleared_group_are_refused() -> None:
    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "first")
    index.clear((7,))
    with pytest.raises(StaleHandle, match="holds nothing"):
        index.add_columns(7, 1, ("policy_logprobs",), 5, "second")


def test_the_same_put_again_is_refused_and_changes_nothing() -> None:
    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "first")
    with pytest.raises(StaleHandle):
        index.put(7, 1, ("response_ids",), 10, "again")
    assert index.payloads(7) == ("first",) and index.bytes_held == 10


def test_a_put_that_fails_leaves_what_was_there() -> None:
    def broken() -> Iterator[str]:
        yield "response_ids"
        raise ConnectionError

    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "old")
    with pytest.raises(ConnectionError):
        index.put(7, 2, broken(), 25, "new")
    assert index.payloads(7) == ("old",) and index.bytes_held == 10
