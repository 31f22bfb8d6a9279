"""The controller's trainer port over Ray actors: all ranks as one.

every call          goes to all ranks, in the same order; training calls have a share for each
a rank raises       the others end the call too, together or at their timeout; the step is aborted
columns are lost    PayloadLost, with their groups; the ranks are healthy
a rank dies         ActorLost for any rank, because the controller replaces all of them
ranks disconnect    the same
a rank hangs        the others give up at their timeout, which is shorter than any step's deadline

The module also has the trainer port for runs without engines, which need no published weights.

It also asks engines for their layout, so that trainer ranks cut releases for it. All engines have
the same layout. Cutting only saves bytes: an engine can load its part from any release. So the wait
for the layout is short. If no engine answers, releases are published without it.
"""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import ray
import structlog

from offbeat.actors.call import Handle, await_reply
from offbeat.actors.ray_ports import PayloadHandle, Places, flat
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.trainer import TorchTrainerConfig, TrainerConfig
from offbeat.generators.rows import make_empty_release
from offbeat.messages.failures import (
    ActorLost,
    ArgumentLost,
    OffbeatError,
    PayloadLost,
    StartFailed,
    UnfitGroup,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import WeightRelease
from offbeat.trainers.errors import ColumnsMissing, UnfitColumns
from offbeat.trainers.memory import with_highest
from offbeat.trainers.ranks.dispatch import Replicas, minibatch_shares
from offbeat.trainers.ranks.peers import PeerFailed, WorldBroken
from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.transport import make_release

log = structlog.stdlib.get_logger()
AskLayout = Callable[[Fence], Awaitable[EngineLayout | None]]
FIRST_SHARE: Final = 0.5
"""Share of ``sync.deadline_s`` that the first release may wait for engines that are starting."""
_LATER_S: Final = 1.0  # wait of each later release


class EngineLayouts:
    """Asks all engines for their layout until one answers, and keeps the answer."""

    def __init__(self, engines: Mapping[str, AskLayout], first_s: float) -> None:
        """``first_s``: seconds that the first call may wait. Later calls wait a second at most."""
        self._engines, self._limit_s = engines, first_s
        self._layout: EngineLayout | None = None
        self._is_over = False  # an engine answered, or no engine has a layout

    async def first(self, fence: Fence) -> EngineLayout | None:
        """Return the layout, or None if no engine has recorded one or answered in time."""
        if not self._is_over:
            limit_s, self._limit_s = self._limit_s, _LATER_S
            try:
                async with asyncio.timeout(limit_s):
                    await self._ask(fence)
            except TimeoutError:
                log.info("weights.layout_unknown", waited_s=limit_s)
        return self._layout

    async def _ask(self, fence: Fence) -> None:
        asked = [asyncio.ensure_future(ask(fence)) for ask in self._engines.values()]
        try:
            failures = 0
            for answer in asyncio.as_completed(asked):
                try:
                    self._layout = await answer
                except OffbeatError:  # the engine is synced or replaced like any other that fails
                    failures += 1
                if self._layout is not None:
                    self._is_over = True
                    return
            self._is_over = not failures
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def make_layouts(engines: Mapping[str, Handle], deadline_s: float) -> EngineLayouts:
    """Create the ``EngineLayouts`` of engine actors, for releases with this ``sync.deadline_s``."""

    def make_ask(name: str, engine: Handle) -> AskLayout:
        return lambda fence: await_reply(engine.layout.remote(fence), name, "record its layout")

    asks = {name: make_ask(name, engine) for name, engine in engines.items()}
    return EngineLayouts(asks, FIRST_SHARE * deadline_s)


T = TypeVar("T")
_GRACE_S: Final = 5.0
"""Seconds to wait for the other ranks after one has failed. Healthy ranks detect it at once."""
_PATIENCE: Final = 0.7
"""Share of ``step_deadline_s`` that ranks wait for each other. The controller waits longer."""


class RayTrainer:
    """Presents all trainer ranks as one trainer.

    Ray restarts a killed rank, with the initial model. Until all ranks are up, every call raises
    ``ActorLost``. When ``state`` returns for the first time, all ranks are up. A rank that is being
    killed may still reply for a moment. ``state`` ignores that reply.
    """

    def __init__(
        self,
        ranks: Sequence[Handle],
        config: TrainerConfig | None = None,
        layouts: EngineLayouts | None = None,
    ) -> None:
        """Create the port.

        Args:
            ranks: The trainer ranks.
            config: Defines how ranks share model and data. None means one rank.
            layouts: Layout of the engines, by which ranks cut releases. If None, ranks send each
                engine the whole release.
        """
        config = config or TorchTrainerConfig()
        self._ranks = list(ranks)
        self._replicas = Replicas.of(config) if len(self._ranks) > 1 else Replicas()
        self._timeout_s = _PATIENCE * config.step_deadline_s
        self._grace_s = min(_GRACE_S, (1 - _PATIENCE) * config.step_deadline_s / 2)
        # Handles of a release, and of its delta, known from the first state
        self._handles, self._delta_handles = 0, 0
        self._incarnations, self._killed = list[str](), set[str]()  # names of incarnations
        self._joining, self._joined = asyncio.Lock(), list[str]()  # incarnations with a world
        self._layouts, self._planned = layouts, list[str]()  # incarnations that know the layout
        self._numbers = itertools.count(1)  # numbers of the calls with columns that are sent ahead

    # --- start and end ---------------------------------------------------------------------------

    async def state(self, fence: Fence) -> TrainerState:
        """Return the ranks' state. First form their process group if needed.

        A caller may repeat the call while an earlier call is open. The group is formed only once.
        """
        identities = await self._all(lambda rank: rank.identity.remote(fence), "start")
        incarnations = [incarnation for incarnation, _ in identities]
        if dying := self._killed.intersection(incarnations):
            raise ActorLost("trainer", "start", f"{', '.join(sorted(dying))} is being killed")
        self._incarnations = incarnations
        worlds = {world for _, world in identities}
        if len(worlds) > 1:  # one was restarted, and the others wait for its former incarnation
            await self.restart()
            raise ActorLost("trainer", "start", "its ranks are not of one world")
        if worlds == {""}:
            async with self._joining:
                if self._joined != incarnations:  # else an earlier call has formed it meanwhile
                    await self._meet(fence)
                    self._joined = incarnations
        about = await self._first(lambda rank: rank.about.remote(fence), "start")
        _, self._handles, self._delta_handles = about
        return (await self._all(lambda rank: rank.state.remote(fence), "start"))[0]

    async def _meet(self, fence: Fence) -> None:
        """Make the ranks join a new process group."""
        listen = self._ranks[0].listen.remote(fence)
        store = await self._reply(0, listen, "start")
        at = WorldRendezvous(self._incarnations[0], store, len(self._ranks), self._timeout_s)
        await self._all(lambda rank: rank.join.remote(fence, at), "start")

    async def restart(self) -> None:
        self._killed.update(self._incarnations)
        for rank in self._ranks:
            ray.kill(rank, no_restart=False)

    async def close(self) -> None:
        with contextlib.suppress(ActorLost):
            await self._all(lambda rank: rank.close.remote(), "close")

    # --- a step ----------------------------------------------------------------------------------

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        shares = self._shares(chunk)
        replies = list[tuple[Any, Any]]()
        sent = list[_Sent]()
        for rank, handle in enumerate(self._ranks):
            places, columns = self._send(rank, fence, shares, chunk, sent)
            replies.append(tuple(handle.prepare_logprobs.remote(fence, loss, places, *columns)))
        written = [meta for meta, _ in replies]
        answers = await self._of_groups(chunk, shares, written, sent, "prepare_logprobs")
        made: dict[int, tuple[int, PayloadHandle]] = {}
        names = tuple[str, ...]()
        for share, rank in enumerate(self._replicas.leaders):
            own, sizes = answers[rank]
            names = names or own
            for index, (place, size) in enumerate(zip(shares[share], sizes, strict=True)):
                made[place] = size, PayloadHandle(replies[rank][1], index)
        sizes, payloads = zip(*(made[place] for place in sorted(made)), strict=True)
        return PreparedColumns(names, sizes, payloads)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        await self._all(lambda rank: rank.begin_train_step.remote(fence, key, loss), "begin")

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        shares = self._shares(chunk)
        calls, sent = list[Any](), list[_Sent]()
        for rank, handle in enumerate(self._ranks):
            part = select_groups(chunk, self._find_places(rank, shares))
            places, columns = self._send(rank, fence, shares, chunk, sent)
            calls.append(
                handle.train_microbatch.remote(
                    fence,
                    key,
                    chunk.prompt_indices,
                    part.advantages,
                    part.minibatches,
                    places,
                    *columns,
                )
            )
        answers = await self._of_groups(chunk, shares, calls, sent, "microbatch")
        return combine_results([answers[rank] for rank in self._replicas.leaders])

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        return with_highest(
            await self._all(lambda rank: rank.finish_train_step.remote(fence, key), "finish")
        )

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        await self._all(lambda rank: rank.abort_train_step.remote(fence, key), "abort")

    # --- weights and states ----------------------------------------------------------------------

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        first, *others = self._ranks
        handles = self._handles + self._delta_handles
        call = first.publish_weights.options(num_returns=1 + handles)
        incarnations, layout = self._incarnations, await self._new_layout(fence)
        content = (fence, version) if layout is None else (fence, version, ray.put(layout))
        meta, *chunks = call.remote(*content)
        helping = [each.publish_weights.remote(*content) for each in others]
        published, *_ = await self._gather([meta, *helping], "publish")
        if layout is not None:
            self._planned = incarnations
        return make_release(version, published, tuple(chunks), self._delta_handles)

    async def _new_layout(self, fence: Fence) -> EngineLayout | None:
        """Return the layout of the engines if these ranks do not know it yet."""
        if self._layouts is None or self._planned == self._incarnations:
            return None
        return await self._layouts.first(fence)

    async def save(self, fence: Fence, step: int) -> None:
        await self._all(lambda rank: rank.save.remote(fence, step), "save")

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        return await self._first(
            lambda rank: rank.save_checkpoint.remote(fence, version), "checkpoint"
        )

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        return await self._first(lambda rank: rank.restore.remote(fence, at_most), "restore")

    # --- all ranks at once -----------------------------------------------------------------------

    def _shares(self, chunk: Chunk) -> tuple[tuple[int, ...], ...]:
        """Return the indices of each share's groups in the chunk. One rank gets the whole chunk."""
        places = range(len(chunk.prompt_indices))
        if self._replicas.data == 1:
            return (tuple(places),)
        tokens = chunk.group_tokens or (1,) * len(chunk.prompt_indices)
        place_of = {prompt_index: place for place, prompt_index in enumerate(chunk.prompt_indices)}
        minibatches = chunk.minibatches or (0,) * len(chunk.prompt_indices)
        assigned = minibatch_shares(
            dict(zip(chunk.prompt_indices, tokens, strict=True)),
            dict(zip(chunk.prompt_indices, minibatches, strict=True)),
            self._replicas.data,
        )
        return tuple(tuple(place_of[prompt_index] for prompt_index in share) for share in assigned)

    def _find_places(self, rank: int, shares: Sequence[Sequence[int]]) -> list[int]:
        """Return the indices of a rank's groups in the chunk, share after share."""
        return [place for share in self._replicas.list_shares(rank) for place in shares[share]]

    def _send(
        self,
        rank: int,
        fence: Fence,
        shares: Sequence[Sequence[int]],
        chunk: Chunk,
        sent: list["_Sent"],
    ) -> tuple[Places, list[Any]]:
        """Return the location of a rank's columns, and the arguments that carry them.

        A single rank gets the columns with the call. Several ranks compute together, so a rank must
        report lost columns inside the call. Therefore their columns are sent ahead of the call.
        """
        places, refs = flat(select_groups(chunk, self._find_places(rank, shares)))
        if len(self._ranks) == 1 or not refs:
            return places, [0, *refs]
        number = next(self._numbers)
        sent.append(_Sent(rank, self._ranks[rank].hold.remote(fence, number, *refs)))
        return places, [number]

    async def _of_groups(
        self,
        chunk: Chunk,
        shares: Sequence[Sequence[int]],
        refs: Sequence[Any],
        sent: Sequence["_Sent"],
        during: str,
    ) -> list[Any]:
        """Return the replies of all ranks to a call with groups.

        Raises:
            UnfitGroup: A rank cannot train one of the groups.
            PayloadLost: The columns of some groups are lost.
            OffbeatError: As in ``_gather``.
        """
        try:
            return await self._gather(refs, during)
        except UnfitColumns as unfit:
            place = self._find_places(unfit.rank, shares)[unfit.place]
            raise UnfitGroup(unfit.rank, chunk.prompt_indices[place], str(unfit)) from unfit
        except ArgumentLost as lost:
            raise payload_lost(chunk, [lost]) from lost
        except ColumnsMissing as missing:
            raise payload_lost(chunk, await self._losses(sent)) from missing

    async def _losses(self, sent: Sequence["_Sent"]) -> list[ArgumentLost]:
        """Return which of the columns sent ahead of a call were lost.

        Raises:
            OffbeatError: Columns did not arrive for another reason.
        """
        calls = [self._reply(each.rank, each.reply, "hold") for each in sent]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failures = [each for each in answers if isinstance(each, BaseException)]
        losses = [each for each in failures if isinstance(each, ArgumentLost)]
        if len(losses) < len(failures) or not losses:
            others = [each for each in failures if not isinstance(each, ArgumentLost)]
            raise others[0] if others else ActorLost("trainer", "hold", "columns did not arrive")
        return losses

    async def _first(self, call: Callable[[Handle], Any], during: str) -> Any:  # noqa: ANN401 -- what a remote call answers
        return (await self._all(call, during))[0]

    async def _all(self, call: Callable[[Handle], Any], during: str) -> list[Any]:
        return await self._gather([call(rank) for rank in self._ranks], during)

    async def _gather(self, refs: Sequence[Any], during: str) -> list[Any]:
        """Return the replies of all ranks.

        Raises:
            ActorLost: A rank died, lost contact with the others, or does not reply after another
                rank failed.
            OffbeatError: The error of a rank, if all have replied.
        """
        if len(refs) == 1:
            return [await self._reply(0, refs[0], during)]
        calls = [
            asyncio.ensure_future(self._reply(rank, ref, during)) for rank, ref in enumerate(refs)
        ]
        try:
            _, late = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if late:  # a rank failed
                await asyncio.wait(late, timeout=self._grace_s)
            failures = {
                rank: failure
                for rank, call in enumerate(calls)
                if call.done() and (failure := call.exception()) is not None
            }
            if failures:
                silent = [rank for rank, call in enumerate(calls) if not call.done()]
                raise pick_failure(failures, silent, during)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _reply(self, rank: int, ref: "ray.ObjectRef[T]", during: str) -> T:
        return await await_reply(ref, f"trainer rank {rank}", during)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Columns that were sent to a rank ahead of a call."""

    rank: int
    reply: Any  # reference to that call's reply


def payload_lost(chunk: Chunk, losses: Sequence[ArgumentLost]) -> PayloadLost | ArgumentLost:
    """Return the failure for lost objects. It names the chunk's groups with columns in them."""
    gone = {each.object_id for each in losses}
    prompt_indices = tuple(
        prompt_index
        for prompt_index, handles in zip(chunk.prompt_indices, chunk.payloads, strict=True)
        if any(handle.ref.hex() in gone for handle in handles)
    )
    first = losses[0]
    return PayloadLost(prompt_indices, first.during, first.detail) if prompt_indices else first


def pick_failure(
    failures: dict[int, BaseException], silent: Sequence[int], during: str
) -> BaseException:
    """Return the most specific of all ranks' failures."""
    for kind in (StartFailed, ActorLost):
        if gone := next((each for each in failures.values() if isinstance(each, kind)), None):
            return gone
    first = str(next(iter(failures.values())))
    if silent:
        detail = f"no answer after another rank failed: {first}"
        return ActorLost(f"trainer rank {silent[0]}", during, detail)
    own = [each for each in failures.values() if not isinstance(each, PeerFailed)]
    if any(isinstance(each, WorldBroken) for each in own):
        return ActorLost("trainer", during, first)
    return own[0] if own else ActorLost("trainer", during, first)


def select_groups(chunk: Chunk, places: Sequence[int]) -> Chunk:
    """Return the groups of a chunk at these indices."""
    return Chunk(
        tuple(chunk.prompt_indices[place] for place in places),
        tuple(chunk.payloads[place] for place in places),
        tuple(chunk.advantages[place] for place in places) if chunk.advantages else (),
        minibatches=tuple(chunk.minibatches[place] for place in places)
        if chunk.minibatches
        else (),
    )


def combine_results(replies: Sequence[ChunkResult]) -> ChunkResult:
    """Combine the results of one rank per replica: add the counts, and take the maximum time."""
    return ChunkResult(
        tokens=sum(each.tokens for each in replies),
        sequences=sum(each.sequences for each in replies),
        microbatches=sum(each.microbatches for each in replies),
        compute_s=max(each.compute_s for each in replies),
    )


class UnpublishedTrainer(RayTrainer):
    """Port of the trainer ranks for runs in which nothing loads the weights."""

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        """Return an empty release of the version without calling a rank."""
        del fence
        return make_empty_release(version)
