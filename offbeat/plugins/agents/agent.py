"""Environment ``agent``: a user's own loop around the model, which it calls over HTTP.

    ``async def run(task: dict, client: AgentClient, **options) -> float | {"reward": float, ...}``

Beside further numbers, the mapping may have the final answer as text, ``answer``.
``task`` is the row of the data file; ``client`` has the address, the key and the name of the model
for this sample. The function runs in child processes, many episodes at once in each
(``episode_child``): a call that is cancelled costs one sample, and so does a process that dies,
because the others in it are played again. A child inherits only variables of an allow-list, so that
no token of the worker is in the hands of code that a model may have written.
"""

from functools import partial
from typing import Final

import msgspec

from offbeat.environments.agent_client import AgentClient
from offbeat.environments.frames import RewardTarget
from offbeat.environments.killable import RewardFailed, RewardPool
from offbeat.environments.reward_failure import group_failure
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.groups import RolloutTask
from offbeat.plugins.agents.episode_child import EpisodeChild, EpisodeLimits

INHERITED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""Environment variables that an agent inherits besides those that the recipe names."""

_REASONS: Final = {
    "reward_raised": "agent_raised",
    "reward_process_died": "agent_process_died",
    "reward_answered_twice": "agent_answered_twice",
}


class AgentFunction(RewardPool):
    """Runs a user's agent function in killable children."""

    def __init__(self, target: RewardTarget, workers: int, limits: EpisodeLimits) -> None:
        start = partial(EpisodeChild.start_with, limits)
        super().__init__(target, workers, start, limits.at_once)
        self.episodes = workers * limits.at_once
        """Episodes that run at once."""

    async def run(self, task: RolloutTask, client: AgentClient) -> NamedRewards:
        """Play one episode and return its rewards; an episode that is cancelled is ended.

        Raises:
            EnvironmentUnavailable: The agent raised it.
            RolloutFailed: ``agent_raised``, ``agent_process_died``, ``agent_answered_twice``,
                ``reward_none``, ``reward_wrong_type``, ``reward_not_finite``: of kind DATA.
                ``agent_process_lost`` is INFRASTRUCTURE, ``reward_import_failed`` is a BUG.
        """
        try:
            encoded = msgspec.json.encode(client).decode()
            (rewards,) = await self.call(task.prompt.data, [encoded])
        except RewardFailed as error:
            error.sample = None  # the only one of its call, not of the group
            reason = _REASONS.get(error.reason, error.reason)
            raise group_failure(task, error, reason) from error
        assert rewards is not None  # noqa: S101 - ``may_be_none`` is not set
        return rewards
