"""Content of fake prompt groups, generated from their seed: lengths, rewards, and poison.

Depends on the option ``images``: prompts may have pictures, and picture failures.
"""

from typing import Final, TypeVar

import msgspec

from offbeat.config.limits import on_failed_sample
from offbeat.config.run import RunConfig
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.groups import (
    PROCESS_LOST,
    Receipt,
    RolloutTask,
    SampleFailure,
    SampleStatus,
    VersionSpans,
)
from offbeat.plugins.simulation.engine import FakeEngine
from offbeat.plugins.simulation.records import DrawnSamples

T = TypeVar("T")
PROMPT_TOKENS: Final = 5
MOST_TURNS: Final = 3
_COLUMNS: Final = ("response_ids", "rewards")
_MEDIA_COLUMNS: Final = ("media_values", "media_sizes", "media_kind")
_TOKEN_BYTES: Final = 13
_MULTIPLIER: Final = 6364136223846793005
_INCREMENT: Final = 1442695040888963407
_MASK: Final = 2**64 - 1
_FUTURE: Final = 1000
_MOST_LOST: Final = 3
"""Tries of a sample that cost no retry, because another episode ended its process."""

_LOST_SHARE: Final = 0.25  # of the tries that fail
_DATA_PROBLEMS: Final = ("reward_raised",)
_PICTURE_PROBLEMS: Final = (*_DATA_PROBLEMS, "picture_token", "picture_unusable")
_MODEL_SHARE: Final = 0.5  # of the tries that failed and cost a retry


class _Dice:
    """A few numbers from a seed, one per group. ``random.Random`` would first fill 624 words."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = (seed ^ seed >> 64) * _MULTIPLIER + _INCREMENT & _MASK

    def random(self) -> float:
        self._state = self._state * _MULTIPLIER + _INCREMENT & _MASK
        return (self._state >> 11) / 2**53


class Content:
    """Generated samples of one group. The same task has the same content on every worker.

    With ``several_turns`` a sample has up to three turns of about equal length. It ends with up to
    as many branches, each of which is a first prompt and the turns that follow it.
    """

    def __init__(
        self, task: RolloutTask, config: RunConfig, *, several_turns: bool = False
    ) -> None:
        longest = config.generator.sampling.max_new_tokens
        filtered = config.filters.zero_variance
        dice = (task.seed ^ task.prompt_index) * _MULTIPLIER + _INCREMENT & _MASK
        flat = filtered and (dice >> 33) % 6 == 0
        lengths, rewards = list[int](), list[float]()
        for sample in range(task.samples):
            dice = dice * _MULTIPLIER + _INCREMENT & _MASK
            lengths.append(1 + (dice >> 40) % longest)
            # The first two differ, so that only a group meant to be flat is flat.
            won = bool(sample % 2) if sample < 2 else bool(dice >> 33 & 1)  # noqa: PLR2004
            rewards.append(1.0 if flat or won else 0.0)
        self.task, self.longest = task, longest
        self.lengths, self.rewards = tuple(lengths), tuple(rewards)
        turns = branches = (1,) * task.samples
        if several_turns:
            turns = tuple(
                [
                    min(1 + (dice >> 20 + place) % MOST_TURNS, length)
                    for place, length in enumerate(lengths)
                ]
            )
            branches = tuple(
                [1 + (dice >> 40 + place) % count for place, count in enumerate(turns)]
            )
        self.turns, self.branches, self.most_turns = turns, branches, max(turns)
        self.media_bytes = _media_bytes(task, config, dice)

    def tokens_of_turn(self, turn: int) -> tuple[tuple[int, int], ...]:
        """Return the samples that have this turn, counted from 0, with token counts."""
        if self.most_turns == 1:
            return tuple(enumerate(self.lengths)) if turn == 0 else ()
        samples = enumerate(zip(self.lengths, self.turns, strict=True))
        return tuple(
            (sample, length // turns + (turn < length % turns))
            for sample, (length, turns) in samples
            if turn < turns
        )


def receipt_of(content: Content, engine: FakeEngine, spans: tuple[VersionSpans, ...]) -> Receipt:
    """Return a correct receipt."""
    task, lengths, longest = content.task, content.lengths, content.longest
    media_bytes = content.media_bytes
    return make_receipt(
        task.prompt_index,
        task.attempt,
        spans,
        engine=engine.name,
        engine_incarnation=engine.incarnation,
        rewards=content.rewards,
        prompt_tokens=(PROMPT_TOKENS,) * task.samples,
        finish_reasons=tuple(["length" if each == longest else "stop" for each in lengths]),
        columns=(*_COLUMNS, *_MEDIA_COLUMNS) if media_bytes else _COLUMNS,
        payload_bytes=_TOKEN_BYTES * sum(lengths) + media_bytes,
        generate_s=0.3,
        reward_s=0.02,
        sampling=task.sampling,
        environment=task.prompt.environment,
        turns=_where_any(content.turns),
        branches=_where_any(content.branches),
    )


def drawn_samples(receipt: Receipt) -> DrawnSamples:
    """Return the draws for the samples of a correct receipt."""
    ones = (1,) * receipt.samples
    return DrawnSamples(
        tuple([not valid for valid in receipt.valid]),
        receipt.retries or (0,) * receipt.samples,
        receipt.turns or ones,
        receipt.branches or ones,
        media_bytes_of(receipt),
    )


def data_problem(content: Content) -> str:
    """Return why a group fails because of its data. Pictures have additional reasons."""
    reasons = _PICTURE_PROBLEMS if content.media_bytes else _DATA_PROBLEMS
    return reasons[content.task.prompt_index % len(reasons)]


def media_bytes_of(receipt: Receipt) -> int:
    """Return the picture bytes, which a correct receipt counts beyond the bytes of its tokens."""
    if _MEDIA_COLUMNS[0] not in receipt.columns:
        return 0
    return receipt.payload_bytes - _TOKEN_BYTES * sum(receipt.response_tokens)


def _media_bytes(task: RolloutTask, config: RunConfig, dice: int) -> int:
    """Return the bytes of a prompt's pictures, which often reach the limit."""
    name = task.prompt.environment
    section = config.environments[name].environment if name else config.environment
    if not section.has_media:
        return 0
    most = section.max_media_bytes
    return most if dice >> 37 & 1 else max(1, (dice >> 20) % most)


def _where_any(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the counts, or nothing if each is 1."""
    return counts if max(counts) > 1 else ()


def with_failed_samples(
    receipt: Receipt, task: RolloutTask, config: RunConfig, share: float
) -> Receipt | RolloutFailed:
    """Return the receipt of a group in which this share of the tries failed, or its failure."""
    dice = _Dice(task.seed * _MULTIPLIER ^ task.attempt)
    policy = on_failed_sample(config)
    tries = 1 + config.rollout.sample_retries if policy == "retry" else 1
    failed = [0] * task.samples  # tries of each sample
    lost = [0] * task.samples  # further tries, lost when another episode ended the process
    kinds = [SampleFailure.NONE] * task.samples
    for sample in range(task.samples):
        while failed[sample] < tries and dice.random() < share:
            if lost[sample] < _MOST_LOST and dice.random() < _LOST_SHARE:
                lost[sample] += 1
                kinds[sample] = SampleFailure.INFRASTRUCTURE
                continue
            failed[sample] += 1
            is_model = dice.random() < _MODEL_SHARE
            kinds[sample] = SampleFailure.MODEL if is_model else SampleFailure.INFRASTRUCTURE
    masked = [count == tries for count in failed]
    fails = any(failed) and policy == "fail_group"
    if any(lost) and policy == "fail_group" and not fails:
        return failure_of(task, PROCESS_LOST, "another episode ended the process")
    if fails or task.samples - sum(masked) < task.min_valid_samples:
        reason = "environment_raised" if fails else "too_few_valid_samples"
        by_model = SampleFailure.INFRASTRUCTURE not in kinds
        kind = FailureKind.DATA if fails or by_model else FailureKind.INFRASTRUCTURE
        return failure_of(task, reason, f"{sum(failed)} failed tries", kind=kind)
    return msgspec.structs.replace(
        receipt,
        rewards=_where(masked, 0.0, receipt.rewards),
        valid_tokens=_where(masked, 0, receipt.valid_tokens),
        finish_reasons=_where(masked, "environment_raised", receipt.finish_reasons),
        statuses=_where(masked, SampleStatus.MASKED, (SampleStatus.VALID,) * task.samples),
        failures=tuple(kinds),
        retries=tuple(
            own + others - gone for own, others, gone in zip(failed, lost, masked, strict=True)
        ),
    )


def failure_of(
    task: RolloutTask,
    reason: str,
    detail: str,
    source: Component = Component.ENVIRONMENT,
    kind: FailureKind = FailureKind.INFRASTRUCTURE,
) -> RolloutFailed:
    """Return the failure of a group. An infrastructure failure may pass on a later attempt."""
    return RolloutFailed(kind, task.prompt_index, task.attempt, reason, detail, source)


def _where(masked: list[bool], value: T, values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(value if gone else each for gone, each in zip(masked, values, strict=True))


def poisoned(receipt: Receipt, kind: str) -> Receipt:
    """Return the receipt with one error."""
    first, *others = receipt.version_spans
    match kind:
        case "reward_nan":
            change = {"rewards": (float("nan"), *receipt.rewards[1:])}
        case "group_short":
            change = _every_column(receipt, slice(1, None))
        case "group_ragged":
            change = {"rewards": receipt.rewards[1:]}
        case "sample_doubled":
            change = _every_column(receipt, None)
        case "sample_empty":
            change = {
                "response_tokens": (0, *receipt.response_tokens[1:]),
                "valid_tokens": (0, *receipt.valid_tokens[1:]),
                "version_spans": ((), *others),
            }
        case "version_future":
            version, tokens = first[-1]
            change = {"version_spans": ((*first[:-1], (version + _FUTURE, tokens)), *others)}
        case "attempt_wrong":
            change = {"attempt": receipt.attempt + 1}
        case "spans_short":
            version, tokens = first[-1]
            change = {"version_spans": ((*first[:-1], (version, tokens + 1)), *others)}
        case _:
            raise ValueError(f"{kind} poisons no receipt")
    return msgspec.structs.replace(receipt, **change)


def _every_column(receipt: Receipt, part: slice | None) -> dict[str, tuple[object, ...]]:
    """Cut all columns alike. ``part`` None duplicates the last sample."""
    names = (
        "rewards",
        "prompt_tokens",
        "response_tokens",
        "valid_tokens",
        "finish_reasons",
        "version_spans",
    )
    columns: dict[str, tuple[object, ...]] = {name: getattr(receipt, name) for name in names}
    return {
        name: (*column, column[-1]) if part is None else column[part]
        for name, column in columns.items()
    }
