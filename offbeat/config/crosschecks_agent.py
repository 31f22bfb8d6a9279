"""Checks of the settings that an agent has alone, and of those that it does not read."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.environment_traits import environment_clashes, known_environments
from offbeat.config.mixture import environment_views
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig


def agent_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield the clashes between an agent and the settings of other environments."""
    environment = config.environment
    if environment.command and environment.name != "agent":
        yield Clash(
            ("environment.command", "environment.name"),
            f"environment.command={list(environment.command)} is not used: only an agent may be a "
            "program",
            "Set environment.name to agent, or leave environment.command out.",
        )
    elif environment.command and (environment.target is not None or environment.options):
        other = "target" if environment.target is not None else "options"
        yield Clash(
            ("environment.command", f"environment.{other}"),
            f"environment.{other} is not used: the agent is the program environment.command",
            f"Leave environment.{other} out, and pass arguments in environment.command; or leave "
            "environment.command out.",
        )
    if environment.episodes_per_child is not None:
        yield from _episodes_per_child_clashes(environment)
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
    if not environment.is_agent and environment.variables:
        yield Clash(
            ("environment.variables", "environment.name"),
            f"environment.variables={list(environment.variables)} is not used: only the processes of "
            "an agent are kept from the variables of the worker",
            "Leave environment.variables out.",
        )


def _episodes_per_child_clashes(environment: EnvironmentConfig) -> Iterator[Clash]:
    key = f"environment.episodes_per_child={environment.episodes_per_child}"
    if environment.name != "agent":
        yield Clash(
            ("environment.episodes_per_child", "environment.name"),
            f"{key} is not used: only the processes of name=agent play several episodes at once",
            "Leave environment.episodes_per_child out; environment.reward_concurrency is for calls "
            "of an async reward.",
        )
    elif environment.command and environment.episodes_per_child != 1:
        yield Clash(
            ("environment.episodes_per_child", "environment.command"),
            f"{key} cannot be: with each episode of a program its process group ends, and whatever it "
            "has left in it",
            "Leave environment.episodes_per_child out, and raise environment.reward_workers.",
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
