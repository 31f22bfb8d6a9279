"""Defines section ``rollout`` of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.problems import Clash

OnFailedSample = Literal["fail_group", "retry", "mask"]


class RolloutConfig(Config):
    """Dispatch of prompt groups, and the handling of failed ones."""

    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups generating at once. null: what the sampler admits. Fewer give fresher samples,
    more keep large fleets busy."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of a group's rollout. If a late group waits for its engine, it counts against the
    engine (`generator.request_strikes`). Raise it for long responses or slow environments."""

    infrastructure_retries: Annotated[int, Field(ge=0)] = 8
    """Retries of a group whose engine or worker was lost or late."""

    consecutive_failures: Annotated[int, Field(ge=1)] = 64
    """Infrastructure failures in a row, over all groups, that end the run. Groups that were in
    flight together count as one."""

    outage_failures: Annotated[int, Field(ge=1)] = 4
    """Environment failures in a row, over all groups, that count as an outage. Then one group at a
    time is tried, with growing waits and without using retries, until one succeeds."""

    data_retries: Annotated[int, Field(ge=0)] = 1
    """Retries of a group whose environment or reward failed."""

    on_failed_sample: OnFailedSample | None = None
    """Handling of a sample whose environment or reward fails. fail_group: fail its group. retry:
    draw it again up to `sample_retries` times, then mask it. mask: mask it at once; it counts
    nowhere. null: retry for agents, else fail_group."""

    sample_retries: Annotated[int, Field(ge=0)] = 1
    """on_failed_sample=retry: retries of a failed sample, within the deadline of its group."""

    min_valid_samples: Annotated[int, Field(ge=1)] | None = None
    """A group with fewer unmasked samples has failed. null: 2, or 1 in groups of one."""

    branches: Literal["train", "mask"] = "train"
    """name=agent: samples whose history was rewritten by the agent or the chat template. train:
    each branch is a row with the sample's reward; together they count as one sample. mask: the
    sample trains nothing."""

    truncated_samples: Literal["train", "mask_loss"] = "train"
    """Samples that ran out of tokens. train: learn from them. mask_loss: keep their reward in the
    comparison but train none of their tokens; nothing then teaches the model to finish. A group
    with only such samples is replaced."""

    overlong_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens before `generator.sampling.max_new_tokens` over which the reward falls linearly by up
    to `overlong_penalty`. null: no penalty."""

    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Reward that a response at the limit loses, with `overlong_tokens`. As much as a right answer
    earns makes a long right answer worthless."""

    max_sample_tokens: Annotated[int, Field(ge=2)] | None = None
    """name=agent: tokens per sample over all branches, at most; further calls are refused as
    context_length_exceeded. null: 4 times `generator.max_model_len`, or `max_branches` times if
    that is less or with branches=mask."""

    max_branches: Annotated[int, Field(ge=1)] = 64
    """name=agent: branches per sample, at most. A call that opens another is refused as
    context_length_exceeded."""

    drop_budget: Annotated[int, Field(ge=0)] = 0
    """Groups that the run may drop for data failures; each is a prompt that is not trained. One
    more ends the run, and a resume rolls it out again."""

    infrastructure_drop_budget: Annotated[int, Field(ge=0)] | None = None
    """Groups that the run may drop after `infrastructure_retries`; one more ends it. null: a
    separate budget of `drop_budget`. Raise it if single prompts can kill engines."""

    reward_call_budget: Annotated[int, Field(ge=1)] | None = None
    """Calls of reward functions that the run may make, including retries, evaluations and resumes.
    null: no limit. A group starts only if the rest covers its maximum and the next evaluation, so
    the last calls may stay unused."""

    on_reward_budget_spent: Literal["fail", "stop"] = "fail"
    """When `reward_call_budget` covers no further group: fail ends with RewardCallBudgetSpent after
    a checkpoint; stop ends like `offbeat control RUN stop`."""

    on_dropped_prompt: Literal["replace", "shrink"] = "replace"
    """replace: draw a new prompt and keep the batch whole. shrink: train the smaller batch at
    once."""

    min_step_batch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Smallest batch after `on_dropped_prompt=shrink`, as a fraction of `groups_per_step`. Further
    dropped prompts are replaced."""

    log: bool = True
    """Write every finished group to `rollouts/*.parquet`. A file is written when it is full or some
    time old; a worker that is killed loses the texts of its unfinished file, and nothing else."""

    backoff_s: Annotated[float, Field(gt=0)] = 0.25
    """First wait after a failed rollout. It doubles with each failure of the group, with jitter."""

    backoff_max_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest wait between rollout attempts."""

    def find_clashes(self) -> Iterator[Clash]:
        if self.backoff_s > self.backoff_max_s:
            yield Clash(
                ("rollout.backoff_s", "rollout.backoff_max_s"),
                f"rollout.backoff_s={self.backoff_s:g} is longer than "
                f"rollout.backoff_max_s={self.backoff_max_s:g}, the longest wait allowed",
                f"Set rollout.backoff_max_s to {self.backoff_s:g} or more.",
            )
        if self.overlong_tokens is None and self.overlong_penalty != type(self)().overlong_penalty:
            yield Clash(
                ("rollout.overlong_penalty", "rollout.overlong_tokens"),
                f"rollout.overlong_penalty={self.overlong_penalty:g} is not used: there is no "
                "rollout.overlong_tokens",
                "Set rollout.overlong_tokens to the length of the stretch, or leave "
                "rollout.overlong_penalty out.",
            )
        if self.reward_call_budget is None and self.on_reward_budget_spent != "fail":
            yield Clash(
                ("rollout.on_reward_budget_spent", "rollout.reward_call_budget"),
                "rollout.on_reward_budget_spent is not used: there is no rollout.reward_call_budget",
                "Set rollout.reward_call_budget, or leave it out.",
            )
