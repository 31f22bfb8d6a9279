"""Padding of a megatron rank's microbatches, by which its ranks stay aligned."""

from typing import Any

import numpy as np
import pytest

from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.trainers.batches.packing import PADDING, PackedRows
from offbeat.weight_sync.grid import ModelGrid

pytest.importorskip("megatron.core", reason="needs the extra megatron")

# The library warns of every kernel it does not find.
pytestmark = pytest.mark.filterwarnings("ignore")


def config_of(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415 - an extra

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=4, **options)


def aligned(microbatches: list[PackedRows], config: Any) -> list[PackedRows]:
    from offbeat.plugins.megatron import passes as room  # noqa: PLC0415 - an extra

    grid = ModelGrid(tensor=config.tensor_model_parallel_size, context=config.context_parallel_size)
    return room.align_microbatches(microbatches, config, ParallelLayout(grid, 0))


def rows(rows_: int, tokens: int) -> PackedRows:
    """Every token but the last of a row predicts the next one."""
    places_RT = np.arange(rows_ * tokens).reshape(rows_, tokens)
    predicts_U = places_RT[:, :-1].ravel()
    ids_RT = places_RT + 1
    return PackedRows(
        input_ids_RT=ids_RT,
        positions_RT=np.tile(np.arange(tokens), (rows_, 1)),
        segments_RT=np.ones((rows_, tokens), np.int64),
        sample_tokens_RT=np.full((rows_, tokens), tokens - 1),
        predicts_U=predicts_U,
        which_N=np.arange(len(predicts_U)),
        target_N=ids_RT[:, 1:].ravel(),
        source_N=np.arange(len(predicts_U)),
        one_branch_a_row=True,
    )


def test_ranks_that_share_only_gradients_pad_nothing() -> None:
    own = [rows(2, 5), rows(1, 3)]
    assert aligned(own, config_of()) == own


def test_rows_that_are_shared_along_the_sequence_grow_to_a_multiple_of_the_ranks() -> None:
    config = config_of(tensor_model_parallel_size=4, sequence_parallel=True)
    own = rows(2, 5)
    (padded,) = aligned([own], config)
    assert padded.input_ids_RT.shape == padded.positions_RT.shape == (2, 8)
    assert (padded.input_ids_RT[:, :5] == own.input_ids_RT).all()
    assert (padded.input_ids_RT[:, 5:] == own.padding_token).all()
    assert (padded.segments_RT[:, 5:] == PADDING).all(), "nobody attends to the padding"
    assert (padded.sample_tokens_RT[:, 5:] == 0).all(), "padding is of no sample"
    predicting = padded.input_ids_RT.ravel()[padded.predicts_U]
    assert (predicting == own.input_ids_RT.ravel()[own.predicts_U]).all()
    assert (padded.target_N == own.target_N).all()


def test_tensor_parallel_ranks_that_each_compute_whole_rows_pad_nothing() -> None:
    own = [rows(2, 5)]
    assert aligned(own, config_of(tensor_model_parallel_size=4)) == own


def test_rows_that_context_parallel_ranks_share_grow_to_two_equal_parts_for_each() -> None:
    for sequence, tokens in ((False, 12), (True, 24)):
        config = config_of(
            context_parallel_size=3,
            tensor_model_parallel_size=2 + 2 * sequence,
            sequence_parallel=sequence,
        )
        (padded,) = aligned([rows(2, 11)], config)
        assert padded.input_ids_RT.shape == (2, tokens)
