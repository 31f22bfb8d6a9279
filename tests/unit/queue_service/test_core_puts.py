from collections.abc import Mapping, Sequence

import pytest
from core_fixtures import LOGPROBS, TOKENS, Queue, names

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core import ColumnSpec, PutReceipt, Schema
from offbeat.queue_service.core.records import Scalar
from offbeat.queue_service.errors import QueuePayloadLost, Redeclared, UnknownPartition
from offbeat.transfer_queue.errors import StaleHandle


@pytest.mark.parametrize(
    ("columns", "tags", "rows", "says"),
    [
        ((ColumnSpec("mask", "bool"),), {}, 2, "column 'mask' is not declared"),
        (
            (ColumnSpec("logprobs", "float64"),),
            {},
            2,
            "dense float64; the schema wants dense float",
        ),
        ((ColumnSpec("tokens", "int32"),), {}, 2, "dense int32; the schema wants ragged int32"),
        ((TOKENS, TOKENS), {}, 2, "given twice"),
        ((), {}, 2, "at least one column"),
        ((TOKENS,), {"reward": [1.0]}, 2, "column 'tag reward' is 1 values; .* 2: one per row"),
        ((TOKENS,), {"reward": [1.0, [2.0]]}, 2, r"tag reward' is \[2.0\]"),
        ((TOKENS,), {}, 0, "at least 1 row"),
    ],
)
def test_a_put_whose_metadata_is_refused_is_not_acknowledged_and_leaves_nothing(
    columns: Sequence[ColumnSpec], tags: Mapping[str, Sequence[Scalar]], rows: int, says: str
) -> None:
    queue = Queue()
    waiter = queue.wait()
    with pytest.raises(SchemaError, match=says):
        queue.put("a", columns=columns, tags=tags, rows=rows)
    stats = queue.core.stats(0.0)
    assert (stats.groups, stats.rows, stats.nbytes) == (0, 0, 0)
    assert queue.core.settled() == [] and queue.core.freed() == []
    assert queue.put("a").generation == 1, "and the name is free"
    assert queue.served() == {waiter: ["a"]}


def test_a_put_that_is_acknowledged_can_be_claimed_at_once() -> None:
    queue = Queue()
    receipt = queue.put("a", tags={"reward": [0.5, 1.0]})
    assert queue.take().receipts == (receipt,)
    assert receipt == PutReceipt("train", "a", 1, 1, 2, 10, {"reward": (0.5, 1.0)})


def test_a_repeated_put_gets_the_same_receipt_and_is_delivered_once() -> None:
    queue = Queue()
    first = queue.put("a", tags={"reward": [0.5, 1.0]})
    assert queue.put("a", tags={"reward": [0.5, 1.0]}) == first
    queue.core.ack(queue.take().id)
    assert queue.put("a", tags={"reward": [0.5, 1.0]}) == first
    assert queue.claim() is None
    queue.core.clear([first])
    assert queue.put("a", tags={"reward": [0.5, 1.0]}) == first, "even when it was let go of"
    assert queue.claim() is None and len(queue.core.freed()) == 1


def test_the_same_attempt_with_other_columns_is_another_write_and_refused() -> None:
    queue = Queue()
    queue.put("a", columns=(TOKENS,))
    with pytest.raises(StaleHandle):
        queue.put("a", columns=(TOKENS, LOGPROBS))


def test_an_older_attempt_never_overwrites_a_newer_one_nor_comes_back_after_it() -> None:
    queue = Queue()
    newer = queue.put("a", 3)
    with pytest.raises(StaleHandle, match="group a attempt 2 is gone: the queue holds attempt 3"):
        queue.put("a", 2)
    assert queue.core.parts(newer)[0].payload == "a/3"
    queue.core.clear([newer])
    with pytest.raises(StaleHandle, match="holds nothing of it"):
        queue.put("a", 2)
    assert queue.core.stats(0.0).groups == 0


def test_a_newer_attempt_replaces_an_older_one_and_its_leases_lose_the_group() -> None:
    queue = Queue()
    old, _ = queue.put("a", 1), queue.put("b")
    lease = queue.take(2)
    new = queue.put("a", 2)
    assert names(queue.core.lease(lease.id)) == ["b"] and queue.core.freed() == ["a/1"]
    with pytest.raises(StaleHandle):
        queue.core.parts(old)
    queue.core.ack(lease.id)
    assert queue.take().receipts == (new,), "the ack of the old one did not consume the new one"
    assert queue.core.clear([old]) == 0, "nor does clearing it"


def test_a_late_put_never_lands_in_another_group_or_partition() -> None:
    """No index is ever given twice: a handle of what is gone means nothing else."""
    queue = Queue()
    queue.core.declare("eval", Schema((TOKENS,)))
    old = queue.put("a")
    queue.core.clear_partition("train")
    queue.put("b")
    queue.core.put("eval", "a", 1, 2, (TOKENS,), 5, "eval/a", now=0.0)
    with pytest.raises(StaleHandle):
        queue.core.add_columns(old, (LOGPROBS,), 5, "late", now=0.0)
    stats = queue.core.stats(0.0)
    assert (stats.partitions["train"].nbytes, stats.partitions["eval"].nbytes) == (10, 5)
    assert len({old.generation, queue.take().receipts[0].generation}) == 2


def test_a_group_is_claimable_once_all_rows_have_all_columns_of_the_task() -> None:
    queue = Queue()
    receipt = queue.put("a", columns=(TOKENS,), rows=3)
    waiter = queue.wait(task="critic", columns=("tokens", "logprobs"))
    assert queue.claim() is not None, "another task lacks nothing"
    queue.core.add_columns(receipt, (LOGPROBS,), 4, "first", now=0.0, rows=slice(0, 2))
    assert queue.core.settled() == [] and queue.core.stats(0.0).waits == {"columns": 1}
    queue.core.add_columns(receipt, (LOGPROBS,), 2, "last", now=0.0, rows=slice(2, 3))
    assert queue.served() == {waiter: ["a"]}
    parts = queue.core.parts(receipt, ("logprobs",))
    assert [(part.start, part.stop, part.payload) for part in parts] == [
        (0, 2, "first"),
        (2, 3, "last"),
    ]


def test_columns_added_again_change_nothing_and_written_rows_are_never_overwritten() -> None:
    queue = Queue()
    receipt = queue.put("a", columns=(TOKENS,), rows=3)
    for _ in range(2):
        now = queue.core.add_columns(receipt, (LOGPROBS,), 4, "x", now=0.0, rows=slice(0, 2))
        assert now.nbytes == 14
    with pytest.raises(SchemaError, match="column 'logprobs' is written already in some of rows 0"):
        queue.core.add_columns(receipt, (LOGPROBS,), 4, "y", now=0.0)
    with pytest.raises(SchemaError, match="a range of rows within 0 to 3"):
        queue.core.add_columns(receipt, (LOGPROBS,), 4, "z", now=0.0, rows=slice(2, 4))
    assert queue.core.stats(0.0).nbytes == 14


def test_a_lost_group_leaves_is_told_of_once_and_only_a_newer_attempt_is_taken() -> None:
    queue = Queue()
    receipt = queue.put("a")
    queue.take()
    (told,) = queue.core.lost([receipt, receipt], "node 3 died")
    assert (told.group, told.attempt, told.reason) == ("a", 1, "node 3 died")
    assert queue.core.take_lost("train") == [told] and queue.core.take_lost("train") == []
    with pytest.raises(QueuePayloadLost, match=r"node 3 died.*newer attempt"):
        queue.core.parts(receipt)
    with pytest.raises(StaleHandle):
        queue.put("a", 1)
    queue.put("a", 2)
    assert names(queue.take(now=1.0)) == ["a"]
    assert queue.core.stats(0.0).lost == 1


def test_a_name_keeps_its_first_declaration() -> None:
    queue = Queue()
    queue.core.declare("train", Schema((TOKENS, LOGPROBS)))
    with pytest.raises(Redeclared, match="partition 'train' is declared with"):
        queue.core.declare("train", Schema((TOKENS,)))
    queue.claim(columns=("tokens", "logprobs"))
    queue.claim(columns=("logprobs", "tokens"))
    with pytest.raises(
        SchemaError, match=r"task 'actor' of .* columns tokens, logprobs; .* tokens"
    ):
        queue.claim(columns=("tokens",))
    with pytest.raises(UnknownPartition, match=r"'eval' is not declared \(declared: train\)"):
        queue.core.take_lost("eval")


def test_what_is_remembered_of_groups_that_are_gone_is_bounded() -> None:
    queue = Queue()
    home = queue.core.partitions["train"]
    home.remembered = 3
    for i in range(10):
        queue.core.clear([queue.put(f"g-{i}")])
    assert list(home.gone) == ["g-7", "g-8", "g-9"]
