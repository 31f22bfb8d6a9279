import asyncio
import os
from pathlib import Path

import pytest

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    Returned,
    StepApplied,
    StepIntent,
    StepRefused,
    Unclaimed,
)
from offbeat.controller.journal import FileJournal, read_journal
from offbeat.controller.ledger import Ledger
from offbeat.messages.groups import Receipt

RECEIPT = Receipt(
    ordinal=0,
    attempt=1,
    engine="generator-0",
    engine_incarnation="life-1",
    rewards=(0.5,),
    prompt_tokens=(3,),
    response_tokens=(2,),
    valid_tokens=(2,),
    finish_reasons=("stop",),
    version_spans=(((0, 1), (1, 1)),),
    columns=("response_ids",),
    payload_bytes=10,
)
EVERY_KIND: list[AnyEvent] = [
    Admitted(0, 1),
    Dispatched(0, 1, "generator-0", 0),
    Committed(RECEIPT),
    Claimed(1, 1, (0,)),
    Unclaimed(1, 1),
    Returned(0, 1, "evicted", "stale"),
    Dropped(0, "reward_nan", 1),
    StepIntent(1, 1, ()),
    StepApplied(1, 1, (), 1),
    StepRefused(2, 1, "gradient norm is nan"),
]


def written(directory: Path, events: list[AnyEvent]) -> Path:
    journal = FileJournal(directory)
    for event in events:
        journal.append(event)
    journal.close()
    return directory / "events.jsonl"


def test_every_kind_of_event_comes_back_equal_and_in_order(tmp_path: Path) -> None:
    written(tmp_path / "journal", EVERY_KIND)
    assert list(read_journal(tmp_path / "journal")) == EVERY_KIND


def test_the_fold_of_the_file_is_the_ledger(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    ledger = Ledger(journal.append)
    for _ in range(3):
        ledger.dispatch(ledger.admit(1), "generator-0", 0)
    ledger.commit(RECEIPT)
    ledger.retry(1, "data", "reward_nan")
    journal.close()
    folded = Ledger.fold(read_journal(tmp_path))
    assert folded.counts() == ledger.counts()
    assert folded.groups == ledger.groups


def test_a_barrier_leaves_what_was_appended_with_the_operating_system(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    journal.append(EVERY_KIND[0])
    assert list(read_journal(tmp_path)) == [], "appending costs no system call"
    asyncio.run(journal.barrier())
    assert list(read_journal(tmp_path)) == EVERY_KIND[:1]
    journal.append(EVERY_KIND[1])
    asyncio.run(journal.barrier())
    assert list(read_journal(tmp_path)) == EVERY_KIND[:2]
    journal.close()


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path: Path) -> None:
    file = written(tmp_path, EVERY_KIND[:3])
    whole = file.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for size in range(last, len(whole)):
        os.truncate(file, size)
        assert list(read_journal(tmp_path)) == EVERY_KIND[:2]
        file.write_bytes(whole)


def test_a_second_run_cannot_write_into_the_journal_of_a_first(tmp_path: Path) -> None:
    file = written(tmp_path, EVERY_KIND)
    before = file.read_bytes()
    with pytest.raises(FileExistsError):
        FileJournal(tmp_path)
    assert file.read_bytes() == before
