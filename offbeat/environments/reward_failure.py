"""Translation of a reward that is missing into the failure of its group."""

from typing import Final

from offbeat.environments.killable import RewardFailed
from offbeat.environments.reward_value import RewardFault
from offbeat.environments.unavailable import EnvironmentUnavailable
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.groups import RolloutTask

_KINDS: Final = {
    RewardFault.SHARED: FailureKind.INFRASTRUCTURE,
    RewardFault.IMPORT: FailureKind.BUG,
    RewardFault.SAMPLE: FailureKind.DATA,
    RewardFault.NONE: FailureKind.DATA,
}


def group_failure(
    task: RolloutTask, error: RewardFailed, reason: str
) -> EnvironmentUnavailable | RolloutFailed:
    """Return the error that an environment raises for ``task``, counted under ``reason``."""
    if error.fault is RewardFault.SERVICE:
        return EnvironmentUnavailable(error.detail)
    return RolloutFailed(
        _KINDS[error.fault],
        task.prompt_index,
        task.attempt,
        reason,
        error.detail,
        Component.ENVIRONMENT,
        error.sample,
    )
