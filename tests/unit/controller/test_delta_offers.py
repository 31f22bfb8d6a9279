"""Which engine gets what a release changes, and which gets all of it."""

from typing import Any

import pytest

from offbeat.controller.syncing import DeltaOffers
from offbeat.messages.weights import FullReason, WeightDelta, WeightRelease, WeightsAck


def release(version: int, base: str | None = None, **fields: Any) -> WeightRelease:
    delta = None if base is None else WeightDelta(base, f"to d{version}", None, (), 10, 0.01)
    return WeightRelease(version, f"d{version}", None, (), 1000, delta=delta, **fields)


def ack(version: int, *, incarnation: str = "g0-1") -> WeightsAck:
    return WeightsAck("g0", incarnation, version, version, f"d{version}", 0.1, 0.1)


def offers(*acks: WeightsAck) -> DeltaOffers:
    made = DeltaOffers(enabled=True)
    for each in acks:
        made.took(each)
    made.take_figures()
    return made


def reasons(made: DeltaOffers) -> dict[str, float]:
    figures = made.take_figures()
    assert figures["sync/full_releases"] == sum(figures[f"sync/full_{each}"] for each in FullReason)
    return {each: n for each in FullReason if (n := figures[f"sync/full_{each}"])}


def test_an_engine_that_acked_the_base_gets_the_delta() -> None:
    made, new = offers(ack(1)), release(2, base="d1")
    made.released(new)
    assert made.offer("g0", "g0-1", new) is new
    figures = made.take_figures()
    assert figures["sync/sent_bytes"] == 10
    assert figures["sync/changed_fraction"] == 0.01
    assert figures["sync/full_releases"] == 0


@pytest.mark.parametrize(
    ("made", "incarnation"),
    [
        pytest.param(offers(), "g0-1", id="a new engine"),
        pytest.param(offers(ack(1)), "g0-2", id="a restarted one"),
        pytest.param(offers(ack(0)), "g0-1", id="one that skipped a release"),
        pytest.param(offers(ack(1), ack(2)), "g0-1", id="one that has the release already"),
    ],
)
def test_an_engine_not_known_to_serve_the_base_gets_everything(
    made: DeltaOffers, incarnation: str
) -> None:
    offered = made.offer("g0", incarnation, release(2, base="d1"))
    assert offered.delta is None
    assert offered.digest == "d2"
    assert reasons(made) == {FullReason.UNKNOWN_BASE: 1}


@pytest.mark.parametrize("reason", [FullReason.NO_BASE, FullReason.TOO_LARGE])
def test_a_release_without_a_delta_says_why(reason: FullReason) -> None:
    made = offers(ack(1))
    made.offer("g0", "g0-1", release(2, full_reason=reason))
    assert reasons(made) == {reason: 1}


def test_after_a_failed_load_an_engine_gets_everything() -> None:
    made = offers(ack(1))
    made.lost("g0")
    assert made.offer("g0", "g0-1", release(2, base="d1")).delta is None


def test_an_engine_that_refused_the_base_gets_everything_and_is_counted_so() -> None:
    made, new = offers(ack(1)), release(2, base="d1")
    made.offer("g0", "g0-1", new)
    made.refused("g0")
    assert made.offer("g0", "g0-1", new).delta is None
    assert reasons(made) == {FullReason.REFUSED: 1}


def test_after_a_rewind_every_engine_gets_everything_once() -> None:
    made = offers(ack(1))
    made.forget()
    assert made.offer("g0", "g0-1", release(2, base="d1")).delta is None
    made.took(ack(2))
    assert made.offer("g0", "g0-1", release(3, base="d2")).delta is not None


def test_without_deltas_only_bytes_are_counted() -> None:
    made = DeltaOffers(enabled=False)
    made.offer("g0", "g0-1", release(1))
    assert made.take_figures() == {"sync/sent_bytes": 1000}
