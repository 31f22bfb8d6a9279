"""Weight sync of the fleet: publish a release, have every engine take it, count the acks.

    waits for             woken by
    a release             the train pump, after a step
    rollouts in flight    their replies (mode drain)
    the engines           their acks

All syncs go through one lock: the regular one after a step, and the one that brings a restarted
engine up to date. An engine that does not ack in time is STALE and serves nothing; the others go on.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import structlog

from offbeat.controller.fleet import Health
from offbeat.controller.lifecycle import Phase
from offbeat.controller.ports import Generator, Trainer
from offbeat.controller.state import RunState
from offbeat.messages.failures import (
    ActorLost,
    DeadlineExceeded,
    EngineUnavailable,
    StaleFence,
    WeightSyncFailed,
)
from offbeat.messages.weights import WeightRelease, WeightsAck

log = structlog.stdlib.get_logger()
_LEFT_BEHIND = (ActorLost, DeadlineExceeded, EngineUnavailable, WeightSyncFailed, StaleFence)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync did. The pause is apart from the transfer."""

    version: int
    nbytes: int
    acked: int
    failed: int
    pause_s: float  # longest over the engines
    transfer_s: float  # longest over the engines


class WeightSync:
    """Owns the current release and the sync epoch.

    In mode ``keep`` the trainer goes on at once: its snapshot is queued before the calls of the next
    step, engines take the release meanwhile, and ``serving_version`` rises when they ack. The next
    snapshot waits for that, and a step is not finished before the snapshot of the last one is made:
    so a slow fleet slows the trainer down, and no weights change while they are read.
    """

    def __init__(
        self,
        state: RunState,
        trainer: Trainer,
        generators: Mapping[str, Generator],
    ) -> None:
        self._state, self._trainer, self._generators = state, trainer, generators
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._asked: int | None = None  # version to publish; None once its snapshot is made
        self._busy = False  # a release is being made or travels
        self.release: WeightRelease | None = None
        self.report: SyncReport | None = None  # of the last release all engines were offered

    async def ask(self, version: int) -> None:
        """Have the trainer's weights released, as they are now.

        Returns once the trainer has been called, or while an earlier release still travels: the
        call follows then. Mode ``drain`` returns when the release is served.
        """
        state = self._state
        self._asked = version
        state.moved()
        await state.until(
            "train pump", "the call for a snapshot", lambda: self._busy or self._asked is None
        )
        if state.config.sync.mode == "drain":
            await self.settled()

    async def snapshot_made(self) -> None:
        """Return once no snapshot is owed: the weights may change."""
        await self._state.until(
            "train pump", "the snapshot of the last step", lambda: self._asked is None
        )

    async def settled(self) -> None:
        """Return once every living engine was offered the release, and took it or was left behind."""
        await self._state.until(
            "train pump", "the weight sync", lambda: self._asked is None and not self._busy
        )

    async def run(self) -> NoReturn:
        """The sync pump: makes each release and offers it to the engines."""
        state = self._state
        while True:
            await state.until("sync pump", "a version to publish", lambda: self._asked is not None)
            release = await self._publish(self._asked or 0)
            if state.config.sync.mode == "drain":
                await self._drain()
            async with self._lock:
                acks = await self._sync(state.fleet.in_sync_set(), release)
            self.report = _report(release, acks)
            self._busy, state.gate_open = False, True
            if state.lifecycle.phase is Phase.SYNCING:
                state.enter(Phase.RUNNING)
            state.moved()

    async def _publish(self, version: int) -> WeightRelease:
        state = self._state
        self._busy = True
        if state.lifecycle.phase is Phase.RUNNING:
            state.enter(Phase.SYNCING)
        state.moved()
        self.release = await state.call(
            f"publish of version {version}",
            on="the trainer",
            deadline_s=state.config.sync.deadline_s,
            reply=self._trainer.publish_weights(state.fence, version),
        )
        self._asked = None
        state.ledger.released(version, self.release.digest)
        state.moved()
        return self.release

    async def catch_up(self, name: str) -> bool:
        """Bring one engine to the current release. False: it did not take it."""
        async with self._lock:
            if self.release is None:
                return False
            if self._state.fleet.engines[name].health is Health.HEALTHY:
                return True  # the sync that held the lock served it as well
            acks = await self._sync([name], self.release)
        return acks[0] is not None

    async def _drain(self) -> None:
        """Close the gate and wait for every group in flight."""
        state = self._state
        state.gate_open = False
        await state.until("weight sync", "rollouts in flight", lambda: state.ledger.in_flight == 0)

    async def _sync(self, names: list[str], release: WeightRelease) -> list[WeightsAck | None]:
        self._epoch += 1
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
        """One engine's part; None when it is left behind as STALE."""
        state = self._state
        try:
            ack = await state.call(
                f"sync of version {release.version}",
                on=name,
                deadline_s=state.config.sync.deadline_s,
                reply=self._generators[name].load_weights(state.fence, epoch, release),
            )
            _check_ack(ack, release)
        except _LEFT_BEHIND as failure:
            log.warning("sync.engine_left_behind", engine=name, error=str(failure))
            state.fleet.stale(name)
            state.moved()
            return None
        accepted = state.fleet.acked(ack)
        state.busy.paused(ack.pause_s)
        state.busy.engine_changed(state.fleet.engines[name])
        state.moved()
        return ack if accepted else None


def _check_ack(ack: WeightsAck, release: WeightRelease) -> None:
    if (ack.version, ack.digest) != (release.version, release.digest):
        detail = f"it acked version {ack.version} with digest {ack.digest}"
        raise WeightSyncFailed(ack.engine, ack.epoch, release.version, detail)


def _report(release: WeightRelease, acks: list[WeightsAck | None]) -> SyncReport:
    done = [ack for ack in acks if ack is not None]
    return SyncReport(
        version=release.version,
        nbytes=release.nbytes,
        acked=len(done),
        failed=len(acks) - len(done),
        pause_s=max((ack.pause_s for ack in done), default=0.0),
        transfer_s=max((ack.transfer_s for ack in done), default=0.0),
    )
