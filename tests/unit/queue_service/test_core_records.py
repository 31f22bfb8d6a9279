import pickle
from typing import Any

import msgspec
import pytest
from core_fixtures import LOGPROBS, ROOMY, TOKENS, Queue, names

from offbeat.queue_service.core import (
    CapacityGrant,
    Lease,
    LostGroup,
    PutReceipt,
    QueueCore,
    QueueSnapshot,
    Schema,
    Stats,
)
from offbeat.queue_service.errors import LeaseExpired


def records() -> list[Any]:
    queue = Queue()
    receipt = queue.put("a", tags={"reward": [0.5, 1.0], "reason": ["stop", "length"]})
    queue.put("b")
    lease = queue.take()
    lost = queue.core.lost([queue.put("c")], "node died")
    queue.wait(7)
    snapshot, _ = queue.core.export(1.0)
    return [receipt, lease, *lost, CapacityGrant(1, 2), queue.core.stats(2.0), snapshot]


@pytest.mark.parametrize(
    "record", records(), ids=["receipt", "lease", "lost", "room", "stats", "snapshot"]
)
def test_every_record_survives_msgspec_and_pickle(record: Any) -> None:
    kinds = (PutReceipt, Lease, LostGroup, CapacityGrant, Stats, QueueSnapshot)
    (kind,) = [each for each in kinds if isinstance(record, each)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=kind) == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=kind) == record
    assert pickle.loads(pickle.dumps(record)) == record  # noqa: S301 - our own bytes


def test_a_restored_queue_delivers_what_was_leased_and_not_what_was_acked() -> None:
    queue = Queue()
    receipts = [queue.put(name, columns=(TOKENS,)) for name in "abc"]
    queue.core.ack(queue.take().id)
    lease = queue.take()
    queue.core.add_columns(receipts[2], (LOGPROBS,), 3, "c/more", now=0.0, rows=slice(0, 1))
    snapshot, payloads = queue.core.export(5.0)
    restored = Queue()
    restored.core = QueueCore(ROOMY)
    wire = msgspec.json.encode(snapshot)
    restored.core.import_(msgspec.json.decode(wire, type=QueueSnapshot), payloads, 100.0)
    assert restored.core.stats(100.0).oldest_age_s == 5.0
    with pytest.raises(LeaseExpired):
        restored.core.ack(lease.id)
    again = restored.take(2)
    assert names(again) == ["b", "c"] and again.id > lease.id
    assert [part.payload for part in restored.core.parts(receipts[2])] == ["c/1", "c/more"]
    assert restored.put("d").generation > receipts[2].generation
    with pytest.raises(ValueError, match="into a new queue"):
        restored.core.import_(snapshot, payloads, 0.0)


def test_a_schema_of_more_columns_than_an_integer_has_bits_is_fine() -> None:
    wide = tuple(msgspec.structs.replace(LOGPROBS, name=f"c{i}") for i in range(200))
    queue = Queue(schema=Schema(wide))
    receipt = queue.put("a", columns=wide[:199])
    snapshot, payloads = queue.core.export(0.0)
    restored = QueueCore(ROOMY)
    wire = msgspec.msgpack.encode(snapshot)
    restored.import_(msgspec.msgpack.decode(wire, type=QueueSnapshot), payloads, 0.0)
    restored.add_columns(receipt, wide[199:], 1, "last", now=0.0)
    assert restored.claim("train", "actor", 1, ("c0", "c199"), now=0.0, lease_s=1.0) is not None
