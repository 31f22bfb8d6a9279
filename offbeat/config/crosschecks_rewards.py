"""Settings of the calls of async rewards, where no such call is made."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.graders import GRADERS
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig

CALL_KEYS = ("reward_concurrency", "reward_retries", "reward_retry_on", "reward_calls_per_s")
"""Keys of ``environment`` that only an async reward reads."""


def call_keys_set(environment: EnvironmentConfig) -> list[str]:
    """Return which keys of the calls of async rewards are not at their default."""
    set_here = environment.model_dump(exclude_defaults=True)
    return [f"environment.{key}" for key in CALL_KEYS if key in set_here]


def reward_call_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield limits of calls that the chosen environment never makes."""
    name, target = config.environment.name, config.environment.target
    if name == "function" and target not in GRADERS:
        return
    chosen = "environment.name" if name != "function" else "environment.target"
    for key in call_keys_set(config.environment):
        yield Clash(
            (key, chosen),
            f"{key} is not used: {chosen}={name if name != 'function' else target} calls no async reward",
            f"Leave {key} out, or name an async reward function with environment.name=function.",
        )
