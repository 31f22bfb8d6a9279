"""Rows that context-parallel ranks share: attention and predictions by parts are those of whole rows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.plugins.megatron.attention import list_row_parts
from offbeat.plugins.megatron.token_share import (
    find_columns,
    list_column_ranges,
    order_parts,
    token_share,
)
from offbeat.trainers.batches.packing import PADDING, AttentionPart, PackedRows, visible


@st.composite
def packed(draw: st.DrawFn) -> tuple[PackedRows, int]:
    """Rows of a prompt and branches behind it, and ranks that share them."""
    ranks, rows = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    tokens = 2 * ranks * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    ids_RT = rng.integers(0, 50, (rows, tokens))
    cuts = sorted(draw(st.lists(st.integers(1, tokens), min_size=3, max_size=3)))
    segments_RT = np.full((rows, tokens), PADDING)
    for segment, (start, stop) in enumerate(pairwise([0, *cuts])):
        segments_RT[:, start:stop] = segment
    of_sample_RT = np.where(segments_RT > 0, rng.integers(1, 9, segments_RT.shape), 0)
    wanted = draw(st.integers(0, 5))
    predicts_U, which_N = np.unique(rng.integers(0, rows * tokens, wanted), return_inverse=True)
    target_N = rng.integers(0, 50, wanted)
    values = (ids_RT, ids_RT + 7, segments_RT, of_sample_RT)
    places = (predicts_U, which_N, target_N, np.arange(wanted))
    return PackedRows(*values, *places, one_branch_a_row=False), ranks


@given(packed())
def test_what_ranks_attend_to_together_is_what_whole_rows_attend_to(
    given_: tuple[PackedRows, int],
) -> None:
    rows, ranks = given_
    count, tokens = rows.input_ids_RT.shape
    want_RTT = visible(rows.segments_RT)
    seen_RTT = np.zeros_like(want_RTT)
    for rank in range(ranks):
        share, own = token_share(rows, rank, ranks), list_column_ranges(tokens, rank, ranks)
        assert share.segments_RT is not None
        columns_O = find_columns(tokens, rank, ranks)
        seen_QK = np.zeros((count * len(columns_O), count * tokens), np.int64)
        for part in list_row_parts(share.segments_RT, own):
            keys = np.concatenate([np.arange(each.start, each.stop) for each in part.keys])
            for earlier, query in enumerate(
                range(part.queries.stop - 1, part.queries.start - 1, -1)
            ):
                seen_QK[query, keys[: len(keys) - earlier]] += 1
        assert seen_QK.max() == 1, "no pair counts twice"
        seen_RORT = seen_QK.reshape(count, len(columns_O), count, tokens)
        for row in range(count):
            seen_RTT[row, columns_O] = seen_RORT[row, :, row]
            assert not np.delete(seen_RORT[row], row, axis=1).any(), "rows are apart"
    assert (seen_RTT == want_RTT).all()


def test_rows_of_padding_attend_to_themselves() -> None:
    (part,) = list_row_parts(np.full((1, 3), PADDING), [slice(0, 3)])
    assert part == AttentionPart(slice(0, 3), (slice(0, 3),))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathered_parts_are_put_into_the_order_of_the_row(ranks: int) -> None:
    tokens = 6 * ranks
    gathered = np.concatenate([find_columns(tokens, rank, ranks) for rank in range(ranks)])
    pieces = np.split(gathered, 2 * ranks)
    ordered = np.concatenate([pieces[each] for each in order_parts(ranks)])
    assert (ordered == np.arange(tokens)).all()


@given(packed())
def test_every_wanted_token_is_predicted_by_one_rank_from_the_same_place(
    given_: tuple[PackedRows, int],
) -> None:
    rows, ranks = given_
    found = list[int]()
    for rank in range(ranks):
        share = token_share(rows, rank, ranks)
        place_N = rows.predicts_U[rows.which_N[share.own_N]]
        own_N = share.predicts_U[share.which_N]
        assert (rows.input_ids_RT.ravel()[place_N] == share.input_ids_RO.ravel()[own_N]).all()
        assert (rows.positions_RT.ravel()[place_N] == share.positions_RO.ravel()[own_N]).all()
        assert len(share.predicts_U) == max(1, len(share.own_U)), "the head is never without rows"
        found += share.own_N.tolist()
    assert sorted(found) == list(range(len(rows.target_N)))


@given(packed())
def test_every_response_token_is_one_ranks_with_the_tokens_of_its_sample(
    given_: tuple[PackedRows, int],
) -> None:
    rows, ranks = given_
    shares = [token_share(rows, rank, ranks) for rank in range(ranks)]
    tokens = rows.input_ids_RT.shape[1]
    order = np.concatenate([find_columns(tokens, rank, ranks) for rank in range(ranks)])
    together_RT = np.concatenate([each.sample_tokens_RO for each in shares], axis=1)
    assert (together_RT == rows.sample_tokens_RT[:, order]).all()
