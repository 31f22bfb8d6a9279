"""Defines section ``trainer.optimizer`` of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.problems import Clash

_OPTIMIZER = "trainer.optimizer"

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate. Lower it if rewards collapse, if the KL grows, or if samples are more
    off-policy."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the learning rate after warm-up. linear and cosine fall to `min_learning_rate` at
    the last step. wsd falls only over the last `decay_steps`. With constant, extending a run does
    not change its schedule."""

    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Final learning rate of linear, cosine and wsd."""

    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """With schedule=wsd: length of the decay in steps, at the end of the run. The rate falls as 1 -
    sqrt(x), where x is the elapsed share of these steps."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""

    decay_samples: Annotated[int, Field(ge=1)] | None = None
    """Length of the decay in samples, instead of `decay_steps`. It is rounded up to whole steps of
    `groups_per_step * samples_per_group`."""

    warmup_samples: Annotated[int, Field(ge=1)] | None = None
    """Length of the warm-up in samples, instead of `warmup_steps`."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's running-average coefficients."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Denominator term of AdamW. A larger value slows weights with tiny gradients."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of float32 master weights to bfloat16. nearest: small updates take effect only after
    they have added up. stochastic: they take effect at once, right on average but noisy. stochastic
    needs backend=torch, one rank and model.dtype=bfloat16. On a resume, you may change this only
    from stochastic to nearest."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this. null: no clipping."""

    def find_clashes(self) -> Iterator[Clash]:
        lengths = {
            "warmup": (self.warmup_steps, self.warmup_samples),
            "decay": (self.decay_steps, self.decay_samples),
        }
        for phase, (steps, samples) in lengths.items():
            if steps and samples:
                yield Clash(
                    (f"{_OPTIMIZER}.{phase}_steps", f"{_OPTIMIZER}.{phase}_samples"),
                    f"{_OPTIMIZER}.{phase}_steps={steps} and {_OPTIMIZER}.{phase}_samples={samples} are "
                    "two lengths of one phase",
                    "Leave one of them out.",
                )
        least = self.min_learning_rate
        if least > self.learning_rate:
            yield Clash(
                (f"{_OPTIMIZER}.min_learning_rate", f"{_OPTIMIZER}.learning_rate"),
                f"{_OPTIMIZER}.min_learning_rate={least:g} is above the peak, "
                f"{_OPTIMIZER}.learning_rate={self.learning_rate:g}: the rate would rise",
                f"Set {_OPTIMIZER}.min_learning_rate to less.",
            )
        if least and self.schedule == "constant":
            yield Clash(
                (f"{_OPTIMIZER}.min_learning_rate", f"{_OPTIMIZER}.schedule"),
                f"{_OPTIMIZER}.min_learning_rate={least:g} is not used: "
                f"{_OPTIMIZER}.schedule=constant never falls",
                f"Set {_OPTIMIZER}.schedule to cosine, linear or wsd, or leave it out.",
            )
