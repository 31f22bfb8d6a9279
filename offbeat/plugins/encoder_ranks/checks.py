"""Checks encoder ranks: bytes per rank, and traffic between encoder and language ranks.

The bytes are held throughout a step, and are computed only from the inventory of a model. This
module loads torch, which needs seconds, so it is imported only for recipes with a model.
"""

# pyright: reportUnknownMemberType=false
# transformers leaves its configs untyped.

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.config.limits import encoder_tokens, find_encoder, freeze_patterns, trainer_replicas
from offbeat.config.mixture import environment_views, key_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.environments.media_prompts import find_media
from offbeat.launch.checks.gpu_memory import against_gpu, largest_rank_said
from offbeat.launch.checks.model_proof import build_unfilled_model
from offbeat.messages.finding import Finding, error, size
from offbeat.models.media_rules import MediaRules, media_rules
from offbeat.plugins.encoder_ranks.bridge import gradient_dtype
from offbeat.plugins.encoder_ranks.layout import Grid, side_grid
from offbeat.plugins.encoder_ranks.sides import Inventory, make_inventory
from offbeat.plugins.encoder_ranks.tower_plan import make_plans
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.activation_bytes import count_sharded_bytes
from offbeat.trainers.torch.model import freeze
from offbeat.trainers.trainer_plugin import RankBytes, find_trainer

_WHOLE: Mapping[str, str] = MappingProxyType({})


def largest_of_side(
    inventory: Inventory,
    grid: Grid,
    side: Side,
    dtype: torch.dtype,
    *,
    references: int = 0,
    plan: Mapping[str, str] = _WHOLE,
) -> RankBytes:
    """Return the bytes of a side's first rank, which holds the most.

    A trained 16-bit weight is kept as a float32 master, as in ``ShardedWeights``. A frozen weight
    stays in 16 bits. Buffers are whole on every rank. Memory of passes and messages is additional.

    Args:
        inventory: Tensors of the whole model, with the trained ones marked.
        grid: The ranks.
        side: Side of the rank.
        dtype: Dtype of the weights in passes.
        references: Number of frozen copies next to the model.
        plan: Kind of division by module name, for the side's divided matrices.
    """
    tensor = grid.count_tensor_ranks(side)
    buffers = {each.name: each for each in inventory.buffers if each.side is side}
    trained = {name for name, each in inventory.trained if each is side}
    return count_sharded_bytes(
        (
            (each.name, each.shape, each.name in trained)
            for each in inventory.weights
            if each.side is side and each.name not in buffers
        ),
        sum(prod(each.shape) * each.dtype.itemsize for each in buffers.values()),
        dtype,
        data=len(grid.list_ranks(side)) // tensor,
        tensor=tensor,
        plan=plan,
        references=references,
    )


class BridgeBytes(NamedTuple):
    """Bytes of the values of messages, without their headers."""

    features: int
    gradients: int  # of these features; 0 if the tower is frozen


def bridge_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, tokens: int, *, trains_tower: bool
) -> BridgeBytes:
    """Return the bytes of the messages for media with this number of tokens.

    A feature has ``hidden size`` numbers of the model's dtype, and the same again for each decoder
    layer with separate features. Gradients are sent in at least float32.

    Args:
        config: Config of the model.
        dtype: Dtype of the weights in passes.
        tokens: Number of placeholders.
        trains_tower: Whether gradients are sent back.
    """
    hidden: int = config.get_text_config(decoder=True).hidden_size
    numbers = tokens * hidden * (1 + media_rules(config).deep_layers)
    back = gradient_dtype(dtype).itemsize if trains_tower else 0
    return BridgeBytes(numbers * dtype.itemsize, numbers * back)


_TOKENS: Final = 1000


def messages_said(config: RunConfig, model: PreTrainedConfig, *, trains_tower: bool) -> str:
    """Return the bytes of features and gradients in a chunk, as text of a finding.

    A chunk has at most the groups of a step, each with the media of one prompt.

    Args:
        config: The recipe.
        model: Config of the recipe's model, which reads media.
        trains_tower: Whether gradients are sent back.
    """
    rules = media_rules(model)

    def said(tokens: int) -> str:
        dtype = getattr(torch, config.model.dtype)
        made = bridge_bytes(model, dtype, tokens, trains_tower=trains_tower)
        back = f"gradients of {size(made.gradients)}" if trains_tower else "no gradients"
        return f"features of {size(made.features)} and {back}"

    tokens, key = _most_of_a_prompt(config, rules)
    prompts = config.groups_per_step
    return (
        f"messages of a chunk: {said(_TOKENS)} per {_TOKENS:,} tokens of {rules.noun}, of which it has "
        f"{tokens * prompts:,} at most ({prompts} prompts, by {key}): {said(tokens * prompts)}"
    )


def _most_of_a_prompt(config: RunConfig, rules: MediaRules) -> tuple[int, str]:
    """Return the maximum media tokens of a prompt, and the key that sets this limit."""
    features_by_key = {
        key_in(name, find_media().LIMIT_KEY): rules.max_features(view.environment.max_media_bytes)
        for name, view in environment_views(config).items()
    }
    widest = max(features_by_key, key=features_by_key.__getitem__)
    # A prompt leaves room for at least one token of its response.
    bounds = [(features_by_key[widest], widest)]
    bounds += [(config.generator.max_model_len - 1, "generator.max_model_len")]
    return min(bounds)


_SUBJECT: Final = "encoder ranks"
_MODEL: Final = "model"


def check_encoder(config: RunConfig, gpu: int | None) -> Iterator[Finding]:
    """Check that the model has two sides, and that each side's part fits the device of its ranks.

    ``check_layout`` reports the memory of the megatron trainer's language ranks.

    Args:
        config: The recipe. Without ``trainer.encoder`` there are no findings.
        gpu: Memory of a rank's GPU in bytes, or None if it is unknown or the ranks are on the CPU.
            ``check_memory`` compares the CPU memory with the needs of the whole run.
    """
    trainer = config.trainer
    if not isinstance(trainer, ModelTrainerConfig) or find_encoder(trainer) is None:
        return

    grid = side_grid(trainer)
    if (model := _mark_model(config)) is None:
        return
    try:
        inventory = make_inventory(model, has_experts=find_trainer(trainer.backend) is not None)
        sides = _Sides(model.config, grid, inventory, make_plans(model, grid))
    except UntrainableModel as refused:
        yield error(_MODEL, f"{refused.subject} {refused.problem}", f"{refused.fix}.")
        return
    for side in Side:
        if trainer.backend == "torch" or side is Side.TOWER:
            yield _of_side(config, sides, side, gpu)


class _Sides(NamedTuple):
    """Two sides of a model, and the ranks that hold them."""

    model: PreTrainedConfig
    grid: Grid
    inventory: Inventory
    plans: dict[Side, dict[str, str]]  # divided matrices of each side


def _mark_model(config: RunConfig) -> PreTrainedModel | None:
    """Return the model without memory, with frozen weights marked.

    Return None if it reads no media, or if ``check_model_proof`` reports its problem.
    """
    model = build_unfilled_model(config)
    if model is None or not media_rules(model.config).reads_media:
        return None
    try:
        freeze(model, freeze_patterns(config))
    except UntrainableModel:
        return None
    return model


def _of_side(config: RunConfig, sides: _Sides, side: Side, gpu: int | None) -> Finding:
    """Compare the bytes of a side's rank with the memory of its GPU."""
    references = int(config.algorithm.loss.needs_reference_logprobs)

    def held_in(dtype: torch.dtype) -> RankBytes:
        plan = sides.plans[side]
        return largest_of_side(
            sides.inventory, sides.grid, side, dtype, references=references, plan=plan
        )

    held = held_in(getattr(torch, config.model.dtype))
    ranks = sides.grid.list_ranks(side)
    first, last = min(ranks), max(ranks)
    weights = "weights, with those of the reference," if references else "weights"
    of = "vision tower" if side is Side.TOWER else "language model"
    seen = (
        f"{len(ranks)} of the {of}, rank {first}{f' to {last}' if last > first else ''}; "
        f"{largest_rank_said(held, weights)}; what a pass gathers and computes comes on top"
    )
    if side is Side.TOWER:
        trains = sides.inventory.is_trained(side)
        messages = messages_said(config, sides.model, trains_tower=trains)
        tokens = encoder_tokens(config.trainer)
        media = "all media of a chunk" if tokens is None else f"{tokens} tokens of media"
        seen = f"{seen}, for {media} at once; {messages}"
    is_less_in_half = held_in(torch.bfloat16).total < held.total
    less, key = _what_lowers(config, side, is_less_in_half=is_less_in_half)
    whole = sides.inventory.parameters * getattr(torch, config.model.dtype).itemsize
    loading = whole + held.weights if first == 0 else 0
    about, fix = (_SUBJECT, seen), (less, f"{key}.gpus")
    return against_gpu(config, about, held.total, gpu, fix, first, loading)


def _what_lowers(config: RunConfig, side: Side, *, is_less_in_half: bool) -> tuple[str, str]:
    """Return settings that lower the memory of a side's rank, and the section of that side."""
    encoder, lanes = find_encoder(config.trainer), trainer_replicas(config.trainer)
    key = "trainer.encoder" if side is Side.TOWER else "trainer"
    # The number of lanes is a multiple of the number of encoders.
    is_most = side is Side.TOWER and encoder is not None and encoder.data_parallel == lanes
    raised = [] if is_most else [f"{key}.data_parallel"]
    ways = [f"Raise {' or '.join([*raised, f'{key}.tensor_parallel'])}"]
    ways += ["set model.dtype=bfloat16"] if is_less_in_half else []
    return ", ".join([*ways, "freeze more of it (trainer.freeze)"]), key
