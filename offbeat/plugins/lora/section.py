"""Defines section ``trainer.lora`` of a recipe."""

from typing import Annotated, Final, cast

from pydantic import Field

from offbeat.config.base import Config

KIND: Final = "lora"
"""Kind of releases that hold only adapters."""


class LoraConfig(Config):
    """Low-rank adapters next to frozen matrices (extra ``lora``). Only the adapters are trained."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of each adapter. A higher rank can learn more, but weights, moments, checkpoints and
    releases grow. The smaller side of a matrix is the useful maximum."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapter outputs are scaled by alpha / rank. A larger value acts like a higher learning
    rate."""

    target_modules: tuple[str, ...] = ()
    """Names, or name endings, of linear modules that get adapters, such as `q_proj`. Empty: all
    linear modules except the output head. Experts and routers that are stored as one tensor per
    layer get none, and neither do modules that PEFT cannot adapt in the model's class. `offbeat
    check` counts them."""


def lora_section(trainer: Config) -> LoraConfig:
    """Return the section of a trainer of adapters."""
    return cast("LoraConfig", getattr(trainer, "lora"))  # noqa: B009 -- the core's model has no such field
