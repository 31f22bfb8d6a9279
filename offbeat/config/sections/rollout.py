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
    """Maximum prompt groups generating at once. null: all that the sampler admits. Fewer groups
    give fresher samples; more keep large fleets busy."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for a group's rollout, and for a prompt of an evaluation. If this time runs out while
    the group waits for an engine, and that engine answered nothing in the last quarter of it, the
    request counts as failed by the engine (`generator.request_strikes`). Raise it for long
    responses or slow environments."""

    infrastructure_retries: Annotated[int, Field(ge=0)] = 8
    """Retries of a group after its engine or worker was lost or late."""

    consecutive_failures: Annotated[int, Field(ge=1)] = 64
    """Consecutive infrastructure failures, over all groups, that end the run. Failures of groups
    that were in flight together count as one."""

    outage_failures: Annotated[int, Field(ge=1)] = 4
    """Consecutive environment failures, over all groups, that count as an outage. During an outage,
    one group at a time is tried until one succeeds. The waits between these tries grow, and the
    tries do not use up retries."""

    data_retries: Annotated[int, Field(ge=0)] = 1
    """Retries of a group after its environment or reward failed."""

    on_failed_sample: OnFailedSample | None = None
    """Handling of a sample whose environment or reward fails. fail_group: fail its group. retry:
    draw it again up to `sample_retries` times, then mask it. mask: mask it at once, so that it
    counts nowhere. null: retry for agents, else fail_group."""

    sample_retries: Annotated[int, Field(ge=0)] = 1
    """With `on_failed_sample=retry`: retries per failed sample, within its group's deadline."""

    min_valid_samples: Annotated[int, Field(ge=1)] | None = None
    """Minimum unmasked samples per group; a group with fewer fails. null: 2, or 1 for groups of
    one."""

    branches: Literal["train", "mask"] = "train"
    """With `environment.name=agent`: samples whose history the agent or the chat template rewrote.
    train: each branch is a row with the sample's reward, and together they count as one sample.
    mask: train no part of the sample."""

    truncated_samples: Literal["train", "mask_loss"] = "train"
    """Samples that ran out of tokens. train: learn from them. mask_loss: use their rewards to
    compare the samples of the group, but train none of their tokens and leave them out of the
    loss's divisor. Then nothing teaches the model to finish. A group in which all samples ran out
    of tokens is replaced."""

    overlong_tokens: Annotated[int, Field(ge=1)] | None = None
    """Length in tokens of the stretch before `generator.sampling.max_new_tokens` in which the
    reward falls linearly, by up to `overlong_penalty`. null: no penalty."""

    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """With `overlong_tokens`: amount subtracted from the reward of a response at the limit. If it
    equals the reward of a right answer, a long right answer is worth nothing."""

    max_sample_tokens: Annotated[int, Field(ge=2)] | None = None
    """With `environment.name=agent`: maximum tokens per sample, over all branches. Further calls
    are refused as context_length_exceeded. null: `generator.max_model_len` times the smaller of 4
    and `max_branches`; with `branches=mask`, times `max_branches`."""

    max_branches: Annotated[int, Field(ge=1)] = 64
    """With `environment.name=agent`: maximum branches per sample. A call that would open one more
    is refused as context_length_exceeded."""

    drop_budget: Annotated[int, Field(ge=0)] = 0
    """Groups that may be dropped for data failures; their prompts are not trained. One more ends
    the run, and a resume rolls that group out again."""

    infrastructure_drop_budget: Annotated[int, Field(ge=0)] | None = None
    """Groups that may be dropped after `infrastructure_retries`. One more ends the run. null: as
    many as `drop_budget`, counted separately. Raise it if single prompts can kill engines."""

    reward_call_budget: Annotated[int, Field(ge=1)] | None = None
    """Maximum calls of reward functions in the run, including retries, evaluations and resumes.
    null: no limit. A group starts only if the remaining calls cover its maximum and the next
    evaluation, so the last calls may stay unused."""

    on_reward_budget_spent: Literal["fail", "stop"] = "fail"
    """What happens when `reward_call_budget` covers no further group. fail: end with
    RewardCallBudgetSpent after a checkpoint. stop: end like `offbeat control RUN stop`."""

    on_dropped_prompt: Literal["replace", "shrink"] = "replace"
    """What happens to a batch if one of its prompts is dropped. replace: draw a new prompt and
    train a full batch. shrink: train the smaller batch at once."""

    min_step_batch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With `on_dropped_prompt=shrink`: smallest batch, as a fraction of `groups_per_step`. Prompts
    dropped beyond that are replaced."""

    log: bool = True
    """Write every finished group to `rollouts/*.parquet`. A file is written when it is full or
    after some time. A killed worker loses only the texts of its unfinished file."""

    backoff_s: Annotated[float, Field(gt=0)] = 0.25
    """Seconds to wait after a failed rollout. The wait doubles with each failure of the group, with
    jitter."""

    backoff_max_s: Annotated[float, Field(gt=0)] = 10.0
    """Maximum seconds between two attempts of a rollout."""

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
                f"rollout.overlong_penalty={self.overlong_penalty:g} is not used without "
                "rollout.overlong_tokens",
                "Set rollout.overlong_tokens to the length of the stretch, or leave "
                "rollout.overlong_penalty out.",
            )
        if self.reward_call_budget is None and self.on_reward_budget_spent != "fail":
            yield Clash(
                ("rollout.on_reward_budget_spent", "rollout.reward_call_budget"),
                "rollout.on_reward_budget_spent is not used without rollout.reward_call_budget",
                "Set rollout.reward_call_budget, or leave it out.",
            )
