"""A journal put together from whole records in an order that never was: it is told, not believed."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.controller.events import (
    AnyEvent,
    Dropped,
    DropReason,
    Opened,
    Returned,
    ReturnKind,
    Rewound,
    StepApplied,
)
from offbeat.controller.journal import JournalCorrupt, recover
from offbeat.controller.journal.frames import SEGMENT, frame, header
from offbeat.controller.journal.legality import contradiction
from offbeat.controller.ledger import Ledger, steps_after
from offbeat.messages.failures import OffbeatError
from offbeat.testing.samplers import rewind
from tests.support.ledger_model import receipt


def history() -> list[AnyEvent]:
    """Two steps, a retry, an eviction, a drop, an aborted step, a rewind, and a second incarnation."""
    events = list[AnyEvent]()
    ledger = Ledger(events.append)

    def rolled_out(version: int) -> int:
        prompt_index = ledger.admit(None)
        attempt = ledger.dispatch(prompt_index, "generator-0", version)
        ledger.commit(receipt(prompt_index, attempt, version))
        return prompt_index

    ledger.open("run-1", 1)
    step = [rolled_out(0), rolled_out(0)]
    ledger.claim(step, 1, 1)
    ledger.unclaim(1, 1)
    ledger.claim(step, 1, 2)
    ledger.intend(1, 2)
    ledger.applied(1, 2)
    ledger.checkpointed(1, "digest-1")
    old = rolled_out(0)
    ledger.evict(old, "stale")
    attempt = ledger.dispatch(old, "generator-1", 1)
    ledger.retry(old, ReturnKind.INFRASTRUCTURE, "engine_lost")
    ledger.drop(old, DropReason.DATA, "reward_raised")
    ledger.claim([rolled_out(1)], 2, 1)
    ledger.intend(2, 1)
    ledger.applied(2, 1)
    rewind(ledger, 1, "the trainer was started anew", steps_after(1, reversed(events)))
    ledger.open("run-1", 2)
    assert attempt == 2
    return events


def recovered(directory: Path, payloads: list[bytes]) -> Ledger:
    file = directory / "events-000001.bin"
    file.write_bytes(header(SEGMENT) + b"".join(map(frame, payloads)))
    return recover(directory)


def conserves(ledger: Ledger) -> bool:
    counts = ledger.counts()
    drawn = counts.pop("drawn")
    return drawn == sum(counts.values()) + sum(ledger.totals.dropped.values())


EVENTS = history()
PAYLOADS = [msgspec.msgpack.encode(event) for event in EVENTS]
AT = st.integers(0, len(EVENTS) - 1)


def test_what_a_ledger_records_contradicts_nothing(tmp_path: Path) -> None:
    assert recovered(tmp_path, PAYLOADS).counts() == Ledger.fold(EVENTS).counts()


def test_a_step_of_other_attempts_than_those_in_training_is_damage() -> None:
    place = next(at for at, event in enumerate(EVENTS) if isinstance(event, StepApplied))
    applied, ledger = EVENTS[place], Ledger.fold(EVENTS[:place])
    assert isinstance(applied, StepApplied)
    assert contradiction(ledger, applied) is None
    other = msgspec.structs.replace(applied, attempts=tuple(each + 1 for each in applied.attempts))
    assert "is of other attempts than those that are training" in str(contradiction(ledger, other))


@pytest.mark.parametrize(
    "event", [each for each in EVENTS if not isinstance(each, Opened)], ids=repr
)
def test_a_record_that_stands_there_twice_is_damage_or_changes_nothing(event: AnyEvent) -> None:
    ledger = Ledger.fold(EVENTS[: EVENTS.index(event) + 1])
    before = str(ledger), ledger.trainer_version, ledger.steps.staleness
    if contradiction(ledger, event) is None:
        ledger.apply(event)
    assert (str(ledger), ledger.trainer_version, ledger.steps.staleness) == before


@pytest.mark.parametrize(
    "undone",
    [
        {"staleness": ((0, 4),)},
        {"staleness": ((7, 1),)},
        {"attempts": ()},
    ],
)
def test_a_rewind_that_undoes_what_was_not_trained_is_damage(
    tmp_path: Path, undone: dict[str, object]
) -> None:
    at = next(place for place, event in enumerate(EVENTS) if isinstance(event, Rewound))
    rewound = EVENTS[at]
    assert isinstance(rewound, Rewound)
    step = msgspec.structs.replace(rewound.undone[0], **undone)
    other = msgspec.structs.replace(rewound, undone=(step,))
    with pytest.raises(JournalCorrupt, match="Rewound cannot follow"):
        recovered(tmp_path, [*PAYLOADS[:at], msgspec.msgpack.encode(other)])


@pytest.mark.parametrize("kind", [Returned, Dropped])
def test_a_reason_that_no_ledger_records_is_damage(tmp_path: Path, kind: type[AnyEvent]) -> None:
    at = next(place for place, event in enumerate(EVENTS) if isinstance(event, kind))
    record = msgspec.msgpack.decode(PAYLOADS[at])
    known = {*ReturnKind, *DropReason}
    mood = ["mood" if field in known else field for field in record]
    with pytest.raises(JournalCorrupt, match="no record: Invalid enum value 'mood'"):
        recovered(tmp_path, [*PAYLOADS[:at], msgspec.msgpack.encode(mood)])


def test_two_runs_in_one_journal_are_told_apart(tmp_path: Path) -> None:
    other = msgspec.msgpack.encode(Opened("run-2", 3))
    with pytest.raises(
        JournalCorrupt, match="Opened cannot follow: it is of run run-2, those before"
    ):
        recovered(tmp_path, [*PAYLOADS, other])


@given(AT, AT, st.sampled_from(["twice", "lost", "moved"]))
def test_records_in_another_order_are_told_or_lose_no_group(
    tmp_path_factory: pytest.TempPathFactory, at: int, to: int, what: str
) -> None:
    others = PAYLOADS[:at] + PAYLOADS[at + 1 :]
    changed: dict[str, Callable[[], list[bytes]]] = {
        "twice": lambda: [*PAYLOADS[:to], PAYLOADS[at], *PAYLOADS[to:]],
        "lost": lambda: others,
        "moved": lambda: [*others[:to], PAYLOADS[at], *others[to:]],
    }
    try:
        ledger = recovered(tmp_path_factory.mktemp("journal"), changed[what]())
    except JournalCorrupt:
        return
    assert conserves(ledger)


@given(AT, st.integers(0, 10**6), st.integers(0, 255))
def test_a_record_with_another_byte_and_its_own_checksum_raises_nothing_but_what_is_declared(
    tmp_path_factory: pytest.TempPathFactory, at: int, where: int, byte: int
) -> None:
    payload = bytearray(PAYLOADS[at])
    payload[where % len(payload)] = byte
    try:
        ledger = recovered(
            tmp_path_factory.mktemp("journal"),
            [*PAYLOADS[:at], bytes(payload), *PAYLOADS[at + 1 :]],
        )
    except OffbeatError:
        return
    assert conserves(ledger)
