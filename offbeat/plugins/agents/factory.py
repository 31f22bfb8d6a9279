"""Creates the agent of a worker from the config section.

Environment ``agent``: a user's loop around the model, which it calls over HTTP.

    ``async def run(task: dict, client: AgentClient, **options) -> float | {"reward": float, ...}``

In addition to further numbers, the mapping may have the final answer as text, ``answer``. ``task``
is the row of the data file. ``client`` has the address, the key and the name of the model for this
sample. The function runs in child processes, many episodes at once in each (``killable``). A
cancelled call costs one sample. So does a process that dies, because the other episodes in it are
played again. A child may run code that a model has written. It inherits only variables on an
allow-list, so that this code gets none of the worker's tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.environment_plugin import (
    Agent,
    AgentClient,
    PluginOfAgents,
    find_environment,
)
from offbeat.environments.factory import BadEnvironment, make_reward_target
from offbeat.environments.frames import RewardTarget
from offbeat.environments.inputs import ENVIRONMENT, resolve_program
from offbeat.environments.killable import ChildJob, ChildPool, RewardFailed
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.groups import EPISODE_LATE, RolloutTask
from offbeat.plugins.agents import agent_program

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
"""Environment variables that an agent inherits in addition to the recipe's variables."""

_REASONS: Final = {
    "reward_deadline": EPISODE_LATE,
    "reward_raised": "agent_raised",
    "reward_process_died": "agent_process_died",
    "reward_answered_twice": "agent_answered_twice",
}


class AgentFunction(ChildPool):
    """Runs a user's agent function in killable children."""

    def __init__(self, target: RewardTarget, workers: int, job: ChildJob) -> None:
        super().__init__(target, workers, job)
        self.episodes = workers * job.calls_at_once
        """Episodes that run at once."""

    async def run(self, task: RolloutTask, client: AgentClient) -> NamedRewards:
        """Play one episode and return its rewards. End the episode if it is cancelled.

        Raises:
            EnvironmentUnavailable: The agent raised it.
            RolloutFailed: ``agent_raised``, ``episode_deadline``, ``agent_process_died``,
                ``agent_answered_twice``, ``reward_none``, ``reward_wrong_type``, ``reward_not_finite``: of kind DATA.
                ``agent_process_lost`` is INFRASTRUCTURE, ``reward_import_failed`` is a BUG.
        """
        try:
            encoded = msgspec.json.encode(client).decode()
            (rewards,) = await self.call(task.prompt.data, [encoded])
        except RewardFailed as error:
            error.sample = None  # its index is within the call, not the group
            error.reason = _REASONS.get(error.reason, error.reason)
            raise error.fail(task) from error
        assert rewards is not None  # noqa: S101 - ``may_be_none`` is not set
        return rewards


NAME: Final = "agent"
"""Environment with an agent that is a function or a program named in the recipe."""

_LATE: Final = "it took longer than environment.episode_deadline_s={deadline_s:g}"

_PROGRAM: Final = "offbeat.plugins.agents.agent_child"
"""Module that a child executes to play episodes."""

_EPISODES_PER_CHILD: Final = 64
"""Episodes that share a child process if the agent is a function."""

_NO_DIGESTS: Final[Mapping[str, str]] = MappingProxyType({})


def make_agent(
    config: EnvironmentConfig,
    working_dir: Path,
    began_with: Mapping[str, str] = _NO_DIGESTS,
    *,
    model_path: str = "",
) -> Agent:
    """Create the agent of one worker, without starting its processes.

    Raises:
        BadEnvironment: Neither a function nor a program is named, the program is missing, or
            a plug-in cannot use its options.
    """
    plugin = find_environment(config.name)
    if isinstance(plugin, PluginOfAgents):
        return plugin.make_agent(config, working_dir, model_path)
    if config.command:
        program = resolve_program(config.command[0], working_dir)
        if program is None:
            problem = f"{config.command[0]!r} is not a program, from {working_dir} or on the PATH"
            raise BadEnvironment("environment.command", problem)
        options = {"command": [program, *config.command[1:]]}
        return make_agent_function(config, agent_program.TARGET, working_dir, "", options)
    if config.target is None:
        problem = "an agent needs it, or environment.command; name module:name"
        raise BadEnvironment("environment.target", problem)
    source = began_with.get(ENVIRONMENT, "")
    return make_agent_function(config, config.target, working_dir, source, config.options)


def make_agent_function(
    config: EnvironmentConfig, target: str, working_dir: Path, source: str, options: dict[str, Any]
) -> AgentFunction:
    """Create killable children that run an async function as agents."""
    variables = (*INHERITED, *config.variables)
    given: dict[str, Any] = {
        "options": options,
        "limits": None,
        "deadline_s": config.episode_deadline_s,
        "variables": variables,
    }
    if config.command:
        given["memory_mib"] = config.reward_memory_mib
    agent = make_reward_target(config, target, working_dir, source, **given)
    # A program's process group ends with each episode, including any processes it left.
    job = playing(episodes_at_once(config), calls_in_all=1 if config.command else None)
    return AgentFunction(agent, config.reward_workers, job)


def playing(episodes: int, **limits: Any) -> ChildJob:  # noqa: ANN401 - fields of a job
    """Return the job of children that play ``episodes`` episodes at once."""
    return ChildJob(_PROGRAM, "episode", _LATE, episodes, outlives_calls=True, **limits)


def episodes_at_once(config: EnvironmentConfig) -> int:
    """Return how many episodes of an agent share a child process."""
    if config.command or config.name != NAME:
        return 1
    return config.episodes_per_child or _EPISODES_PER_CHILD
