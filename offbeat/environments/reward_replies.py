"""Replies of a reward child: what user code returned or raised, as a message to the parent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from offbeat.config.user_code import describe, traceback_of
from offbeat.environments.frames import RewardCall, RewardReply
from offbeat.environments.reward_value import (
    BadReward,
    NamedRewards,
    reward_and_answer_of,
    reward_of,
)


def row_of(call: RewardCall) -> dict[str, Any]:
    """Return a copy of the row for one sample, so that the function's changes affect no other."""
    return msgspec.json.decode(call.prompt, type=dict[str, Any])


def reply_with(call: RewardCall, sample: int, value: object) -> RewardReply:
    """Return the reply for a value that user code returned."""
    if isinstance(value, Mapping):
        value = reward_and_answer_of(cast("Mapping[object, object]", value))
    elif not isinstance(value, NamedRewards | BadReward):
        value = reward_of(value)
    match value:
        case BadReward():
            return RewardReply(call.number, sample, problem=value)
        case NamedRewards():
            return RewardReply(call.number, sample, value)
        case _:
            return RewardReply(call.number, sample, NamedRewards(cast("float", value), {}))


def reply_to_raise(
    call: RewardCall, sample: int, error: BaseException, working_dir: Path
) -> RewardReply:
    """Return the reply for an exception that user code raised."""
    raised = BadReward("reward_raised", describe(error, working_dir), traceback=traceback_of(error))
    return RewardReply(call.number, sample, problem=raised)
