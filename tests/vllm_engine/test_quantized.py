"""Float8 blocks beside vLLM's own functions for them: no engine here computes with such weights."""

# pyright: reportMissingImports=false
# ruff: noqa: PLC0415 -- vLLM warns as it is imported, which only a test's own filter lets pass
import torch

from offbeat.plugins.float8.precision import quantization_config
from offbeat.plugins.float8.quantize import dequantize, quantize

WHOLE = [(256, 384), (128, 128), (640, 256)]
"""Shapes that end with blocks: vLLM's function takes no others."""
SHAPES = [*WHOLE, (300, 129), (1, 1)]


def weight(shape: tuple[int, int]) -> torch.Tensor:
    dice = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=dice).to(torch.bfloat16)


def test_blocks_are_those_of_vllm_s_quantizer_but_for_ties() -> None:
    """vLLM multiplies by the reciprocal of a scale: a quotient next to a tie may round otherwise."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    differing = values_in_all = 0
    for shape in SHAPES:
        ours = quantize("w", weight(shape))
        values, scales = per_block_cast_to_fp8(weight(shape))
        assert ours.scales.equal(scales)
        assert ours.values.dtype == values.dtype
        steps = ours.values.view(torch.uint8).int() - values.view(torch.uint8).int()
        assert int(steps.abs().max()) <= 1
        differing += int(steps.ne(0).sum())
        values_in_all += steps.numel()
    assert differing <= values_in_all * 1e-3


def test_vllm_reads_the_blocks_as_they_are_meant() -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        scaled_dequantize,
    )

    for shape in WHOLE:
        ours = quantize("w", weight(shape))
        theirs = scaled_dequantize(
            ours.values, ours.scales, GroupShape(128, 128), out_dtype=torch.float32
        )
        assert theirs.equal(dequantize(ours, torch.float32))


def test_vllm_knows_the_scheme_that_engines_are_given() -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    matrices = {
        "model.layers.0.self_attn.q_proj.weight": (128, 128),
        "model.layers.0.mlp.gate.weight": (4, 128),
    }
    config = Fp8Config.from_config(quantization_config(matrices.items()))
    assert config.weight_block_size == [128, 128]
    assert config.is_checkpoint_fp8_serialized
    assert config.ignored_layers == ["model.layers.0.mlp.gate"]
