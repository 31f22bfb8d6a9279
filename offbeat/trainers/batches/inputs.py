"""Inputs of the loss other than the new log-probabilities, in order of a microbatch's tokens."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.algorithms.losses import LossTokens
from offbeat.config.sections.loss import LossConfig, SftLossConfig
from offbeat.messages.failures import SchemaError
from offbeat.trainers.batches.packing import Batch, PackedRows, check_finite, check_length
from offbeat.trainers.errors import UnfitColumns
from offbeat.transfer_queue.schema import (
    GENERATION_LOGPROBS,
    POLICY_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    WEIGHT_VERSIONS,
    Columns,
)


def loss_tokens(
    batch: Batch,
    groups: Sequence[Columns],
    advantages: Sequence[Sequence[float]],
    config: LossConfig,
    device: torch.device,
    *,
    version: int | None = None,
) -> Callable[[PackedRows, Tensor, Tensor], LossTokens]:
    """Return a function that selects the values of a microbatch from the groups' columns.

    The function's arguments are a microbatch, its log-probabilities [N] and its entropies [N]. With
    the trainer's weight ``version``, the result includes each token's staleness. This is a
    diagnostic, not an input of the loss.

    Raises:
        SchemaError: No group has a column that the loss needs, or the advantages do not match the
            samples.
        UnfitColumns: A group's column does not fit its tokens, or is not finite at a trained token.
    """
    firsts = np.searchsorted(batch.group_S, np.arange(len(groups)))
    counts = np.diff([*batch.sample_S[firsts], batch.sample_S[-1] + 1]).tolist()
    if [len(each) for each in advantages] != counts:
        got = [len(each) for each in advantages]
        raise SchemaError("advantages", f"{got} per group", f"{counts}: one per sample")
    advantage_of_sample = np.concatenate([np.asarray(each, np.float64) for each in advantages])

    share_S = _share_of_sample(batch)

    def column(name: str) -> NDArray[np.generic]:
        return _column(batch, groups, name)

    is_recorded = isinstance(config, SftLossConfig) and not any(
        GENERATION_LOGPROBS in each for each in groups
    )
    generation = None if is_recorded else column(GENERATION_LOGPROBS)
    old = column(POLICY_LOGPROBS) if config.needs_policy_logprobs else generation
    reference = column(REFERENCE_LOGPROBS) if config.needs_reference_logprobs else None
    teacher = column(TEACHER_LOGPROBS) if config.teacher_path is not None else None
    staleness = None if version is None else np.subtract(version, column(WEIGHT_VERSIONS))

    def make(packed: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> LossTokens:
        present, sequence_N = np.unique(batch.branch[packed.source_N], return_inverse=True)

        def tensor(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        return LossTokens(
            logprobs_N=logprobs_N,
            old_N=logprobs_N.detach() if old is None else tensor(old[packed.source_N]),
            generation_N=None if generation is None else tensor(generation[packed.source_N]),
            reference_N=None if reference is None else tensor(reference[packed.source_N]),
            teacher_N=None if teacher is None else tensor(teacher[packed.source_N]),
            advantages_N=tensor(advantage_of_sample[batch.sample_S[present]][sequence_N]),
            mask_N=torch.ones(len(sequence_N), dtype=torch.bool, device=device),
            sequence_N=tensor(sequence_N),
            sequences=len(present),
            staleness_N=None if staleness is None else tensor(staleness[packed.source_N]),
            sample_share_S=None if share_S is None else tensor(share_S[present]),
            entropy_N=entropy_N,
        )

    return make


def _share_of_sample(batch: Batch) -> NDArray[np.float64] | None:
    """Return [S]: each branch's share of its sample's wanted tokens. Return None if all are 1."""
    if batch.sample_S[-1] == len(batch.sample_S) - 1:
        return None
    wanted_S = np.bincount(batch.branch[batch.wanted], minlength=len(batch.sample_S))
    return wanted_S / np.maximum(batch.sample_tokens_S, 1)


def _column(batch: Batch, groups: Sequence[Columns], name: str) -> NDArray[np.generic]:
    if not any(name in group for group in groups):
        raise SchemaError(name, "missing", "written before train_microbatch")
    tokens = np.diff(batch.ends, prepend=0).tolist()
    for place, group in enumerate(groups):
        if name not in group:
            raise UnfitColumns(place, name, "missing", "in every group")
        check_length(place, group, name, tokens[place])
    values = np.concatenate([group[name] for group in groups])
    check_finite(name, values, batch.wanted, batch.ends)
    return values
