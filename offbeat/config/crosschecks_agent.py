"""Checks of settings that only agents read, in the sections of the core, and of one that they do not."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.environment_traits import (
    environment_clashes,
    find_traits,
    known_environments,
)
from offbeat.config.mixture import environment_views
from offbeat.config.run import RunConfig
from offbeat.doors import PluginUnusable, find_plugin


def agent_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield the clashes between an agent and the settings of other environments."""
    environment = config.environment
    own_keys = find_traits(environment.name).keys
    if environment.command and "command" not in own_keys:
        yield Clash(
            ("environment.command", "environment.name"),
            f"environment.command={list(environment.command)} is not used: only an agent may be a "
            "program",
            "Set environment.name to agent, or leave environment.command out.",
        )
    if environment.episodes_per_child is not None and "episodes_per_child" not in own_keys:
        yield Clash(
            ("environment.episodes_per_child", "environment.name"),
            f"environment.episodes_per_child={environment.episodes_per_child} is not used: only the "
            "processes of name=agent play several episodes at once",
            "Leave environment.episodes_per_child out; environment.reward_concurrency is for calls "
            "of an async reward.",
        )
    if environment.renderer and not environment.is_agent:
        known = known_environments().items()
        agents = " and ".join(f"name={name}" for name, traits in known if traits.is_agent)
        yield Clash(
            ("environment.renderer", "environment.name"),
            f"environment.renderer={environment.renderer} is not used: only the conversations of "
            f"{agents} are rendered by it",
            "Leave environment.renderer out.",
        )
    yield from environment_clashes(environment.name, environment)
    if environment.is_agent and environment.max_turns > 1:
        yield Clash(
            ("environment.max_turns", "environment.name"),
            f"environment.max_turns={environment.max_turns} is not used: an agent decides itself how "
            "often it calls the model",
            "Leave environment.max_turns out, and count in the agent.",
        )
    if environment.is_agent:
        yield from _player_clashes(environment.name)
    elif environment.variables:
        yield Clash(
            ("environment.variables", "environment.name"),
            f"environment.variables={list(environment.variables)} is not used: only the processes of "
            "an agent are kept from the variables of the worker",
            "Leave environment.variables out.",
        )


def _player_clashes(name: str) -> Iterator[Clash]:
    """Yield that nothing here plays agents: another package may bring an environment of them."""
    try:
        find_plugin("agents", "endpoint")
    except PluginUnusable as unusable:
        yield Clash(
            ("environment.name",),
            f"environment.name={name} is played by a plug-in: {unusable.subject}: {unusable.problem}",
            f"{unusable.fix}.",
        )


def agent_limit_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield limits of the samples of agents in a run that has none."""
    if any(view.environment.is_agent for view in environment_views(config).values()):
        return
    of_agents = {"max_sample_tokens", "max_branches", "branches"}
    for key, value in config.rollout.model_dump(include=of_agents, exclude_defaults=True).items():
        yield Clash(
            (f"rollout.{key}", "environment.name"),
            f"rollout.{key}={value} is not used: it is about the samples of agents alone",
            f"Leave rollout.{key} out.",
        )
