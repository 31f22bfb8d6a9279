"""Prompts, rollout tasks, and the receipts of finished prompt groups.

A receipt is columnar: one tuple entry per sample. The controller reads nothing else of a group. The
tokens stay in the payload.
"""

import enum
from typing import Any, Final, TypeVar

import msgspec

from offbeat.messages.media import Thumbnail

T = TypeVar("T")
VersionSpans = tuple[tuple[int, int], ...]
"""Weight versions of one sample, in token order: ``((version, number of tokens), ...)``."""

RewardsByName = tuple[tuple[str, tuple[float | None, ...]], ...]
"""Names, each with a value per sample. None if the reward does not apply to the sample."""


class Prompt(msgspec.Struct, frozen=True):
    """One row of the prompt source, at a position in the endless prompt order."""

    prompt_index: int  # position in the endless order, from 0
    epoch: int  # passes over the rows before this one
    row: int  # index of the row in the source
    data: dict[str, Any]  # input of the environment: text, answer, ...
    environment: str = ""  # the prompt's environment, if the run has several
    folder: str = ""  # of the data file: paths of pictures are relative to it; empty: no file


class RolloutTask(msgspec.Struct, frozen=True):
    """Task to make one prompt group: ``samples`` rollouts of one prompt, on one engine."""

    prompt: Prompt
    attempt: int  # from 1; the result of an older attempt is refused at commit
    samples: int
    engine: str  # name of the engine that serves it
    seed: int  # seed of this group; sample i uses (seed, i)
    deadline_s: float
    # Scored and reported, never trained. Prompt indices refer to the evaluation's source
    evaluation: bool = False
    sampling: str = ""  # identity of the settings to sample under: offbeat.config.mixture
    min_valid_samples: int = 1  # the group fails with fewer unmasked samples
    eval_set: str = ""  # name of the evaluation's set; empty: the only set
    version: int = 0  # version that the engine had acked at dispatch

    @property
    def prompt_index(self) -> int:
        return self.prompt.prompt_index

    @property
    def group_id(self) -> str:
        return group_id(self.prompt.prompt_index)

    @property
    def request_prefix(self) -> str:
        """Return a readable prefix for the task's request ids. The worker makes the ids unique."""
        readable = f"{self.prompt.prompt_index}-{self.attempt}"
        if not self.evaluation:
            return readable
        return f"eval-{self.eval_set}-{readable}" if self.eval_set else f"eval-{readable}"


class Spooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location on disk of a copy of a group's columns, and the digest of the copy."""

    segment: str  # file in the run's spool
    offset: int
    nbytes: int
    digest: bytes


OUT_OF_TOKENS: Final = "length"
"""Finish reason of a sample that was cut off because it ran out of tokens."""

OUT_OF_TURNS: Final = "turns"
"""Finish reason of an episode that was cut off because it ran out of turns."""

LATE: Final = "deadline"
"""Finish reason of a masked sample whose environment did not answer in time."""

EPISODE_LATE: Final = "episode_deadline"
"""Finish reason of a masked sample: an agent's episode that exceeded its own time limit."""

PROCESS_LOST: Final = "agent_process_lost"
"""Reason for an episode that lost its process without causing the loss."""


class SampleStatus(enum.StrEnum):
    """Status of a sample: whether it counts in its group's training, comparisons and reports."""

    VALID = "valid"
    MASKED = "masked"  # no gradient, no part in a mean, a deviation or a divisor; its reward is 0.0


class SampleFailure(enum.StrEnum):
    """Kind of a sample's last failed try."""

    NONE = "none"  # no try has failed
    INFRASTRUCTURE = (
        "infrastructure"  # a resource of the environment was lost, out of service or late
    )
    MODEL = "model"  # the environment or the reward failed on the model's text


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Record of a finished group. Its producer has checked schema, lengths and finiteness.

    It contains only plain values. Columnar tuples have one entry per sample. ``payload_bytes`` is
    the size of the packed columns. A new field at the end needs no new ``SCHEMA`` of the journal.
    """

    prompt_index: int
    attempt: int
    engine: str
    engine_incarnation: str
    rewards: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    valid_tokens: tuple[int, ...]  # tokens with loss_mask set
    finish_reasons: tuple[str, ...]  # stop | length | ...; of a masked sample: why it failed
    version_spans: tuple[VersionSpans, ...]
    columns: tuple[str, ...]
    payload_bytes: int
    generate_s: float = 0.0  # time in the engine, first to last turn
    reward_s: float = 0.0  # time in the environment and the reward
    spooled: Spooled | None = None  # None: the columns would be lost with the controller
    kept_kv: tuple[int, ...] = ()  # per sample: tokens sampled with older keys; empty: none
    sampling: str = ""  # identity of the settings it was sampled under; empty: unknown
    truncated_turns: tuple[
        int, ...
    ] = ()  # of each sample, turns that ran out of tokens; empty: none
    statuses: tuple[SampleStatus, ...] = ()  # of each sample; empty: all are valid
    failures: tuple[SampleFailure, ...] = ()  # of each sample, also before a retry; empty: none
    retries: tuple[int, ...] = ()  # of each sample, tries after the first one; empty: none
    turns: tuple[int, ...] = ()  # of each sample, model calls; empty: one each
    # Of each sample of an evaluation, its final answer or ""; empty: none are extracted
    answers: tuple[str, ...] = ()
    rewards_by_name: RewardsByName = ()  # in addition to ``rewards``; only ``rewards`` are trained
    # Of each sample, rows of the columns: the branches of an agent's sample; empty: one each
    branches: tuple[int, ...] = ()
    environment: str = ""  # the group's environment, if the run has several
    # Of each sample of an evaluation, its response as bounded text; empty: not decoded
    texts: tuple[str, ...] = ()
    previews: tuple[Thumbnail, ...] = ()  # of the media of an evaluation's prompt
    # Of each sample of an agent, requests that the endpoint refused; empty: none
    refused_requests: tuple[int, ...] = ()
    textless_tokens: int = 0  # trained tokens whose ids the tokenizer lacks

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Return for each sample whether it is valid and ran out of tokens, in any turn."""
        if not (self.statuses or self.truncated_turns):
            return tuple([reason == OUT_OF_TOKENS for reason in self.finish_reasons])
        turns = self.truncated_turns or (0,) * self.samples
        samples = zip(self.valid, self.finish_reasons, turns, strict=True)
        return tuple(
            [valid and (reason == OUT_OF_TOKENS or cut > 0) for valid, reason, cut in samples]
        )

    @property
    def truncated_samples(self) -> int:
        """Return the number of truncated valid samples."""
        return sum(self.truncated)

    @property
    def generated_tokens(self) -> tuple[int, ...]:
        """Return each valid sample's trained tokens, or all of them if truncated and masked."""
        truncated = self.truncated
        if not any(truncated):
            return self.of_valid(self.valid_tokens)
        samples = zip(self.valid_tokens, self.response_tokens, truncated, strict=True)
        return self.of_valid(
            tuple(whole if is_cut and not own else own for own, whole, is_cut in samples)
        )

    @property
    def samples(self) -> int:
        """Return the number of samples, including masked samples."""
        return len(self.rewards)

    @property
    def valid(self) -> tuple[bool, ...]:
        """Return for each sample whether it is valid: not masked."""
        if not self.statuses:
            return (True,) * self.samples
        return tuple([status is SampleStatus.VALID for status in self.statuses])

    @property
    def masked_samples(self) -> int:
        return self.statuses.count(SampleStatus.MASKED)

    @property
    def valid_rewards(self) -> tuple[float, ...]:
        """Return the rewards of the valid samples. Other rewards have no meaning."""
        return self.of_valid(self.rewards)

    def of_valid(self, values: tuple[T, ...]) -> tuple[T, ...]:
        """Return the entries of valid samples from one value per sample."""
        if not self.statuses:
            return values
        samples = zip(values, self.statuses, strict=True)
        return tuple([value for value, status in samples if status is SampleStatus.VALID])

    @property
    def retried_samples(self) -> int:
        """Return how many samples were drawn more than once."""
        return len(self.retries) - self.retries.count(0)

    @property
    def branched_samples(self) -> int:
        """Return how many samples have more than one branch, including masked samples."""
        return len(self.branches) - self.branches.count(1)

    @property
    def refused_samples(self) -> int:
        """Return how many samples had a request refused by the endpoint, including masked ones."""
        return len(self.refused_requests) - self.refused_requests.count(0)

    @property
    def late_samples(self) -> int:
        """Return how many samples were masked because their environment was late."""
        if not self.statuses:
            return 0
        samples = zip(self.valid, self.finish_reasons, strict=True)
        return sum(not valid and reason in (LATE, EPISODE_LATE) for valid, reason in samples)

    @property
    def tokens(self) -> int:
        """Return the prompt and response tokens over all branches: the input of a forward pass."""
        if not self.branches:
            return sum(self.prompt_tokens) + sum(self.response_tokens)
        prompts = zip(self.prompt_tokens, self.branches, strict=True)
        return sum(tokens * count for tokens, count in prompts) + sum(self.response_tokens)

    @property
    def oldest_versions(self) -> tuple[int, ...]:
        """Return the weight version of the oldest token of each valid sample."""
        spans = self.of_valid(self.version_spans)
        return tuple([version for version, _ in map(min, spans)])

    @property
    def oldest_version(self) -> int:
        """Return the weight version of the group's oldest token, which determines its staleness."""
        return min(map(min, self.version_spans))[0]  # pairs, compared by version first

    @property
    def newest_version(self) -> int:
        return max(map(max, self.version_spans))[0]


def group_id(prompt_index: int) -> str:
    """Return the readable name of a group: ``g-000412``."""
    return f"g-{prompt_index:06d}"
