"""Batches many small calls between two actors into few remote ones.

A remote call costs about a millisecond of CPU whatever it carries, and a rollout of a small model
costs less than that. So what is asked within one turn of the event loop travels in one ``exchange``,
and so do the answers that are there when it returns.

    Coalescer (caller)                                   Outbox (callee)
    call(question) -- exchange(asked, cancelled) -->     work(question) as a task each
                   <-- answers, as soon as one is there --

One exchange is always open while answers are owed. A newer one takes over from it: the older
returns at once with what there is. So an exchange that was alone and brings nothing says that
nothing is owed: a callee which lost its memory with its process is found out.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec

from offbeat.messages.failures import ActorLost, OffbeatError

Q = TypeVar("Q")
A = TypeVar("A")


class BatchedReply(msgspec.Struct, Generic[A], frozen=True):
    """The reply to the question of this id: a value, or the failure that ``call`` raises."""

    id: int
    value: A | None
    failure: OffbeatError | None = None


Exchange = Callable[[Sequence[tuple[int, Q]], Sequence[int]], Awaitable[Sequence[BatchedReply[A]]]]


class CallBatcher(Generic[Q, A]):
    """Batches the calls to one callee; this is the caller's end.

    A cancelled ``call`` cancels its work in the callee. When an exchange fails, for whatever
    reason, every call that was open when it began raises that: its answers may have been in it.
    Later calls try again.
    """

    def __init__(self, exchange: Exchange[Q, A]) -> None:
        self._exchange = exchange
        self._next_id = 0
        self._open: dict[int, asyncio.Future[A]] = {}
        self._asked = list[tuple[int, Q]]()
        self._cancelled = list[int]()
        self._exchanges = set[asyncio.Task[None]]()
        self._newest: asyncio.Task[None] | None = None
        self._flush_is_due = False

    async def call(self, question: Q) -> A:
        """The answer, or the failure, of one question.

        Raises:
            ActorLost: Also when the callee is there, but knows nothing of the question any more.
            Exception: The failure of the work, or of an exchange.
        """
        id_, self._next_id = self._next_id, self._next_id + 1
        answer = self._open[id_] = asyncio.get_running_loop().create_future()
        self._asked.append((id_, question))
        self._flush_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            self._cancelled.append(id_)  # it was sent: the flush was due before this could run
            self._flush_soon()
            raise
        finally:
            del self._open[id_]

    def close(self) -> None:
        """Give up on open exchanges. Open calls are the caller's to cancel."""
        for exchange in self._exchanges:
            exchange.cancel()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Start an exchange with all that was asked since the last one."""
        self._flush_is_due = False
        asked, self._asked = self._asked, []
        cancelled, self._cancelled = self._cancelled, []
        if asked or cancelled or self._owed(self._next_id):
            alone = all(exchange.done() for exchange in self._exchanges)
            task = asyncio.ensure_future(self._carry(asked, cancelled, self._next_id, alone=alone))
            self._exchanges.add(task)
            task.add_done_callback(self._exchanges.discard)
            self._newest = task

    async def _carry(
        self, asked: list[tuple[int, Q]], cancelled: list[int], before: int, *, alone: bool
    ) -> None:
        """Carry out one exchange; calls with ids from ``before`` on do not belong to it.

        ``alone``: no other was on its way when it began. Exchanges may overtake each other, so only
        one that was alone all the time knows that nobody took over from it.
        """
        try:
            answers = await self._exchange(asked, cancelled)
        except Exception as failure:  # noqa: BLE001 - not handled here: the calls raise it
            self._fail(before, failure)
            return
        for answer in answers:
            self._deliver(answer)
        if self._newest is not asyncio.current_task() or not self._owed(before):
            return
        if answers or not alone:
            self._flush_soon()
        else:  # nothing is owed there
            detail = "it knows nothing of this question any more"
            self._fail(before, ActorLost("the callee", "a call", detail))

    def _deliver(self, answer: BatchedReply[A]) -> None:
        waiting = self._open.get(answer.id)
        if waiting is None or waiting.done():
            return  # cancelled or failed meanwhile
        if answer.failure is not None:
            waiting.set_exception(answer.failure)
        else:
            waiting.set_result(answer.value)  # type: ignore[arg-type]  # a value, if no failure

    def _fail(self, before: int, failure: Exception) -> None:
        """Fail every call made until then.

        A callee that is alive learns of it in the next exchange.
        """
        for id_ in self._owed(before):
            self._open[id_].set_exception(failure)
            self._cancelled.append(id_)

    def _owed(self, before: int) -> list[int]:
        return [id_ for id_, answer in self._open.items() if id_ < before and not answer.done()]


@dataclass(slots=True)
class _Client(Generic[A]):
    """The replies that one caller is owed."""

    incarnation: str
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: deque[BatchedReply[A]] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None

    def ended(self, id_: int, _task: asyncio.Task[None]) -> None:
        """A task is done: it left an answer, or was cancelled."""
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
    """Answers batched calls; this is the callee's end, for any number of callers.

    A caller has a name; when it comes back as another incarnation, the calls of the former one are
    cancelled.
    """

    def __init__(
        self,
        work: Callable[[Q], Awaitable[A]],
        failed: Callable[[Exception], OffbeatError],
        *,
        weigh: Callable[[A], int] = lambda _: 0,
        limit: int = 1,
    ) -> None:
        """Make it.

        Args:
            work: Answers one question.
            failed: The typed failure to send for what ``work`` raised.
            weigh: Weight of an answer, for ``limit``.
            limit: An exchange returns no further answer once those it has weigh this much.
        """
        self._work, self._failed = work, failed
        self._weigh, self._limit = weigh, limit
        self._clients: dict[str, _Client[A]] = {}

    async def exchange(
        self, name: str, incarnation: str, asked: Sequence[tuple[int, Q]], cancelled: Sequence[int]
    ) -> list[BatchedReply[A]]:
        """Take questions; return the answers that are there.

        Without any, a newer exchange took over, or this caller is owed nothing.
        """
        client = self._client(name, incarnation)
        for id_ in cancelled:
            if task := client.tasks.get(id_):
                task.cancel()
        for id_, question in asked:
            task = client.tasks[id_] = asyncio.ensure_future(self._answer(client, id_, question))
            # Not at the end of ``_answer``: a task cancelled before its first step never gets there.
            task.add_done_callback(partial(client.ended, id_))
        client.wake()  # an older exchange: this one takes over
        waiter = client.waiter = asyncio.get_running_loop().create_future()
        if client.tasks and not client.answers:
            await waiter
            await asyncio.sleep(0)  # what else this turn of the loop finishes comes along
        return self._taken(client)

    def cancel_all(self) -> None:
        """Cancel all work; its callers receive that it is lost."""
        for client in self._clients.values():
            client.cancel_all()

    async def close(self) -> None:
        """Give up on all work, and return when none is going on."""
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

    def _taken(self, client: _Client[A]) -> list[BatchedReply[A]]:
        taken, weight = list[BatchedReply[A]](), 0
        while client.answers and (not taken or weight < self._limit):
            answer = client.answers.popleft()
            weight += 0 if answer.value is None else self._weigh(answer.value)
            taken.append(answer)
        return taken
