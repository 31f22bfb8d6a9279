"""Settings of the calls of async rewards, where no such call is made."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.graders import GRADERS
from offbeat.config.reward_calls import max_evaluation_calls, max_reward_calls
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig

CALL_KEYS = ("reward_concurrency", "reward_retries", "reward_retry_on", "reward_calls_per_s")
"""Keys of ``environment`` that only an async reward reads."""


def call_keys_set(environment: EnvironmentConfig) -> list[str]:
    """Return which keys of the calls of async rewards are not at their default."""
    set_here = environment.model_dump(exclude_defaults=True)
    return [f"environment.{key}" for key in CALL_KEYS if key in set_here]


def reward_function_clashes(environment: EnvironmentConfig) -> Iterator[Clash]:
    """Yield what cannot work with several reward functions."""
    if environment.name != "function":
        yield Clash(
            ("environment.rewards", "environment.name"),
            f"environment.rewards is not used: environment.name={environment.name} has a reward of its own",
            "Set environment.name to function, or leave environment.rewards out.",
        )
    for key in ("target", "options"):
        if getattr(environment, key):
            yield Clash(
                (f"environment.{key}", "environment.rewards"),
                f"environment.{key} is not used: environment.rewards names the functions",
                f"Write it below one of them, as in environment.rewards.NAME.{key}.",
            )
    if not any(each.weight for each in environment.rewards.values()):
        first = next(iter(environment.rewards))
        yield Clash(
            (f"environment.rewards.{first}.weight",),
            "every weight of environment.rewards is 0: each sample has a reward of 0, so nothing would be learned",
            f"Give the reward to train on a weight, as in environment.rewards.{first}.weight=1.",
        )
    for name, each in environment.rewards.items():
        if not all(each.target.partition(":")) and each.target not in GRADERS:
            yield Clash(
                (f"environment.rewards.{name}.target",),
                f"environment.rewards.{name}.target={each.target} does not name a function in a module",
                f"Write module:name, as in rewards.math:exact_match; built in: {', '.join(GRADERS)}.",
            )


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


def reward_budget_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a budget of calls that bounds nothing, or that does not cover the first step."""
    budget = config.rollout.reward_call_budget
    if budget is None:
        if config.rollout.on_reward_budget_spent != "fail":
            yield Clash(
                ("rollout.on_reward_budget_spent", "rollout.reward_call_budget"),
                "rollout.on_reward_budget_spent is not used: there is no rollout.reward_call_budget",
                "Set rollout.reward_call_budget, or leave it out.",
            )
        return
    per_group, scored = max_reward_calls(config), max_evaluation_calls(config)
    if not per_group:
        yield Clash(
            ("rollout.reward_call_budget", "environment.name"),
            f"rollout.reward_call_budget is not used: environment.name={config.environment.name} calls no "
            "reward function of yours, and what an agent's own program calls is not counted",
            "Leave it out, or name a reward function with environment.name=function.",
        )
    elif budget < (least := config.groups_per_step * per_group + scored):
        beside = f", and an evaluation up to {scored}" if scored else ""
        yield Clash(
            ("rollout.reward_call_budget", "groups_per_step"),
            f"rollout.reward_call_budget={budget} may not cover one step: the rewards of "
            f"groups_per_step={config.groups_per_step} groups make up to {per_group} calls each{beside}",
            f"Set it to {least} or more.",
        )
