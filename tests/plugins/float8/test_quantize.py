"""Quantization to float8 blocks, beside a reference that computes in float64."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.plugins.float8.precision import BLOCK, scale_region
from offbeat.plugins.float8.quantize import (
    LARGEST,
    Quantized,
    UnquantizableWeights,
    dequantize,
    quantize,
)
from offbeat.weight_sync.region import Region

SIZES = st.sampled_from([1, 2, 127, 128, 129, 200, 256, 300])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def matrix(rows: int, columns: int, seed: int, spread: float, dtype: torch.dtype) -> Tensor:
    """Return values whose magnitudes differ by orders; some are zero, some blocks are."""
    dice = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=dice)
    weight *= torch.exp(spread * torch.randn(rows, columns, generator=dice))
    weight[torch.rand(rows, columns, generator=dice) < 0.1] = 0
    if rows > BLOCK:
        weight[BLOCK : 2 * BLOCK, :BLOCK] = 0
    return weight.to(dtype)


def ulp(scaled: Tensor) -> Tensor:
    """Return the distance of neighbouring values of float8_e4m3fn at each of ``scaled`` (float64)."""
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6)))
    return torch.exp2(exponent - 3)


def blocks_of(weight: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
    rows, columns = weight.shape
    return [
        (
            (row, column),
            weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK],
        )
        for row in range(-(-rows // BLOCK))
        for column in range(-(-columns // BLOCK))
    ]


@given(SIZES, SIZES, st.integers(0, 2**20), st.sampled_from([0.0, 1.0, 6.0]), DTYPES)
@example(300, 129, 1, 6.0, torch.bfloat16)
def test_each_value_is_within_half_an_ulp_of_the_scaled_weight(
    rows: int, columns: int, seed: int, spread: float, dtype: torch.dtype
) -> None:
    weight = matrix(rows, columns, seed, spread, dtype)
    weight = weight.clamp(-3e4, 3e4)  # float16 has infinities beyond
    values, scales = quantize("w", weight)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == weight.shape
    assert scales.dtype == torch.float32
    exact, found = weight.double(), values.double()
    for (row, column), block in blocks_of(exact):
        largest = float(block.abs().max())
        # 448 is the largest value of the type; a block of zeros has the scale 1
        want = largest / 448 if largest else 1.0
        assert float(scales[row, column]) == pytest.approx(want, rel=2**-23)
    for (row, column), block in blocks_of(exact):
        scaled = block / float(scales[row, column])
        near = (found[row * BLOCK :, column * BLOCK :])[: block.shape[0], : block.shape[1]]
        # The quotient is computed in float32: a relative 2**-23 beside half a unit in the last place
        bound = 0.5 * ulp(scaled) + scaled.abs() * 2.0**-23
        assert bool(((near - scaled).abs() <= bound).all())


@given(SIZES, SIZES, st.integers(0, 2**20), DTYPES)
def test_what_the_blocks_stand_for_is_near_the_weights(
    rows: int, columns: int, seed: int, dtype: torch.dtype
) -> None:
    weight = matrix(rows, columns, seed, 1.0, dtype).clamp(-3e4, 3e4)
    quantized = quantize("w", weight)
    again = dequantize(quantized, torch.float64)
    for (row, column), block in blocks_of(weight.double() - again):
        step = float(quantized.scales[row, column]) * 16  # between 416 and 448
        assert float(block.abs().max()) <= step * (1 + 1e-6)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**20))
def test_a_region_quantized_alone_is_the_region_of_the_whole(
    rows: int, columns: int, seed: int
) -> None:
    weight = matrix(3 * BLOCK + 17, 3 * BLOCK + 50, seed, 2.0, torch.bfloat16)
    shape = tuple(weight.shape)
    whole = quantize("w", weight)
    for start in (0, BLOCK):
        first = start, start
        stop = min(start + rows * BLOCK, shape[0]), min(start + columns * BLOCK, shape[1])
        for region in (Region(first, stop), Region(first, shape)):
            scales = scale_region(region, shape)
            assert scales is not None
            alone = quantize("w", weight[region.slices])
            assert bits(alone.values).equal(bits(whole.values[region.slices]))
            assert alone.scales.equal(whole.scales[scales.slices])


@pytest.mark.parametrize(
    "region", [Region((1, 0), (129, 128)), Region((0, 0), (100, 200)), Region((0, 64), (128, 200))]
)
def test_a_region_that_cuts_a_block_has_no_scales(region: Region) -> None:
    assert scale_region(region, (300, 200)) is None
    assert scale_region(Region((0, 0), (300, 200)), (300, 200)) == Region((0, 0), (3, 2))


def test_rows_are_quantized_alike_however_many_there_are() -> None:
    weight = matrix(32 * BLOCK + 200, 130, 3, 2.0, torch.float32)
    values, scales = quantize("w", weight)
    last = quantize("w", weight[32 * BLOCK :])
    assert bits(values[32 * BLOCK :]).equal(bits(last.values))
    assert scales[32:].equal(last.scales)


def test_equal_weights_have_equal_bytes_strided_or_not() -> None:
    weight = matrix(300, 200, 5, 2.0, torch.float32)
    first, second = quantize("w", weight), quantize("w", weight.t().contiguous().t())
    assert bits(first.values).equal(bits(second.values))
    assert first.scales.equal(second.scales)


def test_what_blocks_stand_for_is_quantized_to_the_same_blocks() -> None:
    quantized = quantize("w", matrix(300, 200, 7, 1.0, torch.float32))
    again = quantize("w", dequantize(quantized, torch.float32))
    assert bits(quantized.values).equal(bits(again.values))


def test_blocks_of_zeros_and_signs_of_zero_survive() -> None:
    weight = torch.zeros(130, 130)
    weight[0, 0] = -0.0
    values, scales = quantize("w", weight)
    assert scales.equal(torch.ones(2, 2))
    assert bits(values)[0, 0] == 0x80
    assert not bool(bits(values)[1:].any())


@pytest.mark.parametrize("value", [3e38, 1e-38, 1e-45, 6.1e-5])
def test_the_largest_of_a_block_becomes_448_unless_its_scale_would_be_subnormal(
    value: float,
) -> None:
    weight = torch.full((4, 4), value)
    values, scales = quantize("w", weight)
    assert float(scales[0, 0]) >= 2.0**-126
    assert float(values.float().max()) <= LARGEST
    if value > 448 * 2.0**-126:
        assert float(values[0, 0]) == LARGEST
        assert dequantize(Quantized(values, scales), torch.float64)[0, 0] == pytest.approx(value)
    assert not bool(values.float().isnan().any())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinities_and_nans_are_refused_with_the_block(value: float) -> None:
    weight = torch.ones(32 * BLOCK + 300, 200)
    weight[32 * BLOCK + 130, 199] = value
    with pytest.raises(UnquantizableWeights, match=r"layer\.weight: \[4224:4352, 128:256\]"):
        quantize("layer.weight", weight)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_a_matrix_without_elements_has_none_in_blocks(shape: tuple[int, int]) -> None:
    values, scales = quantize("w", torch.empty(shape))
    assert values.shape == shape
    assert scales.numel() == 0


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
