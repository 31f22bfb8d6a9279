"""Weight sync of the fleet: publishes a release, has every engine load it, counts the acks.

All syncs go through one lock: the regular sync after a step, and the sync of a restarted engine. If
an engine does not ack in time, or its pump gives up on it, it stops serving while the other engines
continue. That engine is then synced separately, outside the lock and the regular syncs, until it
acks a release. So an engine that hangs in its transfers delays the others by only one deadline. If
a release is lost with the trainer's machine, no engine is at fault. The release is published again
as soon as no step is being finished.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec
import structlog

from offbeat.config.limits import shares_weights
from offbeat.controller.engine_record import EngineRecord, Health
from offbeat.controller.errors import TrainerLost
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.lifecycle import RunPhase
from offbeat.controller.pending_waits import Pump
from offbeat.controller.ports import Generator
from offbeat.controller.signal import Signal
from offbeat.controller.state import RunState
from offbeat.controller.trainer_client import TrainerClient
from offbeat.controller.weight_guards import CanaryWatch, UnchangedReleases
from offbeat.messages.failures import (
    ActorLost,
    BaseRefused,
    CanaryFailed,
    Component,
    DeadlineExceeded,
    EngineUnavailable,
    ReleaseLost,
    StaleFence,
    TrainStepFailed,
    WeightSyncFailed,
)
from offbeat.messages.weights import FullReason, WeightRelease, WeightsAck
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

log = structlog.stdlib.get_logger()
_REPUBLISHED: Final = 3  # times in a row without an ack; then the trainer is replaced
_LEFT_BEHIND = (ActorLost, DeadlineExceeded, EngineUnavailable, WeightSyncFailed, StaleFence)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Outcome of one sync, with pause and transfer times."""

    nbytes: int
    pause_s: float  # longest over the engines
    transfer_s: float  # longest over the engines


class WeightSync:
    """Owns the current release and the sync epoch.

    consumes   versions that the train pump asks it to publish
    produces   releases, and engines that serve them
    waits for  a version to publish, rollouts in flight (mode ``drain``), the engines
    woken by   the train pump after a step, replies of rollouts, acks

    In mode ``keep`` the trainer continues at once. Its snapshot is queued before the calls of the
    next step, engines load the release meanwhile, and ``serving_version`` rises when they ack. The
    next snapshot waits for the acks. A step is not finished before the snapshot of the last step
    exists. So a slow fleet slows the trainer down, and no weights change while they are read.
    Engines that share the weights decode nothing from ``finish`` to their ack. Therefore a step is
    not finished during an evaluation either.

    Sketch of the loop around one version, in mode ``keep``::

        await sync.request_release(version)  # train pump: the trainer copies its weights
        release = await publish(version)     # sync pump: chunks, manifest, digest
        acks = await load_weights(engines)   # every engine in sync verifies, swaps and acks
        await sync.wait_for_snapshot()       # train pump, before ``finish`` of the next step
        await sync.wait_until_served()       # at the end of the run, and in mode ``drain``
    """

    def __init__(
        self,
        state: RunState,
        trainer_client: TrainerClient,
        generators: Mapping[str, Generator],
    ) -> None:
        self._state, self._trainer_client, self._generators = state, trainer_client, generators
        self._lock = asyncio.Lock()
        self._shares_weights = shares_weights(state.config)
        self._epoch = state.first_of_incarnation  # engines refuse epochs of former controllers
        self._released = Signal()
        self._republished = 0  # since an engine last acked one
        self._report: SyncReport | None = None  # of the last sync, until ``take_report``
        self.unchanged, self.canaries = UnchangedReleases(), CanaryWatch(generators)
        self.deltas = DeltaOffers(enabled=state.config.sync.delta)
        self.missed = set[str]()  # engines that failed to load a release that is now lost

    # --- what the train pump calls ---------------------------------------------------------------

    async def request_release(self, version: int) -> None:
        """Request the release of the trainer's current weights.

        In mode ``keep``, this returns once the trainer has been called. If an earlier release is in
        transit, it returns at once, and the call follows later. In mode ``drain``, it returns when
        the release is served.

        Raises:
            TrainerLost: The trainer could not make a release.
        """
        sync = self._state.sync
        sync.requested_version = version
        await self._until(
            "the call for a snapshot", lambda: sync.is_busy or sync.requested_version is None
        )
        if self._state.config.sync.mode == "drain":
            await self.wait_until_served()

    async def wait_for_snapshot(self) -> None:
        """Wait until the weights may change: no pending snapshot or evaluation uses them."""
        sync, fleet, shared = self._state.sync, self._state.fleet, self._shares_weights
        await self._until(
            "the snapshot of the last step" + (", or an evaluation" if shared else ""),
            lambda: sync.requested_version is None and not (shared and fleet.is_any_pinned),
        )

    async def wait_until_served(self) -> None:
        """Wait until every live engine has loaded the release or was left behind."""
        sync = self._state.sync
        await self._until("the weight sync", lambda: sync.is_settled)

    def take_report(self) -> SyncReport | None:
        """Return the report of the last sync, or None if no sync has ended since the last call."""
        report, self._report = self._report, None
        return report

    def forget(self) -> None:
        """Forget the release before a rewind. Results of transfers in progress are ignored."""
        sync = self._state.sync
        sync.requested_version, sync.release, sync.is_lost = None, None, False
        self._republished = 0
        self.deltas.forget()

    async def _until(self, target: str, predicate: Callable[[], bool]) -> None:
        state = self._state
        await state.waits.until(
            Pump.TRAIN, target, lambda: predicate() or state.trainer.lost is not None
        )
        state.trainer.check()

    # --- the pump --------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Publish each requested release and sync the engines to it."""
        state, sync = self._state, self._state.sync
        while True:
            await state.waits.until(Pump.SYNC, "a version to publish", self._may_publish)
            if not self._may_publish():
                continue  # a step is being finished by now
            if sync.requested_version is None:
                sync.requested_version = state.ledger.trainer_version
            release = await self._publish(sync.requested_version)
            if release is not None:
                if state.config.sync.mode == "drain":
                    await self._drain()
                async with self._lock:
                    acks = await self._sync(state.fleet.in_sync_set(), release)
                self._report = _report(release, acks) or self._report
            sync.is_busy, sync.is_gate_open = False, True
            state.observer.times.engines_wait(GeneratorTime.WAITING_GATE)
            if state.lifecycle.phase is RunPhase.SYNCING:
                state.lifecycle.enter(RunPhase.RUNNING)
            for engine in state.fleet.serving:
                if self.is_behind(engine):
                    state.engine_signals[engine.name].notify()

    def _may_publish(self) -> bool:
        """Return whether a release is due and can be made now, while the weights do not change."""
        sync = self._state.sync
        return sync.requested_version is not None or (
            sync.is_lost and self._state.ledger.intent is None
        )

    async def _publish(self, version: int) -> WeightRelease | None:
        """Have the trainer publish a release. Return None if it could not.

        The train pump handles that failure.
        """
        state, sync, trainer = self._state, self._state.sync, self._trainer_client.trainer
        sync.is_busy = True
        if state.lifecycle.phase is RunPhase.RUNNING:
            state.lifecycle.enter(RunPhase.SYNCING)
        waiter = f"publish of version {version}"
        lineage = state.ledger.lineage
        try:
            with state.observer.trainer_in(TrainerTime.SYNC, Failpoint.PUBLISHING):
                release = await self._trainer_client.call(
                    waiter,
                    lambda: trainer.publish_weights(state.fence, version),
                    state.config.sync.deadline_s,
                )
        except (TrainerLost, TrainStepFailed) as failure:
            if state.ledger.lineage == lineage and sync.requested_version is not None:
                lost = failure if isinstance(failure, TrainerLost) else None
                state.trainer.lost = lost or TrainerLost(waiter, str(failure))
                sync.requested_version = None
            return None  # after a rewind another version may be requested: that one is next
        if sync.requested_version is None or state.ledger.lineage != lineage:
            return None  # forgotten meanwhile
        self.unchanged.released(sync.release, release)
        self.deltas.released(release)
        sync.requested_version, sync.release, sync.is_lost = None, release, False
        state.ledger.released(version, release.digest)
        state.fleet.released(version)
        self._released.notify()
        return release

    async def first_release(self, waiter: str) -> None:
        """Wait until a release is available for an engine to load."""
        sync = self._state.sync
        if not sync.is_there:
            until = self._released.wait_for(lambda: sync.is_there)
            await self._state.waits.local(waiter, target="weights to serve", until=until)

    def is_behind(self, engine: EngineRecord) -> bool:
        """Return whether the engine serves an older release and no sync of it is in progress."""
        sync = self._state.sync
        release = sync.release
        return (
            release is not None
            and not (sync.is_busy or sync.is_lost or engine.pinned)
            and engine.health is Health.HEALTHY
            and engine.version != release.version
        )

    async def catch_up(self, name: str) -> bool:
        """Sync one engine to the current release, and return False if that failed."""
        engine, sync = self._state.fleet.engines[name], self._state.sync
        if engine.syncs_apart and sync.release is not None and not sync.is_lost:
            acks = await self._sync([name], sync.release)
            if acks[0] is not None or engine.syncs_apart:
                return acks[0] is not None
            # It loaded a release, but not the current one. The next sync waits for it again.
        async with self._lock:
            if sync.release is None or sync.is_lost or engine.is_given_up:
                return False
            if engine.pinned:
                return True  # pinned during the wait for the lock; it catches up when unpinned
            if engine.health is Health.HEALTHY and engine.version == sync.release.version:
                return True  # the sync that held the lock served it as well
            acks = await self._sync([name], sync.release)
        return acks[0] is not None

    async def sender_answers(self, name: str) -> bool:
        """Return whether the trainer answers, after an engine failed to receive a release from it.

        If it does not, the trainer is lost and the engine is not at fault. A stored release needs
        no trainer.
        """
        state = self._state
        if state.config.sync.transport == "object_store":
            return True
        if not self._may_lose_trainer():
            return False  # it is being replaced
        trainer, waiter, lineage = (
            self._trainer_client.trainer,
            f"weights for {name}",
            state.ledger.lineage,
        )
        try:
            await self._trainer_client.call(
                waiter, lambda: trainer.state(state.fence), state.config.trainer.step_deadline_s
            )
        except (TrainerLost, TrainStepFailed) as failure:
            if state.ledger.lineage == lineage and self._may_lose_trainer():
                state.trainer.lost = TrainerLost(waiter, str(failure))
            return False
        return True

    def _may_lose_trainer(self) -> bool:
        state = self._state
        is_up = state.lifecycle.phase in (RunPhase.RUNNING, RunPhase.SYNCING)
        return is_up and state.trainer.lost is None

    async def _drain(self) -> None:
        """Close the gate and wait for every group in flight."""
        state = self._state
        state.sync.is_gate_open = False
        state.observer.times.engines_wait(GeneratorTime.WAITING_WEIGHTS)
        await state.waits.until(
            Pump.SYNC, "rollouts in flight", lambda: state.ledger.in_flight == 0
        )

    async def _sync(self, names: list[str], release: WeightRelease) -> list[WeightsAck | None]:
        self._epoch += 1
        for name in names:  # before anything else runs: none of them may be pinned from here on
            self._state.fleet.load_began(name)
            self.missed.discard(name)
        self._state.observer.reached(Failpoint.TRANSFERRING)
        async with asyncio.TaskGroup() as transfers:
            tasks = [
                transfers.create_task(
                    self._sync_one(name, self._epoch, release), name=f"sync {name}"
                )
                for name in names
            ]
            if tasks:
                await asyncio.wait(tasks)
        return [task.result() for task in tasks]

    async def _sync_one(self, name: str, epoch: int, release: WeightRelease) -> WeightsAck | None:
        try:
            return await self._transfer(name, epoch, release)
        finally:
            self._state.fleet.load_ended(name)

    async def _transfer(self, name: str, epoch: int, release: WeightRelease) -> WeightsAck | None:
        """Sync one engine. Return None if it is left behind as STALE."""
        state, since = self._state, asyncio.get_running_loop().time()
        try:
            with state.observer.times.syncing(state.fleet.engines[name]):
                ack = await self._load_engine(name, epoch, release)
            _check_ack(ack, release)
        except ReleaseLost as lost:
            self.missed.add(name)
            self._lose(release, lost)
            return None
        except _LEFT_BEHIND as failure:
            log.warning("sync.engine_left_behind", engine=name, error=str(failure))
            self.deltas.lost(name)
            if isinstance(failure, CanaryFailed):
                self.canaries.failed(failure)
            if isinstance(failure, DeadlineExceeded):
                state.fleet.sync_timed_out(name)
            else:
                state.fleet.stale(name)
            return None
        if release is not state.sync.release:  # published meanwhile, or of an abandoned lineage
            self.deltas.lost(name)
            state.fleet.took_former_release(name)
            return None
        if not state.fleet.acked(ack):  # from a process that is gone by now
            state.fleet.stale(name)
            return None
        if ack.canary_gap is not None:
            self.canaries.passed(name)
        self._republished = 0
        self.deltas.took(ack)
        state.ledger.served(ack)
        state.observer.synced(ack, since)
        return ack

    async def _load_engine(self, name: str, epoch: int, release: WeightRelease) -> WeightsAck:
        """Load a release's delta into one engine, or the full release if its base differs."""
        engine = self._state.fleet.engines[name]
        offered = self.deltas.offer(name, engine.incarnation, release)
        try:
            return await self._load(name, epoch, offered)
        except BaseRefused as refused:
            log.info("sync.base_refused", engine=name, error=str(refused))
            self.deltas.refused(name)
        self._epoch += 1  # a separate broadcast
        full = self.deltas.offer(name, engine.incarnation, release)
        return await self._load(name, self._epoch, full)

    async def _load(self, name: str, epoch: int, release: WeightRelease) -> WeightsAck:
        state = self._state
        return await state.waits.call(
            f"sync of version {release.version}",
            target=name,
            component=Component.ENGINE,
            deadline_s=state.config.sync.deadline_s,
            reply=self._generators[name].load_weights(state.fence, epoch, release),
            engine=name,
        )

    def _lose(self, release: WeightRelease, lost: ReleaseLost) -> None:
        """Have a lost release published again. Engines keep serving their version."""
        state, sync = self._state, self._state.sync
        if release is not sync.release:
            return  # another release is already on its way
        log.warning("sync.release_lost", version=release.version, error=str(lost))
        if not sync.is_lost:
            self._republished += 1
            sync.is_lost = True
        if self._republished > _REPUBLISHED:
            waiter = f"publish of version {release.version}"
            state.trainer.lost = TrainerLost(waiter, f"lost {_REPUBLISHED} times in a row: {lost}")


def _check_ack(ack: WeightsAck, release: WeightRelease) -> None:
    if (ack.version, ack.digest) != (release.version, release.digest):
        detail = f"it acked version {ack.version} with digest {ack.digest}"
        raise WeightSyncFailed(ack.engine, ack.epoch, release.version, detail)
    if release.canary is not None and ack.canary_gap is None:
        detail = "it acked without having computed the canary of the release"
        raise WeightSyncFailed(ack.engine, ack.epoch, release.version, detail)


def _report(release: WeightRelease, acks: list[WeightsAck | None]) -> SyncReport | None:
    """Return the report of a sync, or None if no engine loaded the release."""
    done = [ack for ack in acks if ack is not None]
    if not done:
        return None
    pause_s, transfer_s = max(ack.pause_s for ack in done), max(ack.transfer_s for ack in done)
    return SyncReport(release.nbytes, pause_s, transfer_s)


class DeltaOffers:
    """Records which release each engine serves, and metrics of the bytes sent. Pure.

    An engine is offered a delta if its living process last acked the base, compared by digest. The
    engine itself checks again that it has the base, so a wrong choice here only costs bytes.
    """

    def __init__(self, *, enabled: bool) -> None:
        """Create the record. ``enabled``: whether the trainer publishes deltas."""
        self._enabled = enabled
        self._acked = dict[str, tuple[str, str]]()  # incarnation and digest by engine
        self._refused = set[str]()  # engines that refused a base, until they are offered a release
        self._said = dict[str, FullReason]()  # last logged reason by engine
        self._nbytes, self._full = 0, Counter[FullReason]()  # since the last ``take_figures``
        self._changed: float | None = None  # share of words changed by the last release

    def offer(self, name: str, incarnation: str, release: WeightRelease) -> WeightRelease:
        """Return the release that an engine should load, with or without its delta."""
        delta = release.delta
        if delta is not None and self._acked.get(name) == (incarnation, delta.base):
            self._nbytes += delta.nbytes
            self._said.pop(name, None)
            return release
        self._nbytes += release.nbytes
        if self._enabled:
            self._count(name, release)
        return msgspec.structs.replace(release, delta=None)

    def released(self, release: WeightRelease) -> None:
        """Record a release that the trainer has published."""
        self._changed = None if release.delta is None else release.delta.changed

    def took(self, ack: WeightsAck) -> None:
        """Record the release that an engine has acked and serves."""
        self._acked[ack.engine] = ack.incarnation, ack.digest

    def lost(self, name: str) -> None:
        """Record that an engine's weights are unknown, so its next release is a full one."""
        self._acked.pop(name, None)

    def refused(self, name: str) -> None:
        """Record that an engine refused a delta: it no longer serves the base that it acked."""
        self.lost(name)
        self._refused.add(name)

    def forget(self) -> None:
        """Forget every base, before a rewind to another line of versions."""
        self._acked.clear()

    def take_figures(self) -> dict[str, float]:
        """Return the transfer metrics since the last call."""
        figures: dict[str, float] = {"sync/sent_bytes": self._nbytes}
        if self._enabled:
            figures |= {f"sync/full_{reason}": self._full[reason] for reason in FullReason}
            figures["sync/full_releases"] = self._full.total()
        if self._changed is not None:
            figures["sync/changed_fraction"] = self._changed
        self._nbytes, self._full, self._changed = 0, Counter[FullReason](), None
        return figures

    def _count(self, name: str, release: WeightRelease) -> None:
        reason = release.full_reason or FullReason.UNKNOWN_BASE
        if name in self._refused:
            self._refused.discard(name)
            reason = FullReason.REFUSED
        self._full[reason] += 1
        if self._said.get(name) is not reason:
            self._said[name] = reason
            log.info("sync.full_release", engine=name, version=release.version, reason=reason)
