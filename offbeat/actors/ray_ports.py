"""The controller's ports over Ray actors: thin adapters, one remote call each.

Payload handles are passed as top-level arguments, so that Ray resolves them: small objects are sent
inside the call, large ones are read from shared memory.

Also holds the controller's side of the spool, over Ray's object store.
"""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from offbeat.actors.call import Handle, await_reply
from offbeat.actors.call_batching import BatchedReply, CallBatcher, Exchange
from offbeat.actors.ray_worker import RayWorker
from offbeat.messages.failures import ActorLost, ArgumentLost, ReleaseLost
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.training import Chunk
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.messages.worker_report import OnJoined, OnLost, OnReport
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool_reader import Hold, SpoolReader

Places = tuple[tuple[tuple[int, int], ...], ...]
"""Location of each group's columns: ``(object, index in it)``, in the order written."""


@dataclass(frozen=True, slots=True)
class PayloadHandle:
    """Handle of one group's columns inside an object that may hold columns of several groups.

    The object is freed with the last handle to it. A copy on disk is kept while ``hold`` is
    referenced.
    """

    ref: "ray.ObjectRef[list[Columns]]"
    index: int
    hold: object = field(default=None, compare=False, repr=False)


class RayRollouts:
    """Port of all environment workers, used in turn. Tasks for the same worker are batched.

    Lost workers are skipped. If all are lost, a group waits until one is back.
    """

    def __init__(
        self, workers: Sequence[Handle], hold: Callable[[Receipt], object] = lambda _: None
    ) -> None:
        """Create the port. ``hold`` is called for each finished group.

        The result of ``hold`` is kept as long as the payload exists.
        """
        self._workers = [
            RayWorker(f"environment-{index}", handle) for index, handle in enumerate(workers)
        ]
        self._hold = hold
        self._fence: Fence | None = None
        self._calls = [CallBatcher(self._exchange_with(worker)) for worker in self._workers]
        self._turn = itertools.cycle(range(len(self._workers)))

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, PayloadHandle]:
        """Roll out a task.

        Return the receipt by value, and a reference to the payload. This process owns the payload.
        """
        self._fence = fence
        index, clock = self._next(), asyncio.get_running_loop().time
        give_up_at = clock() + task.deadline_s
        worker = self._workers[index]
        worker.introduce()
        try:
            await worker.back()
            return await self._calls[index].call(task)
        except asyncio.CancelledError:
            if clock() >= give_up_at:
                worker.probe()
            raise

    def report_joined(self, on_joined: OnJoined) -> None:
        """Set the callback for each worker process that replies for the first time."""
        for worker in self._workers:
            worker.on_joined = on_joined

    def report_lost(self, on_lost: OnLost) -> None:
        """Set the callback for each lost worker process, called before its groups fail."""
        for worker in self._workers:
            worker.on_lost = on_lost

    def report_to(self, on_report: OnReport) -> None:
        """Set the callback for the report that a worker process sends with each reply."""
        for worker in self._workers:
            worker.on_report = on_report

    def _next(self) -> int:
        first, workers = next(self._turn), self._workers
        in_turn = [(first + later) % len(workers) for later in range(len(workers))]
        return next((each for each in in_turn if not workers[each].gone), first)

    async def close(self) -> None:
        for calls in self._calls:
            calls.close()
        async with asyncio.TaskGroup() as closing:
            for worker in self._workers:
                worker.close()
                closing.create_task(self._close_one(worker))

    @staticmethod
    async def _close_one(worker: RayWorker) -> None:
        with contextlib.suppress(ActorLost):
            worker.closed(await await_reply(worker.handle.close.remote(), worker.name, "close"))

    def _exchange_with(
        self, worker: RayWorker
    ) -> Exchange[RolloutTask, tuple[Receipt, PayloadHandle]]:
        async def exchange(
            requests: Sequence[tuple[int, RolloutTask]],
            cancelled: Sequence[int],
            doubted: Sequence[int],
        ) -> list[BatchedReply[tuple[Receipt, PayloadHandle]]]:
            answers, payload = worker.handle.exchange.remote(
                self._fence, requests, cancelled, doubted
            )
            places = itertools.count()

            def pack(receipt: Receipt) -> tuple[Receipt, PayloadHandle]:
                return receipt, PayloadHandle(payload, next(places), self._hold(receipt))

            return [
                BatchedReply(each.id, each.value and pack(each.value), each.failure)
                for each in await worker.answer(answers, "rollout")
            ]

        return exchange


class RayGenerator:
    """Port of one engine actor."""

    def __init__(self, name: str, engine: Handle) -> None:
        self.name = name
        self._engine = engine

    async def state(self, fence: Fence) -> EngineState:
        return await await_reply(self._engine.state.remote(fence), self.name, "state")

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        # Ray replaces handles with their content only if the handles themselves are arguments
        ref = self._engine.load.remote(fence, epoch, release.without_handles(), *release.handles)
        try:
            return await await_reply(ref, self.name, release.loading)
        except ArgumentLost as lost:
            raise ReleaseLost(self.name, release.version, lost.detail) from lost

    async def restart(self) -> None:
        ray.kill(self._engine, no_restart=False)

    async def retire(self) -> None:
        ray.kill(self._engine, no_restart=True)

    async def close(self) -> None:
        with contextlib.suppress(ActorLost):
            await await_reply(self._engine.close.remote(), self.name, "close")


def flat(chunk: Chunk) -> tuple[Places, list[Any]]:
    """Return every object of a chunk once, and where each group's columns are in them."""
    refs: dict[Any, int] = {}
    places = tuple(
        tuple((refs.setdefault(handle.ref, len(refs)), handle.index) for handle in handles)
        for handles in chunk.payloads
    )
    return places, list(refs)


class RaySpool(SpoolReader[PayloadHandle]):
    """Spool that loads groups into objects of this process."""

    def make_payload(self, columns: Columns, hold: Hold) -> PayloadHandle:
        return PayloadHandle(ray.put([columns]), 0, hold)

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return the groups with a lost object. This process owns all objects, so it can tell."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, _lost, payloads)


def _lost(payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
    """Return the groups with a lost object. Check each object once, without waiting for it."""
    lost: dict[Any, bool] = {}
    gone = set[int]()
    for prompt_index, handles in payloads.items():
        for ref in (handle.ref for handle in cast("tuple[PayloadHandle, ...]", handles)):
            if ref not in lost:
                lost[ref] = _is_lost(ref)
            if lost[ref]:
                gone.add(prompt_index)
    return gone


def _is_lost(ref: "ray.ObjectRef[Any]") -> bool:
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return False  # presumably on another machine
    except ObjectLostError:
        return True
    return False
