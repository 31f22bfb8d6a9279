"""Most calls of reward functions that one prompt group, or one evaluation, can make."""

from offbeat.config.graders import GRADERS
from offbeat.config.limits import on_failed_sample
from offbeat.config.mixture import environment_views, evaluation_sets
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig


def counted_functions(environment: EnvironmentConfig) -> int:
    """Return the number of reward functions of an environment, built-in graders apart."""
    if environment.name != "function":
        return 0
    targets = [each.target for each in environment.rewards.values()] or [environment.target]
    return sum(target not in GRADERS for target in targets)


def max_reward_calls(config: RunConfig) -> int:
    """Return the most calls that the rewards of one group make, their tries included."""
    return config.samples_per_group * _calls_per_sample(config)


def max_evaluation_calls(config: RunConfig) -> int:
    """Return the most calls that the rewards of one evaluation make; 0 in a run that has none."""
    if not (config.eval.interval or config.eval.at_start):
        return 0
    samples = sum(
        (one.prompts or 0) * (one.samples or 1) for one in evaluation_sets(config).values()
    )
    return samples * _calls_per_sample(config)


def _calls_per_sample(config: RunConfig) -> int:
    """Return the most calls for one sample of a group.

    A group is scored as a whole first. Where a failed sample does not fail its group, each sample
    is then scored by itself, and those that are drawn again once more each time.
    """
    scorings = 1
    policy = on_failed_sample(config)
    if policy != "fail_group":
        scorings += 1 + (config.rollout.sample_retries if policy == "retry" else 0)
    per_sample = max(
        counted_functions(view.environment) * (1 + view.environment.reward_retries)
        for view in environment_views(config).values()
    )
    return scorings * per_sample
