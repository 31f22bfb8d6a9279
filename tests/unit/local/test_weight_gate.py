"""Decode steps and optimizer steps take turns, with real threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from offbeat.local.shared_weights import EngineTurns, WeightGate

LIMIT_S = 30


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def never() -> None:
    raise AssertionError("nobody was refused")


def adopted(gate: WeightGate) -> EngineTurns:
    """An engine that has loaded the present weights."""
    turns = EngineTurns(gate)
    with turns.adopting() as is_unchanged:
        assert is_unchanged
    return turns


def until_closed(gate: WeightGate) -> None:
    while gate.enter() is not None:
        gate.end()


def test_a_change_begins_after_the_decode_step_in_progress(threads: ThreadPoolExecutor) -> None:
    gate, order = WeightGate(), list[str]()
    turns = adopted(gate)

    def change() -> None:
        gate.close()
        order.append("change")

    assert turns.begin(never)
    changing = threads.submit(change)
    until_closed(gate)
    order.append("step")
    turns.end()
    changing.result(LIMIT_S)
    assert order == ["step", "change"]


def test_an_engine_is_refused_during_a_change_and_asked_again_after_it() -> None:
    gate, retries = WeightGate(), list[str]()
    turns = adopted(gate)
    gate.close()
    assert not turns.begin(lambda: retries.append("first"))
    assert not turns.begin(lambda: retries.append("second"))
    assert retries == []
    gate.open(changed=False)
    assert retries == ["second"]
    assert turns.begin(never)
    turns.end()
    gate.close()
    gate.open(changed=False)
    assert retries == ["second"]


def test_after_a_change_each_engine_decodes_once_it_has_loaded_the_new_weights() -> None:
    gate = WeightGate()
    first, second = adopted(gate), adopted(gate)
    gate.close()
    gate.open(changed=True)
    with first.adopting() as is_unchanged:
        assert is_unchanged
        assert not first.begin(lambda: None), "it has not loaded them yet"
    assert first.begin(never)
    first.end()
    assert not second.begin(lambda: None)
    with second.reading() as are_served:
        assert not are_served
    with first.reading() as are_served:
        assert are_served


def fail_to_load(turns: EngineTurns, *, is_unchanged: bool) -> None:
    with turns.adopting() as found:
        assert found == is_unchanged
        raise LookupError


def test_an_engine_that_fails_to_load_adopts_nothing() -> None:
    gate = WeightGate()
    turns = adopted(gate)
    assert gate.close()
    with pytest.raises(LookupError):
        fail_to_load(turns, is_unchanged=False)
    gate.open(changed=True)
    with pytest.raises(LookupError):
        fail_to_load(turns, is_unchanged=True)
    assert not turns.begin(lambda: None)
    assert gate.close(), "nobody uses the weights"
    assert not gate.close()


def test_whoever_waits_for_the_weights_gets_them_at_the_opening(
    threads: ThreadPoolExecutor,
) -> None:
    gate = WeightGate()
    gate.close()
    waiting = threads.submit(lambda: gate.enter(waits=True))
    gate.open(changed=True)
    assert waiting.result(LIMIT_S) == 1


def test_no_decode_step_of_any_engine_ever_overlaps_a_change(threads: ThreadPoolExecutor) -> None:
    """The weights are two numbers, which are equal except during a change."""
    gate, weights, changes = WeightGate(), [0, 0], 300
    seen = [set[int](), set[int]()]
    is_over = threading.Event()

    def train() -> None:
        for version in range(1, changes + 1):
            gate.close()
            weights[0] = version
            weights[1] = version
            gate.open(changed=True)
        is_over.set()

    def decode(own: set[int]) -> None:
        turns, retry = EngineTurns(gate), threading.Event()
        loaded = -1
        while not (is_over.is_set() and own and max(own) == changes):
            retry.clear()
            if turns.begin(retry.set):
                assert weights[0] == weights[1] == loaded
                own.add(loaded)
                turns.end()
                continue
            if not retry.is_set():
                with turns.adopting() as is_unchanged:
                    loaded = weights[0] if is_unchanged else -1

    running = [threads.submit(train), *(threads.submit(decode, own) for own in seen)]
    for each in running:
        each.result(LIMIT_S)
    assert all(changes in own for own in seen)
