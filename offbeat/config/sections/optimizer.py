"""Defines section ``trainer.optimizer`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate. Higher learns in fewer steps and is less stable: lower it when
    rewards collapse or the KL grows, and with more off-policy samples."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at 0 at the last step. Decay settles the end
    of a run of known length, constant lets you go on."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0. They keep the first steps small while AdamW's averages
    are poor, and learn little themselves."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay. It pulls all weights to 0, which limits their growth; fine-tuning
    by RL mostly leaves it off."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's running-average coefficients. Larger ones average over more steps, which smooths
    noise and reacts later."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator term. A larger one damps weights with tiny gradients, which helps
    where updates are noisy and slows them."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this; None: no clipping. A small bound limits the harm
    of a bad batch, and slows learning if most steps are clipped."""
