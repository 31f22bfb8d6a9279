"""The columns of the vocabulary whose logits a tensor-parallel rank of megatron-core has.

Legend: U positions with logits, V columns of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from offbeat.trainers.torch.logprobs import NEVER
from offbeat.trainers.torch.vocabulary_rows import VocabularyShare


def own_columns(
    logits_UV: Tensor, vocabulary: int, group: ProcessGroup
) -> tuple[Tensor, VocabularyShare | None]:
    """Return this rank's logits without padding, and its share of the vocabulary; None: all of it.

    Columns behind the vocabulary are padding, whose gradient is zero. A rank with nothing else keeps
    one of them, as that of a token that is never drawn, so that it takes part in every collective.

    Args:
        logits_UV: [U, V] floating: this rank's columns; rank r has those from ``r * V`` on.
        vocabulary: Number of columns over all ranks, without padding.
        group: The tensor-parallel ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return logits_UV[:, :vocabulary], None
    cuts = tuple(min(vocabulary, each * logits_UV.shape[1]) for each in range(ranks + 1))
    share = VocabularyShare(cuts, rank, group)
    if share.rows:
        return logits_UV[:, : share.rows], share
    return torch.where(
        torch.zeros_like(logits_UV[:, :1], dtype=torch.bool), logits_UV[:, :1], NEVER
    ), share
