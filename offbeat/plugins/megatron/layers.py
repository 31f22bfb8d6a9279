"""Specification of a model's layers: the library's modules, and a norm for every layout."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnnecessaryComparison=false
# megatron-core has no types.

from functools import partial
from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import nn

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.attention import SegmentAttention
from offbeat.plugins.megatron.context import ContextAttention
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.router import ExpertRouter


class Norm(nn.RMSNorm):
    """RMS norm of torch, usable with sequence parallelism, which the library's own wrapper refuses.

    There every tensor-parallel rank normalises its share of the tokens, so each has a partial
    gradient of the weight; the attribute ``sequence_parallel`` makes the finalize hook sum them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue] -- read by name


def block_of(architecture: Architecture, layout: ParallelLayout) -> ModuleSpec:
    """Return the specification of the layers of one stage, without Transformer Engine."""
    here = layout.grid.layers_of(layout.pipeline_rank, architecture.layers)
    layers = [
        _layer_of(architecture, layout, has_experts=architecture.has_experts(layer))
        for layer in here
    ]
    block = TransformerBlockSubmodules(layers, layer_norm=ModuleSpec(module=Norm))
    return ModuleSpec(module=TransformerBlock, submodules=block)


def _layer_of(
    architecture: Architecture, layout: ParallelLayout, *, has_experts: bool
) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=architecture.experts if has_experts else None,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
    )
    parts = cast("TransformerLayerSubmodules", layer.submodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = cast("ModuleSpec", parts.self_attention)
    inner = cast("SelfAttentionSubmodules", attention.submodules)
    if architecture.qk_norm:
        inner.q_layernorm = inner.k_layernorm = Norm
    if has_experts:
        mlp: Any = parts.mlp  # since megatron-core 0.19 a partial function
        experts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        cast("MoESubmodules", experts).router = partial(ExpertRouter, architecture)
    inner.core_attention = ContextAttention if layout.grid.context > 1 else SegmentAttention
    return layer


def mark_weights(model: nn.Module) -> None:
    """Mark the weights that are sharded over tensor-parallel ranks, and those of experts.

    The library counts all but sharded weights once in its gradient norm. Its layers set the marks when
    they initialise weights, which is skipped here because the weights are loaded from files.

    It takes experts for dense layers if there is one rank of expert parallelism, and reduces their
    gradients over the copies of a dense layer. Experts have other copies where fewer ranks share the
    matrices of an expert than those of a dense layer.
    """
    divided_axes: dict[type[object], int] = {
        ColumnParallelLinear: 0,
        VocabParallelEmbedding: 0,
        RowParallelLinear: 1,
    }
    for module in model.modules():
        axis = divided_axes.get(type(module))
        if axis is None or module.weight is None:
            continue
        if not hasattr(module.weight, "tensor_model_parallel"):  # marked by megatron-core 0.19
            set_tensor_model_parallel_attributes(module.weight, True, axis, 1)  # noqa: FBT003 -- its signature
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.is_expert:
            module.weight.allreduce = False  # pyright: ignore[reportAttributeAccessIssue] -- read by name
