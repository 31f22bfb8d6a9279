"""Packs a finished group into the standard columns, checks them and creates the receipt.

Legend: G samples of the group, B branches over all samples, N response tokens over all branches.
"""

from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter, sub
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import FailureKind, SchemaError
from offbeat.messages.groups import Receipt, RewardsByName, RolloutTask, VersionSpans
from offbeat.messages.media import Media
from offbeat.rollouts.calls import make_failure
from offbeat.transfer_queue import schema

Columns = dict[str, NDArray[Any]]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Samples of a group before they are packed."""

    prompt_ids: tuple[int, ...]
    response_ids: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32] | None  # [N]; None: no engine has sampled the tokens
    loss_mask: NDArray[np.bool_] | None  # [N]; None: the model sampled every token
    offsets: NDArray[np.int64]  # [B + 1]
    version_spans: tuple[VersionSpans, ...]  # [B], each adding up to the branch's length
    finish_reasons: tuple[str, ...]  # [G]
    engine_incarnation: str
    generate_s: float
    reward_s: float
    kept_kv: tuple[int, ...] = ()  # [G], see GenerateResult
    truncated_turns: tuple[int, ...] = ()  # [G], see Receipt
    turns: tuple[int, ...] = ()  # [G], see Receipt
    rewards_by_name: RewardsByName = ()
    answers: tuple[str, ...] = ()  # [G], see Receipt
    branches: tuple[int, ...] = ()  # [G], see Receipt
    refused_requests: tuple[int, ...] = ()  # [G], see Receipt
    media: Media | None = None  # of the prompt


def pack_columns(
    task: RolloutTask, rollout: Rollout, rewards: list[float]
) -> tuple[Receipt, Columns]:
    """Return the columns of the group and their receipt.

    Raises:
        RolloutFailed: ``schema``, if a column violates the schema (for example a NaN logprob).
    """
    tokens, mask = len(rollout.response_ids), rollout.loss_mask
    columns: Columns = {
        schema.PROMPT_IDS: np.array(rollout.prompt_ids, dtype=np.int32),
        schema.RESPONSE_IDS: rollout.response_ids,
        schema.RESPONSE_OFFSETS: rollout.offsets,
        schema.LOSS_MASK: _fill(tokens, np.bool_, 1) if mask is None else mask,
        schema.WEIGHT_VERSIONS: version_of_each_token(rollout.version_spans, tokens),
        schema.REWARDS: np.fromiter(rewards, np.float32, len(rewards)),
    }
    if rollout.branches:
        samples = np.arange(len(rollout.branches), dtype=np.int32)
        columns[schema.BRANCH_SAMPLES] = np.repeat(samples, rollout.branches)
    if rollout.media is not None:
        columns |= rollout.media
    required = schema.RECORDED_COLUMNS
    if rollout.logprobs is not None:
        columns[schema.GENERATION_LOGPROBS] = rollout.logprobs
        required = schema.ROLLOUT_COLUMNS
    try:
        schema.check(columns, required)
    except SchemaError as error:
        raise make_failure(task, FailureKind.DATA, "schema", str(error)) from error
    return _receipt(task, rollout, columns), columns


def version_of_each_token(spans: tuple[VersionSpans, ...], tokens: int) -> NDArray[np.int32]:
    """Expand version spans to the weight version of each token, [N]."""
    versions = [version for branch in spans for version, _ in branch]
    if len(set(versions)) == 1:  # almost every group
        return _fill(tokens, np.int32, versions[0])
    counts = [count for branch in spans for _, count in branch]
    return np.repeat(np.array(versions, dtype=np.int32), counts)


def _fill(tokens: int, dtype: type[Number], value: int) -> NDArray[Number]:
    """Return an array of one value, [N]. ``np.full`` and ``np.ones`` are three times slower."""
    column = np.empty(tokens, dtype)
    column.fill(value)
    return column


def _receipt(task: RolloutTask, rollout: Rollout, columns: Columns) -> Receipt:
    starts, spans = rollout.offsets, rollout.version_spans
    if rollout.branches:
        bounds = np.cumsum([0, *rollout.branches])
        starts = starts[bounds]
        spans = tuple(_spans_of_sample(spans[first:end]) for first, end in pairwise(bounds))
    ends = starts.tolist()
    lengths = tuple(map(sub, ends[1:], ends))
    mask = rollout.loss_mask
    valid = lengths
    if mask is not None:
        valid = tuple(np.add.reduceat(mask, starts[:-1], dtype=np.int64).tolist())
    return Receipt(
        prompt_index=task.prompt_index,
        attempt=task.attempt,
        engine=task.engine,
        engine_incarnation=rollout.engine_incarnation,
        rewards=tuple(columns[schema.REWARDS].tolist()),  # bit-equal to the column
        prompt_tokens=(len(rollout.prompt_ids),) * len(lengths),
        response_tokens=lengths,
        valid_tokens=valid,
        finish_reasons=rollout.finish_reasons,
        version_spans=spans,
        columns=tuple(columns),
        payload_bytes=schema.payload_bytes(columns),
        generate_s=rollout.generate_s,
        reward_s=rollout.reward_s,
        kept_kv=rollout.kept_kv,
        truncated_turns=rollout.truncated_turns,
        refused_requests=rollout.refused_requests,
        turns=rollout.turns,
        rewards_by_name=rollout.rewards_by_name,
        answers=rollout.answers,
        branches=rollout.branches,
        environment=task.prompt.environment,
    )


def _spans_of_sample(branches: tuple[VersionSpans, ...]) -> VersionSpans:
    """Return the spans of a sample's branches, concatenated."""
    by_version = groupby(chain.from_iterable(branches), key=itemgetter(0))
    return tuple((version, sum(count for _, count in run)) for version, run in by_version)
