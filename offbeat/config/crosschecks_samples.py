"""Combinations of settings about failed and long samples that cannot work."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import on_failed_sample
from offbeat.config.run import RunConfig


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
