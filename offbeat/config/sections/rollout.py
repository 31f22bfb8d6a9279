"""Defines section ``rollout`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config


class RolloutConfig(Config):
    """Dispatch of prompt groups, and the handling of failed ones."""

    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups generating at once. None: what the sampler admits."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy rollout of one prompt group.

    One that waits for its engine then counts against
    the engine (``generator.request_strikes``), one that waits for its environment does not."""

    infrastructure_retries: Annotated[int, Field(ge=0)] = 8
    """Further attempts of a group whose engine or worker was lost or late."""

    consecutive_failures: Annotated[int, Field(ge=1)] = 64
    """Infrastructure failures in a row, over all groups, that end the run.

    Those of groups that were in
    flight together count as one: a process that dies takes all of its groups with it."""

    outage_failures: Annotated[int, Field(ge=1)] = 4
    """Failures of the environment in a row, over all groups, that are taken for an outage of it.

    From then on one group at a time is tried, with growing waits, until a rollout is answered. A trial
    costs its prompt no retry."""

    data_retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts of a group whose environment or reward failed."""

    on_failed_sample: Literal["fail_group", "retry", "mask"] = "fail_group"
    """What is done where environment or reward fail at one sample. fail_group: its group has failed;
    retry: that sample alone is drawn again, up to ``sample_retries`` times, and masked after that;
    mask: it is masked at once. A masked sample keeps its place and counts nowhere."""

    sample_retries: Annotated[int, Field(ge=0)] = 1
    """on_failed_sample=retry: further tries of a failed sample, within the deadline of its group."""

    min_valid_samples: Annotated[int, Field(ge=1)] | None = None
    """A group with fewer samples that are not masked has failed. None: two; one in groups of one."""

    drop_budget: Annotated[int, Field(ge=0)] = 0
    """Groups that may be dropped over the run for data failures; one more ends it."""

    infrastructure_drop_budget: Annotated[int, Field(ge=0)] | None = None
    """Groups that may be dropped over the run after ``infrastructure_retries``, because each attempt
    hung or lost its engine or worker; one more ends it. None: as many as ``drop_budget``, counted
    apart."""

    on_dropped_prompt: Literal["replace", "shrink"] = "replace"
    """replace: draw a fresh prompt so that the batch stays whole; shrink.

    Train the smaller batch.
    """

    min_step_batch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Smallest batch that ``on_dropped_prompt.

    Shrink`` may leave, as a share of ``groups_per_step``;
    further dropped prompts of the step are replaced."""

    log: bool = True
    """Keep every finished group in ``rollouts/*.parquet``."""

    backoff_s: Annotated[float, Field(gt=0)] = 0.25
    """First wait after a failed rollout; doubles with each failure of the group, with jitter."""

    backoff_max_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest such wait."""
