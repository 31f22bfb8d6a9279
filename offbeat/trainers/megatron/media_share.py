"""The features of media that one rank writes into its tokens' embeddings. Pure.

Legend: R rows, T tokens of a row, O tokens of this rank's context share, S of those the embedding
leaves this rank, K placeholders.
"""

from dataclasses import dataclass

import numpy as np

from offbeat.multimodal.placing import PlacedMedia
from offbeat.trainers.batches.packing import Ints
from offbeat.trainers.megatron.layout import ParallelLayout
from offbeat.trainers.megatron.token_share import columns_of


@dataclass(frozen=True, slots=True)
class MediaShare:
    """Placeholders among the tokens whose embeddings a rank holds."""

    places_K: Ints  # indices into the flattened [S, R] of the embedding
    sources_K: Ints  # index of the feature of each, over all media of the microbatch


def media_share(
    media: PlacedMedia,
    shape: tuple[int, int],
    layout: ParallelLayout,
    *,
    sequence_parallel: bool,
) -> MediaShare:
    """Return the placeholders of one rank: every one is that of one context-parallel rank.

    With sequence parallelism each is that of one tensor-parallel rank as well, else of all of them.

    Args:
        media: Media in the rows of a microbatch.
        shape: Its rows and the tokens of each.
        layout: The rank.
        sequence_parallel: Whether tensor-parallel ranks share the tokens.
    """
    rows, tokens = shape
    row_K, column_K = np.divmod(media.places_K, tokens)
    column_of = np.full(tokens, -1)
    columns_S = np.arange(tokens)
    if layout.grid.context > 1:
        columns_S = columns_of(tokens, layout.context_rank, layout.grid.context)
    if sequence_parallel:
        columns_S = columns_S.reshape(layout.grid.tensor, -1)[layout.tensor_rank]
    column_of[columns_S] = np.arange(len(columns_S))
    own_K = column_of[column_K]
    is_own_K = own_K >= 0
    return MediaShare((own_K * rows + row_K)[is_own_K], media.sources_K[is_own_K])


def axes_share(axes_3RT: Ints, layout: ParallelLayout) -> Ints:
    """Return the positions [3, R, O] of the tokens of one context-parallel rank."""
    if layout.grid.context == 1:
        return axes_3RT
    columns_O = columns_of(axes_3RT.shape[2], layout.context_rank, layout.grid.context)
    return np.ascontiguousarray(axes_3RT[:, :, columns_O])
