"""Checks, by a model's config, that the megatron trainer knows the model and can divide it.

It loads torch, which is slow to import (seconds), so only recipes with a model import it.

Also computes the shapes of one rank's parameters, and their bytes by kind. Pure.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod
from typing import Final, Literal

from offbeat.config.limits import find_encoder
from offbeat.config.run import RunConfig
from offbeat.launch.checks.gpu_memory import against_gpu, largest_rank_said
from offbeat.messages.finding import Finding, error
from offbeat.plugins.megatron.architecture import (
    Architecture,
    check_balanced,
    check_recomputed,
    read_architecture,
)
from offbeat.plugins.megatron.freezing import frozen_weights
from offbeat.plugins.megatron.layout import ParallelLayout, make_grid
from offbeat.plugins.megatron.layout_rules import broken_rules, fitting_sizes
from offbeat.plugins.megatron.mapping import ROUTER_BIAS, TOWER, pad_vocabulary
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import Shape

_FLOAT32 = 4


def largest_rank(
    architecture: Architecture,
    grid: ModelGrid,
    dtype: Literal["float32", "bfloat16", "float64"],
    *,
    sharded: bool,
    frozen: Collection[str] = (),
) -> RankBytes:
    """Return the bytes of the largest rank. Ranks of one stage have equal sizes.

    Args:
        architecture: The model.
        grid: The parallel sizes, which fit it.
        dtype: Dtype of the weights.
        sharded: Whether copies of a weight share its optimizer state, as on CUDA.
        frozen: Hugging Face names of weights of the vision tower that are not trained.
    """
    stages = (ParallelLayout(grid, stage * grid.stage_ranks) for stage in range(grid.pipeline))
    return max(
        (
            _rank_bytes(architecture, layout, dtype, sharded=sharded, frozen=frozen)
            for layout in stages
        ),
        key=lambda each: each.total,
    )


def _rank_bytes(
    a: Architecture, layout: ParallelLayout, dtype: str, *, sharded: bool, frozen: Collection[str]
) -> RankBytes:
    grid, shapes = layout.grid, rank_parameters(a, layout)
    total = sum(map(prod, shapes.values()))
    trained = total - sum(prod(shapes.get(f"{TOWER}{name}", (0,))) for name in frozen)
    experts = sum(prod(shape) for name, shape in shapes.items() if ".local_experts." in name)
    dense = trained - experts
    wide = 8 if dtype == "float64" else _FLOAT32
    each = 2 if dtype == "bfloat16" else wide
    states = (3 if each < wide else 2) * wide  # a master, if the weights have 16 bits, two moments
    held = float(trained)
    if sharded:
        held = dense / (grid.context * grid.data)
        held += experts * grid.expert * grid.expert_tensor_ranks / grid.stage_ranks
    biases = sum(map(prod, rank_buffers(a, layout).values()))
    return RankBytes(total * each + biases * _FLOAT32, trained * wide, round(held * states))


def rank_parameters(a: Architecture, layout: ParallelLayout) -> dict[str, Shape]:
    """Return the shapes of a rank's parameters by the library's names."""
    tensor, shapes = layout.grid.tensor, dict[str, Shape]()
    rows = pad_vocabulary(a, layout) // tensor
    if layout.is_first_stage:
        shapes["embedding.word_embeddings.weight"] = (rows, a.hidden)
        shapes |= {f"{TOWER}{name}": shape for name, shape in a.tower}
    for index, layer in enumerate(layout.grid.list_layers(layout.pipeline_rank, a.layers)):
        shapes |= _layer(f"decoder.layers.{index}.", a, layout, has_experts=a.has_experts(layer))
    if layout.is_last_stage:
        shapes["decoder.final_layernorm.weight"] = (a.hidden,)
        if not (a.tied and layout.is_first_stage):
            shapes["output_layer.weight"] = (rows, a.hidden)
    return shapes


def rank_buffers(a: Architecture, layout: ParallelLayout) -> dict[str, Shape]:
    """Return the shapes of a rank's router biases by the library's names."""
    here = enumerate(layout.grid.list_layers(layout.pipeline_rank, a.layers))
    return {
        f"decoder.layers.{index}.{ROUTER_BIAS}": (a.experts,)
        for index, layer in here
        if a.sigmoid_routing and a.has_experts(layer)
    }


def _layer(
    at: str, a: Architecture, layout: ParallelLayout, *, has_experts: bool
) -> dict[str, Shape]:
    tensor = layout.grid.tensor
    rows = (a.heads + 2 * a.groups) * a.head_dim // tensor
    shapes: dict[str, Shape] = {
        f"{at}input_layernorm.weight": (a.hidden,),
        f"{at}self_attention.linear_qkv.weight": (rows, a.hidden),
        f"{at}self_attention.linear_proj.weight": (a.hidden, a.heads * a.head_dim // tensor),
        f"{at}pre_mlp_layernorm.weight": (a.hidden,),
    }
    if a.qkv_bias:
        shapes[f"{at}self_attention.linear_qkv.bias"] = (rows,)
    if a.qk_norm:
        shapes[f"{at}self_attention.q_layernorm.weight"] = (a.head_dim,)
        shapes[f"{at}self_attention.k_layernorm.weight"] = (a.head_dim,)
    if not has_experts:
        return shapes | _mlp(f"{at}mlp.", a.hidden, a.intermediate // tensor)
    shapes[f"{at}mlp.router.weight"] = (a.experts, a.hidden)
    wide = a.expert_intermediate // layout.grid.expert_tensor_ranks
    for expert in range(a.experts // layout.grid.expert):
        shapes |= _mlp(f"{at}mlp.experts.local_experts.{expert}.", a.hidden, wide)
    if a.shared_intermediate:
        shared = f"{at}mlp.shared_experts."
        shapes |= _mlp(shared, a.hidden, a.shared_intermediate // tensor)
        if a.shared_gate:
            shapes[f"{shared}gate_weight"] = (1, a.hidden)
    return shapes


def _mlp(at: str, hidden: int, wide: int) -> dict[str, Shape]:
    return {f"{at}linear_fc1.weight": (2 * wide, hidden), f"{at}linear_fc2.weight": (hidden, wide)}


_LAYOUT: Final = "layout"


def check_layout(config: RunConfig, gpu: int | None = None) -> Iterator[Finding]:
    """Check the parallel sizes of a megatron trainer, and compare its largest rank with ``gpu``.

    Args:
        config: The recipe. With another trainer nothing is checked.
        gpu: Memory of a rank's GPU in bytes. None: unknown, or the ranks are on the CPU.
    """
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig):
        return

    try:
        architecture = read_architecture(config.model.path)
        check_balanced(architecture, trainer.moe)
        check_recomputed(architecture, recompute=trainer.activation_checkpointing)
    except UntrainableModel as refused:
        yield error("model", f"{refused.subject} {refused.problem}", f"{refused.fix}.")
        return
    grid = make_grid(trainer)
    broken = list(broken_rules(architecture, grid, sequence_parallel=trainer.sequence_parallel))
    if broken:
        reasons = "; ".join(
            f"{each.setting}={each.got} is not {_alone(each.want)}" for each in broken
        )
        sizes = [f"{key} to {value}" for key, value in fitting_sizes(architecture, trainer).items()]
        yield error(_LAYOUT, reasons, f"Set {' and '.join(sizes)}: together they fit.")
        return
    apart = find_encoder(trainer) is not None  # then encoder ranks hold the tower and check it
    held = held_by_megatron_rank(
        config, trainer, replace(architecture, tower=()) if apart else architecture
    )
    seen = (
        f"{grid.ranks} rank{'' if grid.ranks == 1 else 's'}{' of the language model' if apart else ''}; "
        f"{largest_rank_said(held)}; activations come on top"
    )
    axes = "trainer.tensor_parallel" + (", trainer.expert_parallel" if architecture.experts else "")
    shared = ", or trainer.data_parallel, whose ranks share the optimizer"
    shared = shared if _shares_optimizer(config, trainer) else ""
    less = f"Raise {axes} or trainer.pipeline_parallel{shared}"
    yield against_gpu(config, (_LAYOUT, seen), held.total, gpu, (less, "trainer.gpus"))


def held_by_megatron_rank(
    config: RunConfig, trainer: MegatronTrainerConfig, architecture: Architecture
) -> RankBytes:
    """Return the bytes of the largest rank of a recipe's model.

    Args:
        config: The recipe.
        trainer: Its trainer, with sizes that fit the model.
        architecture: The model that its ranks hold, without the tower if encoder ranks hold that.
    """
    return largest_rank(
        architecture,
        make_grid(trainer),
        config.model.dtype,
        sharded=_shares_optimizer(config, trainer),
        frozen=_frozen(config.model.path, trainer),
    )


def _shares_optimizer(config: RunConfig, trainer: MegatronTrainerConfig) -> bool:
    return trainer.device != "cpu" and config.model.dtype != "float64"


def _frozen(path: str, trainer: MegatronTrainerConfig) -> Collection[str]:
    """Return the frozen weights, or none if ``check_model_proof`` refuses the patterns."""
    try:
        return frozen_weights(path, trainer.freeze).names
    except UntrainableModel:
        return ()


def _alone(want: str) -> str:
    """Return a rule's demand on a size, with its reason, but without the alternatives."""
    return want.partition(", or ")[0]
