"""QueueCore beside a naive model: any calls in any order, late, repeated and refused ones too."""

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from queue_model import COLUMNS, PREDICATES, SPECS, TASKS, Ask, Claim, Held, Model

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core import (
    Lease,
    PutReceipt,
    QueueCore,
    QueueLimits,
    QueueSnapshot,
    Schema,
    Where,
)
from offbeat.queue_service.errors import LeaseExpired, QueueFull, QueuePayloadLost
from offbeat.transfer_queue.errors import StaleHandle

GROUP = st.sampled_from(["g-0", "g-1", "g-2", "g-3", "g-4"])
WRITTEN = st.sets(st.sampled_from(COLUMNS), min_size=1)
TASK, CLIENT = st.sampled_from(sorted(TASKS)), st.sampled_from(["x", "y"])
WHERE = st.sampled_from([(), (), *PREDICATES])
COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(sorted)
LEASE_S = st.sampled_from([1.0, 5.0])
PICK = st.integers(0, 10_000)
NBYTES = st.integers(0, 30)
CONSUMERS = [(), ("actor",), ("actor", "critic")]
LIMITS = QueueLimits(max_rows=16, max_bytes=120)


class QueueMoves(RuleBasedStateMachine):
    @initialize(consumers=st.sampled_from(CONSUMERS))
    def start(self, consumers: tuple[str, ...]) -> None:
        self.core = QueueCore(LIMITS)
        self.core.declare("train", Schema(tuple(SPECS.values()), consumers))
        self.model = Model(LIMITS, consumers)
        self.receipts: list[PutReceipt] = []
        self.now = 0.0
        self.writes = 0

    # --- producers ---------------------------------------------------------------------------

    @rule(name=GROUP, step=st.sampled_from([1, 1, 1, 0, -1]), rows=st.integers(1, 4), columns=WRITTEN,
          nbytes=NBYTES, score=st.integers(0, 3), permit=st.none() | PICK)  # fmt: skip
    def put(
        self, name: str, step: int, rows: int, columns: set[str], nbytes: int, score: int,
        permit: int | None,
    ) -> None:  # fmt: skip
        model, first = self.model, frozenset(columns)
        promised = sorted(model.promises)
        spend = promised[permit % len(promised)] if permit is not None and promised else None
        scores = [score, *[2] * (rows - 1)]
        old, gone = model.find(name), model.gone.get(name)
        attempt = step + (old.attempt if old else gone[0] if gone else 0)
        self.writes += 1
        payload = f"payload-{self.writes}"
        before = model.generation

        def call() -> PutReceipt:
            return self.core.put(
                "train", name, attempt, rows, [SPECS[each] for each in sorted(columns)], nbytes,
                payload, now=self.now, tags={"score": scores}, permit=spend,
            )  # fmt: skip

        if old is not None and (old.attempt, old.first) == (attempt, first):
            assert call().generation == old.generation
            self.spend(spend)
            return
        if old is not None and attempt <= old.attempt:
            with pytest.raises(StaleHandle):
                call()
            return
        if old is None and gone is not None and attempt <= gone[0]:
            if gone == (attempt, first, False):
                assert call().generation <= before
                self.spend(spend)
            else:
                with pytest.raises(StaleHandle):
                    call()
            return
        room = model.promises.get(spend or 0, Ask(0, 0, 0, ""))
        more_rows = rows - room.rows - (old.rows if old else 0)
        more_bytes = nbytes - room.nbytes - (old.nbytes if old else 0)
        covered = spend is not None and more_rows <= 0 and more_bytes <= 0
        turn = spend is not None or not model.asks
        if not covered and not (turn and model.fits(more_rows, more_bytes)):
            with pytest.raises(QueueFull):
                call()
            return
        receipt = call()
        model.generation += 1
        assert receipt.generation == model.generation
        self.receipts.append(receipt)
        model.promises.pop(spend or 0, None)
        if old is not None:
            model.remove(old, replaced=True)
        cells = {(each, row) for each in columns for row in range(rows)}
        held = Held(name, attempt, rows, nbytes, scores, first, model.generation, cells, [payload])
        model.groups.append(held)
        model.settle(self.now)
        model.let_in()

    def spend(self, permit: int | None) -> None:
        if self.model.promises.pop(permit or 0, None) is not None:
            self.model.let_in()

    @rule(pick=PICK, columns=WRITTEN, nbytes=NBYTES, start=st.none() | st.integers(0, 2))
    def add_columns(self, pick: int, columns: set[str], nbytes: int, start: int | None) -> None:
        if not self.receipts:
            return
        receipt = self.receipts[pick % len(self.receipts)]
        rows = None if start is None else slice(start, min(start + 2, receipt.rows))
        group = self.model.find(receipt.group)
        self.writes += 1
        payload = f"payload-{self.writes}"

        def call() -> PutReceipt:
            specs = [SPECS[each] for each in sorted(columns)]
            return self.core.add_columns(receipt, specs, nbytes, payload, now=self.now, rows=rows)

        if group is None or group.generation != receipt.generation:
            with pytest.raises((StaleHandle, QueuePayloadLost)):
                call()
            return
        span = range(*(rows or slice(None)).indices(receipt.rows))
        cells = {(name, row) for name in columns for row in span}
        if cells and cells <= group.cells:
            assert call().nbytes == group.nbytes
            return
        overlap = cells & group.cells
        if not cells or overlap:
            with pytest.raises(SchemaError):
                call()
            return
        group.cells |= cells
        group.nbytes += nbytes
        group.payloads.append(payload)
        assert call().nbytes == group.nbytes
        self.model.settle(self.now)

    @rule(rows=st.integers(1, 6), nbytes=NBYTES, client=CLIENT)
    def wait_to_put(self, rows: int, nbytes: int, client: str) -> None:
        model = self.model
        model.last_waiter += 1
        assert self.core.wait_to_put(rows, nbytes, client) == model.last_waiter
        model.asks.append(Ask(model.last_waiter, rows, nbytes, client))
        model.let_in()

    # --- consumers ---------------------------------------------------------------------------

    @rule(task=TASK, counts=COUNTS, where=WHERE, client=CLIENT, lease_s=LEASE_S)
    def claim(
        self, task: str, counts: list[int], where: Where, client: str, lease_s: float
    ) -> None:
        self.declare(task)
        least, most = counts
        lease = self.core.claim(
            "train", task, most, TASKS[task], now=self.now, lease_s=lease_s, where=where,
            client=client, at_least=least,
        )  # fmt: skip
        want = self.model.available(task, where)[:most]
        if len(want) < least:
            assert lease is None
            return
        assert lease is not None
        assert lease.id == self.model.lend(task, want, client, self.now + lease_s)
        self.same(lease, want)

    @rule(task=TASK, counts=COUNTS, where=WHERE, client=CLIENT, lease_s=LEASE_S)
    def wait(self, task: str, counts: list[int], where: Where, client: str, lease_s: float) -> None:
        self.declare(task)
        least, most = counts
        self.model.last_waiter += 1
        waiter_id = self.core.wait(
            "train", task, most, TASKS[task], now=self.now, lease_s=lease_s, where=where,
            client=client, at_least=least,
        )  # fmt: skip
        assert waiter_id == self.model.last_waiter
        claim = Claim(waiter_id, task, client, least, most, where, lease_s)
        self.model.claims.append(claim)
        self.model.settle(self.now)

    @rule(pick=PICK, way=st.sampled_from(["ack", "ack", "release", "renew"]))
    def end_lease(self, pick: int, way: str) -> None:
        """Any lease there ever was."""
        if not self.model.last_lease:
            return
        lease_id = 1 + pick % self.model.last_lease
        model = self.model
        if lease_id not in model.loans:
            if way == "ack" and lease_id in model.acked:
                self.core.ack(lease_id)
                return
            with pytest.raises(LeaseExpired):
                self.finish(lease_id, way)
            return
        lease = self.finish(lease_id, way)
        if way == "ack":
            model.ack(lease_id)
        elif way == "release":
            model.end(lease_id)
            model.settle(self.now)
        elif lease is not None:
            model.loans[lease_id].expires_at = self.now + 7.0
            self.same(lease, model.lent(lease_id))

    def finish(self, lease_id: int, way: str) -> Lease | None:
        if way == "ack":
            return self.core.ack(lease_id)
        if way == "release":
            return self.core.release(lease_id, now=self.now)
        return self.core.renew(lease_id, 7.0, now=self.now)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        loans = self.model.loans
        due = [each for each in loans if loans[each].expires_at <= self.now]
        due.sort(key=lambda each: (loans[each].expires_at, each))
        assert [lease.id for lease in self.core.expire(self.now)] == due
        self.model.end_all(due, self.now)

    # --- groups and clients leave --------------------------------------------------------------

    @rule(picks=st.lists(PICK, max_size=3), lost=st.booleans())
    def let_go(self, picks: list[int], lost: bool) -> None:
        """Any receipt there ever was, the same one twice too."""
        receipts = [self.receipts[pick % len(self.receipts)] for pick in picks if self.receipts]
        here = dict[str, Held]()
        for receipt in receipts:
            group = self.model.find(receipt.group)
            if group is not None and group.generation == receipt.generation:
                here[group.name] = group
        if lost:
            assert [each.group for each in self.core.lost(receipts, "node died")] == list(here)
            assert [each.group for each in self.core.take_lost("train")] == list(here)
        else:
            assert self.core.clear(receipts) == len(here)
        for group in here.values():
            self.model.remove(group, lost=lost)
        self.model.let_in()

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if not self.model.last_waiter:
            return
        waiter_id = 1 + pick % self.model.last_waiter
        assert self.core.cancel(waiter_id) == self.give_up(waiter_id)

    def give_up(self, waiter_id: int) -> bool:
        model = self.model
        claims = [each for each in model.claims if each.id != waiter_id]
        asks = [each for each in model.asks if each.id != waiter_id]
        promised = model.promises.pop(waiter_id, None) is not None
        waited = len(claims) < len(model.claims) or len(asks) < len(model.asks) or promised
        asked = len(asks) < len(model.asks) or promised
        model.claims, model.asks = claims, asks
        if asked:
            model.let_in()
        return waited

    @rule(client=CLIENT)
    def drop_client(self, client: str) -> None:
        self.core.drop_client(client, now=self.now)
        model = self.model
        waits = [each.id for each in (*model.claims, *model.asks) if each.client == client]
        waits += [each.id for each in model.promises.values() if each.client == client]
        for waiter_id in waits:
            self.give_up(waiter_id)
            model.served.pop(waiter_id, None)
        leases = [each for each, loan in model.loans.items() if loan.client == client]
        model.end_all(leases, self.now)

    @rule()
    def restart(self) -> None:
        """A snapshot through the wire into a new queue: leases and waits end, all else stays."""
        snapshot, payloads = self.core.export(self.now)
        wire = msgspec.msgpack.encode(snapshot)
        core = QueueCore(LIMITS)
        core.import_(msgspec.msgpack.decode(wire, type=QueueSnapshot), payloads, self.now)
        self.core, model = core, self.model
        model.claims, model.asks, model.promises = [], [], {}
        for lease_id in list(model.loans):
            model.end(lease_id)
        model.acked.clear()

    # --- what holds ----------------------------------------------------------------------------

    def declare(self, task: str) -> None:
        if task not in self.model.tasks:
            self.model.tasks.append(task)

    def same(self, lease: Lease, groups: list[Held]) -> None:
        assert [each.group for each in lease.receipts] == [each.name for each in groups]
        assert [each.generation for each in lease.receipts] == [each.generation for each in groups]

    @invariant()
    def whoever_can_be_served_was(self) -> None:
        served = {
            waiter_id: [each.group for each in what.receipts]
            if isinstance(what, Lease)
            else (what.rows, what.nbytes)
            for waiter_id, what in self.core.settled()
        }
        assert served == self.model.served
        self.model.served = {}

    @invariant()
    def payloads_are_let_go_of_once_and_with_their_group(self) -> None:
        freed, self.model.freed = self.model.freed, []
        assert Counter(map(str, self.core.freed())) == Counter(freed)

    @invariant()
    def the_numbers_are_those_of_the_groups(self) -> None:
        stats, model = self.core.stats(self.now), self.model
        assert stats.groups == len(model.groups)
        assert stats.rows == sum(group.rows for group in model.groups)
        assert stats.nbytes == sum(group.nbytes for group in model.groups)
        assert stats.promised_rows == sum(each.rows for each in model.promises.values())
        assert stats.promised_bytes == sum(each.nbytes for each in model.promises.values())
        assert stats.leases == len(model.loans)
        assert sum(stats.waits.values()) == len(model.claims) + len(model.asks)
        ends = [loan.expires_at for loan in model.loans.values()]
        assert self.core.next_expiry() == min(ends, default=None)
        for task in model.tasks:
            told = stats.partitions["train"].tasks[task]
            assert told.available == len(model.available(task))
            assert told.leased == sum(group.at.get(task) is not None for group in model.groups)
            acked = [group for group in model.groups if task in group.at and not group.at[task]]
            assert told.acked == len(acked)

    @invariant()
    def puts_never_pass_the_bound(self) -> None:
        assert self.core.stats(self.now).rows <= LIMITS.max_rows

    @invariant()
    def a_receipt_leads_to_its_own_payloads_or_nowhere(self) -> None:
        for receipt in self.receipts[-20:]:
            group = self.model.find(receipt.group)
            if group is not None and group.generation == receipt.generation:
                parts = self.core.parts(receipt)
                assert [part.payload for part in parts] == group.payloads
            else:
                with pytest.raises((StaleHandle, QueuePayloadLost)):
                    self.core.parts(receipt)


TestQueueMoves = QueueMoves.TestCase
TestQueueMoves.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
