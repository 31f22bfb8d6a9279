"""Losses of a rank by name: the built-in losses and the user's, which is loaded and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from offbeat.algorithms.custom_loss import CustomLoss, LossRefused
from offbeat.algorithms.loss_proof import prove_loss
from offbeat.algorithms.losses import LOSSES
from offbeat.algorithms.tokens import Loss
from offbeat.config.by_value import unpack
from offbeat.config.limits import trainer_device
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.user_code import LOSS as LOSS_FORM
from offbeat.config.user_code import NAME_FIX, TargetNotFound, load_target
from offbeat.environments.inputs import LOSS, check_same, source_digest
from offbeat.trainers.spec import TrainerSpec

_NAME_FIX: Final = "Name it module:function, the module being importable from the working directory"


def load_losses(spec: TrainerSpec) -> Mapping[str, Loss]:
    """Return the losses by name. The loss of ``algorithm.loss.target`` is imported and checked.

    Raises:
        LossRefused: It cannot be imported, or lacks a property that training needs.
        InputChanged: The loss's source has changed since the run began.
    """
    config = spec.config.algorithm.loss
    if not isinstance(config, CustomLossConfig):
        return LOSSES
    working_dir = Path(spec.working_dir)
    unpack(spec.values)
    check_same(LOSS, config.target, source_digest(config.target, working_dir), spec.inputs)
    loss = load_custom_loss(config, working_dir, trainer_device(spec.config.trainer))
    return {**LOSSES, config.name: loss}


def load_custom_loss(config: CustomLossConfig, working_dir: Path, device: str) -> CustomLoss:
    """Import the loss of ``algorithm.loss.target``, check it on a torch device, and return it.

    Raises:
        LossRefused: It cannot be imported, or lacks a property that training needs.
    """
    loss = CustomLoss(_function(config.target, working_dir), config.target, working_dir)
    prove_loss(loss, config, torch.device(device))
    return loss


def _function(target: str, working_dir: Path) -> Any:  # noqa: ANN401 -- the user's object
    try:
        return load_target(target, working_dir, LOSS_FORM)
    except TargetNotFound as error:
        fix = _NAME_FIX if error.fix == NAME_FIX else error.fix
        raise LossRefused(target, error.problem, fix) from error
