"""Checks of the settings that an agent has alone, and of those that it does not read."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.rollout import RolloutConfig


def agent_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield the clashes between an agent and the settings of other environments."""
    environment = config.environment
    if environment.name == "agent" and environment.max_turns > 1:
        yield Clash(
            ("environment.max_turns", "environment.name"),
            f"environment.max_turns={environment.max_turns} is not used: an agent decides itself how "
            "often it calls the model",
            "Leave environment.max_turns out, and count in the agent.",
        )
    if environment.name != "agent" and environment.variables:
        yield Clash(
            ("environment.variables", "environment.name"),
            f"environment.variables={list(environment.variables)} is not used: only the processes of "
            "an agent are kept from the variables of the worker",
            "Leave environment.variables out.",
        )
    rollout = config.rollout
    limits = {"max_sample_tokens": rollout.max_sample_tokens, "max_branches": rollout.max_branches}
    for key, limit in limits.items():
        if environment.name != "agent" and limit != RolloutConfig.model_fields[key].default:
            yield Clash(
                (f"rollout.{key}", "environment.name"),
                f"rollout.{key}={limit} is not used: it bounds the samples of agents alone",
                f"Leave rollout.{key} out.",
            )
