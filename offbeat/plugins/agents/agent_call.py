"""One call of a user's agent function, in its child process."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast

import msgspec

from offbeat.config.user_code import describe
from offbeat.environments.agent_client import AgentClient
from offbeat.environments.reward_value import (
    BadReward,
    NamedRewards,
    reward_of,
    short_answer,
    unavailable,
)
from offbeat.environments.unavailable import EnvironmentUnavailable

_REWARD: Final = "reward"
_ANSWER: Final = "answer"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_NAMES: Final = 32


def agent_as_reward(run: Callable[..., Any]) -> Callable[..., Awaitable[object]]:
    """Return an async agent function in the form of an async reward function.

    What a reward function gets as response is here an ``AgentClient`` as JSON.
    """

    async def scored(row: dict[str, Any], client: str, **options: Any) -> object:  # noqa: ANN401
        try:
            value = await run(row, msgspec.json.decode(client, type=AgentClient), **options)
        except EnvironmentUnavailable as error:
            return unavailable(describe(error))
        return _reward_in(value)

    return scored


def _reward_in(value: object) -> object:
    """Return what an agent returned: a number, or the rewards and the final answer in a mapping."""
    if not isinstance(value, Mapping):
        return value
    named = dict(cast("Mapping[object, object]", value))
    answers = _ANSWER in named
    answer = named.pop(_ANSWER, None)
    if not isinstance(answer, str | None):
        problem = f"{_ANSWER!r} is {type(answer).__name__} {answer!r:.80}: it is the final answer, as text"
        return BadReward("reward_wrong_type", problem)
    if _REWARD not in named:
        problem = f"the agent returned {sorted(map(str, named))!r:.200} without {_REWARD!r}"
        return BadReward("reward_wrong_type", problem)
    if len(named) > _MOST_NAMES or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in named
    ):
        problem = (
            f"the agent named its rewards {sorted(map(str, named))!r:.200}: use at most {_MOST_NAMES} "
            "names, of letters, digits, '_' and '-'"
        )
        return BadReward("reward_wrong_type", problem)
    by_name = dict[str, float]()
    for name, each in named.items():
        reward = reward_of(each)
        if isinstance(reward, BadReward):
            return BadReward(reward.reason, f"{name}: {reward.detail}")
        by_name[str(name)] = reward
    said = short_answer(answer or "") if answers else None
    return NamedRewards(by_name.pop(_REWARD), by_name, said)
