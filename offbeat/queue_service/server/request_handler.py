"""Handles the calls of clients, with the core, the payload memory and the waiting calls.

No I/O: channels pass calls in and take replies; the event loop provides the time and the timers. A
waiting call is answered by the call that satisfies it, or at its deadline.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from offbeat.queue_service import wire
from offbeat.queue_service.core.core import QueueCore
from offbeat.queue_service.core.records import CapacityGrant, Lease, PutReceipt
from offbeat.queue_service.core.snapshot import QueueSnapshot
from offbeat.queue_service.errors import LeaseExpired, QueueFull, TooLarge
from offbeat.queue_service.server.connections import Connection, PendingCall
from offbeat.queue_service.server.payload_memory import PayloadMemory
from offbeat.queue_service.server.snapshots import Saving
from offbeat.queue_service.server.wake_latency import LatencyHistogram
from offbeat.queue_service.storage.arenas import Arena
from offbeat.queue_service.wire import ONE_WAY, Reply, WireCall, encode, failure_of

_COOL_AFTER_S: Final = 1.0  # unused memory is released after this time
_NIL: Final = msgspec.Raw(encode(None))
_LATER: Final = object()


class RequestHandler:
    """Handles the calls of all connections, one at a time, on one event loop."""

    def __init__(self, core: QueueCore, memory: PayloadMemory, saving: Saving, newest: int) -> None:
        self._core, self._memory, self._saving = core, memory, saving
        self._loop = asyncio.get_running_loop()
        self._waits: dict[int, PendingCall] = {}
        self._connections: Counter[str] = Counter()  # connections by client name
        self._named = 0
        self._newest = newest  # generation of the last put
        self._specs = wire.Specs()
        self._calls = 0
        self._wakes, self._changed_at = LatencyHistogram(), 0.0
        self._closed = False
        self._waited_s: defaultdict[str, float] = defaultdict(float)
        self._expiry: asyncio.TimerHandle | None = None
        self._cooling: asyncio.TimerHandle | None = None
        self._saves: set[asyncio.Task[None]] = set()
        self._answers: dict[type, Callable[[Connection, WireCall, Any], Any]] = {
            wire.Attach: self._attach,
            wire.Probe: lambda _connection, _call, _op: memory.probe(),
            wire.Leave: lambda it, _call, _op: core.drop_client(it.client, self._loop.time()),
            wire.Declare: lambda _connection, _call, op: core.declare(op.partition, op.schema),
            wire.Borrow: self._borrow,
            wire.Put: self._put,
            wire.AddColumns: self._add_columns,
            wire.Claim: self._claim,
            wire.Ack: self._ack,
            wire.Release: lambda _connection, _call, op: core.release(op.lease, self._loop.time()),
            wire.Renew: lambda _connection, _call, op: core.renew(
                op.lease, op.lease_s, self._loop.time()
            ),
            wire.Locate: lambda connection, _call, op: self._payloads(connection, op.receipts),
            wire.Clear: lambda _connection, _call, op: core.clear(op.receipts),
            wire.ClearPartition: lambda _connection, _call, op: core.clear_partition(op.partition),
            wire.ReportLost: self._report_lost,
            wire.TakeLost: lambda _connection, _call, op: core.take_lost(op.partition),
            wire.GetStats: self._stats,
            wire.SaveTo: self._save_to,
            wire.Nothing: lambda _connection, _call, _op: None,
        }

    # --- channels ----------------------------------------------------------------------------

    def take(self, connection: Connection, call: WireCall) -> None:
        """Handle a call; ``connection.answer`` receives the reply once, now or later."""
        self._calls += 1
        self._changed_at = self._loop.time()
        self._memory.unpin(connection.client, call.unpinned)
        if (
            call.cancels is not None
            and (cancelled := self._cancel(connection, call.cancels)) is not None
        ):
            self._reply(connection, cancelled, None)
        try:
            value = self._answer(connection, call)
        except Exception as error:  # noqa: BLE001 - not handled here: the caller gets it
            self._refuse(connection, call, error)
        else:
            if value is not _LATER:
                self._reply(connection, call, value)
        self._settle()

    def _answer(self, connection: Connection, call: WireCall) -> object:
        if call.id in connection.waits:
            raise ValueError(
                f"call {call.id} of {connection.client} waits already; number the next one anew"
            )
        return self._answers[type(call.op)](connection, call, call.op)

    def leave(self, connection: Connection) -> None:
        """End a connection. With its last connection, the client ends too."""
        if self._closed:
            return
        self._changed_at = self._loop.time()
        for call_id in list(connection.waits):
            self._cancel(connection, call_id)
        if not connection.client:
            return
        self._connections[connection.client] -= 1
        if not self._connections[connection.client]:
            del self._connections[connection.client]
            self._core.drop_client(connection.client, self._loop.time())
            self._memory.client_gone(connection.client)
        self._settle()

    def close(self) -> None:
        """Stop the timers; no call is answered any more."""
        for timer in (self._expiry, self._cooling, *(wait.timer for wait in self._waits.values())):
            if timer is not None:
                timer.cancel()
        for save in self._saves:
            save.cancel()
        self._closed = True
        self._memory.close()

    # --- clients -----------------------------------------------------------------------------

    def _attach(self, connection: Connection, call: WireCall, op: wire.Attach) -> str:
        del call
        connection.maps = op.maps
        if not connection.client:
            if op.client is None:
                self._named += 1
            connection.client = op.client or f"client-{self._named}"
            self._connections[connection.client] += 1
        return connection.client

    # --- producers ---------------------------------------------------------------------------

    def _borrow(self, connection: Connection, call: WireCall, op: wire.Borrow) -> Arena:
        del call
        most = self._core.limits.max_bytes
        if op.nbytes > most:
            raise TooLarge("bytes", op.nbytes, 0, most)
        return self._memory.lend(connection.client, op.nbytes)

    def _put(self, connection: Connection, call: WireCall, op: wire.Put) -> object:
        payload = self._memory.store(connection.client, op.payload)
        try:
            return self._stored(op, payload, None)
        except TooLarge:
            self._memory.drop(payload)
            raise
        except QueueFull as full:
            if not op.wait_s > 0:  # nor NaN
                self._memory.drop(payload)
                raise
            waiting = msgspec.structs.replace(op, payload=payload)
            waiter = self._core.wait_to_put(op.rows, op.nbytes, connection.client)
            later = msgspec.structs.replace(call, op=waiting)
            return self._wait(connection, later, waiter, op.wait_s, full)
        except Exception:
            self._memory.drop(payload)
            raise

    def _stored(self, op: wire.Put, payload: wire.WirePayload, permit: int | None) -> PutReceipt:
        """Put into the core; drop the payload if the put is a repetition."""
        now = self._loop.time()
        receipt = self._core.put(
            op.partition, op.group, op.attempt, op.rows, self._specs.of(op.columns), op.nbytes,
            payload,
            now=now, tags=op.tags, permit=permit,
        )  # fmt: skip
        if receipt.generation > self._newest:
            self._newest = receipt.generation
        else:
            self._memory.drop(payload)
        return receipt

    def _add_columns(
        self, connection: Connection, call: WireCall, op: wire.AddColumns
    ) -> PutReceipt:
        del call
        payload = self._memory.store(connection.client, op.payload)
        rows, now = slice(op.start, op.stop), self._loop.time()
        try:
            grown = self._core.add_columns(
                op.receipt, self._specs.of(op.columns), op.nbytes, payload, now=now, rows=rows
            )
        except Exception:
            self._memory.drop(payload)
            raise
        if all(part.payload is not payload for part in self._core.parts(grown)):
            self._memory.drop(payload)
        return grown

    # --- consumers ---------------------------------------------------------------------------

    def _claim(self, connection: Connection, call: WireCall, op: wire.Claim) -> object:
        core, now = self._core, self._loop.time()
        lease = core.claim(
            op.partition, op.task, op.n, op.columns, now=now, lease_s=op.lease_s, where=op.where,
            client=connection.client, at_least=op.at_least,
        )  # fmt: skip
        if lease is not None:
            return self._delivery(connection, lease)
        if not op.wait_s > 0:  # nor NaN
            return None
        waiter = core.wait(
            op.partition, op.task, op.n, op.columns, now=now, lease_s=op.lease_s, where=op.where,
            client=connection.client, at_least=op.at_least,
        )  # fmt: skip
        return self._wait(connection, call, waiter, op.wait_s, None)

    def _delivery(self, connection: Connection, lease: Lease) -> wire.Delivery:
        return wire.Delivery(lease, self._payloads(connection, lease.receipts))

    def _payloads(
        self, connection: Connection, receipts: tuple[PutReceipt, ...]
    ) -> wire.Deliveries:
        groups = [self._core.parts(receipt) for receipt in receipts]
        return self._memory.deliver(connection.client, groups, maps=connection.maps)

    def _ack(self, connection: Connection, call: WireCall, op: wire.Ack) -> None:
        del connection, call
        receipts: tuple[PutReceipt, ...] = ()
        if op.clear:
            with contextlib.suppress(LeaseExpired):  # the ack's reply reports the error
                receipts = self._core.lease(op.lease).receipts
        self._core.ack(op.lease)
        self._core.clear(receipts)

    # --- groups that leave, and numbers ------------------------------------------------------

    def _report_lost(self, connection: Connection, call: WireCall, op: wire.ReportLost) -> None:
        del connection, call
        self._core.lost(op.receipts, op.reason)

    def _stats(
        self, connection: Connection, call: WireCall, op: wire.GetStats
    ) -> wire.ServiceStats:
        del connection, call, op
        queue = self._core.stats(self._loop.time())
        return wire.ServiceStats(
            queue,
            len(self._connections),
            self._memory.arena_bytes,
            self._calls,
            dict(self._waited_s),
            self._wakes.count,
            self._wakes.p99_s,
        )

    def _save_to(self, connection: Connection, call: WireCall, op: wire.SaveTo) -> object:
        """Take index and payloads between two calls; write them beside the event loop."""
        snapshot, stored = self._core.export(self._loop.time())
        payloads = [
            self._memory.kept(payload) for payload in cast("list[wire.WirePayload]", stored)
        ]
        save = self._loop.create_task(
            self._save(connection, call, op.directory, snapshot, payloads)
        )
        self._saves.add(save)
        save.add_done_callback(self._saves.discard)
        return _LATER

    async def _save(
        self,
        connection: Connection,
        call: WireCall,
        directory: str,
        snapshot: QueueSnapshot,
        payloads: list[wire.WirePayload],
    ) -> None:
        try:
            blocks = [(payload, self._memory.block_of(payload)) for payload in payloads]
            await self._saving.write(directory, snapshot, blocks)
        except Exception as error:  # noqa: BLE001 - not handled here: the caller gets it
            self._refuse(connection, call, error)
        else:
            self._reply(connection, call, len(payloads))
        finally:
            if not self._closed:
                for payload in payloads:
                    self._memory.drop(payload)
                self._settle()

    # --- answers, now and later --------------------------------------------------------------

    def _reply(self, connection: Connection, call: WireCall, value: object) -> None:
        if call.id == ONE_WAY:
            return
        raw = _NIL if value is None else msgspec.Raw(encode(value))
        connection.answer(Reply(call.id, raw, None, self._memory.announce(connection.client)))

    def _refuse(self, connection: Connection, call: WireCall, error: Exception) -> None:
        if call.id == ONE_WAY:
            return
        freed = self._memory.announce(connection.client)
        connection.answer(Reply(call.id, _NIL, failure_of(error), freed))

    def _wait(
        self,
        connection: Connection,
        call: WireCall,
        waiter: int,
        wait_s: float,
        full: QueueFull | None,
    ) -> object:
        timer = self._loop.call_later(wait_s, self._overdue, waiter)
        self._waits[waiter] = PendingCall(connection, call, self._loop.time(), timer, full)
        connection.waits[call.id] = waiter
        return _LATER

    def _end_wait(self, waiter: int) -> PendingCall:
        wait = self._waits.pop(waiter)
        wait.timer.cancel()
        del wait.connection.waits[wait.call.id]
        self._waited_s[type(wait.call.op).__name__] += self._loop.time() - wait.since
        return wait

    def _cancel(self, connection: Connection, call_id: int) -> WireCall | None:
        """Forget a waiting call and return it for the caller to answer.

        None if it does not wait.
        """
        waiter = connection.waits.get(call_id)
        if waiter is None:
            return None
        self._core.cancel(waiter)
        call = self._end_wait(waiter).call
        if isinstance(call.op, wire.Put):
            self._memory.drop(call.op.payload)
        return call

    def _overdue(self, waiter: int) -> None:
        self._core.cancel(waiter)
        wait = self._end_wait(waiter)
        op, full = wait.call.op, wait.full
        if isinstance(op, wire.Put) and full is not None:
            self._memory.drop(op.payload)
            late = QueueFull(full.limit, full.requested, full.in_use, full.capacity, op.wait_s)
            self._refuse(wait.connection, wait.call, late)
        else:
            self._reply(wait.connection, wait.call, None)
        self._settle()

    def _settle(self) -> None:
        """Answer the waiters that the last call served, free memory, and set the timers.

        Leases are delivered before the next put is admitted: it may replace a group of theirs.
        """
        rooms = deque[tuple[int, CapacityGrant]]()
        while (settled := self._core.settled()) or rooms:
            for waiter, got in settled:
                if isinstance(got, Lease):
                    self._serve(waiter, got)
                else:
                    rooms.append((waiter, got))
            if rooms:
                self._serve(*rooms.popleft())
        for payload in self._core.freed():
            self._memory.drop(cast("wire.WirePayload", payload))
        expiry = self._core.next_expiry()
        if expiry is not None and (self._expiry is None or expiry < self._expiry.when()):
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = self._loop.call_at(expiry, self._expire)
        if self._cooling is None and self._memory.has_excess:
            self._cooling = self._loop.call_later(_COOL_AFTER_S, self._cool)

    def _serve(self, waiter: int, got: Lease | CapacityGrant) -> None:
        if waiter not in self._waits:
            return
        wait = self._end_wait(waiter)
        self._wakes.add(self._loop.time() - self._changed_at)
        connection, call, op = wait.connection, wait.call, wait.call.op
        if isinstance(got, Lease):
            self._reply(connection, call, self._delivery(connection, got))
            return
        assert isinstance(op, wire.Put)  # noqa: S101 - who waits for room puts
        try:
            receipt = self._stored(op, op.payload, waiter)
        except Exception as error:  # noqa: BLE001 - not handled here: the caller gets it
            self._core.cancel(waiter)
            self._memory.drop(op.payload)
            self._refuse(connection, call, error)
        else:
            self._reply(connection, call, receipt)

    def _expire(self) -> None:
        self._expiry, self._changed_at = None, self._loop.time()
        self._core.expire(self._changed_at)
        self._settle()

    def _cool(self) -> None:
        self._cooling = None
        self._memory.cool()
