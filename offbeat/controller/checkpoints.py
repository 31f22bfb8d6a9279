"""Saves checkpoints of the trainer's state, and handles failed saves."""

from functools import partial

import structlog

from offbeat.controller.errors import TrainerLost
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.state import RunState
from offbeat.controller.trainer_client import TrainerClient
from offbeat.messages.failures import CheckpointFailed, TrainStepFailed
from offbeat.telemetry.time_accounting import TrainerTime

log = structlog.stdlib.get_logger()


class Checkpoints:
    """Saves a checkpoint every ``checkpoint.interval`` steps; a replaced trainer restores it."""

    def __init__(self, state: RunState, trainer_client: TrainerClient) -> None:
        self._state, self._trainer_client = state, trainer_client
        self._tried = 0  # newest version with a started save, failed or not

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint of this version, or of one that was missed before it, is due.

        It is due once a multiple of the interval was passed since the newest checkpoint. If a
        controller died before a save, the next controller makes that save. If the disk refused a
        save, the next try is at the next multiple.
        """
        interval = self._state.config.checkpoint.interval
        if not interval:
            return False
        made = [each for each in self._state.ledger.checkpoints if each <= version]
        tried = self._tried if self._tried < version else 0  # else a rewind has undone it
        return version // interval > max([tried, *made], default=0) // interval

    async def save(self, version: int) -> None:
        """Save this version.

        A full or broken disk costs a checkpoint, not the run: earlier checkpoints are kept.

        Raises:
            TrainerLost: The trainer holds a different version, because its process was replaced
                unnoticed.
        """
        state, waiter = self._state, f"checkpoint of version {version}"
        self._tried = version
        with state.observer.trainer_in(TrainerTime.CHECKPOINT, Failpoint.CHECKPOINTING):
            try:
                made = await self._trainer_client.call(
                    waiter,
                    partial(self._trainer_client.trainer.save_checkpoint, state.fence, version),
                    state.config.checkpoint.deadline_s,
                )
            except CheckpointFailed as failure:
                log.error("checkpoint.failed", version=version, error=str(failure))  # noqa: TRY400
                return
            except TrainStepFailed as failure:
                raise TrainerLost(waiter, str(failure)) from failure
        state.ledger.checkpointed(made.version, made.digest)

    async def save_model(self) -> None:
        """Save the trained model, if any step was applied."""
        state, checkpoint = self._state, self._state.config.checkpoint
        version = state.ledger.trainer_version
        if not (checkpoint.final and version):
            return
        waiter = f"model of version {version}"
        with state.observer.trainer_in(TrainerTime.CHECKPOINT):
            try:
                save = partial(self._trainer_client.trainer.save, state.fence, version)
                await self._trainer_client.call(waiter, save, checkpoint.deadline_s)
            except TrainStepFailed as failure:  # it restarted by itself with different weights
                raise TrainerLost(waiter, str(failure)) from failure
