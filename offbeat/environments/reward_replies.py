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
    if isinstance(value, NamedRewards):
        by_name = {name: each for name, each in value.by_name.items() if each is not None}
        return RewardReply(call.number, sample, value.reward, by_name=by_name, answer=value.answer)
    reward = value if isinstance(value, BadReward) else reward_of(value)
    if isinstance(reward, BadReward):
        return RewardReply(call.number, sample, None, reward.reason, reward.detail, reward.fault)
    return RewardReply(call.number, sample, reward)


def reply_to_raise(
    call: RewardCall, sample: int, error: BaseException, working_dir: Path
) -> RewardReply:
    """Return the reply for an exception that user code raised."""
    return RewardReply(
        call.number,
        sample,
        None,
        "reward_raised",
        describe(error, working_dir),
        traceback=traceback_of(error),
    )
