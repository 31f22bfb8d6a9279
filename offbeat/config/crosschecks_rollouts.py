"""Finds settings of rewards, samples and demonstrations that cannot work."""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.graders import GRADERS
from offbeat.config.limits import on_failed_sample
from offbeat.config.reward_calls import max_evaluation_calls, max_reward_calls
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig

_UNREAD: Final = {
    "environment": (
        "target",
        "command",
        "options",
        "reward_deadline_s",
        "reward_start_s",
        "reward_workers",
        "reward_memory_mib",
        "variables",
        "max_turns",
    ),
    "rollout": ("on_failed_sample", "sample_retries", "max_sample_tokens", "max_branches"),
}
"""Keys that nothing reads where no model is called and nothing is scored."""


def demonstration_clashes(config: RunConfig) -> Iterator[Clash]:
    """Demonstrations come without a generator, and what reads a generator comes without them."""
    recorded = config.environment.name == "demonstrations"
    generator = config.generator
    if recorded and generator.has_engines:
        yield Clash(
            ("environment.name", "generator.backend"),
            f"environment.name=demonstrations has no work for generator.backend={generator.backend}: "
            "its samples are rows of a file",
            "Set generator.backend to none.",
        )
    if not (generator.has_engines or recorded):
        yield Clash(
            ("generator.backend", "environment.name"),
            f"generator.backend=none draws no samples, and environment.name={config.environment.name} "
            "needs them",
            "Set environment.name to demonstrations, or generator.backend to embedded or vllm.",
        )
    if recorded:
        yield from _rows_are_trained_as_they_are(config)


def _rows_are_trained_as_they_are(config: RunConfig) -> Iterator[Clash]:
    if config.data.path is None:
        yield Clash(
            ("data.path", "environment.name"),
            "environment.name=demonstrations has no rows of its own",
            "Set data.path to a JSON Lines file with `prompt` and `completion`, or `messages`, in "
            "each row.",
        )
    for section, keys in _UNREAD.items():
        set_here = getattr(config, section).model_dump(exclude_defaults=True)
        for key in (each for each in keys if each in set_here):
            yield Clash(
                (f"{section}.{key}", "environment.name"),
                f"{section}.{key} is not used with environment.name=demonstrations: no model is called "
                "and nothing is scored",
                f"Leave {section}.{key} out.",
            )
    loss = config.algorithm.loss.name
    if loss != "sft":
        yield Clash(
            ("algorithm.loss.name", "environment.name"),
            f"algorithm.loss.name={loss} learns nothing with environment.name=demonstrations: rows "
            "have neither rewards nor logprobs of an engine",
            "Set algorithm.loss.name to sft.",
        )
    if config.samples_per_group != 1:
        yield Clash(
            ("samples_per_group", "environment.name"),
            f"samples_per_group={config.samples_per_group} with environment.name=demonstrations: a row "
            "holds one sample",
            "Set samples_per_group to 1; groups_per_step is the number of rows in a step.",
        )
    if config.sampler.name != "in_order":
        yield Clash(
            ("sampler.name", "environment.name"),
            f"sampler.name={config.sampler.name} decides by the age of samples, and rows of "
            "environment.name=demonstrations have none",
            "Set sampler.name to in_order, and sampler.max_staleness to the steps to read ahead.",
        )
    if config.eval.interval:
        yield Clash(
            ("eval.interval", "generator.backend"),
            f"eval.interval={config.eval.interval} needs an engine to sample the held-out prompts, and "
            f"generator.backend={config.generator.backend} has none",
            "Set eval.interval to 0; evaluate the exported model in a run that has engines.",
        )


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


def sample_clashes(config: RunConfig) -> Iterator[Clash]:
    """A number of valid samples no group has or every group has; a penalty nothing falls under."""
    yield from _overlong_clashes(config)
    minimum = config.rollout.min_valid_samples
    if minimum is None:
        return
    if minimum > config.samples_per_group:
        yield Clash(
            ("rollout.min_valid_samples", "samples_per_group"),
            f"rollout.min_valid_samples={minimum} can never be reached with "
            f"samples_per_group={config.samples_per_group}: every group would be dropped",
            f"Set rollout.min_valid_samples to {config.samples_per_group} or less.",
        )
    if on_failed_sample(config) == "fail_group":
        yield Clash(
            ("rollout.min_valid_samples", "rollout.on_failed_sample"),
            f"rollout.min_valid_samples={minimum} is not used with rollout.on_failed_sample=fail_group: "
            "no sample is ever masked",
            "Set rollout.on_failed_sample to retry or mask, or leave rollout.min_valid_samples out.",
        )


def _overlong_clashes(config: RunConfig) -> Iterator[Clash]:
    stretch, longest = config.rollout.overlong_tokens, config.generator.sampling.max_new_tokens
    environment = config.environment
    if stretch is None:
        if config.rollout.overlong_penalty != type(config.rollout)().overlong_penalty:
            yield Clash(
                ("rollout.overlong_penalty", "rollout.overlong_tokens"),
                f"rollout.overlong_penalty={config.rollout.overlong_penalty:g} is not used: there is no "
                "rollout.overlong_tokens",
                "Set rollout.overlong_tokens to the length of the stretch, or leave "
                "rollout.overlong_penalty out.",
            )
        return
    if stretch > longest:
        yield Clash(
            ("rollout.overlong_tokens", "generator.sampling.max_new_tokens"),
            f"rollout.overlong_tokens={stretch} is longer than a response can be: "
            f"generator.sampling.max_new_tokens={longest}",
            f"Set rollout.overlong_tokens to {longest} or less.",
        )
    if environment.is_agent or environment.name == "demonstrations" or environment.max_turns > 1:
        yield Clash(
            ("rollout.overlong_tokens", "environment.name"),
            f"rollout.overlong_tokens={stretch} measures one response against "
            "generator.sampling.max_new_tokens, and samples of this environment have several, or none",
            "Leave rollout.overlong_tokens out, and let the reward see the length.",
        )
