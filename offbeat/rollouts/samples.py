"""Draws the samples of a group. Retries failed samples, or drops the sample or the group.

A sample fails because of its environment: ``begin``, ``step`` or the reward raised, returned an
invalid value, was out of service or was late. If the engine fails, the whole attempt of the group
fails, and is retried elsewhere. After a bug the whole attempt fails, too, and the run ends.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, Self

import msgspec

from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import (
    LATE,
    PROCESS_LOST,
    Receipt,
    RolloutTask,
    SampleFailure,
    SampleStatus,
)
from offbeat.messages.media import Media
from offbeat.rollouts.calls import Generate, make_failure
from offbeat.rollouts.columns import Columns, pack_columns
from offbeat.rollouts.deadline import within_deadline
from offbeat.rollouts.transcript import Transcript, common_prompt, join_samples

TOO_FEW: Final = "too_few_valid_samples"
"""Reason of a group that failed because too many of its samples failed."""

_SHARE: Final = 0.95
"""Fraction of the deadline after which a sample is late. Then there is time to pack the others."""

BRANCHES: Final = "branches"
"""Failure reason of an agent's sample with several branches, if the recipe allows only one."""

_NOT_RETRIED: Final = (LATE, BRANCHES)
"""Failure reasons without a retry: no time is left, or the agent would do the same again."""

_MOST_NAMES: Final = 32
"""Maximum names of metrics in a group. More are an error, such as names with numbers in them."""

_UNCOUNTED: Final = 3
"""Free retries of a sample after another sample ended its process. After that, losses count."""

_KINDS: Final = {
    FailureKind.INFRASTRUCTURE: SampleFailure.INFRASTRUCTURE,
    FailureKind.DATA: SampleFailure.MODEL,
}


def _forget(task: RolloutTask, failure: RolloutFailed) -> None:
    """Keep no record of a failure."""


@dataclass(frozen=True, slots=True)
class SampleFailurePolicy:
    """Decides what happens after a failed sample."""

    on_failed: Literal["retry", "mask", "fail_group"] = "fail_group"
    sample_retries: int = 1  # with ``retry``
    keep: Callable[[RolloutTask, RolloutFailed], None] = _forget
    """Called with each failure that costs one sample. It is reported nowhere else."""

    @property
    def tries(self) -> int:
        return 1 + self.sample_retries if self.on_failed == "retry" else 1

    def spares_group(self, failure: RolloutFailed) -> bool:
        """Return whether this failure costs only one sample, and not its group."""
        return (
            self.on_failed != "fail_group"
            and failure.kind is not FailureKind.BUG
            and failure.source is Component.ENVIRONMENT
        )


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """Outcome of all tries of one sample."""

    transcript: Transcript  # of the last try
    status: SampleStatus
    failure: RolloutFailed | None = None  # of the last failed try
    retries: int = 0


Draw = Callable[[Transcript, int, Generate], Awaitable[None]]
"""Function that fills a transcript, including its reward, with tokens from the passed engine.

The number counts retries. It is 0 at the first try.
"""


@dataclass(frozen=True, slots=True)
class SampleDraws:
    """Draws the samples of one group, each as often as the policy allows."""

    task: RolloutTask
    policy: SampleFailurePolicy
    generate: Generate
    ends_at: float  # time of the event loop after which a sample is late

    @classmethod
    def begin(cls, task: RolloutTask, policy: SampleFailurePolicy, generate: Generate) -> Self:
        """Start the clock of a group."""
        ends_at = asyncio.get_running_loop().time() + _SHARE * task.deadline_s
        return cls(task, policy, generate, ends_at)

    async def draw_all(self, draw_of: Callable[[int], Draw]) -> list[DrawnSample]:
        """Draw every sample of the group concurrently.

        Raises:
            RolloutFailed: The first failure that affects more than one sample, or after which the
                policy drops the group. The other samples are cancelled.
        """
        try:
            async with asyncio.TaskGroup() as samples:
                running = [
                    samples.create_task(
                        self._drawn(sample, draw_of(sample)),
                        name=f"sample-{self.task.prompt_index}-{sample}",
                    )
                    for sample in range(self.task.samples)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [run.result() for run in running]

    async def _drawn(self, sample: int, draw: Draw) -> DrawnSample:
        retry, uncounted, transcript, failure = -1, 0, Transcript(), None
        while retry + 1 < self.policy.tries + uncounted:
            retry += 1
            transcript = Transcript()
            try:
                await self._within_time(partial(draw, transcript, retry))
            except RolloutFailed as error:
                if error.source is Component.ENVIRONMENT:
                    error.sample, error.response_ids = sample, transcript.token_ids
                if not self.policy.spares_group(error):
                    raise
                self.policy.keep(self.task, error)
                failure = error
                if error.reason in _NOT_RETRIED:
                    break
                if error.reason == PROCESS_LOST and uncounted < _UNCOUNTED:
                    uncounted += 1
            else:
                return DrawnSample(transcript, SampleStatus.VALID, failure, retry)
        return DrawnSample(transcript, SampleStatus.MASKED, failure, retry)

    async def _within_time(self, draw: Callable[[Generate], Awaitable[None]]) -> None:
        if self.policy.on_failed == "fail_group":  # the group's deadline applies
            await draw(self.generate)
            return
        left_s = self.ends_at - asyncio.get_running_loop().time()
        await within_deadline(self.task, self.generate, draw, limit_s=left_s)


def pack_samples(
    task: RolloutTask,
    prompt_ids: tuple[int, ...],
    samples: Sequence[DrawnSample],
    media: Media | None = None,
) -> tuple[Receipt, Columns]:
    """Return columns and receipt of a group, with failed samples masked.

    ``media`` are the pictures of the prompt.

    Raises:
        RolloutFailed: ``too_few_valid_samples``, also if no sample has a token; or ``schema``, as
            in ``pack_columns``.
    """
    _check_enough(task, samples)
    transcripts = [each.transcript for each in samples]
    versions = [version for one in transcripts for row in one.branches for version, _ in row.spans]
    if not versions:
        raise _too_few(task, samples, valid=0)
    newest = max(versions)  # so that no placeholder makes its group older than its tokens
    for each in samples:
        if each.status is SampleStatus.MASKED and each.failure is not None:
            each.transcript.become_masked(each.failure.reason, prompt_ids[-1], newest)
    rewards = [one.reward for one in transcripts]
    rollout = replace(join_samples(prompt_ids, transcripts), media=media)
    receipt, columns = pack_columns(task, rollout, rewards)
    return _with_outcomes(receipt, samples), columns


def pack_with_own_prompts(
    task: RolloutTask, samples: Sequence[DrawnSample]
) -> tuple[Receipt, Columns]:
    """Return columns and receipt of a group with a separate prompt per sample.

    A metric that a sample lacks becomes None. The prompt of the group is the common beginning of
    all prompts of the valid samples' branches. The rest of each prompt becomes an observation
    before the first turn of its branch: response tokens outside the loss.

    Raises:
        RolloutFailed: ``prompts_differ`` if not even the first token is the same, because columns
            need a prompt; ``reward_names_differ`` if rewards have too many names; or as in
            ``pack_samples``.
    """
    _check_enough(task, samples)
    valid = [each.transcript for each in samples if each.status is SampleStatus.VALID]
    if not valid:  # an evaluation that spares its prompts
        valid = [each.transcript for each in samples if each.transcript.prompt_ids]
        if not valid:
            raise _too_few(task, samples, valid=0)
    prompt_ids = common_prompt(branch.prompt_ids for one in valid for branch in one.branches)
    if not prompt_ids:
        detail = f"the prompts of {len(valid)} samples have no first token in common"
        raise make_failure(task, FailureKind.DATA, "prompts_differ", detail)
    names = sorted({name for one in valid for name in one.rewards_by_name})
    if len(names) > _MOST_NAMES:
        detail = (
            f"the samples of the group returned metrics of {len(names)} names, {names!r:.200}: use "
            f"at most {_MOST_NAMES}, the same in every sample"
        )
        raise make_failure(task, FailureKind.DATA, "reward_names_differ", detail)
    for one in valid:  # None: it counts in no mean
        one.rewards_by_name = {name: one.rewards_by_name.get(name) for name in names}
    for each in samples:
        each.transcript.move_behind(prompt_ids)
    return pack_samples(task, prompt_ids, samples)


def seed_of_turn(seed: int, sample: int, turn: int, retry: int) -> int:
    """Return the seed of a model call. A retry gets a different seed, so that it can succeed."""
    again = f":{retry}" if retry else ""
    return random.Random(f"{seed}:{sample}:{turn}{again}").getrandbits(31)


def slice_result(result: GenerateResult, sample: int) -> GenerateResult:
    """Return the part of an answer that belongs to one sample."""
    start, end = result.offsets[sample : sample + 2].tolist()
    return msgspec.structs.replace(
        result,
        token_ids=result.token_ids[start:end],
        logprobs=result.logprobs[start:end],
        offsets=result.offsets[sample : sample + 2] - start,
        finish_reasons=(result.finish_reasons[sample],),
        version_spans=(result.version_spans[sample],),
        kept_kv=result.kept_kv[sample : sample + 1],
    )


def _check_enough(task: RolloutTask, samples: Sequence[DrawnSample]) -> None:
    """Raise if too few samples are valid, with kind INFRASTRUCTURE if a sample failed that way."""
    valid = sum(each.status is SampleStatus.VALID for each in samples)
    if valid < task.min_valid_samples:
        raise _too_few(task, samples, valid)


def _too_few(task: RolloutTask, samples: Sequence[DrawnSample], valid: int) -> RolloutFailed:
    failures = [
        (index, each.failure)
        for index, each in enumerate(samples)
        if each.status is SampleStatus.MASKED and each.failure is not None
    ]
    index, first = min(failures, key=lambda each: each[1].kind is not FailureKind.INFRASTRUCTURE)
    why = (
        f"{valid} of {task.samples} samples are valid, but rollout.min_valid_samples is "
        f"{task.min_valid_samples}"
        if valid < task.min_valid_samples
        else f"none of {task.samples} samples has a token"
    )
    detail = f"{first.detail} ({first.reason}); {why}"
    error = RolloutFailed(
        first.kind, task.prompt_index, task.attempt, TOO_FEW, detail, Component.ENVIRONMENT, index
    )
    error.__cause__ = first
    return error


def _with_outcomes(receipt: Receipt, samples: Sequence[DrawnSample]) -> Receipt:
    """Return the receipt. If any try has failed, it includes the failed tries of its samples."""
    if all(each.failure is None for each in samples):
        return receipt
    statuses = tuple(each.status for each in samples)
    return msgspec.structs.replace(
        receipt,
        statuses=statuses if SampleStatus.MASKED in statuses else (),
        failures=tuple(
            SampleFailure.NONE if each.failure is None else _KINDS[each.failure.kind]
            for each in samples
        ),
        retries=tuple(each.retries for each in samples),
    )
