"""The ledger under random moves: nothing is lost, nothing counts twice, the journal is the state."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.controller.events import AnyEvent, Committed, Dispatched
from offbeat.controller.ledger import IllegalMove, Ledger, Place
from offbeat.messages.groups import Receipt
from offbeat.sampler.policy import NEVER


def receipt(ordinal: int, attempt: int, version: int = 0, tokens: int = 2) -> Receipt:
    """Two samples; the older one of ``version``, the other of the next."""
    return Receipt(
        ordinal=ordinal,
        attempt=attempt,
        engine="generator-0",
        engine_incarnation="life-1",
        rewards=(0.0, 1.0),
        prompt_tokens=(3, 3),
        response_tokens=(tokens, tokens),
        valid_tokens=(tokens, tokens),
        finish_reasons=("stop", "stop"),
        version_spans=(((version, tokens),), ((version + 1, tokens),)),
        columns=("response_ids",),
        payload_bytes=100,
    )


def state_of(ledger: Ledger) -> dict[str, Any]:
    return {
        "groups": {o: repr(group) for o, group in ledger.groups.items()},
        "ready": list(ledger.ready),
        "training": list(ledger.training),
        "totals": repr(ledger.totals),
        "version": ledger.trainer_version,
        "counts": ledger.counts(),
        "tokens": ledger.ready_tokens,
        "versions": ledger.versions,
        "stamped": ledger.stamped,
        "shrunk": ledger.shrunk,
    }


def check(ledger: Ledger) -> None:
    """Every ordinal is in one place, and every index says so."""
    counts, groups = ledger.counts(), ledger.groups.values()
    dropped = ledger.totals.dropped.total()
    places = ("admitted", "in_flight", "ready", "training", "trained")
    assert counts["drawn"] == sum(counts[place] for place in places) + dropped
    for place in Place:
        assert counts[place] == sum(group.place is place for group in groups)
    assert ledger.ready.keys() == {g.ordinal for g in groups if g.place is Place.READY}
    assert ledger.training.keys() == {g.ordinal for g in groups if g.place is Place.TRAINING}
    assert ledger.ready_tokens == sum(g.receipt.tokens for g in ledger.ready.values() if g.receipt)
    bound = [g.bound_version for g in groups if g.place in (Place.IN_FLIGHT, Place.READY)]
    assert ledger.versions == {version: bound.count(version) for version in set(bound)}
    stamps = [g.stamp for g in groups if g.place is not Place.TRAINING]
    assert ledger.stamped == {stamp: stamps.count(stamp) for stamp in set(stamps)}


PICK = st.integers(0, 6)
"""Picks a living group; the highest picks one that has ended, or was never drawn."""


class LedgerMoves(RuleBasedStateMachine):
    """Any move on any ordinal at any time: it happens where it is legal, else it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.events = list[AnyEvent]()
        self.ledger = Ledger(self._record)
        self.ended = set[int]()  # trained or dropped

    def _record(self, event: AnyEvent) -> None:
        check(self.ledger)  # at the very moment an event is recorded
        self.events.append(event)

    def _picked(self, pick: int) -> int:
        living = sorted(self.ledger.groups)
        if pick == 6 or not living:
            return min(self.ended, default=self.ledger.totals.drawn)
        return living[pick % len(living)]

    def _is_at(self, ordinal: int, place: Place) -> bool:
        group = self.ledger.groups.get(ordinal)
        return group is not None and group.place is place

    def _expect(self, move: Any, *, legal: bool) -> None:
        if legal:
            move()
            return
        before, recorded = state_of(self.ledger), len(self.events)
        with pytest.raises(IllegalMove):
            move()
        assert state_of(self.ledger) == before
        assert len(self.events) == recorded

    @precondition(lambda self: len(self.ledger.groups) < 6)
    @rule(stamp=st.sampled_from([NEVER, 1, 2, 3]))
    def admit(self, stamp: int) -> None:
        assert self.ledger.admit(stamp) == self.ledger.totals.drawn - 1

    @rule(pick=PICK, version=st.integers(0, 3))
    def dispatch(self, pick: int, version: int) -> None:
        ordinal = self._picked(pick)
        self._expect(
            lambda: self.ledger.dispatch(ordinal, "generator-0", version),
            legal=self._is_at(ordinal, Place.ADMITTED),
        )

    @rule(pick=PICK, kind=st.sampled_from(["infrastructure", "data"]))
    def retry(self, pick: int, kind: str) -> None:
        ordinal = self._picked(pick)
        self._expect(
            lambda: self.ledger.retry(ordinal, kind, "engine_lost"),
            legal=self._is_at(ordinal, Place.IN_FLIGHT),
        )

    @rule(
        pick=PICK, late=st.sampled_from([0, 0, 0, 1]), more=st.integers(0, 2),
        tokens=st.integers(1, 5),
    )  # fmt: skip
    def commit(self, pick: int, late: int, more: int, tokens: int) -> None:
        """``late``: the answer is of an attempt before the last one."""
        ordinal = self._picked(pick)
        group = self.ledger.groups.get(ordinal)
        attempt = group.attempt - late if group else 1
        version = group.bound_version + more if group else 0
        self._expect(
            lambda: self.ledger.commit(receipt(ordinal, attempt, version, tokens)),
            legal=self._is_at(ordinal, Place.IN_FLIGHT) and not late,
        )

    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        ordinal = self._picked(pick)
        self._expect(
            lambda: self.ledger.evict(ordinal, "stale"), legal=self._is_at(ordinal, Place.READY)
        )

    @rule(picks=st.sets(PICK, max_size=3))
    def claim(self, picks: set[int]) -> None:
        ordinals = sorted({self._picked(pick) for pick in picks})
        self._expect(
            lambda: self.ledger.claim(ordinals, self.ledger.trainer_version + 1, 1),
            legal=all(self._is_at(ordinal, Place.READY) for ordinal in ordinals),
        )

    @rule()
    def claim_all(self) -> None:
        ready = list(self.ledger.ready)
        claimed = self.ledger.claim(ready, self.ledger.trainer_version + 1, 1)
        assert [group.ordinal for group in claimed] == ready

    @rule()
    def unclaim(self) -> None:
        trained = set(self.ledger.training)
        self.ledger.unclaim(self.ledger.trainer_version + 1, 1)
        assert trained <= self.ledger.ready.keys()

    @rule(pick=PICK, shrink=st.booleans())
    def drop(self, pick: int, shrink: bool) -> None:
        ordinal = self._picked(pick)
        legal = ordinal in self.ledger.groups
        self._expect(lambda: self.ledger.drop(ordinal, "reward_nan", shrink=shrink), legal=legal)
        self.ended |= {ordinal} if legal else set()

    @rule()
    def apply_a_step(self) -> None:
        version, groups = self.ledger.trainer_version, set(self.ledger.training)
        self.ledger.intend(version + 1, 1)
        assert self.ledger.applied(version + 1) == self.ledger.trainer_version == version + 1
        self.ended |= groups

    @rule()
    def refuse_a_step(self) -> None:
        version, groups = self.ledger.trainer_version, set(self.ledger.training)
        self.ledger.refused(version + 1, 1, "step_refused")
        assert self.ledger.trainer_version == version
        self.ended |= groups

    @invariant()
    def every_ordinal_is_in_one_place(self) -> None:
        check(self.ledger)

    @invariant()
    def what_has_ended_never_comes_back(self) -> None:
        assert not self.ended & self.ledger.groups.keys()
        assert len(self.ended) + len(self.ledger.groups) == self.ledger.totals.drawn

    @invariant()
    def the_fold_of_the_events_is_the_ledger(self) -> None:
        assert state_of(Ledger.fold(self.events)) == state_of(self.ledger)


TestLedgerMoves = LedgerMoves.TestCase


def test_a_group_is_known_by_the_oldest_token_it_really_has() -> None:
    events = list[AnyEvent]()
    ledger = Ledger(events.append)
    ordinal = ledger.admit(NEVER)
    assert ledger.dispatch(ordinal, "generator-0", 3) == 1
    assert ledger.groups[ordinal].bound_version == 3, "no token can be older"
    ledger.commit(receipt(ordinal, 1, version=4))
    assert ledger.groups[ordinal].bound_version == 4
    assert isinstance(events[1], Dispatched)
    assert isinstance(events[2], Committed)


def test_a_claim_of_one_wrong_group_claims_none() -> None:
    ledger = Ledger()
    good, bad = ledger.admit(NEVER), ledger.admit(NEVER)
    ledger.dispatch(good, "generator-0", 0)
    ledger.commit(receipt(good, 1))
    with pytest.raises(IllegalMove, match="cannot claim g-000001: it is admitted"):
        ledger.claim([good, bad], 1, 1)
    assert list(ledger.ready) == [good]


def test_an_unclaimed_group_is_no_younger_than_before() -> None:
    ledger = Ledger()
    ordinal = ledger.admit(NEVER)
    ledger.dispatch(ordinal, "generator-0", 2)
    ledger.commit(receipt(ordinal, 1, version=2))
    ledger.claim([ordinal], 1, 1)
    ledger.unclaim(1, 1)
    assert ledger.versions == {2: 1}
    assert ledger.groups[ordinal].receipt is not None
