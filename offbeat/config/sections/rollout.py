"""Defines section ``rollout`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config

OnFailedSample = Literal["fail_group", "retry", "mask"]


class RolloutConfig(Config):
    """Dispatch of prompt groups, and the handling of failed ones."""

    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups generating at once; None: what the sampler admits. Fewer queue less on the
    engines and give fresher samples, more keep large fleets busy."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy rollout of one prompt group; one that waits for its engine then counts
    against the engine (`generator.request_strikes`), one that waits for its environment does
    not. Raise it for long responses and slow environments, at the price of noticing a hung
    rollout later."""

    infrastructure_retries: Annotated[int, Field(ge=0)] = 8
    """Further attempts of a group whose engine or worker was lost or late. More save prompts on
    machines that are taken away, fewer end sooner on a prompt that itself kills engines."""

    consecutive_failures: Annotated[int, Field(ge=1)] = 64
    """Infrastructure failures in a row, over all groups, that end the run; those of groups that
    were in flight together count as one. A smaller number ends a run whose fleet is broken
    sooner, a larger one sits longer outages out."""

    outage_failures: Annotated[int, Field(ge=1)] = 4
    """Failures of the environment in a row, over all groups, that are taken for an outage: from
    then on one group at a time is tried, with growing waits and at no cost in retries, until a
    rollout is answered. Fewer spare the retries of more prompts, more keep the fleet at work
    through chance failures."""

    data_retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts of a group whose environment or reward failed. More save prompts from
    failures that pass, and compute the ones that always fail again as often."""

    on_failed_sample: OnFailedSample | None = None
    """Handling of a sample whose environment or reward fails. fail_group fails its group; retry draws
    that sample again up to ``sample_retries`` times and masks it after that; mask masks it at
    once; None: retry with environment.name=agent, else fail_group. Retries and masks save the other
    samples of the group; a masked sample counts nowhere, so its group compares fewer."""

    sample_retries: Annotated[int, Field(ge=0)] = 1
    """on_failed_sample=retry: further tries of a failed sample, within the deadline of its
    group. More tries leave fewer samples masked, and hold their groups up longer."""

    min_valid_samples: Annotated[int, Field(ge=1)] | None = None
    """A group with fewer samples that are not masked has failed; None: two, or one in groups of
    one. More keep advantages well estimated, fewer throw less work away."""

    branches: Literal["train", "mask"] = "train"
    """name=agent: what becomes of a sample whose turns are not one conversation, because the agent
    or the chat template rewrites its history. train: every branch is a row of its own, with the
    reward of the sample; together they count as one sample. mask: the sample trains nothing. train
    uses every token drawn, at the cost of computing what branches share once for each; mask keeps
    side conversations from being rewarded for what another branch did."""

    truncated_samples: Literal["train", "mask_loss"] = "train"
    """A sample that ran out of tokens: train learns from it as from any other; mask_loss keeps its
    reward in the comparison and trains none of its tokens, so that an answer which was only cut
    off is not unlearnt. Masking leaves nothing that teaches the model to come to an end. A group
    of which every sample is masked is replaced."""

    overlong_tokens: Annotated[int, Field(ge=1)] | None = None
    """Length of the stretch before `generator.sampling.max_new_tokens` on which a response's reward
    falls by up to ``overlong_penalty``, in proportion; None: no penalty. A long stretch makes
    answers shorter early, a short one is felt only by those about to be cut off."""

    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Reward that a response at the limit loses, with ``overlong_tokens``. As much as a right answer earns
    makes a long right answer worth nothing; more makes length matter more than being right."""

    max_sample_tokens: Annotated[int, Field(ge=2)] | None = None
    """name=agent: most tokens of one sample, over all its branches, each with its prompt and what
    it shares with others; a call beyond is refused as context_length_exceeded. None: four times
    ``generator.max_model_len``, or ``max_branches`` times with fewer or with branches=mask. Fewer
    bound the memory of a group and the length of episodes, more let agents finish longer tasks."""

    max_branches: Annotated[int, Field(ge=1)] = 64
    """name=agent: most branches of one sample; a call that opens another one is refused as
    context_length_exceeded. Fewer end an agent that rewrites its history sooner, and compute what
    branches share less often; more let it finish longer tasks."""

    drop_budget: Annotated[int, Field(ge=0)] = 0
    """Groups that may be dropped over the run for data failures; one more ends it. Each drop is
    a prompt that is not trained: raise it only as far as the data may be incomplete."""

    infrastructure_drop_budget: Annotated[int, Field(ge=0)] | None = None
    """Groups that may be dropped over the run after ``infrastructure_retries``, because each
    attempt hung or lost its engine or worker; one more ends it. Raise it where single prompts
    may kill engines; None: as many as ``drop_budget``, counted apart."""

    reward_call_budget: Annotated[int, Field(ge=1)] | None = None
    """Calls of reward functions that the run may make, tries, evaluations and resumes included;
    None: no limit. A group is dispatched only while the calls left cover what it can make at most
    and the next evaluation, so what a paid judge costs is bounded, the end of the run can be scored,
    and the last calls of a small budget stay unused."""

    on_reward_budget_spent: Literal["fail", "stop"] = "fail"
    """End of a run whose ``reward_call_budget`` can score no further group: fail ends it with
    RewardCallBudgetSpent, after a checkpoint, so that nobody takes it for complete; stop ends it as
    an operator's stop does, which suits a run that is to train as far as the money goes."""

    on_dropped_prompt: Literal["replace", "shrink"] = "replace"
    """replace: draw a fresh prompt, so that the batch stays whole and the step waits for it;
    shrink: train the smaller batch at once, whose gradient is noisier."""

    min_step_batch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Smallest batch that ``on_dropped_prompt=shrink`` may leave, as a share of
    ``groups_per_step``; further dropped prompts of the step are replaced. A larger share bounds
    the noise of a step, a smaller one waits less."""

    log: bool = True
    """Keep every finished group in ``rollouts/*.parquet``. It lets you read what was sampled,
    and costs disk in proportion to the tokens."""

    backoff_s: Annotated[float, Field(gt=0)] = 0.25
    """First wait after a failed rollout; doubles with each failure of the group, with jitter.
    Longer waits spare a service that is overloaded, shorter ones lose less time to failures
    that pass."""

    backoff_max_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest such wait. A small bound notices sooner that an outage is over, a large one asks
    a broken service less often."""
