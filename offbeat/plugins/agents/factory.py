"""Creates the agent of a worker from the config section."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.environment_plugin import Agent, PluginOfAgents, find_environment
from offbeat.environments.factory import BadEnvironment, make_reward_target
from offbeat.environments.inputs import ENVIRONMENT, resolved_program
from offbeat.plugins.agents import agent_program
from offbeat.plugins.agents.agent import INHERITED, AgentFunction
from offbeat.plugins.agents.episode_child import EpisodeLimits

NAME: Final = "agent"
"""The environment whose agent is a function or a program that the recipe names."""

_EPISODES_PER_CHILD: Final = 64
"""Episodes that share a child process, of an agent that is a function."""

_NO_DIGESTS: Final[Mapping[str, str]] = MappingProxyType({})


def make_agent(
    config: EnvironmentConfig,
    working_dir: Path,
    began_with: Mapping[str, str] = _NO_DIGESTS,
    *,
    model_path: str = "",
) -> Agent:
    """Create the agent of one worker; its processes are not started yet.

    Raises:
        BadEnvironment: Neither a function nor a program is named, or there is no such program; or
            a plug-in cannot use its options.
    """
    plugin = find_environment(config.name)
    if config.name != NAME and isinstance(plugin, PluginOfAgents):
        return plugin.make_agent(config, working_dir, model_path)
    return make_own_agent(config, working_dir, began_with)


def make_own_agent(
    config: EnvironmentConfig, working_dir: Path, began_with: Mapping[str, str] = _NO_DIGESTS
) -> AgentFunction:
    """Create the agent that the recipe names; its processes are not started yet.

    Raises:
        BadEnvironment: Neither a function nor a program is named, or there is no such program.
    """
    if config.command:
        program = resolved_program(config.command[0], working_dir)
        if program is None:
            problem = f"{config.command[0]!r} is no program, from {working_dir} or on the PATH"
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
    given = {"options": options, "limits": None, "deadline_s": None, "variables": variables}
    agent = make_reward_target(config, target, working_dir, source, **given)
    # The process group of a program ends with each episode, and whatever it has left in it.
    limits = EpisodeLimits(episodes_at_once(config), 1 if config.command else None)
    return AgentFunction(agent, config.reward_workers, limits)


def episodes_at_once(config: EnvironmentConfig) -> int:
    """Return how many episodes of an agent share a child process."""
    if config.command or config.name != NAME:
        return 1
    return config.episodes_per_child or _EPISODES_PER_CHILD
