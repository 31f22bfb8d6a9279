"""Translation of a reward that is missing into the failure of its group."""

from typing import assert_never

from offbeat.environments.killable import RewardFailed
from offbeat.environments.reward_value import RewardFault
from offbeat.environments.unavailable import EnvironmentUnavailable
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.groups import RolloutTask


def group_failure(
    task: RolloutTask, error: RewardFailed, reason: str
) -> EnvironmentUnavailable | RolloutFailed:
    """Return the error that an environment raises for ``task``, counted under ``reason``."""
    match error.fault:
        case RewardFault.SERVICE:
            return EnvironmentUnavailable(error.detail)
        case RewardFault.SHARED:
            kind = FailureKind.INFRASTRUCTURE
        case RewardFault.IMPORT:
            kind = FailureKind.BUG
        case RewardFault.SAMPLE | RewardFault.NONE:
            kind = FailureKind.DATA
        case _:
            assert_never(error.fault)
    return RolloutFailed(
        kind,
        task.prompt_index,
        task.attempt,
        reason,
        error.detail,
        Component.ENVIRONMENT,
        error.sample,
    )
