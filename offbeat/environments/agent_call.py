"""One call of a user's agent function, in its child process."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast

import msgspec

from offbeat.config.user_code import describe
from offbeat.environments.agent_client import AgentClient
from offbeat.environments.async_calls import UNAVAILABLE
from offbeat.environments.reward_value import BadReward
from offbeat.environments.unavailable import EnvironmentUnavailable

_REWARD: Final = "reward"


def agent_as_reward(run: Callable[..., Any]) -> Callable[..., Awaitable[object]]:
    """Return an async agent function in the form of an async reward function.

    What a reward function gets as response is here an ``AgentClient`` as JSON. Tasks that the agent
    leaves running are cancelled before its reward counts: the next call is another sample's.

    Raises:
        TypeError: The function is not ``async def``.
    """
    if not inspect.iscoroutinefunction(run):
        raise TypeError("it is not async: write async def run(task, client)")

    async def scored(row: dict[str, Any], client: str, **options: Any) -> object:  # noqa: ANN401
        before = asyncio.all_tasks()
        try:
            value = await run(row, msgspec.json.decode(client, type=AgentClient), **options)
        except EnvironmentUnavailable as error:
            return BadReward(UNAVAILABLE, describe(error))
        finally:
            await _cancelled(asyncio.all_tasks() - before)
        return _reward_in(value)

    return scored


def _reward_in(value: object) -> object:
    """Return the reward in what an agent returned: a number, or a mapping with nothing else in it."""
    if not isinstance(value, Mapping):
        return value
    named = cast("Mapping[object, object]", value)
    others = sorted(str(key) for key in named if key != _REWARD)
    if _REWARD not in named or others:
        problem = (
            f"the agent returned a mapping with the keys {sorted(map(str, named))!r:.200}: return "
            f"{_REWARD!r} alone, a float; nothing records others"
        )
        return BadReward("reward_wrong_type", problem)
    return named[_REWARD]


async def _cancelled(left: set[asyncio.Task[Any]]) -> None:
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
