"""Defines section ``trainer.optimizer`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate. Lower it if rewards collapse or the KL grows, and for more off-policy
    samples."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up. linear and cosine fall to `min_learning_rate` at the last step; wsd
    falls over the last `decay_steps`; constant lets you extend a run."""

    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Rate at the end of linear, cosine and wsd."""

    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """schedule=wsd: last steps, over which the rate falls as 1 - sqrt."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""

    decay_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of the decay, instead of `decay_steps`, rounded up to whole steps of `groups_per_step
    * samples_per_group`."""

    warmup_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of the warm-up, instead of `warmup_steps`."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's running-average coefficients."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Denominator term of AdamW. More slows weights with tiny gradients."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of a float32 master to its bfloat16 weight. nearest: small updates show only after
    they add up. stochastic: right on average at once, with noise. stochastic needs backend=torch,
    one rank and model.dtype=bfloat16; a resume may change only to nearest."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Limit of the global gradient norm. null: no clipping."""
