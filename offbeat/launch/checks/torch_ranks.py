"""Counts the bytes of a torch trainer's rank for a model that several ranks share.

This module loads torch, which takes seconds. So it is imported only for recipes with a model.
"""

from collections.abc import Iterator
from typing import Final

import torch
from transformers import PreTrainedModel

from offbeat.config.limits import find_encoder, freeze_patterns, trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.launch.checks.gpu_memory import against_gpu, largest_rank_said
from offbeat.launch.checks.model_proof import build_unfilled_model
from offbeat.messages.finding import Finding
from offbeat.trainers.errors import PartPackageMissing, UntrainableModel
from offbeat.trainers.torch.activation_bytes import largest_rank, whole_bytes
from offbeat.trainers.torch.model import freeze
from offbeat.trainers.trainer_plugin import RankBytes, freezing_part

_SUBJECT: Final = "trainer ranks"


def check_data_ranks(config: RunConfig, gpu: int | None = None) -> Iterator[Finding]:
    """Compare the bytes of a rank of a sharded model with ``gpu``.

    If ranks split matrices or hold only a vision tower, a part of the trainer makes this check
    instead.

    Args:
        config: The recipe. A single rank gets no finding, because it holds the whole model.
        gpu: Memory of a rank's GPU in bytes, or None if unknown or if the ranks are on the CPU.
    """
    trainer = config.trainer
    if not isinstance(trainer, TorchTrainerConfig) or trainer.tensor_parallel > 1:
        return
    if trainer_ranks(config) == 1 or find_encoder(trainer) is not None:
        return
    if (model := build_unfilled_model(config)) is not None:
        yield from compare_largest_rank(config, trainer, model, _SUBJECT, gpu)


def compare_largest_rank(
    config: RunConfig,
    trainer: TorchTrainerConfig,
    model: PreTrainedModel,
    subject: str,
    gpu: int | None,
) -> Iterator[Finding]:
    """Compare the bytes of the largest rank with ``gpu``. The model is without memory."""
    whole = whole_bytes(model, getattr(torch, config.model.dtype))
    try:
        held = held_by_torch_rank(config, trainer, model)
    except (UntrainableModel, PartPackageMissing):
        return  # ``check_model_proof`` and ``check_packages`` report it
    seen = (
        f"{trainer_ranks(config)} ranks; {largest_rank_said(held)}; "
        "what a pass gathers and computes comes on top"
    )
    less = "Raise trainer.data_parallel, freeze more of the model (trainer.freeze), or train adapters (trainer.lora)"
    fix, loading = (less, "trainer.gpus"), whole + held.weights
    yield against_gpu(config, (subject, seen), held.total, gpu, fix, loading_bytes=loading)


def held_by_torch_rank(
    config: RunConfig, trainer: TorchTrainerConfig, model: PreTrainedModel
) -> RankBytes:
    """Return the bytes of the rank that holds most of a recipe's model.

    Args:
        config: The recipe.
        trainer: The recipe's trainer, without encoder ranks.
        model: The recipe's model without memory. Frozen weights are marked, and additions are not
            yet made.

    Raises:
        UntrainableModel: The patterns of ``trainer.freeze`` or the sizes do not fit the model.
        PartPackageMissing: A part of the trainer needs a package that is not installed.
    """
    freeze(model, freeze_patterns(config))
    part = freezing_part(config)
    if part is not None:
        part.add_to_model(config, model)
    # A frozen model is the reference itself: it is computed without the additions.
    has_reference = config.algorithm.loss.needs_reference_logprobs and part is None
    return largest_rank(
        model,
        getattr(torch, config.model.dtype),
        data=trainer.data_parallel,
        tensor=trainer.tensor_parallel,
        frozen=[each for each in model.parameters() if not each.requires_grad],
        references=int(has_reference),
    )
