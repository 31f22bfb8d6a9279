"""A queue with one partition, and short ways to use it."""

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.queue_service.core import ColumnSpec, Lease, PutReceipt, QueueCore, QueueLimits, Schema
from offbeat.queue_service.core.records import Scalar

TOKENS, LOGPROBS = ColumnSpec("tokens", "int32", ragged=True), ColumnSpec("logprobs", "float32")
SCHEMA = Schema((TOKENS, LOGPROBS))
ROOMY = QueueLimits(max_rows=1_000_000, max_bytes=1_000_000_000)


class Queue:
    """``core`` with the arguments a test does not care about filled in."""

    def __init__(self, limits: QueueLimits = ROOMY, schema: Schema = SCHEMA) -> None:
        self.core = QueueCore(limits)
        self.core.declare("train", schema)

    def put(
        self,
        group: str,
        attempt: int = 1,
        columns: Sequence[ColumnSpec] = (TOKENS, LOGPROBS),
        tags: Mapping[str, Sequence[Scalar]] | None = None,
        rows: int = 2,
        nbytes: int = 10,
        **more: Any,
    ) -> PutReceipt:
        payload = f"{group}/{attempt}"
        return self.core.put(
            "train", group, attempt, rows, columns, nbytes, payload,
            now=more.pop("now", 0.0), tags=tags or {}, **more,
        )  # fmt: skip

    def claim(self, n: int = 1, task: str = "actor", **more: Any) -> Lease | None:
        more = {"now": 0.0, "lease_s": 10.0, "columns": ("tokens",), **more}
        return self.core.claim("train", task, n, **more)

    def wait(self, n: int = 1, task: str = "actor", **more: Any) -> int:
        more = {"now": 0.0, "lease_s": 10.0, "columns": ("tokens",), **more}
        return self.core.wait("train", task, n, **more)

    def take(self, n: int = 1, task: str = "actor", **more: Any) -> Lease:
        lease = self.claim(n, task, **more)
        assert lease is not None, "the test expects something to claim"
        return lease

    def served(self) -> dict[int, list[str]]:
        return {
            waiter_id: names(what) if isinstance(what, Lease) else ["room"]
            for waiter_id, what in self.core.settled()
        }


def names(lease: Lease) -> list[str]:
    return [receipt.group for receipt in lease.receipts]
