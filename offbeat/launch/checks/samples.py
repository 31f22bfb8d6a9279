"""Checks what is done about samples at which environment or reward fail."""

from collections.abc import Iterator

from offbeat.config.limits import min_valid_samples, on_failed_sample
from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, ok


def check_failed_samples(config: RunConfig) -> Iterator[Finding]:
    """Say what a failed sample costs, and what its retries do to the samples that are trained."""
    rollout, least = config.rollout, min_valid_samples(config)
    policy = on_failed_sample(config)
    if policy == "fail_group":
        return
    retries = rollout.sample_retries if policy == "retry" else 0
    again = f"is drawn again up to {retries} times, then masked" if retries else "is masked"
    yield ok(
        "failed samples",
        f"one {again}; a group needs {least} of {config.samples_per_group} valid. Long samples fail "
        "and are late more often than short ones, so both favour short ones: watch "
        "rollout/retried_fraction, rollout/masked_fraction and rollout/late_fraction",
    )
