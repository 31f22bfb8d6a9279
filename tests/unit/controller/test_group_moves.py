"""The table of moves: the ledger, the check of a journal and the document agree with it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.controller.events import AnyEvent, DropReason, Event, ReturnKind
from offbeat.controller.group_moves import MOVES, GroupEnd, GroupMove, Place
from offbeat.controller.journal.legality import contradiction
from offbeat.controller.ledger import IllegalMove, Ledger, steps_after
from offbeat.controller.moves_doc import update_page
from offbeat.testing.samplers import rewind
from tests.support.ledger_model import receipt

PAGE = Path(__file__).parents[3] / "docs" / "journal.md"
DRAWN = 0


def at(place: Place | GroupEnd) -> tuple[Ledger, list[AnyEvent]]:
    """A ledger whose only group is at a place, with its journal."""
    events = list[AnyEvent]()
    ledger = Ledger(events.append)
    ledger.open("run", 1)
    ledger.admit(None)
    if place is Place.ADMITTED:
        return ledger, events
    if place is GroupEnd.DROPPED:
        ledger.drop(DRAWN, DropReason.DATA, "reward_nan")
        return ledger, events
    attempt = ledger.dispatch(DRAWN, "generator-0", 0)
    if place is Place.IN_FLIGHT:
        return ledger, events
    ledger.commit(receipt(DRAWN, attempt, 0))
    if place is Place.READY:
        return ledger, events
    ledger.claim([DRAWN], 1, 1)
    if place is GroupEnd.TRAINED:
        ledger.applied(1, 1)
    return ledger, events


METHODS: dict[str, Callable[[Ledger], object]] = {
    "Dispatched": lambda ledger: ledger.dispatch(DRAWN, "generator-0", 0),
    "Committed": lambda ledger: ledger.commit(receipt(DRAWN, 1, 0)),
    "Claimed": lambda ledger: ledger.claim([DRAWN], 1, 1),
    "Dropped": lambda ledger: ledger.drop(DRAWN, DropReason.DATA, "reward_nan"),
    "evicted": lambda ledger: ledger.evict(DRAWN, "stale"),
    "recovered": lambda ledger: ledger.recover(DRAWN, "payload_lost"),
    "cancelled": lambda ledger: ledger.retry(DRAWN, ReturnKind.CANCELLED, "stale"),
    "outage": lambda ledger: ledger.retry(DRAWN, ReturnKind.OUTAGE, "environment_unavailable"),
}
"""How the ledger makes the moves of one group that it guards, by record and kind."""


def name_of(move: GroupMove) -> str:
    return move.event.__name__ if move.kind is None else move.kind


GUARDED = [move for move in MOVES if name_of(move) in METHODS]


@pytest.mark.parametrize("place", [*Place, *GroupEnd])
@pytest.mark.parametrize("move", GUARDED, ids=name_of)
def test_the_ledger_makes_the_moves_of_the_table_and_no_others(
    move: GroupMove, place: Place | GroupEnd
) -> None:
    ledger, events = at(place)
    make = METHODS[name_of(move)]
    if place not in move.leaves:
        with pytest.raises(IllegalMove):
            make(ledger)
        return
    before = Ledger.fold(events)
    make(ledger)
    group = ledger.groups.get(DRAWN)
    assert (GroupEnd.DROPPED if group is None else group.place) == move.enters
    assert contradiction(before, events[-1]) is None


@pytest.mark.parametrize("move", GUARDED, ids=name_of)
def test_a_journal_with_a_move_from_another_place_is_refused(move: GroupMove) -> None:
    ledger, events = at(min(move.leaves))
    METHODS[name_of(move)](ledger)
    others = [place for place in (*Place, *GroupEnd) if place not in move.leaves]
    assert others
    for place in others:
        assert contradiction(at(place)[0], events[-1]) is not None, place


def test_a_rewind_moves_what_is_claimed_and_what_was_trained() -> None:
    places = dict[str, Place]()
    for place in (Place.TRAINING, GroupEnd.TRAINED):
        ledger, events = at(place)
        rewind(ledger, 0, "a rank was lost", steps_after(0, reversed(events)))
        places[place] = ledger.groups[DRAWN].place
    rewinds = [move for move in MOVES if move.event.__name__ == "Rewound"]
    assert set(places.values()) == {Place.ADMITTED}, "the claimed group has a token of version 1"
    assert all(
        any(leaves in move.leaves and move.enters is enters for move in rewinds)
        for leaves, enters in places.items()
    )


def test_the_document_is_what_the_table_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == update_page(page), "docs/journal.md: run python -m offbeat.controller.moves_doc"


def test_every_record_that_moves_a_group_is_in_the_table() -> None:
    moving: set[type[Event]] = {move.event for move in MOVES}
    assert {each.__name__ for each in moving} == {
        "Admitted", "Dispatched", "Committed", "Returned", "Claimed", "Unclaimed",
        "Dropped", "StepApplied", "StepRefused", "Rewound",
    }  # fmt: skip
