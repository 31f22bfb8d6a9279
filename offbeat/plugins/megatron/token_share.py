"""Finds the tokens of a microbatch that one context-parallel rank computes, and its media. Pure.

A row is cut into two parts per rank. Each rank has one from either end, because later tokens attend
to more.

Legend: R rows, T tokens of a row, O tokens of this rank in a row, U positions that predict, N
wanted tokens, S tokens of O with embeddings on this rank, K placeholders.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.models.media_placing import PlacedMedia
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.trainers.batches.packing import Ints, PackedRows

PARTS_PER_RANK: Final = 2


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of a microbatch that one rank computes."""

    input_ids_RO: Ints
    positions_RO: Ints
    sample_tokens_RO: Ints
    segments_RT: Ints | None
    """Segments of the whole rows. None: plain causal attention, with positions that count up."""

    predicts_U: Ints  # indices into this rank's flattened rows; never empty
    own_U: Ints  # indices of those in the microbatch's ``predicts_U``
    which_N: Ints  # index into ``predicts_U`` of the position that predicts each own wanted token
    own_N: Ints  # indices of those in the microbatch's wanted tokens


def find_columns(tokens: int, rank: int, ranks: int) -> Ints:
    """Return the columns of one rank, for rows with a multiple of two tokens per rank."""
    return np.concatenate(
        [np.arange(*each.indices(tokens)) for each in list_column_ranges(tokens, rank, ranks)]
    )


def list_column_ranges(tokens: int, rank: int, ranks: int) -> list[slice]:
    """Return the columns of ``find_columns`` as slices."""
    part = tokens // (PARTS_PER_RANK * ranks)
    return [slice(each * part, (each + 1) * part) for each in _find_parts(rank, ranks)]


def order_parts(ranks: int) -> list[int]:
    """Return the place of each part of a row if the parts are ordered by rank."""
    gathered = [part for rank in range(ranks) for part in _find_parts(rank, ranks)]
    return sorted(range(len(gathered)), key=gathered.__getitem__)


def _find_parts(rank: int, ranks: int) -> tuple[int, int]:
    return rank, PARTS_PER_RANK * ranks - 1 - rank


def token_share(packed: PackedRows, rank: int = 0, ranks: int = 1) -> TokenShare:
    """Return the share of one of ``ranks`` context-parallel ranks."""
    if ranks == 1:
        return _everything(packed)
    tokens = packed.input_ids_RT.shape[1]
    columns_O = find_columns(tokens, rank, ranks)
    column_of = np.full(tokens, -1)
    column_of[columns_O] = np.arange(len(columns_O))
    row_U, column_U = np.divmod(packed.predicts_U, tokens)
    is_own_U = column_of[column_U] >= 0
    index_U = np.cumsum(is_own_U) - 1
    own_N = np.flatnonzero(is_own_U[packed.which_N])
    places_U = (row_U * len(columns_O) + column_of[column_U])[is_own_U]
    return TokenShare(
        input_ids_RO=packed.input_ids_RT[:, columns_O],
        positions_RO=packed.positions_RT[:, columns_O],
        sample_tokens_RO=packed.sample_tokens_RT[:, columns_O],
        segments_RT=(
            np.zeros_like(packed.segments_RT) if packed.one_branch_a_row else packed.segments_RT
        ),
        predicts_U=_at_least_one(places_U),
        own_U=np.flatnonzero(is_own_U),
        which_N=index_U[packed.which_N[own_N]],
        own_N=own_N,
    )


def _everything(packed: PackedRows) -> TokenShare:
    return TokenShare(
        input_ids_RO=packed.input_ids_RT,
        positions_RO=packed.positions_RT,
        sample_tokens_RO=packed.sample_tokens_RT,
        segments_RT=None if packed.one_branch_a_row else packed.segments_RT,
        predicts_U=_at_least_one(packed.predicts_U),
        own_U=np.arange(len(packed.predicts_U)),
        which_N=packed.which_N,
        own_N=np.arange(len(packed.target_N)),
    )


def _at_least_one(places_U: Ints) -> Ints:
    """Return the places, or else the first one, because the output head must join collectives."""
    return places_U if len(places_U) else np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class MediaShare:
    """Placeholders among the tokens with embeddings on a rank."""

    places_K: Ints  # indices into the flattened [S, R] of the embedding
    sources_K: Ints  # index of the feature of each, over all media of the microbatch


def media_share(
    media: PlacedMedia,
    shape: tuple[int, int],
    layout: ParallelLayout,
    *,
    sequence_parallel: bool,
) -> MediaShare:
    """Return the placeholders of one rank. Each belongs to one context-parallel rank.

    With sequence parallelism it belongs to one tensor-parallel rank as well, else to all of them.

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
        columns_S = find_columns(tokens, layout.context_rank, layout.grid.context)
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
    columns_O = find_columns(axes_3RT.shape[2], layout.context_rank, layout.grid.context)
    return np.ascontiguousarray(axes_3RT[:, :, columns_O])
