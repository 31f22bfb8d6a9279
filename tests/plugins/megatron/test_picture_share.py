"""Placeholders of pictures over ranks that share tokens: each is written once, where its token is."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.models.media_placing import PlacedMedia
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.token_share import axes_share, find_columns, media_share
from offbeat.weight_sync.grid import ModelGrid


@given(
    rows=st.integers(1, 3),
    context=st.integers(1, 3),
    tensor=st.integers(1, 3),
    parts=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_each_placeholder_is_written_by_the_one_rank_that_holds_its_token(
    rows: int, context: int, tensor: int, parts: int, seed: int
) -> None:
    tokens = 2 * context * tensor * parts
    rng = np.random.default_rng(seed)
    places_K = rng.permutation(rows * tokens)[: rng.integers(1, rows * tokens + 1)]
    pictures = PlacedMedia((), places_K, np.arange(len(places_K)))
    written_RT = np.full((rows, tokens), -1)
    for rank in range(context * tensor):
        layout = ParallelLayout(ModelGrid(tensor=tensor, context=context), rank)
        share = media_share(pictures, (rows, tokens), layout, sequence_parallel=True)
        columns = np.arange(tokens)
        if context > 1:
            columns = find_columns(tokens, layout.context_rank, context)
        held_S = np.split(columns, tensor)[layout.tensor_rank]
        row_K, column_K = share.places_K % rows, held_S[share.places_K // rows]
        assert (written_RT[row_K, column_K] == -1).all()
        written_RT[row_K, column_K] = share.sources_K
    want_RT = np.full((rows, tokens), -1)
    want_RT.reshape(-1)[places_K] = np.arange(len(places_K))
    assert (written_RT == want_RT).all()


def test_ranks_that_do_not_share_tokens_all_write_every_placeholder() -> None:
    pictures = PlacedMedia((), np.array([1, 5]), np.array([0, 1]))
    for rank in range(2):
        layout = ParallelLayout(ModelGrid(tensor=2), rank)
        share = media_share(pictures, (2, 4), layout, sequence_parallel=False)
        assert share.places_K.tolist() == [2, 3]  # column 1 of each of two rows
        assert share.sources_K.tolist() == [0, 1]


def test_a_context_parallel_rank_has_the_positions_of_its_own_tokens() -> None:
    axes_3RT = np.arange(3 * 2 * 4).reshape(3, 2, 4)
    grid = ModelGrid(context=2)
    parts = [axes_share(axes_3RT, ParallelLayout(grid, rank)) for rank in range(2)]
    assert (parts[0] == axes_3RT[:, :, [0, 3]]).all()
    assert (parts[1] == axes_3RT[:, :, [1, 2]]).all()
