"""Ray actor of an environment worker. It finds its engines by name."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

from collections.abc import Sequence
from typing import Final

import ray

from offbeat.actors.call import Handle, await_reply
from offbeat.actors.call_batching import BatchedReply, CallBatcher, Exchange, ReplyBatcher
from offbeat.actors.ray_run_files import set_up_files
from offbeat.actors.ray_worker import LIVENESS
from offbeat.messages.failures import ActorLost, OffbeatError, RemoteBug
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.text import first_line
from offbeat.messages.worker_report import WorkerReport
from offbeat.rollouts.worker import EnvironmentSpec, EnvironmentWorker
from offbeat.transfer_queue.schema import Columns

COALESCED_BYTES: Final = 4 * 2**20
"""Size in bytes from which no further group is added to a reply.

A reply is one object in Ray's store, which costs about 2 ms of CPU regardless of its size. The object is
freed with its last group, so a larger bound would hold memory of trained groups for longer.
"""


class EnvironmentActor:
    """Async actor of one environment worker."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        place = set_up_files(spec.name, spec.run_dir, spec.sharing, spec.config)
        self._spec = spec
        self._engines: dict[str, CallBatcher[GenerateRequest, GenerateResult]] = {}
        self._worker = EnvironmentWorker(spec, place, self._generate)
        self._groups = ReplyBatcher(
            self._worker.roll_out,
            _as_failure,
            weigh=lambda group: group[0].payload_bytes,
            limit=COALESCED_BYTES,
        )

    @ray.method(num_returns=2)
    async def exchange(
        self,
        fence: Fence,
        requests: Sequence[tuple[int, RolloutTask]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> tuple[tuple[WorkerReport, list[BatchedReply[Receipt]]], list[Columns]]:
        """Roll groups out, as described in ``offbeat.actors.call_batching``.

        Returns:
            First the report of this process and the receipts, for the controller. Then the columns
            of the successful groups, in the same order, for the trainer. Failures are
            ``RolloutFailed``, classified where they happened.
        """
        self._worker.admit(fence)
        incarnation = f"{fence.run_id}/{fence.incarnation}"
        answers = await self._groups.exchange(
            "controller", incarnation, requests, cancelled, doubted
        )
        receipts = [
            BatchedReply(each.id, each.value[0] if each.value else None, each.failure)
            for each in answers
        ]
        columns = [each.value[1] for each in answers if each.value]
        return (self._worker.report(), receipts), columns

    async def _generate(self, engine: str, request: GenerateRequest) -> GenerateResult:
        return await self._engine(engine).call(request)

    def _engine(self, name: str) -> CallBatcher[GenerateRequest, GenerateResult]:
        """Return the engine with this name, which is looked up at its first request.

        A retired engine has no actor.

        Raises:
            ActorLost: No actor has the name.
        """
        engine = self._engines.get(name)
        if engine is None:
            try:
                handle = ray.get_actor(self._spec.engines[name])
            except ValueError as error:
                raise ActorLost(name, "look-up", first_line(error)) from error
            exchange = _exchange_with(name, handle, self._spec.name, self._worker.incarnation)
            engine = self._engines[name] = CallBatcher(exchange)
        return engine

    async def ping(self) -> WorkerReport:  # a reply shows that the process is alive
        return self._worker.report()

    @ray.method(concurrency_group=LIVENESS)
    async def alive(self) -> None: ...  # also answers while an environment blocks the other methods

    async def close(self) -> WorkerReport:
        """Close the worker. Return the last report, which counts the calls of cancelled work."""
        await self._groups.close()
        return await self._worker.close()


def _exchange_with(
    engine: str, handle: Handle, worker: str, incarnation: str
) -> Exchange[GenerateRequest, GenerateResult]:
    async def exchange(
        requests: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int],
    ) -> Sequence[BatchedReply[GenerateResult]]:
        ref = handle.exchange.remote(worker, incarnation, requests, cancelled, doubted)
        return await await_reply(ref, engine, "generate")

    return exchange


def _as_failure(error: Exception) -> OffbeatError:
    """Return a typed error of ``roll_out`` unchanged. Any other error is a bug in this package."""
    if isinstance(error, OffbeatError):
        return error
    return RemoteBug("environment worker", "rollout", type(error).__name__, first_line(error))
