"""Versions and epochs that fakes refuse, independent of the trainers' and engines' checks.

If a fake called a check of the product, it could not show that the check is wrong.
"""

from offbeat.messages.failures import (
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
    WeightSyncFailed,
)
from offbeat.messages.fences import StepKey


def check_next_step(key: StepKey, held: int) -> None:
    """Raise StepOutOfOrder unless a step follows the version that the trainer holds."""
    if key.step != held + 1:
        raise StepOutOfOrder(str(key), f"the step after version {held}")


def check_held(version: int, held: int, during: TrainerCall) -> None:
    """Raise TrainStepFailed unless a call names the version that the trainer holds."""
    if version != held:
        raise TrainStepFailed(0, version, during, f"it holds version {held}")


def check_newest_transfer(engine: str, epoch: int, version: int, newest: int) -> None:
    """Raise WeightSyncFailed unless a transfer is newer than all transfers of its engine."""
    if epoch <= newest:
        problem = f"a newer transfer was begun: epoch {newest}"
        raise WeightSyncFailed(engine, epoch, version, problem)
