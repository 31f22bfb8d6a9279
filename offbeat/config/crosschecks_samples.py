"""Combinations of settings about failed samples that cannot work."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import on_failed_sample
from offbeat.config.run import RunConfig


def sample_clashes(config: RunConfig) -> Iterator[Clash]:
    """A number of valid samples is required that no group has, or that every group has."""
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
