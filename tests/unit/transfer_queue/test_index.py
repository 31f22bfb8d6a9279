import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert index.has(7, ("response_ids", "policy_logprobs"))


def test_columns_for_a_cleared_group_are_refused() -> None:
    index = QueueIndex()
    index.put(7, 1, ("response_ids",), 10, "first")
    index.clear((7,))
    with pytest.raises(StaleHandle, match="holds nothing"):
        index.add_columns(7, 1, ("policy_logprobs",), 5, "second")


@given(st.lists(st.tuples(st.sampled_from("pac"), st.integers(0, 4), st.integers(1, 3))))
def test_bytes_held_are_those_of_the_groups_held(moves: list[tuple[str, int, int]]) -> None:
    index, model = QueueIndex(), dict[int, dict[int, int]]()
    for move, ordinal, attempt in moves:
        held = model.get(ordinal)
        try:
            if move == "p":
                index.put(ordinal, attempt, ("a",), attempt, object())
                model[ordinal] = {0: attempt, 1: attempt}
            elif move == "a":
                index.add_columns(ordinal, attempt, ("b",), 100, object())
                assert held is not None
                held[2] = 100
            else:
                index.clear((ordinal,))
                model.pop(ordinal, None)
        except StaleHandle:
            refused_put = move == "p" and held is not None and held[0] >= attempt
            assert refused_put or (move == "a" and (held is None or held[0] != attempt))
    sizes = [sum(v for k, v in entry.items() if k) for entry in model.values()]
    assert index.bytes_held == sum(sizes) and len(index) == len(model)
