"""A megatron-core GPTModel of a Hugging Face architecture, without Transformer Engine.

Dropout is off. Nothing random happens in a step, so that it can be repeated.

Also specifies a model's layers: the library's modules, and a norm for every layout.
"""

# pyright: reportIncompatibleVariableOverride=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnnecessaryComparison=false
# megatron-core has no types.
# megatron-core has no types; its ``forward`` is wrapped.

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.attention import SegmentAttention
from offbeat.plugins.megatron.context import ContextAttention
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.layout_rules import broken_rules
from offbeat.plugins.megatron.mapping import ROUTER_BIAS, pad_vocabulary
from offbeat.plugins.megatron.router import ExpertRouter, weigh_tokens
from offbeat.weight_sync.grid import ModelGrid


class Norm(nn.RMSNorm):
    """RMS norm of torch, usable with sequence parallelism, which the library's own wrapper refuses.

    There every tensor-parallel rank normalises its share of the tokens, so each has a partial
    gradient of the weight. The attribute ``sequence_parallel`` makes the finalize hook sum them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue] -- read by name


def make_block_spec(architecture: Architecture, layout: ParallelLayout) -> ModuleSpec:
    """Return the specification of the layers of one stage, without Transformer Engine."""
    here = layout.grid.list_layers(layout.pipeline_rank, architecture.layers)
    layers = [
        _make_layer_spec(architecture, layout, has_experts=architecture.has_experts(layer))
        for layer in here
    ]
    block = TransformerBlockSubmodules(layers, layer_norm=ModuleSpec(module=Norm))
    return ModuleSpec(module=TransformerBlock, submodules=block)


def _make_layer_spec(
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
    """Mark the weights that are sharded over tensor-parallel ranks, and the weights of experts.

    In its gradient norm, the library counts all but sharded weights once. Its layers set the marks
    when they initialise weights. That is skipped here because the weights are loaded from files.

    With one rank of expert parallelism, the library treats experts as dense layers. It would reduce
    their gradients over the copies of a dense layer. But if fewer ranks share an expert's matrices
    than a dense layer's, experts have different copies.
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


_RECOMPUTED_LAYERS: Final[Mapping[str, Any]] = MappingProxyType(
    {  # each separately
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
)


def transformer_config(
    architecture: Architecture,
    layout: ParallelLayout,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> TransformerConfig:
    """Return the library's configuration of one rank's share of a model.

    Raises:
        UnsupportedLayout: The model cannot be partitioned like this.
    """
    a, grid = architecture, layout.grid
    for problem in broken_rules(a, grid, sequence_parallel=sequence_parallel):
        raise problem
    config = TransformerConfig(
        **_sizes(a),
        **_parallel_sizes(grid, sequence_parallel=sequence_parallel),
        **_arithmetic(dtype),
        **_exchange(grid, has_experts=a.experts > 0),
        **(_expert_sizes(a, dtype) if a.experts else {}),
        **(_RECOMPUTED_LAYERS if recompute else {}),
    )
    if a.rope_scale != 1:
        _scale_rotation(config, a.rope_scale)
    return config


def _sizes(a: Architecture) -> dict[str, Any]:
    """Return the options of a decoder layer: sizes, biases and norms."""
    return {
        "num_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "num_query_groups": a.groups,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.intermediate,
        "layernorm_epsilon": a.norm_eps,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.qk_norm,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _parallel_sizes(grid: ModelGrid, *, sequence_parallel: bool) -> dict[str, Any]:
    """Return the options for the layout, and which layers each pipeline stage has."""
    options: dict[str, Any] = {
        "tensor_model_parallel_size": grid.tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "context_parallel_size": grid.context,
        "expert_model_parallel_size": grid.expert,
        "expert_tensor_parallel_size": grid.expert_tensor_ranks,
        "sequence_parallel": sequence_parallel,
    }
    if grid.stages and grid.pipeline > 1:
        stages = [["decoder"] * count for count in grid.stages]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        options["pipeline_model_parallel_layout"] = stages
    return options


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """Return the options for dtypes, initial weights and the divisor of a loss."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,  # the weights are loaded afterwards
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,  # a CUDA kernel of Apex
        # Otherwise the schedule divides the loss by the number of its microbatches.
        "calculate_per_token_loss": True,
    }


def _exchange(grid: ModelGrid, *, has_experts: bool) -> dict[str, Any]:
    """Return the options for the exchange between ranks during a microbatch."""
    # Tokens are sent to their experts. If several ranks share an expert, that needs gathers of
    # uneven parts, which gloo does not have, so tests could not run the production code. Then every
    # rank gathers the tokens of all ranks that share its experts, whose rows have equal lengths.
    gathers = has_experts and grid.expert_tensor_ranks > 1
    return {
        # Each microbatch is as long as its longest row.
        "variable_seq_lengths": grid.pipeline > 1 and not gathers,
        "moe_token_dispatcher_type": "allgather" if gathers else "alltoall",
    }


def _expert_sizes(a: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options for layers of experts. ``router.py`` replaces the routers' work."""
    return {
        "num_moe_experts": a.experts,
        "moe_ffn_hidden_size": a.expert_intermediate,
        "moe_layer_freq": [int(a.has_experts(layer)) for layer in range(a.layers)],
        "moe_shared_expert_intermediate_size": a.shared_intermediate or None,
        "moe_shared_expert_gate": a.shared_intermediate > 0 and a.shared_gate,
        "moe_router_topk": a.experts_per_token,
        "moe_router_pre_softmax": True,  # required with one expert per token
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # As in transformers. A 16-bit router would choose different experts than an engine's.
        "moe_router_dtype": "fp32" if a.sigmoid_routing and dtype != torch.float64 else None,
    }


def _scale_rotation(config: TransformerConfig, scale: float) -> None:
    """Let attention multiply cosines and sines by ``scale``.

    The library computes it from these attributes by yarn's formula, in which ``scale`` is then
    ``0.1 * yarn_mscale * log(e) + 1``. Scaling the softmax would round differently than
    transformers.
    """
    attributes = {
        "yarn_rotary_scaling_factor": math.e,
        "yarn_mscale": 10 * (scale - 1),
        "yarn_mscale_all_dim": 0.0,
    }
    for name, value in attributes.items():
        setattr(config, name, value)


def build_model(
    architecture: Architecture, config: TransformerConfig, layout: ParallelLayout, seed: int
) -> GPTModel:
    """Build one rank's share of the model, on the library's current device."""
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    model = GPTModel(
        config=config,
        transformer_layer_spec=make_block_spec(architecture, layout),
        vocab_size=pad_vocabulary(architecture, layout),
        max_sequence_length=architecture.max_positions,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # pyright: ignore[reportArgumentType] -- a power's base
        share_embeddings_and_output_weights=architecture.tied,
    )
    model.rotary_pos_emb = PackedRotary(architecture, model.pg_collection.cp)
    mark_weights(model)
    weigh_tokens(model)
    if layout.is_last_stage:
        # ``Forward`` gathers the head's inputs, because the head would gather more of them.
        model.output_layer.sequence_parallel = False
    return model.to(torch.cuda.current_device())


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters by the library's names, and the biases of its routers."""
    biases = {name: each for name, each in model.named_buffers() if name.endswith(ROUTER_BIAS)}
    return {name: each.detach() for name, each in model.named_parameters()} | biases


def in_data_parallel(
    model: GPTModel, config: TransformerConfig, *, overlap: bool, sharded: bool
) -> DistributedDataParallel:
    """Wrap the model with gradient buffers in float32, which sums of many microbatches need.

    Args:
        model: One rank's share.
        config: Its configuration.
        overlap: Reductions may start while backward passes still run.
        sharded: Gradients are reduce-scattered over data-parallel ranks, for a sharded optimizer.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype != torch.float64,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=sharded,
    )
    return DistributedDataParallel(config, options, model)


class PackedRotary(RotaryEmbedding):
    """Rotary embedding for rows of samples that share a prompt: positions do not count up."""

    def __init__(self, architecture: Architecture, context_group: ProcessGroup) -> None:
        super().__init__(
            architecture.head_dim,
            rotary_percent=architecture.rotary_fraction,
            rotary_base=architecture.rope_theta,  # pyright: ignore[reportArgumentType] -- a power's base
            use_cpu_initialization=True,
            cp_group=context_group,
        )
        if architecture.rope_frequencies is not None:
            # The library's own scaling fits only one model: it has no ``original_max_position``.
            self.inv_freq = torch.tensor(architecture.rope_frequencies, dtype=torch.float32)
        # Positions of the current microbatch, [R, T] or [3, R, T] on three axes. None: 0, 1, ..
        self.positions: Tensor | None = None
        self._axis_of_pair = architecture.axis_of_pair

    def forward(self, max_seq_len: int, *unused: object, **also_unused: object) -> Tensor:
        """Return angles [T, R or 1, 1, head_dim] in the layout of the library's attention."""
        del unused, also_unused
        if self.positions is None:
            return self.get_emb(max_seq_len)
        self.inv_freq = self.inv_freq.to(self.positions.device)
        positions_TRD = self.positions.mT[..., None]
        if self.positions.ndim == len("3RT"):
            assert self._axis_of_pair is not None  # noqa: S101 -- else its rules give one axis
            positions_TRD = self.positions[list(self._axis_of_pair)].permute(2, 1, 0)
        angles_TRD = positions_TRD.to(self.inv_freq.dtype) * self.inv_freq
        return torch.cat((angles_TRD, angles_TRD), dim=-1)[:, :, None, :]
