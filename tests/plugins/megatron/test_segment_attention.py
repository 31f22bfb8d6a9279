"""Attention by segments, against explicit scores in float64; what it saves for its backward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.plugins.megatron.attention import list_row_parts
from offbeat.plugins.megatron.token_share import find_columns, list_column_ranges
from offbeat.trainers.batches.packing import PADDING, Ints, visible
from offbeat.trainers.torch.split_attention import attention_by_part

pytest.importorskip("megatron.core", reason="needs the extra megatron")

# The library warns of every kernel it does not find.
pytestmark = pytest.mark.filterwarnings("ignore")

HEADS, SIZE, SCALE = 4, 8, 0.3


def rows_of_segments(*rows: Sequence[int]) -> Ints:
    """Rows of a prompt and branches of these lengths, padded to the longest."""
    width = max(map(sum, rows))
    segments_RT = np.full((len(rows), width), PADDING)
    for row, lengths in zip(segments_RT, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return segments_RT


ROWS = {
    "one shared prompt": rows_of_segments([5, 3, 1, 7]),
    "rows of several lengths": rows_of_segments([5, 4, 2], [1, 1], [2, 9, 1, 4]),
    "prompts only": rows_of_segments([6], [6]),
}
GROUPS = [4, 2, 1]


def make_attention(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415 - an extra
    from megatron.core.transformer.enums import AttnMaskType  # noqa: PLC0415 - an extra

    from offbeat.plugins.megatron.attention import SegmentAttention  # noqa: PLC0415 - an extra

    chosen: dict[str, Any] = {"attention_dropout": 0.0} | options
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, **chosen
    )
    return SegmentAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)


def make_inputs(segments_RT: Ints, groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, in the library's layout."""
    rows, tokens = segments_RT.shape
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(tokens, rows, *shape, generator=generator, dtype=dtype)

    query, key, value = make(HEADS, SIZE), make(groups, SIZE), make(groups, SIZE)
    return [*(each.requires_grad_() for each in (query, key, value)), make(HEADS * SIZE)]


def attend_by_scores(inputs: Sequence[Tensor], seen_RTT: Tensor) -> list[Tensor]:
    """The output and the gradients of queries, keys and values, by a softmax over all scores."""
    query, key, value, gradient = inputs
    shared = query.shape[2] // key.shape[2]
    keys, values = (each.repeat_interleave(shared, dim=2) for each in (key, value))
    scores = torch.einsum("orhd,trhd->rhot", query, keys) * SCALE
    shares = scores.masked_fill(~seen_RTT[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("rhot,trhd->orhd", shares, values).flatten(2)
    return [out, *torch.autograd.grad(out, [query, key, value], gradient)]


def assert_equal(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for own, other in zip(got, want, strict=True):
        assert own.shape == other.shape
        assert float((own - other).detach().abs().max()) <= tolerance


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("case", ROWS)
def test_output_and_gradients_are_those_of_explicit_scores(case: str, groups: int) -> None:
    segments_RT = ROWS[case]
    inputs = make_inputs(segments_RT, groups)
    out = make_attention()(*inputs[:3], torch.from_numpy(segments_RT))
    got = [out, *torch.autograd.grad(out, inputs[:3], inputs[3])]
    assert_equal(got, attend_by_scores(inputs, torch.from_numpy(visible(segments_RT))))


@pytest.mark.parametrize("groups", GROUPS)
def test_without_segments_a_token_attends_to_all_before_it(groups: int) -> None:
    segments_RT = ROWS["rows of several lengths"]
    inputs = make_inputs(segments_RT, groups)
    out = make_attention()(*inputs[:3], None)
    got = [out, *torch.autograd.grad(out, inputs[:3], inputs[3])]
    assert_equal(got, attend_by_scores(inputs, torch.from_numpy(visible(0 * segments_RT))))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_context_parallel_ranks_have_their_part_of_the_output_and_of_the_gradients(
    ranks: int, groups: int
) -> None:
    from offbeat.plugins.megatron.attention import attend_by_parts  # noqa: PLC0415 - an extra

    segments_RT = rows_of_segments([7, 8, 3, 6], [4, 1, 11], [24])
    tokens = segments_RT.shape[1]
    query, key, value, gradient = inputs = make_inputs(segments_RT, groups)
    want = attend_by_scores(inputs, torch.from_numpy(visible(segments_RT)))
    got = [torch.zeros_like(each) for each in want]
    for rank in range(ranks):
        own = torch.from_numpy(find_columns(tokens, rank, ranks))
        parts = list_row_parts(segments_RT, list_column_ranges(tokens, rank, ranks))
        out = attend_by_parts(query[own], key, value, parts, SCALE)
        got[0][own] = out.detach()
        gradients = torch.autograd.grad(out, [query, key, value], gradient[own])
        for total, part in zip(got[1:], gradients, strict=True):
            total.add_(part)
    assert_equal(got, want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_functions_that_cuda_uses_attend_to_the_same(ranks: int) -> None:
    segments_RT = rows_of_segments([7, 8, 3, 6])
    tokens = segments_RT.shape[1]
    inputs = make_inputs(segments_RT, groups=2)
    (want, *_) = attend_by_scores(inputs, torch.from_numpy(visible(segments_RT)))
    query, key, value = (each.transpose(0, 1).transpose(1, 2) for each in inputs[:3])
    for rank in range(ranks):
        own = torch.from_numpy(find_columns(tokens, rank, ranks))
        parts = list_row_parts(segments_RT, list_column_ranges(tokens, rank, ranks))
        out = attention_by_part(query[:, :, own], key, value, parts, SCALE)
        assert_equal([out.permute(2, 0, 1, 3).flatten(2)], [want[own]])


@pytest.mark.parametrize("case", [*ROWS, "no segments"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_of_tokens_squared_is_saved_and_no_key_is_repeated(
    case: str, dtype: torch.dtype
) -> None:
    segments_RT = ROWS.get(case, ROWS["one shared prompt"])
    tokens = segments_RT.size
    inputs = make_inputs(segments_RT, 2, dtype)
    saved = list[Tensor]()

    def keep(each: Tensor) -> Tensor:
        saved.append(each)
        return each

    mask = torch.from_numpy(segments_RT) if case in ROWS else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        make_attention()(*inputs[:3], mask)
    queries, keys = HEADS * SIZE, 2 * SIZE
    # Queries and the output, keys and values, log-sums of the scores.
    assert 0 < sum(each.numel() for each in saved) <= tokens * (2 * queries + 2 * keys + HEADS)
    assert max(each.numel() for each in saved) <= tokens * queries


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window_size": (4, 0)}, "window_size"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        (
            {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
            "apply_query_key_layer_scaling",
        ),
    ],
)
def test_options_that_change_the_scores_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        make_attention(**options)
