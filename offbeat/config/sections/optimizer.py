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

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up; linear and cosine fall to ``min_learning_rate`` at the last step, wsd
    (warm-up, stable, decay) stays at the peak and falls over the last ``decay_steps``. Decay settles
    the end of a run of known length, constant lets you go on; wsd can be stretched until it falls."""

    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Rate at which linear, cosine and wsd end. Above 0 the last steps still learn, and settle
    less."""

    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """schedule=wsd: the last steps, over which the rate falls as 1 - sqrt. More settle the weights
    further, fewer learn longer at the peak."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0. They keep the first steps small while AdamW's averages
    are poor, and learn little themselves."""

    decay_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of the decay, in place of ``decay_steps``: ``groups_per_step * samples_per_group`` per
    step, rounded up to whole steps. It keeps its meaning when batches change; steps are what curves
    show."""

    warmup_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of the warm-up, in place of ``warmup_steps``; counted as ``decay_samples``."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay. It pulls all weights to 0, which limits their growth; fine-tuning
    by RL mostly leaves it off."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's running-average coefficients. Larger ones average over more steps, which smooths
    noise and reacts later."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator term. A larger one damps weights with tiny gradients, which helps
    where updates are noisy and slows them."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of a float32 master to its bfloat16 weight. To the nearest, the weight stays where it
    is until small updates have added up, and learns in more steps; at random (stochastic), it is
    right on average from the first, at the price of some noise and of the time to draw it.
    Stochastic is of trainer.backend=torch on one rank with model.dtype=bfloat16. A run that is
    resumed may change to nearest, and not to stochastic."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this; None: no clipping. A small bound limits the harm
    of a bad batch, and slows learning if most steps are clipped."""
