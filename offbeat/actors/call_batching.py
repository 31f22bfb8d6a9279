"""Batches many small calls between two actors into few remote calls.

A remote call costs about a millisecond of CPU, regardless of its size. A rollout of a small model costs
less than that. So all requests of one turn of the event loop are sent in one ``exchange``, which
returns all replies that are ready.

    CallBatcher (caller)                                 ReplyBatcher (callee)
    call(question) -- exchange(asked, cancelled, doubted) --> work(question) as a task each
                   <-- answers, as soon as one is ready --

While replies are pending, at least one exchange is open. When a newer exchange arrives, it
supersedes the older one, which returns at once with the replies that are ready. So if an exchange
that was never superseded returns nothing, the callee has no pending work, for example because its
process was replaced.

Ray may fail to report that a process has died, because Ray's timers follow the wall clock, which
may be set back. So after some time without a reply, another exchange is sent. An exchange is
presumed lost if it stays open although the callee has answered later ones. The next exchange names
the calls that the lost one may have carried. If the callee does not know them, they fail.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec

from offbeat.messages.failures import ActorLost, OffbeatError

Q = TypeVar("Q")
A = TypeVar("A")
_FOLLOW_UP_S: Final = 30.0
"""Seconds without a reply before a second exchange is sent, or before an exchange is presumed lost
because a later one has returned. A large reply may need as long over a slow network."""
_UNKNOWN: Final = "it no longer has this request"


class BatchedReply(msgspec.Struct, Generic[A], frozen=True):
    """Reply to the request with this id: a value, or the failure that ``call`` raises."""

    id: int
    value: A | None
    failure: OffbeatError | None = None


Exchange = Callable[
    [Sequence[tuple[int, Q]], Sequence[int], Sequence[int]], Awaitable[Sequence[BatchedReply[A]]]
]
"""Sends new requests, ids of cancelled requests, and ids that the callee may not know."""


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Q]):
    """Content of one exchange, and the exchanges that were open when it began."""

    requests: tuple[tuple[int, Q], ...]
    cancelled: tuple[int, ...]
    doubted: tuple[int, ...]  # calls that an exchange presumed lost may have carried
    before: int  # calls with this id or a later one do not belong to it
    older: frozenset[asyncio.Task[None]]
    presumed_lost: frozenset[asyncio.Task[None]]


class CallBatcher(Generic[Q, A]):
    """The caller's end: batches the calls to one callee.

    A cancelled ``call`` cancels its work in the callee. If an exchange fails for any reason, every
    call that was open when it began raises the error, because the lost reply may have contained its
    result. Later calls start a new exchange.
    """

    def __init__(self, exchange: Exchange[Q, A]) -> None:
        self._exchange = exchange
        self._next_id = 0
        self._open: dict[int, asyncio.Future[A]] = {}
        self._requests = list[tuple[int, Q]]()
        self._cancelled = list[int]()
        self._exchanges = set[asyncio.Task[None]]()
        self._newest: asyncio.Task[None] | None = None
        self._overtaken = set[asyncio.Task[None]]()  # open although a later one has returned
        self._presumed_lost = set[asyncio.Task[None]]()  # overtaken, and still open long after that
        self._doubted_before = 0  # ids of calls that they may have carried are below it
        self._flush_is_due = False

    async def call(self, question: Q) -> A:
        """Send one request and return its result.

        Raises:
            ActorLost: The callee is lost, or alive without knowing the request.
            Exception: The failure of the work, or of an exchange.
        """
        id_, self._next_id = self._next_id, self._next_id + 1
        answer = self._open[id_] = asyncio.get_running_loop().create_future()
        self._requests.append((id_, question))
        self._flush_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            # It has been sent, because the flush was scheduled before this line could run
            self._cancelled.append(id_)
            self._flush_soon()
            raise
        finally:
            del self._open[id_]

    def close(self) -> None:
        """Cancel open exchanges. The caller cancels its own open calls."""
        for exchange in self._exchanges:
            exchange.cancel()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Start an exchange with all requests since the last exchange."""
        self._flush_is_due = False
        if not (self._requests or self._cancelled or self._is_owed(self._next_id)):
            return
        batch = _Batch(
            tuple(self._requests),
            tuple(self._cancelled),
            tuple(self._list_owed(self._doubted_before)) if self._presumed_lost else (),
            self._next_id,
            frozenset(each for each in self._exchanges if not each.done()),
            frozenset(self._presumed_lost),
        )
        self._requests.clear()
        self._cancelled.clear()
        task = asyncio.ensure_future(self._carry(batch))
        self._exchanges.add(task)
        task.add_done_callback(self._forget)
        self._newest = task
        asyncio.get_running_loop().call_later(_FOLLOW_UP_S, self._follow_up, task)

    def _follow_up(self, exchange: asyncio.Task[None]) -> None:
        """Start another exchange if this one is the newest and has no reply."""
        if exchange is self._newest and not exchange.done():
            self._flush_soon()

    async def _carry(self, batch: _Batch[Q]) -> None:
        """Carry out one exchange."""
        try:
            answers = await self._exchange(batch.requests, batch.cancelled, batch.doubted)
        except Exception as failure:  # noqa: BLE001 - not handled here: the calls raise it
            self._fail(batch.before, failure)
            return
        for answer in answers:
            self._deliver(answer)
        for exchange in batch.presumed_lost:  # the callee was asked for the calls that they carried
            exchange.cancel()
        overtaken = {each for each in batch.older - batch.presumed_lost if not each.done()}
        self._overtake(overtaken)
        if self._newest is not asyncio.current_task() or not self._is_owed(batch.before):
            return
        # Exchanges may overtake each other. So an exchange knows that it was not superseded only if
        # no other one was open.
        if not answers and not batch.older:  # the callee has no pending work
            self._fail(batch.before, ActorLost("the callee", "a call", _UNKNOWN))
        elif answers or not overtaken:
            self._flush_soon()  # else after they have returned or are presumed lost

    def _overtake(self, exchanges: set[asyncio.Task[None]]) -> None:
        """Presume exchanges lost that stay open long after a later one has returned."""
        for exchange in exchanges - self._overtaken:
            self._overtaken.add(exchange)
            asyncio.get_running_loop().call_later(_FOLLOW_UP_S, self._presume_lost, exchange)

    def _presume_lost(self, exchange: asyncio.Task[None]) -> None:
        if not exchange.done():
            self._presumed_lost.add(exchange)
            self._doubted_before = self._next_id
            self._flush_soon()

    def _forget(self, exchange: asyncio.Task[None]) -> None:
        """Forget an exchange that has ended. If the next one waited for that, start it."""
        self._exchanges.discard(exchange)
        self._presumed_lost.discard(exchange)
        if exchange in self._overtaken:
            self._overtaken.discard(exchange)
            if self._newest is not None and self._newest.done():
                self._flush_soon()

    def _deliver(self, answer: BatchedReply[A]) -> None:
        waiting = self._open.get(answer.id)
        if waiting is None or waiting.done():
            return  # cancelled or failed meanwhile
        if answer.failure is not None:
            waiting.set_exception(answer.failure)
        else:
            waiting.set_result(answer.value)  # type: ignore[arg-type]  # a value, if no failure

    def _fail(self, before: int, failure: Exception) -> None:
        """Fail every call with an id below ``before``. The next exchange cancels their work."""
        for id_ in self._list_owed(before):
            self._open[id_].set_exception(failure)
            self._cancelled.append(id_)

    def _is_owed(self, before: int) -> bool:
        """Return whether a call with an id below ``before`` still waits for its reply."""
        return any(id_ < before and not answer.done() for id_, answer in self._open.items())

    def _list_owed(self, before: int) -> list[int]:
        return [id_ for id_, answer in self._open.items() if id_ < before and not answer.done()]


@dataclass(slots=True)
class _Client(Generic[A]):
    """Replies that one caller waits for."""

    incarnation: str
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    answers: deque[BatchedReply[A]] = field(default_factory=deque[BatchedReply[A]])
    waiter: asyncio.Future[None] | None = None

    def ended(self, id_: int, _task: asyncio.Task[None]) -> None:
        """Handle the end of a task, which has stored a reply or was cancelled."""
        del self.tasks[id_]
        if self.answers or not self.tasks:
            self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def cancel_all(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.wake()


class ReplyBatcher(Generic[Q, A]):
    """The callee's end: executes batched calls of any number of callers.

    Callers are identified by name. When a new incarnation of a caller appears, the calls of the
    previous one are cancelled.
    """

    def __init__(
        self,
        work: Callable[[Q], Awaitable[A]],
        failed: Callable[[Exception], OffbeatError],
        *,
        weigh: Callable[[A], int] = lambda _: 0,
        limit: int = 1,
    ) -> None:
        """Create the callee's end.

        Args:
            work: Executes one request.
            failed: Converts an error of ``work`` to the typed failure to send.
            weigh: Returns the weight of a reply, for ``limit``.
            limit: Weight at which an exchange stops adding replies.
        """
        self._work, self._failed = work, failed
        self._weigh, self._limit = weigh, limit
        self._clients: dict[str, _Client[A]] = {}

    async def exchange(
        self,
        name: str,
        incarnation: str,
        requests: Sequence[tuple[int, Q]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> list[BatchedReply[A]]:
        """Accept requests and return the replies that are ready.

        If a call in ``doubted`` is neither pending nor ready here, it fails with ``ActorLost``: its
        process was replaced by this one, or its reply was lost. An empty list means that a newer
        exchange has superseded this one, or that the caller has no pending requests.
        """
        client = self._client(name, incarnation)
        for id_ in cancelled:
            if task := client.tasks.get(id_):
                task.cancel()
        for id_, question in requests:
            task = client.tasks[id_] = asyncio.ensure_future(self._answer(client, id_, question))
            # Not at the end of ``_answer``: a task that is cancelled before its first step never
            # reaches it.
            task.add_done_callback(partial(client.ended, id_))
        known = (
            {*client.tasks, *(answer.id for answer in client.answers)} if doubted else set[int]()
        )
        for id_ in doubted:
            if id_ not in known:
                lost = ActorLost("the callee", "a call", _UNKNOWN)
                client.answers.append(BatchedReply[A](id_, None, lost))
        client.wake()  # supersedes an older exchange
        waiter = client.waiter = asyncio.get_running_loop().create_future()
        if client.tasks and not client.answers:
            await waiter
            await asyncio.sleep(0)  # other replies finished in this turn of the loop are included
        return self._ready(client)

    def cancel_all(self) -> None:
        """Cancel all work. Its callers receive an error."""
        for client in self._clients.values():
            client.cancel_all()

    async def close(self) -> None:
        """Cancel all work, and return when it has ended."""
        self.cancel_all()
        if going_on := [
            task for client in self._clients.values() for task in client.tasks.values()
        ]:
            await asyncio.wait(going_on)

    def _client(self, name: str, incarnation: str) -> _Client[A]:
        client = self._clients.get(name)
        if client is None or client.incarnation != incarnation:
            if client is not None:
                client.cancel_all()
            client = self._clients[name] = _Client(incarnation)
        return client

    async def _answer(self, client: _Client[A], id_: int, question: Q) -> None:
        try:
            answer = BatchedReply(id_, await self._work(question))
        except Exception as error:  # noqa: BLE001 - not handled here: the caller gets it
            answer = BatchedReply[A](id_, None, self._failed(error))
        client.answers.append(answer)

    def _ready(self, client: _Client[A]) -> list[BatchedReply[A]]:
        ready, weight = list[BatchedReply[A]](), 0
        while client.answers and (not ready or weight < self._limit):
            answer = client.answers.popleft()
            weight += 0 if answer.value is None else self._weigh(answer.value)
            ready.append(answer)
        return ready
